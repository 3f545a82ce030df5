"""
How fast is this machine: training, chat tuning, the head's loss, data parallelism, data preparation, decoding.

    python bench.py                                             # all tables, one after another; roughly an hour on two CPU cores
    python bench.py --what=train,decode --nanogpt=../nanoGPT    # against a checkout of nanoGPT, which is the first row then
    python bench.py --what=train --train_args='--n_layer=4 --n_embd=256 --n_head=4'
    python bench.py --what=prep --prep_files='texts/*.parquet'
    python bench.py --profile=True                              # where a step of train_gpt2.py spends its time

It times what the scripts run: train_gpt2.py, chat_sft.py and prepare_data.py are started and their own figures read; decoding
is the model's generate. Variants take turns, round after round; figures are medians over the rounds, and so is each ratio to the
reference, the first row, in the same round: a machine whose speed drifts changes the figures more than the ratios.
"""
import copy
import importlib.util
import json
import math
import os
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import runtime
from configurator import configure, expect_range, fail
from model import GPT, GPTConfig, LOSS_CHUNK, linear_cross_entropy
from prepare_data import count_cpus, find_files, get_tokenizer, read_shard, shard_header

# ---------------------------------------------------------------------------------------------------
# settings
what: str = "all"  # or some of train, chat, loss, ddp, prep and decode, with commas between; or soak
variants: str = "gpt2,gpt2+mla,llama,llama+mla"  # train, decode: what is compared: arch, or arch+attention; ddp, soak, profile: the first
nanogpt: Optional[str] = None  # train, decode: a checkout of nanoGPT, the reference then; else the first of the variants is
rounds: Optional[int] = None  # times each variant has its turn; None: 3, on GPUs, whose speed drifts less, 2
device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
compile: bool = True  # torch.compile; chat: against none
train_args: Optional[str] = None  # train, loss, ddp: flags of train_gpt2.py; None: GPT-2 124M on GPUs, 6 layers of 384 on CPUs, 16 rows
train_iters: int = 15  # train, chat: steps a round, the first of them not counted; ddp: a third of them
chat_args: Optional[str] = None  # chat: settings of chat_sft.py; None: 4 rows of 1024 to GPT-2 124M on GPUs, of 512 to 30M on CPUs
context: int = 1024  # decode: tokens in the cache when the timed ones come
new_tokens: int = 64  # decode: timed tokens a round
prep_files: Optional[str] = None  # prep: texts, as --files of prepare_data.py, for the gpt2 tokenizer against tiktoken alone
minutes: float = 120.0  # soak: how long
profile: bool = False  # instead of tables: a trace of 3 steps of train_gpt2.py into trace.json
one_loss: Optional[Literal["ours", "full", "recompute", "torch"]] = None  # how bench.py starts itself for a row of the loss table
config, given = configure(globals())

SCRIPTS = Path(__file__).resolve().parent
TABLES = ("train", "chat", "loss", "ddp", "prep", "decode")
wanted = TABLES if what == "all" else [part.strip() for part in what.split(",")]
if not set(wanted) <= {*TABLES, "soak"}:
    fail(f"--what={what}: expected all, or some of {', '.join(TABLES)}, or soak")
names = list(dict.fromkeys(name.strip() for name in variants.split(",")))
for name in names:
    if name not in ("gpt2", "gpt2+mla", "llama", "llama+mla"):
        fail(f"--variants={variants}: {name!r} is none of gpt2, gpt2+mla, llama, llama+mla")
if nanogpt is not None and not all((Path(nanogpt) / name).is_file() for name in ("train.py", "model.py")):
    fail(f"--nanogpt={nanogpt}: holds no train.py and model.py; expected the folder of a checkout of nanoGPT")
if prep_files is not None:
    find_files("prep_files", prep_files)  # now, and not when its table is due
expect_range(config, 1, math.inf, "rounds", "context", "minutes")
expect_range(config, 2, math.inf, "new_tokens")
expect_range(config, 5 if profile else 2, math.inf, "train_iters")
_, _, compute_device = runtime.init_process(device)
compute_dtype = runtime.pick_dtype(dtype, compute_device)
on_gpu = compute_device.type == "cuda"
rounds = rounds or (2 if on_gpu else 3)
rows = ["nanoGPT"] * (nanogpt is not None) + names


def flags_for(script, setting, text, ours):
    """The flags of a script that a setting lists -> {name: value}. None of those that bench.py gives it: `ours`, and its own settings."""
    known = re.findall(r"^(\w+): ", (SCRIPTS / script).read_text(encoding="utf-8"), re.M)
    flags = {}
    for flag in text.split():
        key, equals, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not equals:
            fail(f"--{setting}={text}: {flag!r}: expected flags of {script}, --name=value, with spaces between")
        if key not in known:
            fail(f"--{setting}={text}: {script} has no setting {key}")
        if key in ours.split() or key in config:
            fail(f"--{setting}={text}: bench.py gives {script} its {key} itself; leave it out here"
                 + (f" and give bench.py --{key}" if key in config else ""))
        flags[key] = value
    return flags


# the sizes
train_flags = flags_for("train_gpt2.py", "train_args", "--batch_size=16" + ("" if on_gpu else " --n_layer=6 --n_head=6 --n_embd=384 --max_seq_len=256")
                        if train_args is None else train_args, "arch attention gradient_accumulation_steps max_iters data_dir out_dir")
chat_flags = flags_for("chat_sft.py", "chat_args", f"--max_seq_len={1024 if on_gpu else 512}" if chat_args is None else chat_args,
                       "init_from data chat_dir max_iters out_dir")
shape = {"batch_size": 16, **{key: getattr(GPTConfig(), key) for key in ("n_layer", "n_head", "n_embd", "max_seq_len")}}
for key in shape.keys() & train_flags.keys():
    if not (train_flags[key].isdecimal() and int(train_flags[key])):
        fail(f"--train_args={train_args}: {key}={train_flags[key]}: expected a whole number above 0")
    shape[key] = int(train_flags[key])
tokens_per_batch = shape["batch_size"] * shape["max_seq_len"]
size, chat_size = ([f"--{key}={value}" for key, value in flags.items()] for flags in (train_flags, chat_flags))


# ---------------------------------------------------------------------------------------------------
# turns and tables

def take_turns(table, labels, measure, warm_up=0):
    """measure(label) -> figures, a dict, of each label in each round -> {label: [figures, ...]}; rounds of warm_up are left out."""
    found = {label: [] for label in labels}
    for i in range(1 - warm_up, rounds + 1):
        for label in labels:
            print(f"\r{f'{table}, round {i} of {rounds}: {label}':60}", end="", file=sys.stderr, flush=True)
            figures = measure(label)
            found[label] += [figures] if i > 0 else []
    print("\r" + 60 * " ", end="\r", file=sys.stderr, flush=True)
    return found


def cell(found, label, key, form=",.0f", to=None):
    """The median over the rounds of a figure, or of its ratio to that of the label `to`; a dash where there is none."""
    values = [figures.get(key) for figures in found[label]]
    if to is not None:
        values = [a / b if a and b else None for a, b in zip(values, (figures.get(key) for figures in found.get(to, [])))]
    values = [value for value in values if value is not None]
    if not values or isinstance(values[-1], str):
        return values[-1] if values else "-"
    return format(statistics.median(values), form)


def print_table(title, found, columns, *more, labels={}):
    """columns: head, key of the figures, and what else `cell` takes. more: lines that are ready. labels: how they are called."""
    lines = [["", *(head for head, *_ in columns)]]
    lines += [[labels.get(label, str(label)), *(cell(found, label, *column[1:]) for column in columns)] for label in found]
    lines += more
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(title)
    for label, *cells in lines:
        print(label.ljust(widths[0]) + "".join(text.rjust(width + 2) for text, width in zip(cells, widths[1:])), flush=True)


def start(name, command, **options):
    """Runs a program to its end -> what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", **options)
    if done.returncode:
        print(file=sys.stderr)  # behind the progress
        fail(f"{name} ended with code {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    return done.stdout


# ---------------------------------------------------------------------------------------------------
# the loops, as processes

SHORT = "--eval_iters=1", "--sample_tokens=0", "--log_interval=1", "--warmup_iters=0", "--gradient_accumulation_steps=1"


def flags_of(name):
    arch, _, attention = name.partition("+")
    return f"--arch={arch}", f"--attention={attention or 'mha'}"


FIRST = [*flags_of(names[0]), *size]  # the first of the variants, where only one is run


def write_shards(folder):
    """Random tokens as our shards, and as nanoGPT's train.bin and val.bin."""
    tokens = np.random.default_rng(0).integers(0, 50257, 2_000_000, dtype="<u2").tobytes()
    for split in ("train", "val"):
        Path(folder, f"{split}_000000.bin").write_bytes(shard_header(len(tokens) // 2) + tokens)
        Path(folder, f"{split}.bin").write_bytes(tokens)
    Path(folder, "meta.json").write_text(json.dumps({"tokenizer": "gpt2", "vocab_size": 50304}))


def with_cache(folder, name):
    """An environment whose compiler finds nothing when this name comes for the first time, and its own graphs later: cold, then warm."""
    cache = f"{folder}/cache-{name.replace(' ', '-')}"  # g++ is given it unquoted
    return {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}, "warm" if os.path.exists(cache) else "cold"


def time_steps(folder, name, script, *flags, steps=train_iters, ranks=0):
    """Starts a training script, under torchrun for ranks > 0 -> figures from its log, medians over all steps but the first."""
    env, cache = with_cache(folder, name)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    if ranks and not on_gpu:
        env["OMP_NUM_THREADS"] = "1"
    start(script, [sys.executable, *torchrun, SCRIPTS / script, *SHORT, *flags, f"--max_iters={steps}", f"--dtype={compute_dtype}",
                   f"--device={compute_device.type if ranks else device}", f"--out_dir={folder}/out"], env=env)
    log = [json.loads(line) for line in Path(folder, "out", "log.jsonl").read_text().splitlines()]
    shutil.rmtree(f"{folder}/out")  # checkpoints of some GB
    compiling = [entry["seconds"] for entry in log if entry.get("event") == "compiled"]
    if "--compile=True" in flags and not compiling:
        fail(f"--compile=True: {script} went on uncompiled, as torch.compile does not work here; give --compile=False")
    log = [entry for entry in log if "tok_per_sec" in entry][1:]
    return {**log[-1], **{key: statistics.median(entry[key] for entry in log) for key in ("tok_per_sec", "mfu", "wait")},
            cache: compiling[0] if compiling else None}


# runs nanoGPT's train.py, then says what memory it took, as our loops do
NANOGPT = """
import runpy, sys, torch
scripts = sys.argv.pop(1)
runpy.run_path("train.py", run_name="__main__")
del sys.modules["model"]  # ours has the same name
sys.path[0] = scripts
import runtime
print("peak_mem_mb", runtime.peak_memory_mb(torch.device(sys.argv[1].removeprefix("--device="))))
"""


def time_nanogpt(folder):
    """Starts nanoGPT's train.py on the same sizes -> figures as above. Its first iteration's time is what it takes to compile."""
    sizes = [f"--{key.replace('max_seq_len', 'block_size')}={value}" for key, value in shape.items()]
    env, cache = with_cache(folder, "nanoGPT")
    output = start("nanoGPT's train.py", [
        sys.executable, "-c", NANOGPT, SCRIPTS, f"--device={compute_device}", *sizes, f"--compile={compile}",
        "--gradient_accumulation_steps=1", "--eval_iters=1", "--log_interval=1", "--wandb_log=False", "--always_save_checkpoint=False",
        f"--max_iters={train_iters - 1}", f"--dataset={folder}", f"--out_dir={folder}/out"], cwd=nanogpt, env=env)
    seconds = [float(ms) / 1000 for ms in re.findall(r"^iter \d+: .* time ([\d.]+)ms", output, re.MULTILINE)]
    if len(seconds) < 2:
        fail(f"--nanogpt={nanogpt}: its train.py printed no lines like 'iter 1: loss .., time ..ms': {output[-300:]}")
    step, memory = statistics.median(seconds[1:]), re.search(r"^peak_mem_mb ([\d.]+)", output, re.MULTILINE)
    return {"tok_per_sec": tokens_per_batch / step, "peak_mem_mb": float(memory[1]) if memory else None,
            cache: seconds[0] - step if compile else None}


def bench_train(folder):
    def measure(name):
        if name == "nanoGPT":
            return time_nanogpt(folder)
        return time_steps(folder, name, "train_gpt2.py", *flags_of(name), *size, f"--compile={compile}", f"--data_dir={folder}")

    found = take_turns("train", rows, measure)
    sheet = runtime.data_sheet_flops(compute_device, compute_dtype)
    peak = f"the {sheet / 1e12:,.0f} TFLOP/s of its data sheet" if sheet else "a matrix product timed at each start"
    print_table(f"training: train_gpt2.py {' '.join(size)} --compile={compile}; MFU is against {peak}; compiling from nothing (cold) and "
                "from a cache (warm)"
                + "\nnanoGPT: the same sizes, else its own settings; its seconds to compile hold two batches of validation" * bool(nanogpt),
                found, [("tokens/s", "tok_per_sec"), ("ratio", "tok_per_sec", ".2f", rows[0]), ("MFU", "mfu", ".1%"),
                        ("peak MB", "peak_mem_mb"), ("ratio", "peak_mem_mb", ".2f", rows[0]), ("cold s", "cold", ".1f"),
                        ("warm s", "warm", ".1f"), ("waits for data", "wait", ".2%"), ("recompiles", "recompiles")])


# chat tuning, compiled against not: the gain is to be 1.3 at least, compiling 60 s and 10 % of memory at most
def bench_chat(folder):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**({} if on_gpu else dict(n_layer=6, n_head=6, n_embd=384))))
    runtime.save_checkpoint(f"{folder}/base", {"model": gpt.state_dict(), "model_args": asdict(gpt.config), "config": {}, "stage": "base",
                                               "tokenizer": "gpt2", "iter_num": 0, "val_loss": 0.0, "val_iter": 0})
    rng = np.random.default_rng(0)
    with open(f"{folder}/chats.jsonl", "w") as f:
        for length in rng.lognormal(4, 0.7, 2000).astype(int) + 1:  # answers of 55 words in the median
            words = (("user", length // 2 + 1), ("assistant", length))
            f.write(json.dumps({"messages": [{"role": role, "content": "word " * int(n)} for role, n in words]}) + "\n")
    eager = "not compiled"
    found = take_turns("chat", (eager, "compiled")[:1 + compile], lambda label: time_steps(
        folder, f"chat {label}", "chat_sft.py", f"--init_from={folder}/base/ckpt.pt", *chat_size, f"--data={folder}/chats.jsonl",
        f"--chat_dir={folder}/rows", f"--compile={label != eager}"))
    print_table(f"chat tuning: chat_sft.py {' '.join(chat_size)}, {sum(p.numel() for p in gpt.parameters()) / 1e6:.0f}M parameters",
                found, [("useful tok/s", "tok_per_sec"), ("ratio", "tok_per_sec", ".2f", eager), ("peak MB", "peak_mem_mb"),
                        ("ratio", "peak_mem_mb", ".2f", eager), ("cold s", "cold", ".1f"), ("warm s", "warm", ".1f"),
                        ("waits for data", "wait", ".2%"), ("recompiles", "recompiles"), ("useful", "useful", ".1%")],
                ["target", "", ">= 1.30", "", "<= 1.10", "<= 60", "", "", "0", ""])


# data parallel: one core, or one GPU, a rank
def bench_ddp(folder):
    n = torch.cuda.device_count() if on_gpu else min(2, count_cpus())
    if compute_device.type == "mps" or n < 2:
        print("data parallel: left out, it takes two GPUs, or a CPU of two cores", flush=True)
        return
    found = take_turns("ddp", (1, n), lambda ranks: time_steps(
        folder, "ddp", "train_gpt2.py", *FIRST, f"--gradient_accumulation_steps={2 * ranks}", f"--compile={compile}",
        f"--data_dir={folder}", steps=max(2, train_iters // 3), ranks=ranks))
    print_table(f"data parallel: torchrun train_gpt2.py {' '.join(FIRST)} --compile={compile}; a step is 2 micro-batches on each rank, "
                f"which has {'a GPU' if on_gpu else 'one thread'}",
                found, [("tokens/s", "tok_per_sec"), ("ratio", "tok_per_sec", ".2f", 1)], labels={1: "1 rank", n: f"{n} ranks"})


# one long run, with its evaluations, samples and checkpoints: speed and memory are to stay what they are
def bench_soak(folder):
    command = [sys.executable, SCRIPTS / "train_gpt2.py", *FIRST, "--max_iters=1000000000", "--gradient_accumulation_steps=1",
               "--log_interval=10", "--eval_interval=50", "--eval_iters=4", f"--compile={compile}", f"--dtype={compute_dtype}",
               f"--device={device}", f"--data_dir={folder}", f"--out_dir={folder}/soak"]
    with open(f"{folder}/soak.txt", "w+") as output, subprocess.Popen(command, stdout=output, stderr=output) as run, ExitStack() as at_end:
        at_end.callback(lambda: (run.terminate(), run.wait()))  # whatever ends this
        begun, seen, before = time.time(), [], (0, 0.0)
        print(f"soak: train_gpt2.py {' '.join(FIRST)} for {minutes:g} minutes, evaluated, sampled from and saved every 50 steps\n"
              f"{'minutes':>9}{'step':>9}{'tokens/s':>10}{'per CPU second':>16}{'resident MB':>13}", flush=True)
        while run.poll() is None and time.time() - begun < 60 * minutes:
            time.sleep(3 * minutes)  # twenty lines, however long it is
            log = Path(folder, "soak", "log.jsonl")
            steps = [json.loads(line) for line in log.read_text().splitlines() if "tok_per_sec" in line] if log.exists() else []
            if run.poll() is None and len(steps) > 1 and steps[-1]["iter"] > before[0]:  # nothing logged since: no line
                resident, cpu_time = subprocess.check_output(["ps", "-o", "rss=,time=", "-p", str(run.pid)], text=True).split()
                spent = sum(float(n) * unit for n, unit in zip(re.split("[-:]", cpu_time)[::-1], (1, 60, 3600, 86400)))  # [[d-]h:]m:s
                step = steps[-1]["iter"]
                speed = statistics.median(line["tok_per_sec"] for line in steps[-5:])
                per_cpu_second = (step - before[0]) * tokens_per_batch / max(spent - before[1], 1)  # evaluations and all since the last line
                seen.append((speed, per_cpu_second, int(resident) / 1024))
                before = step, spent
                print(f"{(time.time() - begun) / 60:>9.1f}{step:>9,}{speed:>10,.0f}{per_cpu_second:>16,.0f}{seen[-1][2]:>13,.0f}", flush=True)
        if run.poll() is not None:
            output.seek(0)
            fail(f"train_gpt2.py ended with code {run.returncode}: {output.read()[-500:]}")
    quarter = max(1, len(seen) // 4)  # the first line is still warming up
    for what_it_is, values in zip(("tokens/s", "tokens per CPU second", "resident MB"), zip(*seen[1:])):
        first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        print(f"{what_it_is}: {first:,.0f} in the first quarter, {last:,.0f} in the last, {100 * (last / first - 1):+.1f} %", flush=True)


def profile_steps(folder):
    """Runs train_gpt2.py in this process, with torch's profiler on in three of its last steps."""
    from torch._inductor import config as inductor
    inductor.cpp.enable_kernel_profile = True  # or compiled CPU kernels have no names
    stepped = []

    def after_step(optimizer, *_):
        stepped.append(optimizer)
        if optimizer is stepped[0]:  # there may be two
            profiler.step()

    register_optimizer_step_post_hook(after_step)
    sys.argv = ["train_gpt2.py", *SHORT, *FIRST, f"--compile={compile}", f"--max_iters={train_iters}",
                f"--dtype={compute_dtype}", f"--device={device}", f"--data_dir={folder}", f"--out_dir={folder}/out"]
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=train_iters - 4, warmup=1, active=3, repeat=1)) as profiler:
        runpy.run_path(str(SCRIPTS / "train_gpt2.py"), run_name="__main__")
    profiler.export_chrome_trace("trace.json")
    print(profiler.key_averages().table(sort_by=f"self_{'device' if on_gpu else 'cpu'}_time_total", row_limit=10, max_name_column_width=80))
    print(f"3 steps of {' '.join(sys.argv)}\ntrace: {Path('trace.json').resolve()}; open it in https://ui.perfetto.dev")


# ---------------------------------------------------------------------------------------------------
# the head's loss alone, forward and backward, at the shape of training

def run_one_loss():
    """
    One way to take it, in this process: a line of JSON, {"ms", "compiled"}, for each line read; behind the last the peak of memory
    and how far loss and gradients are from those of full logits in float32, |a - b| / |b|.
    """
    torch.manual_seed(0)
    x = torch.randn(tokens_per_batch, shape["n_embd"], device=compute_device, requires_grad=True)  # (N, C), as a norm leaves it
    weight = torch.nn.Parameter(0.02 * torch.randn(50304, shape["n_embd"], device=compute_device))  # (V, C)
    targets = torch.randint(0, 50257, (tokens_per_batch,), device=compute_device)

    def full(x, weight, targets):
        return F.cross_entropy((x @ weight.t()).float(), targets, reduction="sum")

    def recompute(x, weight, targets):
        return sum(checkpoint(full, xc, weight, tc, use_reentrant=False) for xc, tc in zip(x.split(LOSS_CHUNK), targets.split(LOSS_CHUNK)))

    def torchs(x, weight, targets):  # the chunks it chooses itself are slower; without allow_retain_graph a warning breaks the graph
        options = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True, batch_chunk_size=LOSS_CHUNK)
        x, weight = (tensor.to(getattr(torch, compute_dtype)) for tensor in (x, weight))  # autocast passes it by
        return F.linear_cross_entropy(x, weight, targets, reduction="sum", options=options)

    def forward_backward(loss_function, dtype):
        x.grad = weight.grad = None
        with runtime.autocast(compute_device, dtype):
            loss = loss_function(x, weight, targets)
        loss.backward()
        return loss.item()  # waits for the device

    eager = {"ours": linear_cross_entropy, "full": full, "recompute": recompute, "torch": torchs}[one_loss]
    chosen, compiled = (torch.compile(eager, dynamic=False, fullgraph=True), "yes") if compile else (eager, "no")
    for _ in sys.stdin:
        times = []
        for _ in range(5):
            t0 = time.perf_counter()
            try:
                loss = forward_backward(chosen, compute_dtype)
            except torch._dynamo.exc.TorchDynamoException as error:
                chosen, compiled = eager, f"no: {type(error).__name__}: {' '.join(str(error).split())[:60]}"
                loss = forward_backward(chosen, compute_dtype)
            times.append(time.perf_counter() - t0)
        print(json.dumps({"ms": 1000 * statistics.median(times), "compiled": compiled}), flush=True)
        if on_gpu:
            torch.cuda.empty_cache()  # the others have their turn
    memory, found = runtime.peak_memory_mb(compute_device), (torch.tensor(loss), x.grad, weight.grad)
    torch.set_float32_matmul_precision("highest")  # all of its bits, no TF32
    expected = torch.tensor(forward_backward(full, "float32")), x.grad, weight.grad
    print(json.dumps({"peak_mem_mb": memory, **{
        f"off_{i}": float((a - b).norm() / b.norm()) for i, (a, b) in enumerate(zip(found, expected))}}), flush=True)


def bench_loss(folder):
    labels = {"ours": "ours: chunks, gradient formed in forward", "full": "full logits", "recompute": "chunks, recomputed in backward",
              "torch": "torch's linear_cross_entropy, the same chunks"}
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        print(f"torch {torch.__version__} has no chunked linear_cross_entropy\n", flush=True)
        del labels["torch"]
    flags = [f"--dtype={compute_dtype}", f"--device={device}", f"--compile={compile}", f"--train_args={' '.join(size)}"]
    started = {key: subprocess.Popen([sys.executable, SCRIPTS / "bench.py", *flags, f"--one_loss={key}"], text=True,
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=with_cache(folder, f"loss-{key}")[0])
               for key in labels}  # each in a process of its own, whose peak of memory is its own

    def answer(key):
        line = started[key].stdout.readline()
        if not line:
            fail(f"the loss of {labels[key]} ended with code {started[key].wait()}")
        return json.loads(line)

    def measure(key):
        started[key].stdin.write("\n")
        started[key].stdin.flush()
        return answer(key)

    found = take_turns("loss", labels, measure, warm_up=1)
    for key in labels:
        started[key].stdin.close()
        found[key][-1] |= answer(key)
        started[key].wait()
    print_table(f"loss of the head, forward and backward: {tokens_per_batch:,} tokens, {shape['n_embd']} wide, vocabulary 50,304, "
                f"{compute_dtype}; peak MB of the whole process; how far from full logits in float32: |a - b| / |b|",
                found, [("ms", "ms", ".1f"), ("ratio", "ms", ".2f", "ours"), ("peak MB", "peak_mem_mb"), ("compiled", "compiled"),
                        ("loss", "off_0", ".1e"), ("gradient of x", "off_1", ".1e"), ("of the weight", "off_2", ".1e")], labels=labels)


# ---------------------------------------------------------------------------------------------------
# data preparation: the standard library as bytes, which needs no vocabulary; and texts with gpt2's tokenizer against tiktoken alone

def bench_prep(folder):
    labels, texts = {"python": "the standard library, as bytes"}, []
    if prep_files:
        labels |= {"files": f"{prep_files}, gpt2", "tiktoken": f"tiktoken alone, {count_cpus()} threads, these texts in memory"}

    def prepare(key):
        source = ["--dataset=python"] if key == "python" else [f"--files={prep_files}", "--tokenizer=gpt2"]
        t0 = time.perf_counter()
        output = start("prepare_data.py", [sys.executable, SCRIPTS / "prepare_data.py", *source, f"--data_dir={folder}/prepared"])
        seconds = time.perf_counter() - t0
        tokens = json.loads(Path(folder, "prepared", "meta.json").read_text())["tokens"]
        if key == "files" and not texts:  # the same documents, from what was made of them; val comes before train
            shards = sorted(Path(folder, "prepared").glob("*.bin"), key=lambda path: (path.name.startswith("train"), path.name))
            ids, tokenizer = np.concatenate([read_shard(path) for path in shards]), get_tokenizer("gpt2")
            texts.extend(tokenizer.decode(document[1:]) for document in np.split(ids, np.flatnonzero(ids == tokenizer.eot_token))[1:])
        shutil.rmtree(f"{folder}/prepared")
        own = float(re.search(r"([\d,]+) tokens/s", output)[1].replace(",", ""))
        rated = {} if key == "python" else {"rated": tokens / seconds, "own rated": own}
        return {"tokens": tokens, "tok_per_sec": tokens / seconds, "own": own, **rated}

    def tiktoken_alone():
        t0, tokens, tokenizer = time.perf_counter(), len(texts), get_tokenizer("gpt2")  # prepare_data.py counts <|endoftext|>, too
        for i in range(0, len(texts), 4096):  # its lists take 36 bytes a token
            tokens += sum(map(len, tokenizer.encode_ordinary_batch(texts[i:i + 4096], num_threads=count_cpus())))
        speed = tokens / (time.perf_counter() - t0)
        return {"tokens": tokens, "tok_per_sec": speed, "rated": speed, "own rated": speed}

    found = take_turns("prep", labels, lambda key: tiktoken_alone() if key == "tiktoken" else prepare(key))
    print_table("data preparation: prepare_data.py from its start to its end; and its own figure, which begins with the first document",
                found, [("tokens", "tokens"), ("tokens/s", "tok_per_sec"), ("of tiktoken's", "rated", ".2f", "tiktoken"), ("its own", "own"),
                        ("of tiktoken's", "own rated", ".2f", "tiktoken")], labels=labels)


# ---------------------------------------------------------------------------------------------------
# decoding: GPT-2 124M's size, one row

def bench_decode(folder):
    models, cache_bytes = {}, {}
    for name in rows:
        torch.manual_seed(0)
        if name == "nanoGPT":
            spec = importlib.util.spec_from_file_location("nanogpt_model", Path(nanogpt) / "model.py")
            theirs = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(theirs)
            with redirect_stdout(sys.stderr):  # it tells its number of parameters
                models[name] = theirs.GPT(theirs.GPTConfig(block_size=context + new_tokens, bias=False))
        else:
            arch, _, attention = name.partition("+")
            models[name] = GPT(GPTConfig(max_seq_len=context + new_tokens, arch=arch, attention=attention or "mha"))
            cache = models[name].new_cache(1, 1, getattr(torch, compute_dtype))
            cache_bytes[name] = sum(tensor.nbytes for layer in cache for tensor in layer)
        models[name].to(compute_device).eval()
    prompt = torch.randint(0, 50257, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    labels, steps, compiling = list(rows), {}, {}
    problem = compile and runtime.compiler_problem(compute_device, "inductor")
    if problem:
        fail(f"--compile=True: torch.compile does not work here: {problem}; give --compile=False")
    for name in names if compile else ():
        labels.insert(labels.index(name) + 1, f"{name}, compiled")

    def measure(label):
        name, _, compiled = label.partition(", ")
        if name == "nanoGPT":  # on a CPU its sample.py computes in float32, for which 3 tokens are long enough
            n = new_tokens if on_gpu else min(3, new_tokens)
            with runtime.autocast(compute_device, compute_dtype if on_gpu else "float32"):
                t0 = time.perf_counter()
                models[name].generate(torch.tensor([prompt], device=compute_device), n, temperature=1.0, top_k=200).tolist()
        else:
            with runtime.autocast(compute_device, compute_dtype):
                if compiled and name not in steps:
                    t0 = time.perf_counter()
                    steps[name] = copy.deepcopy(models[name])  # whose weights are in compute_dtype from then on
                    steps[name] = steps[name], steps[name].compile_step(1)
                    compiling[name] = time.perf_counter() - t0
                model, step = steps[name] if compiled else (models[name], None)
                tokens = model.generate([prompt], new_tokens, temperature=1.0, top_k=200, compiled=step)
                next(tokens)  # reads the prompt
                t0 = time.perf_counter()
                n = sum(1 for _ in tokens)
        return {"tok_per_sec": n / (time.perf_counter() - t0), "cache": cache_bytes.get(name),
                "compiling": compiling.get(name) if compiled else None}

    found = take_turns("decode", labels, measure, warm_up=1)
    print_table(f"decoding: 12 layers, 12 heads, 768 wide, {context} tokens of context, batch 1, temperature 1, top_k 200"
                + ("; nanoGPT: its generate, as its sample.py runs it" if nanogpt else ""),
                found, [("tokens/s", "tok_per_sec", ".1f"), ("ratio", "tok_per_sec", ".2f", rows[0]), ("cache bytes a token", "cache"),
                        ("ratio", "cache", ".3f", names[0]), ("compile s", "compiling", ".1f")])


# ---------------------------------------------------------------------------------------------------
if one_loss:
    run_one_loss()
    raise SystemExit(0)
print(f"{torch.cuda.get_device_name(compute_device) if on_gpu else f'CPU threads: {torch.get_num_threads()}'}, torch {torch.__version__}, "
      f"{compute_dtype}, rounds: {rounds}\n", flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is started and written here does not outlive it
with tempfile.TemporaryDirectory() as folder:
    write_shards(folder)
    if profile:
        profile_steps(folder)
        raise SystemExit(0)
    # decode is the last: what this process takes counts in the peak of resident memory of those that it starts (Linux)
    for name, bench in zip((*TABLES, "soak"), (bench_train, bench_chat, bench_loss, bench_ddp, bench_prep, bench_decode, bench_soak)):
        if name in wanted:
            t0 = time.time()
            bench(folder)
            print(f"({time.time() - t0:.0f} s)\n", flush=True)
