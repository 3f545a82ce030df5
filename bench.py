"""
How fast is this machine: training, chat tuning, data preparation, decoding.

    python bench.py                                             # all of it: about an hour on two CPU cores
    python bench.py --what=train,decode --nanogpt=../nanoGPT    # next to a checkout of nanoGPT, then the first row
    python bench.py --what=train --train_args='--n_layer=4 --n_embd=256 --n_head=4'
    python bench.py --what=prep --prep_files='texts/*.parquet'  # next to tiktoken alone
    python bench.py --profile=True                              # where does a step of train_gpt2.py spend its time?

It times what you run: train_gpt2.py, chat_sft.py and prepare_data.py, as processes, by their own logs; and sample.py's
generate. The rows of a table take turns, round after round. Each figure is the median over the rounds; in brackets the
median of its ratio to the first row's in the same round, which changes less if the speed of the machine drifts.
"""
import json
import math
import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Optional

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import runtime
from configurator import Positive, configure, fail
from model import GPT, GPTConfig
from prepare_data import count_cpus, python_conversations
from sample import compile_step, generate
from shards import read_meta, read_shard, shard_header
from tokenizer import END_OF_TEXT, get_tokenizer

# -----------------------------------------------------------------------------
# settings
what: str = "all"  # or some of train, chat, prep and decode, separated by commas
variants: str = "gpt2,gpt2+mla,llama,llama+mla"  # train, decode: arch, or arch+attention; profile: the first of them
nanogpt: Optional[str] = None  # train, decode: folder of a checkout of nanoGPT, then the first row
rounds: Optional[Positive] = None  # None: 3, on GPUs, whose speed drifts less, 2
device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of the matmuls
compile: bool = True  # torch.compile; chat, decode: next to uncompiled
train_args: Optional[str] = None  # flags of train_gpt2.py; None: GPT-2 124M, on CPUs 6 layers of 384 and rows of 256
train_iters: Annotated[int, 2, math.inf] = 15  # train, chat: steps a round, the first not counted; profile: before it
chat_args: Optional[str] = None  # chat: flags of chat_sft.py; None: rows of 1024, on CPUs of 512
context: Positive = 1024  # decode: tokens in the cache before the timed ones
new_tokens: Annotated[int, 2, math.inf] = 64  # decode: tokens a round, the first not counted
prep_files: Optional[str] = None  # prep: --files of prepare_data.py, gpt2 tokens; None: the standard library, bytes
profile: bool = False  # instead of tables: a trace of 3 steps of train_gpt2.py, trace.json
config, overrides = configure(globals())

# -----------------------------------------------------------------------------
# setup
SCRIPTS = Path(__file__).resolve().parent
TABLES = ["train", "chat", "prep", "decode"]
VARIANTS = {"gpt2": {"arch": "gpt2", "attention": "mha"}, "gpt2+mla": {"arch": "gpt2", "attention": "mla"},
            "llama": {"arch": "llama", "attention": "mha"}, "llama+mla": {"arch": "llama", "attention": "mla"}}
tables, names = TABLES if what == "all" else what.split(","), variants.split(",")
for setting, chosen, choices in (("what", tables, TABLES), ("variants", names, VARIANTS)):
    if not set(chosen) <= set(choices):
        fail(f"--{setting}={config[setting]}: expected some of {', '.join(choices)}, separated by commas")
if nanogpt and not Path(nanogpt, "train.py").is_file():
    fail(f"--nanogpt={nanogpt}: holds no train.py; expected the folder of a checkout of nanoGPT")
_, _, device = runtime.init_process(device)
dtype = runtime.pick_dtype(dtype, device)
on_gpu = device.type == "cuda"
rounds = rounds or (2 if on_gpu else 3)
compile_error = compile and runtime.compile_error(device, "inductor")
if compile_error:
    fail(f"--compile=True: torch.compile cannot work here ({compile_error}); give --compile=False")

MODES = {"uncompiled": False, "compiled": True} if compile else {"uncompiled": False}
GIVEN = {"max_iters": train_iters, "device": device, "dtype": dtype, "gradient_accumulation_steps": 1, "eval_iters": 1,
         "sample_tokens": 0, "log_interval": 1, "warmup_iters": 0}  # to both training scripts
RESERVED = {*GIVEN, "arch", "attention", "compile", "data_dir", "out_dir", "init_from", "data", "chat_dir"}


def parse_flags(setting, text):
    """The flags in a setting, as {name: value}. The script itself refuses those that it does not know."""
    flags = dict(re.findall(r"--(\w+)=(\S+)", text))
    if len(flags) < len(text.split()) or RESERVED & flags.keys():
        fail(f"--{setting}={text}: expected --name=value, with spaces between; bench.py gives these itself: "
             f"{', '.join(sorted(RESERVED))}")
    return flags


if train_args is None:
    train_args = "" if on_gpu else "--n_layer=6 --n_head=6 --n_embd=384 --max_seq_len=256"
if chat_args is None:
    chat_args = "--max_seq_len=1024" if on_gpu else "--max_seq_len=512"
train_flags = {"batch_size": 16, "max_seq_len": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768,
               **parse_flags("train_args", train_args), "compile": compile}
chat_flags = parse_flags("chat_args", chat_args)
temp_dir = tempfile.TemporaryDirectory()
folder = temp_dir.name

# -----------------------------------------------------------------------------
# rounds and tables
METRICS = {"tok_per_sec": ",.1f", "peak_mem_mb": ",.0f", "mfu": ".1%", "wait": ".2%", "recompiles": ".0f",
           "useful": ".1%", "cold_compile_s": ".1f", "warm_compile_s": ".1f", "cache_bytes": ",.0f",
           "n_tokens": ",.0f"}


def median(runs, reference, key):
    """The median of a metric over the rounds, and of its ratio to the reference's, as text."""
    values = [metrics[key] for metrics in runs if metrics.get(key) is not None]
    ratios = [a[key] / b[key] for a, b in zip(runs, reference) if a.get(key) and b.get(key)]
    text = format(statistics.median(values), METRICS[key]) if values else "-"
    return f"{text} ({statistics.median(ratios):.2f})" if ratios else text


def run_interleaved(title, measures):
    """measures: {label: function that returns metrics}. Calls them in turns, round after round, and prints a table."""
    print(title, flush=True)
    found = {label: [] for label in measures}
    for i in range(rounds):
        for label, measure in measures.items():
            print(f"round {i + 1} of {rounds}: {label} ...", file=sys.stderr, flush=True)
            found[label].append(measure())
    reference, *_, last = [*found.values()] * 2
    keys = [key for key in METRICS if key in last[0] | last[-1]]
    print(" " * 20, *(f"{key:>18}" for key in keys))
    for label, runs in found.items():
        print(f"{label:20}", *(f"{median(runs, reference, key):>18}" for key in keys))
    print(flush=True)


def tokens_per_second(n_tokens, start_time):
    return {"n_tokens": n_tokens, "tok_per_sec": n_tokens / (time.perf_counter() - start_time)}


def to_args(flags):
    return [f"--{name}={value}" for name, value in flags.items()]


def run_python(flags, *command):
    """Runs Python to its end; if it fails, so does this program. Returns what it printed."""
    done = subprocess.run([sys.executable, *command, *to_args(flags)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


# -----------------------------------------------------------------------------
# training

def time_steps(label, script, flags):
    """
    Runs a training script. Returns metrics from its log, without the first step. Each label has its own compiler
    cache, which is empty in the first round.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache = f"{folder}/cache-{label}"  # no spaces: g++ gets it unquoted
    compile_s = "warm_compile_s" if os.path.exists(cache) else "cold_compile_s"
    run_python({**GIVEN, **flags, "out_dir": f"{folder}/out"}, SCRIPTS / script)
    log = [json.loads(line) for line in open(f"{folder}/out/log.jsonl")]
    shutil.rmtree(f"{folder}/out")  # checkpoints of gigabytes
    steps = [entry for entry in log if "tok_per_sec" in entry][1:]
    medians = {key: statistics.median(step[key] for step in steps) for key in ("tok_per_sec", "mfu", "wait")}
    return steps[-1] | medians | {compile_s: entry["seconds"] for entry in log if entry.get("event") == "compiled"}


# runs nanoGPT's train.py, then prints its peak memory, measured as in our loops
NANOGPT = f"""
import os, runpy, sys, torch
os.chdir({nanogpt!r})
runpy.run_path("train.py", run_name="__main__")
del sys.modules["model"]  # ours has the same name
sys.path[0] = {str(SCRIPTS)!r}
import runtime
print("peak_mem_mb", runtime.peak_memory_mb(torch.device({str(device)!r})))
"""


def time_nanogpt():
    """Runs nanoGPT's train.py at the same sizes. Returns metrics, without the first step, which compiles."""
    flags = {name: train_flags[name] for name in ("batch_size", "n_layer", "n_head", "n_embd", "compile")}
    flags |= {"block_size": train_flags["max_seq_len"], "gradient_accumulation_steps": 1, "max_iters": train_iters - 1,
              "eval_iters": 1, "log_interval": 1, "device": device, "dataset": folder, "out_dir": f"{folder}/out"}
    output = run_python(flags, "-c", NANOGPT)
    steps = [float(ms) / 1000 for ms in re.findall(r"^iter \d+: .* time ([\d.]+)ms", output, re.MULTILINE)]
    n_tokens, peak = int(flags["batch_size"]) * int(flags["block_size"]), re.search(r"peak_mem_mb (.+)", output)[1]
    return {"tok_per_sec": n_tokens / statistics.median(steps[1:]), "peak_mem_mb": float(peak)}


def bench_train():
    measures = {"nanoGPT": time_nanogpt} if nanogpt else {}
    for name in names:
        flags = {**train_flags, **VARIANTS[name], "data_dir": folder}
        measures[name] = partial(time_steps, name, "train_gpt2.py", flags)
    run_interleaved(f"training: train_gpt2.py {' '.join(to_args(train_flags))}", measures)


def profile_steps():
    """Runs train_gpt2.py in this process, with torch's profiler on in its last three steps."""
    from torch._inductor import config as inductor
    inductor.cpp.enable_kernel_profile = True  # else compiled CPU kernels have no names
    flags = {**GIVEN, **train_flags, **VARIANTS[names[0]], "max_iters": train_iters + 4}
    sys.argv = ["train_gpt2.py", *to_args({**flags, "data_dir": folder, "out_dir": f"{folder}/out"})]
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=train_iters, warmup=1, active=3)) as profiler:
        # every optimizer here has one AdamW; Muon's wrapper would call this three times a step
        register_optimizer_step_post_hook(lambda step, *_: isinstance(step, torch.optim.AdamW) and profiler.step())
        runpy.run_path(str(SCRIPTS / "train_gpt2.py"), run_name="__main__")
    profiler.export_chrome_trace("trace.json")
    print(profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=10))
    print(f"3 steps of {' '.join(sys.argv)}\nopen {Path('trace.json').resolve()} in https://ui.perfetto.dev")


# -----------------------------------------------------------------------------
# chat tuning, compiled and not

def bench_chat():
    print("training a base model for one step ...", file=sys.stderr, flush=True)
    run_python({**GIVEN, **train_flags, "max_seq_len": 1024, "batch_size": 1, "max_iters": 1, "compile": False,
                "data_dir": folder, "out_dir": f"{folder}/base"}, SCRIPTS / "train_gpt2.py")
    chats = f"{folder}/chats.jsonl"
    with open(chats, "w") as f:
        f.writelines(json.dumps(conversation) + "\n" for conversation in python_conversations())
    flags = {**chat_flags, "init_from": f"{folder}/base", "data": chats, "chat_dir": f"{folder}/rows"}
    measures = {label: partial(time_steps, label, "chat_sft.py", {**flags, "compile": value})
                for label, value in MODES.items()}
    run_interleaved(f"chat tuning: chat_sft.py {chat_args}; the model has the size of train_args", measures)


# -----------------------------------------------------------------------------
# data preparation

def bench_prep():
    prepared = Path(folder, "prepared")
    source = {"files": prep_files, "tokenizer": "gpt2"} if prep_files else {"dataset": "python"}

    def prepare():
        shutil.rmtree(prepared, ignore_errors=True)
        start_time = time.perf_counter()
        run_python({**source, "data_dir": prepared}, SCRIPTS / "prepare_data.py")
        return tokens_per_second(read_meta(prepared)["tokens"], start_time)

    def tiktoken_alone():
        start_time = time.perf_counter()
        encoded = tokenizer.encode_ordinary_batch(texts, num_threads=count_cpus())
        return tokens_per_second(sum(map(len, encoded)) + len(texts), start_time)  # with <|endoftext|>

    measures = {"prepare_data.py": prepare}
    if prep_files:
        prepare()
        tokenizer = get_tokenizer("gpt2")
        shards = [read_shard(path) for path in sorted(prepared.glob("*.bin"), reverse=True)]  # val comes before train
        texts = "".join(map(tokenizer.decode, shards)).split(END_OF_TEXT)[1:]
        measures = {"tiktoken": tiktoken_alone, **measures}
    run_interleaved(f"data preparation: prepare_data.py {' '.join(to_args(source))}, from start to end; tiktoken: "
                    f"alone, texts in memory, {count_cpus()} threads", measures)


# -----------------------------------------------------------------------------
# decoding

def bench_decode():
    prompt = [198] * context

    def decode(model, step, cache_bytes):
        with runtime.autocast(device, dtype):
            tokens = generate(model, [prompt], new_tokens, top_k=200, compiled=step)
            next(tokens)  # reads the prompt
            start_time = time.perf_counter()
            n_tokens = sum(1 for _ in tokens)
        return {**tokens_per_second(n_tokens, start_time), "cache_bytes": cache_bytes}

    def decode_nanogpt(model):
        n_tokens = new_tokens if on_gpu else 3  # which take long enough, without a cache
        with runtime.autocast(device, dtype if on_gpu else "float32"):  # as in its sample.py
            start_time = time.perf_counter()
            model.generate(torch.tensor([prompt], device=device), n_tokens, top_k=200).tolist()
        return tokens_per_second(n_tokens, start_time)

    measures = {}
    if nanogpt:
        module = runpy.run_path(f"{nanogpt}/model.py")
        model = module["GPT"](module["GPTConfig"](block_size=context + new_tokens, bias=False))
        measures["nanoGPT"] = partial(decode_nanogpt, model.to(device))
    for name in names:
        for mode, compiled in MODES.items():
            label = f"{name} {mode}"
            print(f"building {label} ...", file=sys.stderr, flush=True)
            model = GPT(GPTConfig(max_seq_len=context + new_tokens, **VARIANTS[name])).to(device)
            cache = model.new_cache(1, 1, getattr(torch, dtype))
            with runtime.autocast(device, dtype):
                step = compile_step(model, 1) if compiled else None
            measures[label] = partial(decode, model, step, sum(tensor.nbytes for tensor in sum(cache, [])))
    for measure in measures.values():
        measure()  # warm-up
    run_interleaved(f"decoding: GPT-2 124M's size, one row, {context} tokens of context, temperature 1, top_k 200; "
                    f"cache_bytes: for each token", measures)


# -----------------------------------------------------------------------------
print(f"{torch.cuda.get_device_name(device) if on_gpu else device}, {torch.get_num_threads()} CPU threads, "
      f"torch {torch.__version__}, {dtype}, rounds: {rounds}\n", flush=True)
with temp_dir:
    # random tokens, as our shards and as nanoGPT's train.bin and val.bin
    tokens = np.random.default_rng(0).integers(0, 50257, 2_000_000, dtype="<u2").tobytes()
    for split in ("train", "val"):
        Path(folder, f"{split}_000000.bin").write_bytes(shard_header(len(tokens) // 2) + tokens)
        Path(folder, f"{split}.bin").write_bytes(tokens)
    if profile:
        profile_steps()
        raise SystemExit(0)
    # decode comes last: on Linux the memory of this process counts in the peak of those that it starts
    for table, bench in zip(TABLES, (bench_train, bench_chat, bench_prep, bench_decode)):
        if table in tables:
            bench()
