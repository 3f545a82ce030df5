"""
How fast is this machine: training, chat tuning, the head's loss, data parallelism, decoding, data preparation.

    python bench.py                                             # all of it, one table after another
    python bench.py --what=train,decode --nanogpt=../nanoGPT    # against a checkout of nanoGPT, which is the first row then
    python bench.py --what=train --train_args='--n_layer=4 --n_embd=256 --n_head=4'
    python bench.py --what=prep --prep_files='texts/*.parquet'
    python bench.py --profile=True                              # where a step of train_gpt2.py spends its time

It times what the scripts run: train_gpt2.py, chat_sft.py and prepare_data.py are started and their own figures read; decoding
is the model's generate. Variants take turns, round after round, and each ratio is the median over the rounds of the ratio to the
reference, the first row, in the same round: a machine whose speed drifts changes the figures more than the ratios.
"""
import importlib.util
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
from contextlib import redirect_stdout
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
from prepare_data import get_tokenizer, read_shard, shard_header

# ---------------------------------------------------------------------------------------------------
# settings
what: str = "all"  # or some of train, chat, loss, ddp, prep and decode, with commas between
variants: str = "gpt2,gpt2+mla,llama,llama+mla"  # train, decode: what is compared: arch, or arch+attention
nanogpt: Optional[str] = None  # train, decode: a checkout of nanoGPT, the reference then; else the first of the variants is
rounds: Optional[int] = None  # times each variant has its turn; None: 3, on GPUs, whose speed drifts less, 2
device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
compile: bool = True  # train, loss, ddp: torch.compile
train_args: Optional[str] = None  # train, loss, ddp: flags of train_gpt2.py; None: GPT-2 124M on GPUs, 6 layers of 384 on CPUs, 16 rows
train_iters: int = 15  # train, chat: steps a round, the first of them not counted; ddp: a third of them
chat_args: Optional[str] = None  # chat: settings of chat_sft.py; None: 4 rows of 1024 to GPT-2 124M on GPUs, of 512 to 30M on CPUs
context: int = 1024  # decode: tokens in the cache when the timed ones come
new_tokens: int = 64  # decode: timed tokens a round
prep_files: Optional[str] = None  # prep: texts, as --files of prepare_data.py, for the gpt2 tokenizer against tiktoken alone
profile: bool = False  # instead of tables: a trace of the last 3 steps of train_gpt2.py, of the first of the variants
one_loss: Optional[Literal["full", "recompute", "ours", "torch"]] = None  # how bench.py starts itself for a row of the loss table
config, given = configure(globals())

SCRIPTS = Path(__file__).resolve().parent
names = [name.strip() for name in variants.split(",")]
for name in names:
    if name.partition("+")[0] not in ("gpt2", "llama") or name.partition("+")[2] not in ("", "mla"):
        fail(f"--variants={variants}: {name!r} is none of gpt2, gpt2+mla, llama, llama+mla")
for part in what.split(","):
    if part.strip() not in ("all", "train", "chat", "loss", "ddp", "prep", "decode"):
        fail(f"--what={what}: {part!r} is none of all, train, chat, loss, ddp, prep, decode")
if nanogpt is not None and not (Path(nanogpt) / "train.py").is_file():
    fail(f"--nanogpt={nanogpt}: holds no train.py; expected the folder of a checkout of nanoGPT")
expect_range(config, 1, math.inf, "rounds", "context")
expect_range(config, 5 if profile else 2, math.inf, "train_iters", "new_tokens")
_, _, compute_device = runtime.init_process(device)
on_gpu = compute_device.type == "cuda"
rounds = rounds or (2 if on_gpu else 3)
compute_dtype = runtime.pick_dtype(dtype, compute_device)
rows = ["nanoGPT"] * (nanogpt is not None) + names

# the size of train, loss and ddp
size = ["--batch_size=16", *(train_args or ("" if on_gpu else "--n_layer=6 --n_head=6 --n_embd=384 --max_seq_len=256")).split()]
shape = {key: getattr(GPTConfig(), key) for key in ("n_layer", "n_head", "n_embd", "max_seq_len")}
for flag in size:
    key, _, value = flag.removeprefix("--").partition("=")
    if not re.fullmatch(r"--\w+=.*", flag) or (key in shape or key == "batch_size") and not value.isdigit():
        fail(f"--train_args={train_args}: {flag!r}: expected flags of train_gpt2.py, --name=value, with spaces between")
    shape |= {key: int(value)} if key in shape or key == "batch_size" else {}
tokens_per_batch = shape["batch_size"] * shape["max_seq_len"]


def settings_of(name):
    arch, _, attention = name.partition("+")
    return dict(arch=arch, attention=attention or "mha")


def progress(*words):
    print("\r" + " ".join(map(str, words)).ljust(50), end="", file=sys.stderr, flush=True)


def start(name, command, **options):
    """Runs a program to its end -> what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", **options)
    if done.returncode:
        print(file=sys.stderr)  # behind the progress
        fail(f"{name} ended with code {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    return done.stdout


def cell(value, form=",.0f"):
    return "-" if value is None else format(value, form)


def print_table(title, heads, lines):
    """lines: a label and the cells of each."""
    lines = [["", *heads], *lines]
    widths = [max(map(len, column)) + 2 for column in zip(*lines)]
    print(f"\r{title}", *(line[0].ljust(widths[0]) + "".join(text.rjust(width) for text, width in zip(line[1:], widths[1:]))
                          for line in lines), "", sep="\n", flush=True)


def median_ratio(a, b):
    return statistics.median(x / y for x, y in zip(a, b))


# ---------------------------------------------------------------------------------------------------
# the loops, as processes

def write_shards(folder):
    """Random tokens as our shards, and as nanoGPT's train.bin and val.bin."""
    tokens = np.random.default_rng(0).integers(0, 50257, 2_000_000, dtype="<u2").tobytes()
    for split in ("train", "val"):
        (Path(folder) / f"{split}_000000.bin").write_bytes(shard_header(len(tokens) // 2) + tokens)
        (Path(folder) / f"{split}.bin").write_bytes(tokens)
    (Path(folder) / "meta.json").write_text(json.dumps({"tokenizer": "gpt2", "vocab_size": 50304}))


def time_steps(folder, name, script, *flags, steps=train_iters, where=device, ranks=0):
    """
    Starts a training script, under torchrun for ranks > 0 -> its log of each step but the first, and the seconds it compiled: from
    nothing when this name comes for the first time, from what that left in its cache later.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    start(script, [sys.executable, *torchrun, SCRIPTS / script, "--eval_iters=1", "--sample_tokens=0", "--log_interval=1", "--warmup_iters=0",
                   *flags, f"--max_iters={steps}", f"--dtype={compute_dtype}", f"--device={where}", f"--out_dir={folder}/out"],
          env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache-{name}", **({"OMP_NUM_THREADS": "1"} if ranks and not on_gpu else {})})
    log = [json.loads(line) for line in Path(folder, "out", "log.jsonl").read_text().splitlines()]
    shutil.rmtree(f"{folder}/out")  # checkpoints of some GB
    compiling = next((entry["seconds"] for entry in log if entry.get("event") == "compiled"), None)
    return [entry for entry in log if "tok_per_sec" in entry][1:], compiling


# runs nanoGPT's train.py, then says what memory it took, as our loops do
NANOGPT = """
import runpy, sys, torch
script, scripts = sys.argv.pop(1), sys.argv.pop(1)
runpy.run_path(script, run_name="__main__")
del sys.modules["model"]  # ours has the same name
sys.path[0] = scripts
import runtime
print("peak_mem_mb", runtime.peak_memory_mb(torch.device(sys.argv[1].partition("=")[2])))
"""


def time_nanogpt(folder):
    """Starts nanoGPT's train.py for the same steps -> what time_steps returns. Its first iteration's time is the seconds it compiled."""
    sizes = [f"--{key}={value}" for key, value in {**shape, "block_size": shape["max_seq_len"]}.items() if key != "max_seq_len"]
    flags = [f"--device={compute_device}", *sizes, f"--compile={compile}", "--gradient_accumulation_steps=1", "--eval_iters=1", "--log_interval=1",
             "--wandb_log=False", "--always_save_checkpoint=False", f"--max_iters={train_iters - 1}", f"--dataset={folder}", f"--out_dir={folder}/out"]
    output = start("nanoGPT's train.py", [sys.executable, "-c", NANOGPT, "train.py", SCRIPTS, *flags], cwd=nanogpt,
                   env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache-nanoGPT"})
    seconds = [float(ms) / 1000 for ms in re.findall(r"^iter \d+: .* time ([\d.]+)ms", output, re.MULTILINE)]
    memory = re.search(r"^peak_mem_mb ([\d.]+)", output, re.MULTILINE)
    if len(seconds) < 2:
        fail(f"--nanogpt={nanogpt}: its train.py printed no 'iter N: loss .., time ..ms' lines: {output[-300:]}")
    with torch.device("meta"):
        flops = GPT(GPTConfig(**{key: value for key, value in shape.items() if key != "batch_size"})).flops_per_token(shape["max_seq_len"])
    speeds = [tokens_per_batch / s for s in seconds[1:]]
    return [{"tok_per_sec": speed, "mfu": speed * flops / matmul, "peak_mem_mb": memory and float(memory[1])} for speed in speeds], \
        seconds[0] - statistics.median(seconds[1:]) if compile else None


def bench_train(folder):
    speed, compiling, last = {name: [] for name in rows}, {name: [] for name in rows}, {}
    for i in range(rounds):
        for name in rows:
            progress(f"train, round {i + 1} of {rounds}:", name)
            if name == "nanoGPT":
                steps, seconds = time_nanogpt(folder)
            else:
                flags = [f"--{key}={value}" for key, value in settings_of(name).items()]
                steps, seconds = time_steps(folder, name, "train_gpt2.py", *flags, "--gradient_accumulation_steps=1", *size,
                                            f"--compile={compile}", f"--data_dir={folder}")
            speed[name].append(statistics.median(step["tok_per_sec"] for step in steps))
            compiling[name].append(seconds)
            last[name] = {**steps[-1], **{key: statistics.median(step[key] for step in steps) for key in ("mfu", "wait") if key in steps[0]}}
    memory = {name: last[name]["peak_mem_mb"] for name in rows}
    print_table(
        f"training: train_gpt2.py {' '.join(size)} --compile={compile}; cold: compiled from nothing, warm: from a cache; MFU is against "
        f"{matmul / 1e12:.2f} TFLOP/s" + ("; nanoGPT: the same sizes, else its own settings, its compile seconds with the first two "
                                          "batches of validation" if nanogpt else ""),
        ["tokens/s", "ratio", "MFU", "peak MB", "ratio", "cold s", "warm s", "waiting for data", "recompiles"],
        [[name, cell(statistics.median(speed[name])), cell(median_ratio(speed[name], speed[rows[0]]), ".2f"), cell(last[name]["mfu"], ".1%"),
          cell(memory[name]), cell(memory[name] / memory[rows[0]] if memory[name] and memory[rows[0]] else None, ".2f"), *cold_warm(compiling[name]),
          cell(last[name].get("wait"), ".2%"), cell(last[name].get("recompiles"))] for name in rows])


def cold_warm(seconds):
    """Two cells of the seconds compiled in each round: those of the first, and the median of the others."""
    return cell(seconds[0], ".1f"), cell(statistics.median(seconds[1:]) if seconds[1:] and seconds[0] is not None else None, ".1f")


# chat tuning, compiled against not: the gain is to be 1.3 at least, compiling 60 s and 10 % of memory at most
def bench_chat(folder):
    model_size = dict() if on_gpu else dict(n_layer=6, n_head=6, n_embd=384)
    flags = (chat_args or f"--max_seq_len={1024 if on_gpu else 512} --gradient_accumulation_steps=1").split()
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**model_size))
    n_params = sum(p.numel() for p in gpt.parameters())
    runtime.save_checkpoint(f"{folder}/base", {"model": gpt.state_dict(), "model_args": asdict(gpt.config), "config": {}, "tokenizer": "gpt2",
                                               "stage": "base", "iter_num": 0, "val_loss": 0.0, "val_iter": 0})
    del gpt
    rng = np.random.default_rng(0)
    with open(f"{folder}/chats.jsonl", "w") as f:
        for length in rng.lognormal(4, 0.7, 2000).astype(int) + 1:  # answers of 55 words in the median
            messages = [{"role": "user", "content": "word " * int(length // 2 + 1)}, {"role": "assistant", "content": "word " * int(length)}]
            f.write(json.dumps({"messages": messages}) + "\n")
    kinds = {False: "not compiled", True: "compiled"}
    speed, compiling, last = {kind: [] for kind in kinds}, {kind: [] for kind in kinds}, {}
    for i in range(rounds):
        for kind in kinds:
            progress(f"chat, round {i + 1} of {rounds}:", kinds[kind])
            steps, seconds = time_steps(folder, "chat", "chat_sft.py", f"--init_from={folder}/base/ckpt.pt", *flags,
                                        f"--data={folder}/chats.jsonl", f"--chat_dir={folder}/rows", f"--compile={kind}")
            speed[kind].append(statistics.median(step["tok_per_sec"] for step in steps))
            compiling[kind].append(seconds)
            last[kind] = {**steps[-1], **{key: statistics.mean(step[key] for step in steps) for key in ("useful", "wait")}}
    memory = {kind: last[kind]["peak_mem_mb"] or math.nan for kind in kinds}
    print_table(
        f"chat tuning: chat_sft.py {' '.join(flags)}, {n_params / 1e6:.0f}M parameters",
        ["useful tok/s", "ratio", "peak MB", "ratio", "cold s", "warm s", "waiting for data", "recompiles", "useful"],
        [[kinds[kind], cell(statistics.median(speed[kind])), cell(median_ratio(speed[kind], speed[False]), ".2f"), cell(memory[kind]),
          cell(memory[kind] / memory[False], ".2f"), *cold_warm(compiling[kind]), cell(last[kind]["wait"], ".2%"), cell(last[kind]["recompiles"]),
          cell(last[kind]["useful"], ".1%")] for kind in kinds] + [["target", "", ">= 1.30", "", "<= 1.10", "<= 60", "", "", "0", ""]])


# data parallel: one core, or GPU, a rank
def bench_ddp(folder):
    n, steps = torch.cuda.device_count() if on_gpu else 2, max(2, train_iters // 3)
    if compute_device.type == "mps" or n < 2 or not on_gpu and os.cpu_count() < 2:
        print(f"data parallel: left out, it takes two GPUs, or a CPU with two cores\n", flush=True)
        return
    speed = {ranks: [] for ranks in (1, n)}
    for i in range(rounds):
        for ranks in speed:
            progress(f"ddp, round {i + 1} of {rounds}:", ranks)
            log, _ = time_steps(folder, "ddp", "train_gpt2.py", *size, f"--gradient_accumulation_steps={2 * ranks}", f"--compile={compile}",
                                f"--data_dir={folder}", steps=steps, where=compute_device.type, ranks=ranks)
            speed[ranks].append(statistics.median(step["tok_per_sec"] for step in log))
    print_table(f"data parallel: torchrun train_gpt2.py {' '.join(size)} --compile={compile}, two micro-batches a step on each rank, "
                f"{'a GPU' if on_gpu else 'one thread'} a rank", ["tokens/s", "ratio"],
                [[f"{ranks} rank{'s'[:ranks > 1]}", cell(statistics.median(speed[ranks])), cell(median_ratio(speed[ranks], speed[1]), ".2f")]
                 for ranks in speed])


def profile_steps(folder):
    """Runs train_gpt2.py in this process, with torch's profiler on in its last steps but one."""
    torch._inductor.config.cpp.enable_kernel_profile = True  # or compiled CPU kernels have no names
    stepped = []

    def after_step(optimizer, *_):
        stepped.append(optimizer)
        if optimizer is stepped[0]:  # there may be two
            profiler.step()

    sys.argv = ["train_gpt2.py", *(f"--{key}={value}" for key, value in settings_of(names[0]).items()), "--eval_iters=1", "--sample_tokens=0",
                "--warmup_iters=0", "--gradient_accumulation_steps=1", *size, f"--compile={compile}", f"--max_iters={train_iters}",
                f"--dtype={compute_dtype}", f"--device={device}", f"--data_dir={folder}", f"--out_dir={folder}/out"]
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=train_iters - 4, warmup=1, active=3, repeat=1)) as profiler:
        register_optimizer_step_post_hook(after_step)
        runpy.run_path(str(SCRIPTS / "train_gpt2.py"), run_name="__main__")
    profiler.export_chrome_trace("trace.json")
    print(profiler.key_averages().table(sort_by=f"self_{'cuda' if on_gpu else 'cpu'}_time_total", row_limit=10, max_name_column_width=80))
    print(f"the last 3 steps of {' '.join(sys.argv)}\ntrace: {Path('trace.json').resolve()}; open it in https://ui.perfetto.dev")


# ---------------------------------------------------------------------------------------------------
# the head's loss alone, forward and backward, at training's shape

def run_one_loss():
    """
    One way to take it, in this process: a line of JSON, {"ms", "compiled"}, for each line read; behind the last, with the peak of
    memory before, how far loss and gradients are from those of full logits in float32: |a - b| / |b|.
    """
    torch.manual_seed(0)
    x = torch.randn(tokens_per_batch, shape["n_embd"], device=compute_device, requires_grad=True)  # (N, C), as a norm leaves it
    weight = torch.nn.Parameter(0.02 * torch.randn(50304, shape["n_embd"], device=compute_device))  # (V, C)
    targets = torch.randint(0, 50257, (tokens_per_batch,), device=compute_device)

    def full(x, weight, targets):
        return F.cross_entropy((x @ weight.t()).float(), targets, reduction="sum")

    def recompute(x, weight, targets):
        return sum(checkpoint(full, xc, weight, tc, use_reentrant=False) for xc, tc in zip(x.split(LOSS_CHUNK), targets.split(LOSS_CHUNK)))

    def torchs(x, weight, targets):  # autocast leaves it alone; its own choice of chunks is 8 times slower; what allow_retain_graph
        options = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True, batch_chunk_size=LOSS_CHUNK)  # saves is a warning that breaks the graph
        return F.linear_cross_entropy(*(tensor.to(getattr(torch, compute_dtype)) for tensor in (x, weight)), targets, reduction="sum", options=options)

    eager = {"full": full, "recompute": recompute, "ours": linear_cross_entropy, "torch": torchs}[one_loss]

    def forward_backward(loss_function, dtype):
        x.grad = weight.grad = None
        with runtime.autocast(compute_device, dtype):
            loss = loss_function(x, weight, targets)
        loss.backward()
        return loss.item()  # waits for the device

    chosen, compiled = torch.compile(eager, dynamic=False, fullgraph=True) if compile else eager, "yes" if compile else "no"
    for _ in sys.stdin:
        try:
            t0 = time.perf_counter()
            loss = forward_backward(chosen, compute_dtype)
        except torch._dynamo.exc.TorchDynamoException as error:
            chosen, compiled = eager, f"no: {type(error).__name__}: {' '.join(str(error).split())[:60]}"
            loss = forward_backward(chosen, compute_dtype)
        times = [time.perf_counter() - t0]
        for _ in range(4):
            t0 = time.perf_counter()
            loss = forward_backward(chosen, compute_dtype)
            times.append(time.perf_counter() - t0)
        print(json.dumps({"ms": 1000 * statistics.median(times), "compiled": compiled}), flush=True)
        if on_gpu:
            torch.cuda.empty_cache()  # the others have their turn
    figures = {"peak_mem_mb": runtime.peak_memory_mb(compute_device)}
    found = loss, x.grad, weight.grad
    expected = forward_backward(full, "float32"), x.grad, weight.grad
    figures["differences"] = [float(torch.as_tensor(a - b).norm() / torch.as_tensor(b).norm()) for a, b in zip(found, expected)]
    print(json.dumps(figures), flush=True)


def bench_loss(folder):
    kinds = {"ours": "ours: chunks, gradient in forward", "full": "full logits", "recompute": "chunks, recomputed in backward",
             "torch": "torch's linear_cross_entropy"}
    if not hasattr(F, "linear_cross_entropy"):
        print(f"torch {torch.__version__} has no linear_cross_entropy", flush=True)
        del kinds["torch"]
    flags = ["--what=loss", f"--dtype={compute_dtype}", f"--device={device}", f"--compile={compile}", f"--train_args={' '.join(size)}"]
    started = {kind: subprocess.Popen([sys.executable, SCRIPTS / "bench.py", *flags, f"--one_loss={kind}"], text=True, stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache-{kind}"})
               for kind in kinds}  # each in a process of its own, whose peak of memory is its own

    def answer(kind):
        line = started[kind].stdout.readline()
        if not line:
            fail(f"the loss of {kinds[kind]} ended with code {started[kind].wait()}")
        return json.loads(line)

    ms, said = {kind: [] for kind in kinds}, {}
    for i in range(rounds + 1):  # the first compiles
        for kind in kinds:
            progress(f"loss, round {i} of {rounds}:", kind)
            started[kind].stdin.write("\n")
            started[kind].stdin.flush()
            said[kind] = answer(kind)
            ms[kind] += [said[kind]["ms"]] if i else []
    for kind in kinds:
        started[kind].stdin.close()
        said[kind] |= answer(kind)
        started[kind].wait()
    print_table(
        f"loss of the head, forward and backward: {tokens_per_batch:,} tokens, {shape['n_embd']} wide, vocabulary 50,304, {compute_dtype}; "
        f"peak MB of the whole process; differences |a - b| / |b| from full logits in float32",
        ["ms", "ratio", "peak MB", "compiled", "loss differs", "gradient of x", "of the weight"],
        [[kinds[kind], cell(statistics.median(ms[kind]), ".1f"), cell(median_ratio(ms[kind], ms["ours"]), ".2f"), cell(said[kind]["peak_mem_mb"]),
          said[kind]["compiled"], *(cell(d, ".1e") for d in said[kind]["differences"])] for kind in kinds])


# ---------------------------------------------------------------------------------------------------
# data preparation: the standard library as bytes, which needs no vocabulary, and texts with gpt2's tokenizer against tiktoken alone

def bench_prep(folder):
    sources = {"python": ["--dataset=python"], **({"files": [f"--files={prep_files}", "--tokenizer=gpt2"]} if prep_files else {})}
    speed, texts = {key: [] for key in ("python", "files", "own clock", "tiktoken")}, None
    for i in range(rounds):
        for source in sources:
            progress(f"prep, round {i + 1} of {rounds}:", source)
            t0 = time.perf_counter()
            output = start("prepare_data.py", [sys.executable, SCRIPTS / "prepare_data.py", *sources[source], f"--data_dir={folder}/prepared"])
            seconds = time.perf_counter() - t0
            tokens = json.loads(Path(folder, "prepared", "meta.json").read_text())["tokens"]
            speed[source].append(tokens / seconds)
            if source == "files":
                speed["own clock"].append(float(re.search(r"([\d,]+) tokens/s", output)[1].replace(",", "")))
                tokenizer = get_tokenizer("gpt2")
                if texts is None:  # what was prepared, as texts in memory: the same documents
                    ids = np.concatenate([read_shard(path) for split in ("val", "train") for path in sorted(Path(folder, "prepared").glob(f"{split}_*.bin"))])
                    texts = tokenizer.decode_batch(np.split(ids, np.flatnonzero(ids == tokenizer.eot_token))[1:])
                    texts = [text.removeprefix("<|endoftext|>") for text in texts]
                t0 = time.perf_counter()
                tokenizer.encode_ordinary_batch(texts, num_threads=os.cpu_count())
                speed["tiktoken"].append(tokens / (time.perf_counter() - t0))
            shutil.rmtree(f"{folder}/prepared")
    labels = {"python": "the standard library, as bytes", "files": f"{prep_files}, gpt2", "own clock": "  without the start of the script",
              "tiktoken": f"  tiktoken alone, {os.cpu_count()} threads, texts in memory"}
    print_table(f"data preparation: prepare_data.py, its start included" + (f"; {tokens:,} tokens of {prep_files}" if prep_files else ""),
                ["tokens/s", "ratio to tiktoken"],
                [[labels[key], cell(statistics.median(speed[key])), cell(median_ratio(speed[key], speed["tiktoken"]), ".2f")
                  if key != "python" else ""] for key in labels if speed[key]])


# ---------------------------------------------------------------------------------------------------
# decoding: GPT-2 124M's size, one row

def bench_decode(folder):
    models, cache_bytes = {}, {"nanoGPT": None}
    for name in rows:
        torch.manual_seed(0)
        if name == "nanoGPT":
            spec = importlib.util.spec_from_file_location("nanogpt_model", Path(nanogpt) / "model.py")
            theirs = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(theirs)
            with redirect_stdout(sys.stderr):
                models[name] = theirs.GPT(theirs.GPTConfig(block_size=context + new_tokens, dropout=0.0, bias=False))
        else:
            models[name] = GPT(GPTConfig(max_seq_len=context + new_tokens, **settings_of(name)))
            cache = models[name].new_cache(1, 1, getattr(torch, compute_dtype))
            cache_bytes[name] = sum(tensor.nbytes for layer in cache for tensor in layer)
        models[name].to(compute_device).eval()
    prompt = torch.randint(0, 50257, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    speed = {name: [] for name in rows}
    for i in range(rounds + 1):  # the first warms up
        for name in rows:
            progress(f"decode, round {i} of {rounds}:", name)
            if name == "nanoGPT":  # on a CPU its sample.py computes in float32
                n, idx = new_tokens if on_gpu else min(3, new_tokens), torch.tensor([prompt], device=compute_device)
                with runtime.autocast(compute_device, compute_dtype if on_gpu else "float32"), torch.no_grad():
                    t0 = time.perf_counter()
                    models[name].generate(idx, n, temperature=1.0, top_k=200).tolist()
            else:
                with runtime.autocast(compute_device, compute_dtype):
                    tokens = models[name].generate([prompt], new_tokens, temperature=1.0, top_k=200)
                    next(tokens)  # reads the prompt
                    t0 = time.perf_counter()
                    n = sum(1 for _ in tokens)
            if i > 0:
                speed[name].append(n / (time.perf_counter() - t0))
    print_table(f"decoding: 12 layers, 12 heads, 768 wide, {context} tokens of context, batch 1, temperature 1, top_k 200"
                + ("; nanoGPT: its generate, as its sample.py runs it" if nanogpt else ""),
                ["tokens/s", "ratio", "cache bytes a token", "ratio"],
                [[name, cell(statistics.median(speed[name]), ".1f"), cell(median_ratio(speed[name], speed[rows[0]]), ".2f"), cell(cache_bytes[name]),
                  cell(cache_bytes[name] and cache_bytes[name] / cache_bytes[names[0]], ".3f")] for name in rows])


# ---------------------------------------------------------------------------------------------------
if one_loss:
    run_one_loss()
    raise SystemExit(0)
matmul = runtime.peak_flops(compute_device, compute_dtype)  # MFU is against this
print(f"{torch.cuda.get_device_name(compute_device) if on_gpu else f'{torch.get_num_threads()} CPU threads'}, "
      f"torch {torch.__version__}, {compute_dtype}, {rounds} rounds\n", flush=True)
with tempfile.TemporaryDirectory() as folder:
    write_shards(folder)
    if profile:
        profile_steps(folder)
        raise SystemExit(0)
    # decode comes last: what this process takes is counted in the peak memory of those that it starts (Linux)
    for name, bench in (("train", bench_train), ("chat", bench_chat), ("loss", bench_loss), ("ddp", bench_ddp), ("prep", bench_prep),
                        ("decode", bench_decode)):
        if {"all", name} & {part.strip() for part in what.split(",")}:
            t0 = time.time()
            bench(folder)
            print(f"({name} took {time.time() - t0:.0f} s)\n", flush=True)
