"""
How fast is this machine: training, chat tuning, decoding, data preparation.

    python bench.py                                   # all four, minutes
    python bench.py --what=decode --variants=gpt2,gpt2+mla
    python bench.py --what=train --train_args='--n_layer=4 --n_embd=256 --n_head=4'

It times what the scripts run: train_gpt2.py, chat_sft.py and prepare_data.py are started and their own figures read; decoding
is the model's generate. Variants take turns, round after round, and each ratio is the median over the rounds of the ratio to the
first variant in the same round: a machine whose speed drifts changes the figures more than the ratios.
"""
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Optional

import numpy as np
import torch

import runtime
from configurator import configure, expect_range, fail
from model import GPT, GPTConfig
from prepare_data import shard_header

# ---------------------------------------------------------------------------------------------------
# settings
what: Literal["all", "train", "chat", "decode", "prep"] = "all"
variants: str = "gpt2,gpt2+mla,llama,llama+mla"  # train, decode: what is compared, the first is the reference: arch, or arch+attention
rounds: int = 5  # times each variant has its turn
device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
compile: bool = True  # train: torch.compile; decode: that too, beside uncompiled
train_args: Optional[str] = None  # train: settings of train_gpt2.py; None: GPT-2 124M on GPUs, 6 layers of 384 on CPUs
train_iters: int = 15  # train, chat: steps a round, the first of them not counted
chat_args: Optional[str] = None  # chat: settings of chat_sft.py; None: 4 rows of 1024 to GPT-2 124M on GPUs, of 512 to 30M on CPUs
context: int = 1024  # decode: tokens in the cache when the timed ones come
new_tokens: int = 64  # decode: timed tokens a round
config, given = configure(globals())

SCRIPTS = Path(__file__).resolve().parent
names = [name.strip() for name in variants.split(",")]
for name in names:
    if name.partition("+")[0] not in ("gpt2", "llama") or name.partition("+")[2] not in ("", "mla"):
        fail(f"--variants={variants}: {name!r} is none of gpt2, gpt2+mla, llama, llama+mla")
expect_range(config, 1, math.inf, "rounds", "context")
expect_range(config, 2, math.inf, "train_iters", "new_tokens")
_, _, compute_device = runtime.init_process(device)
compute_dtype = runtime.pick_dtype(dtype, compute_device)
matmul = runtime.peak_flops(compute_device, compute_dtype)
print(f"{torch.cuda.get_device_name(compute_device) if compute_device.type == 'cuda' else f'{torch.get_num_threads()} CPU threads'}, "
      f"torch {torch.__version__}, {compute_dtype}; MFU is against {matmul / 1e12:.2f} TFLOP/s", flush=True)


def ratio(rounds_of, name):
    """Median over the rounds of a variant's figure over that of the first variant in the same round."""
    return statistics.median(a / b for a, b in zip(rounds_of[name], rounds_of[names[0]]))


def settings_of(name):
    arch, _, attention = name.partition("+")
    return dict(arch=arch, attention=attention or "mha")


def time_steps(script, out_dir, *flags):
    """Starts a training script for train_iters steps -> its log of each step but the first, and the seconds it compiled."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, "--eval_iters=1", "--sample_tokens=0", "--log_interval=1", "--warmup_iters=0", *flags,
         f"--max_iters={train_iters}", f"--dtype={compute_dtype}", f"--device={device}", f"--out_dir={out_dir}", "--overwrite=True"],
        capture_output=True, text=True)
    if done.returncode:
        print(file=sys.stderr)  # behind the progress
        fail(f"{script} ended with code {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    log = [json.loads(line) for line in Path(out_dir, "log.jsonl").read_text().splitlines()]
    compiling = next((entry["seconds"] for entry in log if entry.get("event") == "compiled"), 0.0)
    return [entry for entry in log if "tok_per_sec" in entry][1:], compiling


# ---------------------------------------------------------------------------------------------------
# training
def bench_train():
    size = (train_args or ("--batch_size=16" if compute_device.type == "cuda" else
                           "--n_layer=6 --n_head=6 --n_embd=384 --max_seq_len=256 --batch_size=16")).split()
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(0, 50257, 2_000_000, dtype=np.uint16)
        for split in ("train", "val"):
            (Path(folder) / f"{split}_000000.bin").write_bytes(shard_header(len(tokens)) + tokens.tobytes())
        (Path(folder) / "meta.json").write_text(json.dumps({"tokenizer": "gpt2", "vocab_size": 50304}))
        speed, figures = {name: [] for name in names}, {}
        for i in range(rounds):
            for name in names:
                print(f"\rtrain, round {i + 1} of {rounds}: {name:10}", end="", file=sys.stderr, flush=True)
                flags = [f"--{key}={value}" for key, value in settings_of(name).items()]
                steps, compiling = time_steps("train_gpt2.py", f"{folder}/{name}", *flags, "--gradient_accumulation_steps=1", *size,
                                              f"--compile={compile}", f"--data_dir={folder}")
                speed[name].append(statistics.median(entry["tok_per_sec"] for entry in steps))
                figures[name] = (statistics.median(entry["mfu"] for entry in steps), steps[-1]["peak_mem_mb"], compiling,
                                 steps[-1]["recompiles"])
    print(f"\rtraining: train_gpt2.py {' '.join(size)} --compile={compile}\n"
          f"{'':12}{'tokens/s':>10}{'ratio':>8}{'MFU':>8}{'peak MB':>9}{'compile s':>11}{'recompiles':>12}")
    for name in names:
        mfu, memory, seconds, recompiles = figures[name]
        print(f"{name:12}{statistics.median(speed[name]):>10,.0f}{ratio(speed, name):>8.2f}{100 * mfu:>7.1f}%{memory or 0:>9,.0f}"
              f"{seconds:>11.1f}{recompiles:>12}", flush=True)


# ---------------------------------------------------------------------------------------------------
# chat tuning, compiled against not: the gain is to be 1.3 at least, compiling 60 s and 10 % of memory at most
def bench_chat():
    size = dict() if compute_device.type == "cuda" else dict(n_layer=6, n_head=6, n_embd=384)
    flags = (chat_args or f"--max_seq_len={1024 if compute_device.type == 'cuda' else 512} --gradient_accumulation_steps=1").split()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        gpt = GPT(GPTConfig(**size))
        runtime.save_checkpoint(folder, {"model": gpt.state_dict(), "model_args": asdict(gpt.config), "config": {}, "tokenizer": "gpt2",
                                         "stage": "base", "iter_num": 0, "val_loss": 0.0, "val_iter": 0})
        rng = np.random.default_rng(0)
        with open(f"{folder}/chats.jsonl", "w") as f:
            for length in rng.lognormal(4, 0.7, 2000).astype(int) + 1:  # answers of 55 words in the median
                messages = [{"role": "user", "content": "word " * int(length // 2 + 1)}, {"role": "assistant", "content": "word " * int(length)}]
                f.write(json.dumps({"messages": messages}) + "\n")
        speed, figures = {True: [], False: []}, {}
        for i in range(rounds):
            for compiled in (False, True):
                print(f"\rchat, round {i + 1} of {rounds}: {'compiled' if compiled else 'not compiled':14}", end="", file=sys.stderr, flush=True)
                steps, compiling = time_steps("chat_sft.py", f"{folder}/{compiled}", f"--init_from={folder}/ckpt.pt", *flags,
                                              f"--data={folder}/chats.jsonl", f"--chat_dir={folder}/rows", f"--compile={compiled}")
                speed[compiled].append(statistics.median(entry["tok_per_sec"] for entry in steps))
                useful = statistics.mean(entry["useful"] for entry in steps)
                figures[compiled] = compiling, steps[-1]["peak_mem_mb"] or math.nan, steps[-1]["recompiles"], useful
    gain = statistics.median(a / b for a, b in zip(speed[True], speed[False]))
    print(f"\rchat tuning: chat_sft.py {' '.join(flags)}, {sum(p.numel() for p in gpt.parameters()) / 1e6:.0f}M parameters\n"
          f"{'':14}{'useful tok/s':>13}{'ratio':>8}{'compile s':>11}{'peak MB':>9}{'ratio':>8}{'recompiles':>12}{'useful':>9}")
    for compiled in (False, True):
        compiling, memory, recompiles, useful = figures[compiled]
        print(f"{'compiled' if compiled else 'not compiled':14}{statistics.median(speed[compiled]):>13,.0f}{gain if compiled else 1:>8.2f}"
              f"{compiling:>11.1f}{memory:>9,.0f}{memory / figures[False][1]:>8.2f}{recompiles:>12}{100 * useful:>8.1f}%")
    print(f"{'target':14}{'':13}{'>= 1.30':>8}{'<= 60':>11}{'':9}{'<= 1.10':>8}{0:>12}", flush=True)


# ---------------------------------------------------------------------------------------------------
# decoding: GPT-2 124M's size, one row
def bench_decode():
    models, cache_bytes = {}, {}
    for name in names:
        torch.manual_seed(0)
        models[name] = GPT(GPTConfig(max_seq_len=context + new_tokens, **settings_of(name))).to(compute_device).eval()
        cache = models[name].new_cache(1, 1, getattr(torch, compute_dtype))
        cache_bytes[name] = sum(tensor.nbytes for layer in cache for tensor in layer)
    prompt = torch.randint(0, 50257, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    steps, compiling = {}, dict.fromkeys(names, math.nan)
    if compile and not runtime.compiler_problem(compute_device, "inductor"):
        for name in names:
            print(f"\rdecode, compiling: {name:10}", end="", file=sys.stderr, flush=True)
            t0 = time.perf_counter()
            with runtime.autocast(compute_device, compute_dtype):
                steps[name] = models[name].compile_step(1)
            compiling[name] = time.perf_counter() - t0
    speed, compiled_speed = {name: [] for name in names}, {name: [] for name in names}
    for i in range(rounds + 1):  # the first warms up
        for name, step in [(name, step) for name in names for step in ([None, steps[name]] if steps else [None])]:
            print(f"\rdecode, round {i} of {rounds}: {name:10}", end="", file=sys.stderr, flush=True)
            with runtime.autocast(compute_device, compute_dtype):
                tokens = models[name].generate([prompt], new_tokens, temperature=0, compiled=step)
                next(tokens)  # reads the prompt
                t0 = time.perf_counter()
                n = sum(1 for _ in tokens)
                seconds = time.perf_counter() - t0
            if i > 0:
                (compiled_speed if step else speed)[name].append(n / seconds)
    print(f"\rdecoding: 12 layers, 12 heads, 768 wide, {context} tokens of context, batch 1\n"
          f"{'':12}{'tokens/s':>10}{'ratio':>8}{'cache bytes a token':>22}{'ratio':>8}{'compiled':>11}{'gain':>7}{'compile s':>11}")
    for name in names:
        gains = [a / b for a, b in zip(compiled_speed[name], speed[name])] or [math.nan]
        print(f"{name:12}{statistics.median(speed[name]):>10.1f}{ratio(speed, name):>8.2f}{cache_bytes[name]:>22,}"
              f"{cache_bytes[name] / cache_bytes[names[0]]:>8.3f}{statistics.median(compiled_speed[name] or [math.nan]):>11.1f}"
              f"{statistics.median(gains):>7.2f}{compiling[name]:>11.1f}", flush=True)


# ---------------------------------------------------------------------------------------------------
# data preparation: the standard library as bytes, which needs no vocabulary
def bench_prep():
    speeds = []
    for i in range(rounds):
        print(f"\rprep, round {i + 1} of {rounds}", end="", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            t0 = time.perf_counter()
            done = subprocess.run([sys.executable, SCRIPTS / "prepare_data.py", "--dataset=python", f"--data_dir={folder}"],
                                  capture_output=True, text=True)
            seconds = time.perf_counter() - t0
            if done.returncode:
                print(file=sys.stderr)
                fail(f"prepare_data.py ended with code {done.returncode}: {done.stderr[-500:]}")
            tokens = json.loads((Path(folder) / "meta.json").read_text())["tokens"]
        speeds.append(tokens / seconds)
    print(f"\rdata preparation: prepare_data.py --dataset=python, {tokens:,} tokens, the start of the script included\n"
          f"{'':12}{statistics.median(speeds):>10,.0f} tokens/s", flush=True)


for name, bench in (("train", bench_train), ("chat", bench_chat), ("decode", bench_decode), ("prep", bench_prep)):
    if what in ("all", name):
        bench()
