"""
How fast is this machine? Times steps of train_gpt2.py, against a checkout of nanoGPT if you have one.

    python bench.py                                              # GPT-2 124M; on a CPU 6 layers of 384, rows of 256
    python bench.py --nanogpt=../nanoGPT                         # alternating with nanoGPT at the same sizes
    python bench.py --flags='--arch=llama --attention=mla'       # any flags of train_gpt2.py
    python bench.py --profile=True                               # where does a step spend its time? trace.json

It runs the scripts themselves, on random tokens. Speeds are medians over the rounds, and within a round over all steps
but the first. compile_s is the longest of all rounds.
"""
import io
import json
import multiprocessing
import os
import re
import runpy
import statistics
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

# before torch, whose import takes seconds: from here on Ctrl-C prints one line
from configurator import Positive, configure, fail

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from distributed import init_process
from machine import describe_machine, peak_memory_mb

TRAIN = Path(__file__).resolve().parent / "train_gpt2.py"


def run_script(path, argv):
    """Runs a script in this process. Returns its globals."""
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    sys.argv = [path.name, *argv]
    return runpy.run_path(str(path), run_name="__main__")


def time_ours(argv, folder):
    with redirect_stdout(sys.stderr):
        run_script(TRAIN, argv)
    start, *entries = [json.loads(line) for line in open(f"{folder}/out/log.jsonl")]
    steps = [entry for entry in entries if "tok_per_sec" in entry][1:]
    result = {name: statistics.median(step[name] for step in steps) for name in ("tok_per_sec", "ms", "mfu")}
    return {**result, "peak_mem_mb": steps[-1]["peak_mem_mb"], "compile_s": start["compile_seconds"]}


def time_nanogpt(script, argv, device):
    with redirect_stdout(io.StringIO()) as output:
        tokens = run_script(script, argv)["tokens_per_iter"]
    ms = statistics.median(float(ms) for ms in re.findall(r" time ([\d.]+)ms", output.getvalue())[1:])
    return {"tok_per_sec": 1000 * tokens / ms, "ms": ms, "peak_mem_mb": peak_memory_mb(device)}


def profile_steps(argv, steps, device):
    """Runs train_gpt2.py in this process and profiles three steps, after `steps` and the profiler's warm-up."""
    from torch._inductor import config as inductor
    inductor.cpp.enable_kernel_profile = True  # else compiled CPU kernels have no names
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=steps, warmup=1, active=3)) as profiler:
        # every optimizer here has one AdamW; MuonAdamW's own step would call this once more
        register_optimizer_step_post_hook(lambda step, *_: isinstance(step, torch.optim.AdamW) and profiler.step())
        trace = Path("trace.json").resolve()
        run_script(TRAIN, [*argv, f"--max_iters={steps + 4}"])
    profiler.export_chrome_trace(str(trace))
    slowest = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=slowest, row_limit=10))
    print(f"open {trace} in https://ui.perfetto.dev")


if __name__ == "__main__":
    flags: str = ""  # of train_gpt2.py; the model's size goes to nanoGPT, too
    steps: Positive = 15  # timed per round, after the first
    rounds: Positive = 3
    nanogpt: str = ""  # folder of a checkout of nanoGPT
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    compile: bool = True
    profile: bool = False  # instead of timing, record three steps
    configure(globals())
    nanogpt_script = Path(nanogpt, "train.py").resolve()
    if nanogpt and not nanogpt_script.is_file():
        fail(f"--nanogpt={nanogpt}: holds no train.py; expected the folder of a checkout of nanoGPT")
    if nanogpt and not all("=" in flag for flag in flags.split()):
        fail(f"--flags={flags}: with --nanogpt write --name=value; only this form sets nanoGPT's size, too")
    if re.search(r"--(out_dir|overwrite|max_iters)\b", flags):
        fail(f"--flags={flags}: leave out --out_dir and --overwrite (the runs are in a temporary folder) and "
             f"--max_iters (give --steps)")
    torch_device, sizes = init_process(device), flags.split()
    if torch_device.type == "cpu" and not re.search(r"\.py\b|--init_from\b", flags):  # these have sizes
        sizes = ["--n_layer=6", "--n_head=6", "--n_embd=384", "--max_seq_len=256", *sizes]  # the last of two wins
    print(", ".join(f"{key} {value}" for key, value in describe_machine(torch_device).items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{folder}/inductor")  # the first round compiles everything
        for split in ("train", "val"):  # random tokens in nanoGPT's format, which train_gpt2.py reads, too
            np.random.default_rng(0).integers(0, 50257, 2_000_000, dtype="<u2").tofile(f"{folder}/{split}.bin")
        common = ["--gradient_accumulation_steps=1", "--eval_iters=1", "--log_interval=1", f"--device={torch_device}",
                  f"--compile={compile}", f"--out_dir={folder}/out"]
        ours = [*common, "--sample_tokens=0", "--warmup_iters=0", "--overwrite=True", f"--data_dir={folder}",
                "--init_from=scratch", *sizes]
        if profile:
            profile_steps(ours, steps, torch_device)
            raise SystemExit(0)

        spawn, rows = multiprocessing.get_context("spawn"), defaultdict(list)
        jobs = {}  # in the order of their turns: a function and its arguments
        if nanogpt:
            theirs = [size.replace("max_seq_len", "block_size") for size in sizes
                      if re.match("--(n_layer|n_head|n_embd|max_seq_len|batch_size)=", size)]
            theirs = [*common, "--batch_size=16", *theirs, f"--max_iters={steps}", f"--dataset={folder}"]
            jobs["nanoGPT"] = time_nanogpt, nanogpt_script, theirs, torch_device
        jobs["train_gpt2.py"] = time_ours, [*ours, f"--max_iters={steps + 1}"], folder
        for i in range(rounds):
            for name, job in jobs.items():
                print(f"round {i + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
                with ProcessPoolExecutor(1, spawn) as process:  # a new one for each measurement
                    rows[name].append(process.submit(*job).result())
        for name, measured in rows.items():
            # the first round compiles, the others find its code in the cache
            medians = {key: (max if key == "compile_s" else statistics.median)(row[key] for row in measured)
                       for key in measured[0]}
            if nanogpt:
                medians["ratio"] = statistics.median(row["tok_per_sec"] / first["tok_per_sec"]
                                                     for row, first in zip(measured, rows["nanoGPT"]))
            print(f"{name:14}", "  ".join(f"{key} {value:,.2f}" for key, value in medians.items()))
