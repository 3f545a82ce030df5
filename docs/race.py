"""
Loss against seconds: train_gpt2.py beside the models and optimizers of nanochat and nanoGPT, on the same rows.

    python docs/race.py --data_dir=data/python --nanochat=../nanochat --nanogpt=../nanoGPT
    python docs/race.py --data_dir=data/mine --nanochat=../nanochat --rates=1,2 --steps=400 --seeds=1,2,3

The models and optimizers of nanochat and nanoGPT are imported from your checkouts and trained in the plain loop below,
with their own schedules and their own learning rates times each of --rates. All contestants read the same rows in the
same order, are compiled, and are validated on the same rows. The seconds are those of training steps, without
compiling and evaluation. One run follows the other. race.csv in out_dir has the points, and race.png draws them. A run
that is complete in race.csv is not repeated, so the same command continues an interrupted race.
"""
import csv
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from configurator import Positive, configure, fail  # noqa: E402
from dataloader import BatchLoader, TokenDataset  # noqa: E402
from distributed import init_process  # noqa: E402

FIELDS = ("run", "step", "tokens", "seconds", "val_loss")


def append(out_dir, *row):
    with open(Path(out_dir, "race.csv"), "a", newline="") as file:
        csv.writer(file).writerow(row)
    print("{}: step {}, {:,} tokens, {:.1f} s, val loss {:.4f}".format(*row), flush=True)


def run_ours(name, seed, s):
    """Runs train_gpt2.py and copies the losses from its log."""
    command = [sys.executable, ROOT / "train_gpt2.py", *s.flags.split(), f"--data_dir={s.data_dir}", f"--seed={seed}",
               *(f"--{key}={getattr(s, key)}" for key in ("n_layer", "n_head", "n_embd", "max_seq_len", "batch_size",
                                                          "eval_interval", "eval_iters", "device", "compile")),
               "--gradient_accumulation_steps=1", f"--max_iters={s.steps}", f"--out_dir={s.out_dir}/{name}",
               f"--log_interval={s.eval_interval}", "--sample_tokens=0", "--overwrite=True"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    seconds = 0.0
    for entry in map(json.loads, open(Path(s.out_dir, name, "log.jsonl"))):
        seconds = entry.get("seconds", seconds)
        if "val_loss" in entry:
            append(s.out_dir, name, entry["iter"], entry["tokens"], seconds, entry["val_loss"])


def build_nanochat(s, vocab_size, device, rate):
    """nanochat's model, optimizer and set_rates(step), as its scripts/base_train.py makes them."""
    os.environ["NANOCHAT_DTYPE"] = "bfloat16"
    sys.path.insert(0, s.nanochat)
    from nanochat.gpt import GPT, GPTConfig
    with torch.device("meta"):
        model = GPT(GPTConfig(sequence_len=s.max_seq_len, vocab_size=vocab_size, n_layer=s.n_layer, n_head=s.n_head,
                              n_kv_head=s.n_head, n_embd=s.n_embd, window_pattern="L"))
    model.to_empty(device=device)
    model.init_weights()
    # without base_train.py's factor for batches of fewer than 524,288 tokens: for small ones it is far too low
    optimizer = model.setup_optimizer(unembedding_lr=0.008 * rate, embedding_lr=0.3 * rate, matrix_lr=0.02 * rate,
                                      scalar_lr=0.5 * rate)
    warmup, decay = min(40, s.steps // 5), round(0.65 * s.steps)

    def set_rates(step):
        left = min(1.0, (s.steps - step) / decay)  # 1 before the decay, 0 at the end
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min((step + 1) / warmup, left + (1 - left) * 0.05)
            if group["kind"] == "muon":
                group["momentum"] = 0.85 + 0.12 * min(1.0, step / 400) if left == 1 else 0.90 + 0.07 * left

    return model, optimizer, set_rates


def build_nanogpt(s, vocab_size, device, rate):
    """nanoGPT's model, optimizer and set_rates(step), with the settings of its train.py."""
    sys.path.insert(0, s.nanogpt)
    from model import GPT, GPTConfig
    model = GPT(GPTConfig(block_size=s.max_seq_len, vocab_size=vocab_size, n_layer=s.n_layer, n_head=s.n_head,
                          n_embd=s.n_embd, dropout=0.0, bias=False)).to(device)
    peak = 6e-4 * rate
    optimizer = model.configure_optimizers(0.1, peak, (0.9, 0.95), device.type)
    warmup = min(100, s.steps // 10)

    def set_rates(step):
        progress = max(0, step - warmup) / (s.steps - warmup)
        cosine = 0.1 * peak + 0.45 * peak * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = min(peak * (step + 1) / warmup, cosine)

    return model, optimizer, set_rates


def run_theirs(name, build, seed, rate, s):
    """Trains a model of nanochat or nanoGPT on our rows. Needs a new process: nanoGPT has a model.py, as we have."""
    _, _, device = init_process(s.device)
    train, val = (TokenDataset(s.data_dir, split, s.max_seq_len) for split in ("train", "val"))
    loader = BatchLoader(train, s.batch_size, seed, 0, 1, device)
    for module in ("model", "optim"):  # ours; nanoGPT has a model.py, too
        sys.modules.pop(module, None)
    torch.manual_seed(seed)
    model, optimizer, set_rates = build(s, train.vocab_size, device, rate)
    compiled = torch.compile(model, dynamic=False, disable=not s.compile)

    def loss_of(batch):
        with torch.autocast(device.type, torch.bfloat16, enabled=build is build_nanogpt):
            out = compiled(**batch)
        return out[1] if isinstance(out, tuple) else out  # nanoGPT returns the logits, too

    loss_of(loader.peek()).backward()  # compiles
    model.zero_grad(set_to_none=True)
    seconds = 0.0
    for step in range(s.steps + 1):
        if step % s.eval_interval == 0 or step == s.steps:
            with torch.no_grad():
                rows = [range(i, i + s.batch_size) for i in range(0, s.eval_iters * s.batch_size, s.batch_size)]
                losses = [loss_of(val.get_batch(list(r), device)).item() for r in rows if r[-1] < len(val)]
            append(s.out_dir, name, step, step * s.batch_size * s.max_seq_len, seconds, sum(losses) / len(losses))
        start = time.perf_counter()
        set_rates(step)
        loss = loss_of(next(loader))
        loss.backward()
        if build is build_nanogpt:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        loss.item()  # waits for the device
        seconds += (time.perf_counter() - start) * (0, 2, 1)[min(step, 2)]  # the first one compiles the optimizer


def draw(out_dir):
    """Loss against seconds of all runs in race.csv; seeds of one contestant have one colour."""
    figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    ax, colours = figure.subplots(), {}
    rows = list(csv.DictReader(open(Path(out_dir, "race.csv"))))
    for run in dict.fromkeys(row["run"] for row in rows):
        contestant = run.rsplit("-", 1)[0]
        points = [(float(row["seconds"]), float(row["val_loss"])) for row in rows
                  if row["run"] == run and row["step"] != "0"]
        line, = ax.plot(*zip(*points), ".-", color=colours.get(contestant),
                        label=None if contestant in colours else contestant)
        colours[contestant] = line.get_color()
    ax.set(xlabel="seconds of training", ylabel="validation loss (nats per token)")
    ax.grid(alpha=0.3)
    ax.legend()
    figure.savefig(Path(out_dir, "race.png"))


if __name__ == "__main__":
    data_dir: str = "data/python"  # shards from prepare_data.py
    nanochat: str | None = None  # folder of a checkout of nanochat
    nanogpt: str | None = None  # folder of a checkout of nanoGPT
    flags: str = "config/speedrun.py"  # of train_gpt2.py
    rates: str = "1"  # factors on the learning rates of nanochat and nanoGPT, with commas between them
    seeds: str = "1"
    steps: Positive = 200
    n_layer: Positive = 6
    n_head: Positive = 4
    n_embd: Positive = 256
    max_seq_len: Positive = 512
    batch_size: Positive = 8  # rows per step
    eval_interval: Positive = 25
    eval_iters: Positive = 32
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    compile: bool = True
    out_dir: str = "out-race"  # race.csv and race.png, and the runs of train_gpt2.py
    config, _ = configure(globals())
    for key, file in (("nanochat", "nanochat/gpt.py"), ("nanogpt", "model.py")):
        if config[key] and not Path(config[key], file).is_file():
            fail(f"--{key}={config[key]}: holds no {file}; expected the folder of a checkout")
    os.makedirs(out_dir, exist_ok=True)
    table = Path(out_dir, "race.csv")
    if not table.exists():
        table.write_text(",".join(FIELDS) + "\n")
    s = SimpleNamespace(**config)
    for seed in map(int, seeds.split(",")):
        jobs = {f"ours-{seed}": (run_ours, (seed, s))}
        for rate in rates.split(","):
            if nanochat:
                jobs[f"nanochat x {rate}-{seed}"] = run_theirs, (build_nanochat, seed, float(rate), s)
            if nanogpt:
                jobs[f"nanoGPT x {rate}-{seed}"] = run_theirs, (build_nanogpt, seed, float(rate), s)
        for name, (function, arguments) in jobs.items():
            rows = list(csv.reader(table.open()))
            if [name, str(steps)] in [row[:2] for row in rows]:
                print(f"{name} is in {table}")
                continue
            with table.open("w", newline="") as file:  # without the beginning of a run that was interrupted
                csv.writer(file).writerows(row for row in rows if row[0] != name)
            process = multiprocessing.get_context("spawn").Process(target=function, args=(name, *arguments))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)
    draw(out_dir)
    print(f"{table}, {out_dir}/race.png")
