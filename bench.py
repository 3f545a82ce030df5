"""
How fast is this machine: training, chat tuning, decoding.

    python bench.py                                             # all of it: about an hour on two CPU cores
    python bench.py --what=train,decode --nanogpt=../nanoGPT    # beside a checkout of nanoGPT
    python bench.py --what=train --train_args='--n_layer=4 --n_embd=256 --n_head=4'
    python bench.py --profile=True                              # where does a step of train_gpt2.py spend its time?

It times what you run: train_gpt2.py and chat_sft.py, as processes, by their own logs; and sample.py's generate. The
rows of a table take turns, round after round. Each figure is the median over the rounds; ratio is that of a row's
tokens/s to the first row's in the same round, which changes less if the speed of the machine drifts; compile_s is the
maximum, that of the first round, which compiles anew. The tables go to stdout, what the scripts print to stderr.
"""
import json
import math
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import runtime
from configurator import Positive, configure, fail, one_line_errors
from model import GPT, GPTConfig
from sample import compile_step, generate
from shards import shard_header

# -----------------------------------------------------------------------------
# settings
what: str = "train,chat,decode"  # or some of them
variants: str = "gpt2,gpt2+mla,llama,llama+mla"  # train, decode: arch, or arch+attention; they win over train_args
nanogpt: str = ""  # train, decode: folder of a checkout of nanoGPT, added as the first row of each table
rounds: Positive = 3
device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of the matmuls
compile: bool = True  # torch.compile; chat, decode: next to uncompiled
train_args: str = ""  # flags of train_gpt2.py; none: GPT-2 124M, on CPUs 6 layers of 384 and rows of 256
train_iters: Positive = 15  # train: steps a round, after one that is not counted; profile: before it
chat_iters: Annotated[int, 2, math.inf] = 100  # chat: steps a round; the first is not counted
ranks: Positive = 1  # chat: processes, which share the machine
chat_args: str = "--max_seq_len=512"  # chat: flags of chat_sft.py; the model has the size of train_args
context: Positive = 1024  # decode: tokens in the cache before the timed ones
decode_rows: Positive = 1  # decode: texts at a time
new_tokens: Positive = 64  # decode: tokens a round, of each text
profile: bool = False  # instead of tables: a trace of 3 steps of train_gpt2.py, trace.json
configure(globals())

# -----------------------------------------------------------------------------
# setup
ROOT = Path(__file__).resolve().parent
TRAIN = ROOT / "train_gpt2.py"
VARIANTS = {name: GPTConfig(*name.split("+"), max_seq_len=context + new_tokens)
            for name in ("gpt2", "gpt2+mla", "llama", "llama+mla")}
with one_line_errors(f"--variants={variants}", f"expected some of {', '.join(VARIANTS)}, separated by commas"):
    variants = {name: VARIANTS[name] for name in variants.split(",")}
if nanogpt and not Path(nanogpt, "train.py").is_file():
    fail(f"--nanogpt={nanogpt}: holds no train.py; expected the folder of a checkout of nanoGPT")
temp_dir = tempfile.TemporaryDirectory()
folder = temp_dir.name
# the first round compiles anew. Set before this process compiles, which settles the folder, for its children too
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{folder}/inductor")
_, _, device = runtime.init_process(device)
dtype = runtime.pick_dtype(dtype, device)
on_gpu = device.type == "cuda"
if compile and (error := runtime.compile_error(device, "inductor")):
    fail(f"--compile=True: torch.compile cannot work here ({error}); give --compile=False")
if not train_args and not on_gpu:
    train_args = "--n_layer=6 --n_head=6 --n_embd=384 --max_seq_len=256"
modes = [False, True] if compile else [False]
common = f"""--max_iters={train_iters + 1} --device={device.type if ranks > 1 else device} --dtype={dtype}
    --compile={compile} --eval_iters=1 --gradient_accumulation_steps=1 --sample_tokens=0 --log_interval=1
    --warmup_iters=0 --overwrite=True --out_dir={folder}/out""".split()
train_flags = [*common, f"--data_dir={folder}", *train_args.split()]  # the last of a repeated flag wins


def compare(title, rows):
    """
    rows: {label: function that returns {metric: number}}. Calls them in turns, rounds times. Prints their medians as
    a table, and returns them.
    """
    runs = {label: [] for label in rows}
    for i in range(rounds):
        for label, measure in rows.items():
            print(f"----- round {i + 1} of {rounds}: {label}", file=sys.stderr, flush=True)
            runs[label].append(measure())
    print(f"\n{title}")
    first, medians = next(iter(runs.values())), {}
    for label, measured in runs.items():
        for run, reference in zip(measured, first):
            run["ratio"] = run["tok_per_sec"] / reference["tok_per_sec"]
        columns = {metric: [run[metric] for run in measured] for metric in measured[0]}
        medians[label] = {metric: max(values) if metric == "compile_s" else statistics.median(values)
                          for metric, values in columns.items()}
        print(f"{label:24}", *(f"{metric} {value:<12,.3f}" for metric, value in medians[label].items()),
              flush=True)
    return medians


def run_python(*args):
    """Runs a script of ours to its end; if it fails, so does this program."""
    code = subprocess.run([sys.executable, *args], stdout=sys.stderr).returncode
    if code:
        raise SystemExit(code)


# -----------------------------------------------------------------------------
# training

def time_steps(*args):
    """Runs a training script. Returns metrics from its log, over all steps but the first."""
    run_python(*args)
    entries = [json.loads(line) for line in open(f"{folder}/out/log.jsonl")]
    steps = [entry for entry in entries if "tok_per_sec" in entry][1:]
    metrics = {name: statistics.median(step[name] for step in steps)
               for name in ("tok_per_sec", "mfu", "wait", "useful")}
    metrics |= {name: steps[-1][name] for name in ("peak_mem_mb", "recompiles", "train_loss")}
    return {**metrics, "compile_s": sum(entry.get("compile_seconds", 0) for entry in entries)}


# runs nanoGPT's train.py, then prints its tokens per step, and its peak memory, measured as in our loops
NANOGPT = f"""
import runpy, sys, torch
tokens = runpy.run_path("train.py", run_name="__main__")["tokens_per_iter"]
del sys.modules["model"]  # ours has the same name
sys.path[0] = {str(ROOT)!r}
import runtime
print(tokens, runtime.peak_memory_mb(torch.device({str(device)!r})))
"""


def time_nanogpt():
    """Runs nanoGPT's train.py at the same sizes. Returns metrics without the first step, which compiles."""
    sizes = re.findall(r"--(?:batch_size|block_size|n_layer|n_head|n_embd)=\S+",
                       train_args.replace("max_seq_len", "block_size"))
    flags = f"""--gradient_accumulation_steps=1 --max_iters={train_iters} --eval_iters=1 --log_interval=1
        --device={device} --compile={compile} --dataset={folder} --out_dir={folder}/out""".split()
    output = subprocess.check_output([sys.executable, "-c", NANOGPT, "--batch_size=16", *sizes, *flags], cwd=nanogpt,
                                     text=True)
    *_, tokens, peak = output.split()
    ms = np.array(re.findall(r" time ([\d.]+)ms", output)[1:], float)
    return {"tok_per_sec": 1000 * int(tokens) / np.median(ms), "peak_mem_mb": float(peak)}


def bench_train():
    rows = {"nanoGPT": time_nanogpt} if nanogpt else {}
    for name, config in variants.items():
        rows[name] = partial(time_steps, TRAIN, *train_flags, f"--arch={config.arch}",
                             f"--attention={config.attention}")
    compare(f"training: train_gpt2.py {train_args}", rows)


def profile_steps():
    """Runs train_gpt2.py in this process, with torch's profiler on in its last three steps."""
    from torch._inductor import config as inductor
    inductor.cpp.enable_kernel_profile = True  # else compiled CPU kernels have no names
    sys.argv = ["train_gpt2.py", *train_flags, f"--max_iters={train_iters + 4}"]
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=train_iters, warmup=1, active=3)) as profiler:
        # every optimizer here has one AdamW; Muon's wrapper would call this three times a step
        register_optimizer_step_post_hook(lambda step, *_: isinstance(step, torch.optim.AdamW) and profiler.step())
        runpy.run_path(str(TRAIN), run_name="__main__")
    profiler.export_chrome_trace("trace.json")
    print(profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=10))
    print(f"3 steps of {' '.join(sys.argv)}\nopen {Path('trace.json').resolve()} in https://ui.perfetto.dev")


# -----------------------------------------------------------------------------
# chat tuning

def bench_chat():
    run_python(TRAIN, *train_flags, "--max_seq_len=1024", "--batch_size=1", "--max_iters=1", "--compile=False",
               f"--out_dir={folder}/base")
    run_python(ROOT / "prepare_data.py", "--dataset=python", "--max_tokens=2000", "--val_tokens=1000",
               f"--data_dir={folder}/python")  # for chat.jsonl, which is always whole
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    args = [*torchrun, ROOT / "chat_sft.py", *common, f"--init_from={folder}/base",
            f"--data={folder}/python/chat.jsonl", f"--chat_dir={folder}/rows", f"--max_iters={chat_iters}",
            f"--gradient_accumulation_steps={ranks}", *chat_args.split()]
    eager, *compiled = compare(f"chat tuning: chat_sft.py {chat_args}, --ranks={ranks}", {
        f"--compile={mode}": partial(time_steps, *args, f"--compile={mode}") for mode in modes}).values()
    for row in compiled:
        loss = row["train_loss"] / eager["train_loss"]
        memory = row["peak_mem_mb"] / eager["peak_mem_mb"]
        for text, ok in ((f"loss at step {chat_iters}: {loss:.4f}, expected 0.95 to 1.05", 0.95 <= loss <= 1.05),
                         (f"tokens/s: {row['ratio']:.3f}, expected at least 1.3", row["ratio"] >= 1.3),
                         (f"memory: {memory:.3f}, expected at most 1.1", memory <= 1.1),
                         (f"compile_s: {row['compile_s']:.0f}, expected at most 60", row["compile_s"] <= 60)):
            print(f"{'pass' if ok else 'FAIL'}  compiled over uncompiled, {text}", flush=True)


# -----------------------------------------------------------------------------
# decoding

def time_tokens(work):
    """work: a function that returns how many tokens it made."""
    start = time.perf_counter()
    n_tokens = work()
    return {"tok_per_sec": n_tokens / (time.perf_counter() - start), "n_tokens": n_tokens}


def time_decoding(config, compiled):
    torch.compiler.reset()
    model = GPT(config).to(device).eval()
    with runtime.autocast(device, dtype):
        if compiled:
            model = compile_step(model, decode_rows)
        tokens = generate(model, [[198] * context] * decode_rows, new_tokens + 1, top_k=200)
        next(tokens)  # reads the prompt
        return time_tokens(lambda: decode_rows * len(list(tokens)))


def time_nanogpt_decoding():
    module = runpy.run_path(f"{nanogpt}/model.py")
    model = module["GPT"](module["GPTConfig"](block_size=context + new_tokens, bias=False)).to(device)
    prompt = torch.full((decode_rows, context), 198, device=device)
    with runtime.autocast(device, dtype if on_gpu else "float32"):  # as in its sample.py
        # 8 tokens, which take long enough without a cache
        return time_tokens(lambda: len(model.generate(prompt, 8, top_k=200)[:, context:].flatten().tolist()))


def bench_decode():
    rows = {"nanoGPT": time_nanogpt_decoding} if nanogpt else {}
    for name, config in variants.items():
        for mode in modes:
            rows[f"{name} --compile={mode}"] = partial(time_decoding, config, mode)
    compare(f"decoding: GPT-2 124M's size, {decode_rows} x {context} tokens of context, temperature 1, top_k 200",
            rows)


# -----------------------------------------------------------------------------
BENCHES = {"train": bench_train, "chat": bench_chat, "decode": bench_decode}
with one_line_errors(f"--what={what}", f"expected some of {', '.join(BENCHES)}, separated by commas"):
    benches = [BENCHES[name] for name in what.split(",")]
print(f"{torch.cuda.get_device_name(device) if on_gpu else device}, {torch.get_num_threads()} CPU threads, "
      f"torch {torch.__version__}, {dtype}, {rounds} rounds", flush=True)
with temp_dir:
    # random tokens, as shards of ours and as nanoGPT's train.bin and val.bin
    tokens = np.random.default_rng(0).integers(0, 50257, 2_000_000, dtype="<u2").tobytes()
    for split in ("train", "val"):
        Path(folder, f"{split}_000000.bin").write_bytes(shard_header(2_000_000) + tokens)
        Path(folder, f"{split}.bin").write_bytes(tokens)
    for bench in [profile_steps] if profile else benches:
        bench()
