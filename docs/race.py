"""
Loss against seconds: trains the model of nanochat or of nanoGPT on the same rows as train_gpt2.py, and draws all runs.

    SAME='--data_dir=data/python --n_layer=6 --n_head=4 --n_embd=256 --max_seq_len=512 --batch_size=8 --max_iters=200
          --eval_interval=25'
    python train_gpt2.py config/speedrun.py $SAME --gradient_accumulation_steps=1 --out_dir=out-race/ours
    python docs/race.py $SAME --nanochat=../nanochat --rate=2 --out_dir=out-race/nanochat
    python docs/race.py $SAME --nanogpt=../nanoGPT --out_dir=out-race/nanogpt
    python docs/race.py --out_dir=out-race

Their model and optimizer are imported from your checkout and trained in the plain loop below, with their own schedule
and their own learning rates times --rate. With the same --seed, all read the same rows in the same order and are
validated on the same rows. log.jsonl in out_dir records the losses and the seconds of training, without evaluation and
without the first step, which compiles. The last command draws all runs below out_dir in race.png, one panel per
folder, and writes the points to race.csv.
"""
import csv
import json
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from configurator import NonNegativeFloat, Positive, Seed, configure, fail, one_line_errors  # noqa: E402
from dataloader import BatchLoader, TokenDataset, validation_loss  # noqa: E402
from distributed import init_process  # noqa: E402

nanochat: str = ""  # folder of a checkout of nanochat
nanogpt: str = ""  # or of nanoGPT
rate: NonNegativeFloat = 1.0  # factor on their learning rates
data_dir: str = "data/python"  # shards from prepare_data.py
out_dir: str = "out-race"  # log.jsonl
seed: Seed = 1337
n_layer: Positive = 6
n_head: Positive = 4
n_embd: Positive = 256
max_seq_len: Positive = 512
batch_size: Positive = 8  # rows per step
max_iters: Positive = 200
eval_interval: Positive = 25
eval_iters: Positive = 64
device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
compile: bool = True
configure(globals())


def build_nanochat(vocab_size, device):
    """nanochat's model, optimizer and set_rates(step), as its scripts/base_train.py makes them."""
    os.environ["NANOCHAT_DTYPE"] = "bfloat16"
    from nanochat.gpt import GPT, GPTConfig
    with torch.device("meta"):
        model = GPT(GPTConfig(sequence_len=max_seq_len, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head,
                              n_kv_head=n_head, n_embd=n_embd, window_pattern="L"))
    model.to_empty(device=device)
    model.init_weights()
    # without base_train.py's factor for batches of fewer than 524,288 tokens: for small ones it is far too low
    optimizer = model.setup_optimizer(unembedding_lr=0.008 * rate, embedding_lr=0.3 * rate, matrix_lr=0.02 * rate,
                                      scalar_lr=0.5 * rate)
    warmup, decay = max(1, max_iters // 50), round(0.65 * max_iters)  # theirs: 40 of some 2,000 steps

    def set_rates(step):
        left = min(1.0, (max_iters - step) / decay)  # 1 before the decay, 0 at the end
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min((step + 1) / warmup, left + (1 - left) * 0.05)
            if group["kind"] == "muon":
                group["momentum"] = 0.85 + 0.12 * min(1.0, step / 400) if left == 1 else 0.90 + 0.07 * left

    return model, optimizer, set_rates


def build_nanogpt(vocab_size, device):
    """nanoGPT's model, optimizer and set_rates(step), with the settings of its train.py."""
    del sys.modules["model"]  # ours; nanoGPT's has the same name
    from model import GPT, GPTConfig
    model = GPT(GPTConfig(block_size=max_seq_len, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd,
                          dropout=0.0, bias=False)).to(device)
    peak = 6e-4 * rate
    optimizer = model.configure_optimizers(0.1, peak, (0.9, 0.95), device.type)
    warmup = min(100, max_iters // 10)

    def set_rates(step):
        progress = max(0, step - warmup) / (max_iters - warmup)
        cosine = 0.1 * peak + 0.45 * peak * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = min(peak * (step + 1) / (warmup + 1), cosine)

    return model, optimizer, set_rates


class SummedLoss(torch.nn.Module):
    """A model of theirs that returns the loss as ours does, summed over the targets."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, idx, targets):
        with torch.autocast(idx.device.type, torch.bfloat16, enabled=bool(nanogpt)):
            out = self.model(idx, targets)
        loss = out[1] if isinstance(out, tuple) else out  # nanoGPT returns the logits, too
        return loss * (targets >= 0).sum()


def draw_runs():
    """Draws loss against seconds of the runs below out_dir as race.png, a panel per folder, and writes race.csv."""
    from matplotlib.figure import Figure
    logs = sorted(Path(out_dir).rglob("log.jsonl"))
    if not logs:
        fail(f"--out_dir={out_dir}: holds no log.jsonl of a run; give --nanochat or --nanogpt to train one")
    folders, names = sorted({log.parent.parent for log in logs}), sorted({log.parent.name for log in logs})
    figure = Figure(figsize=(1 + 5 * len(folders), 4), dpi=120, layout="constrained")
    axes, points = dict(zip(folders, figure.subplots(1, len(folders), squeeze=False)[0])), []
    for log in logs:
        entries = []
        for line in log.open():
            with suppress(ValueError):  # half a line, of a run that was killed
                entries.append(json.loads(line))
        timed = [(0, 0.0), *((entry["tokens"], entry["seconds"]) for entry in entries if "seconds" in entry)]
        steps = [entry for entry in entries if "val_loss" in entry]
        # log_interval may leave no time at the step of an evaluation
        seconds = np.interp([entry["tokens"] for entry in steps], *zip(*timed)).round(3).tolist()
        losses = [entry["val_loss"] for entry in steps]
        points += [(log.parent.relative_to(out_dir), entry["iter"], entry["tokens"], second, loss)
                   for entry, second, loss in zip(steps, seconds, losses)]
        ax = axes[log.parent.parent]
        # without the loss before the first step; a name has the same colour in all panels
        ax.plot(seconds[1:], losses[1:], ".-", label=log.parent.name, color=f"C{names.index(log.parent.name)}")
    for folder, ax in axes.items():
        ax.set(title=folder.name, xlabel="seconds of training", ylabel="validation loss (nats per token)")
        ax.grid(alpha=0.3)
        ax.legend()
    figure.savefig(Path(out_dir, "race.png"))
    with open(Path(out_dir, "race.csv"), "w", newline="") as file:
        csv.writer(file).writerows([("run", "step", "tokens", "seconds", "val_loss"), *points])


if not (nanochat or nanogpt):
    draw_runs()
    raise SystemExit
if nanochat and nanogpt:
    fail("--nanochat, --nanogpt: give one of them, the folder of a checkout")
if Path(out_dir, "log.jsonl").exists():
    fail(f"--out_dir={out_dir}: holds a log.jsonl, which would be replaced; give another folder")
torch_device = init_process(device)
train_data, val_data = (TokenDataset(data_dir, split, max_seq_len) for split in ("train", "val"))
loader = BatchLoader(train_data, batch_size, seed, 0, 1, torch_device)
torch.manual_seed(seed)
sys.path.insert(0, nanochat or nanogpt)
with one_line_errors(nanochat or nanogpt, "expected the folder of a checkout"):
    build = build_nanochat if nanochat else build_nanogpt
    model, optimizer, set_rates = build(train_data.vocab_size, torch_device)
compiled = SummedLoss(torch.compile(model, dynamic=False, disable=not compile))
compiled(**loader.peek()).backward()  # compiles
model.zero_grad(set_to_none=True)

os.makedirs(out_dir, exist_ok=True)
log, seconds = open(Path(out_dir, "log.jsonl"), "w"), 0.0
for step in range(max_iters + 1):
    if step % eval_interval == 0 or step == max_iters:
        val_loss, _ = validation_loss(compiled, val_data, batch_size, eval_iters, torch_device)
        values = {"iter": step, "tokens": loader.tokens, "seconds": seconds, "val_loss": val_loss}
        print(json.dumps(values), file=log, flush=True)
        print(f"step {step}/{max_iters}: {seconds:.1f} s, val loss {val_loss:.4f}", flush=True)
    start = time.perf_counter()
    set_rates(step)
    loss = compiled(**next(loader)) / (batch_size * max_seq_len)
    loss.backward()
    if nanogpt:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    loss.item()  # waits for the device
    if step > 0:  # the first one compiles the optimizer
        seconds += time.perf_counter() - start
