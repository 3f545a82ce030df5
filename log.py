"""The log of a run: a line of JSON and a line on the screen every few steps, and warnings."""
import datetime
import json
import math
import os
import re
from collections import Counter
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_hook

from compiling import graphs_compiled
from configurator import fail
from distributed import gather, get_rank, print0
from machine import peak_memory_mb

FORMATS = {"train_loss": "loss {:.4f}", "val_loss": "val loss {:.4f}", "val_ppl": "perplexity {:.2f}",
           "val_bpb": "{:.4f} bits per byte", "lr": "lr {:.2e}", "grad_norm": "norm {:.2f}", "ms": "{:.0f} ms",
           "tok_per_sec": "{:,.0f} tok/s", "mfu": "mfu {:.1%}", "loss_scale": "scale {:.0f}",
           "sparsity": "sparsity {:.2%}", "ce_loss": "ce {:.4f}", "kl_loss": "kl {:.4f}", "temperature": "T {:.4f}",
           "agreement": "agreement {:.1%}", "shape": "shape {}", "eval_seconds": "evaluated in {:.1f} s"}
MAX_SKIPPED = 50  # exit after this many skipped steps in a row
DIVERGED = 1.2  # warn when the loss, averaged over about 100 steps, is this many times its lowest average


class Logger:
    """
    log(iter_num, name=value, ...) appends a line to out_dir/log.jsonl, prints the values that FORMATS has, and calls
    the trackers. log.step(...) adds up the numbers of one step; log.train(...) logs the steps since its last call,
    with the values of `metrics`: functions that return a dict, called on all ranks. eta_seconds counts eval_seconds,
    the duration of an evaluation with its checkpoint, sample, tasks and plot. Rank 0 writes. Create it after the
    warm-up: from then on, a compiled graph is a recompile.

    loader: the BatchLoader, for the position in the data. flops_per_token of the model and peak_flops of all ranks are
    for MFU.
    """

    def __init__(self, out_dir, max_iters, eval_interval, loader, flops_per_token, peak_flops, metrics, trackers,
                 resuming):
        self.path, self.max_iters, self.eval_interval = Path(out_dir) / "log.jsonl", max_iters, eval_interval
        self.loader, self.flops_per_token, self.peak_flops = loader, flops_per_token, peak_flops
        self.metrics, self.trackers = metrics, trackers
        self.sums = Counter()  # of the steps since the last call of train
        self.seconds = self.eval_seconds = self.last_eval_seconds = 0.0
        self.val_loss, self.rises = math.inf, 0  # the last one, and how many times in a row it rose
        self.diverged = False
        self.forget_losses()
        self.skipped = []  # steps
        self.recompiles, self.graphs = 0, graphs_compiled()
        loader.wait_seconds = 0.0  # the warm-up waited for the first batch
        if get_rank() == 0 and self.path.exists():
            text = self.path.read_bytes() if resuming else b""  # an overwritten run's log is emptied
            found = re.findall(rb'"seconds": ([0-9.]+),', text)
            self.seconds = float(found[-1]) if found else 0.0
            self.eval_seconds = sum(map(float, re.findall(rb'"eval_seconds": ([0-9.]+)', text)))
            os.truncate(self.path, text.rfind(b"\n") + 1)  # a run that was killed may have left half a line

    def step(self, **sums):
        """Adds up one step of the whole job: loss_sum, targets, tokens (no padding), rows, clipped or not, seconds."""
        if not math.isfinite(sums["loss_sum"]):  # else the mean would be NaN; a float16 overflow has a finite loss
            sums |= {"loss_sum": 0.0, "targets": 0}
        self.sums.update(sums, steps=1)
        recompiles = graphs_compiled() - self.graphs
        if recompiles > self.recompiles:
            self.recompiles = recompiles
            print(f"WARNING: rank {get_rank()} recompiled the model, {self.recompiles} times so far; "
                  f"TORCH_LOGS=recompiles says why")

    def skip(self, iter_num, cause):
        """Counts a skipped step and warns, if there is a cause to name; exits after MAX_SKIPPED in a row."""
        self.skipped.append(iter_num)
        if cause:
            print0(f"WARNING: step {iter_num} is skipped: {cause}; {len(self.skipped)} skipped so far")
        if self.skipped[-MAX_SKIPPED:] == [*range(iter_num - MAX_SKIPPED + 1, iter_num + 1)]:
            fail(f"step {iter_num}: {MAX_SKIPPED} steps in a row were skipped: the loss or gradient was not finite; "
                 f"resume from the last checkpoint with a lower --learning_rate, or start again from ckpt_best.pt")

    def train(self, iter_num, **values):
        """Logs the steps since the last call: their mean loss, tokens/s, ..."""
        for metric in self.metrics:
            values = dict(**values, **metric())  # a name that is taken is an error
        sums, self.sums, loader = self.sums, Counter(), self.loader
        seconds, steps, positions = sums["seconds"], sums["steps"], sums["rows"] * loader.dataset.max_seq_len
        self.seconds += seconds
        wait_seconds, loader.wait_seconds = loader.wait_seconds, 0.0
        train_loss = math.nan
        if sums["targets"]:
            train_loss = sums["loss_sum"] / sums["targets"]
            self.check_divergence(iter_num, train_loss, steps)
        self(iter_num, train_loss=train_loss, ms=1000 * seconds / steps,
             tok_per_sec=sums["tokens"] / seconds, useful=sums["tokens"] / positions,
             mfu=self.flops_per_token * positions / seconds / self.peak_flops,
             eta_seconds=(self.max_iters - iter_num) * (seconds / steps + self.last_eval_seconds / self.eval_interval),
             wait=wait_seconds / seconds, epoch=loader.rows_seen / len(loader.dataset),
             peak_mem_mb=peak_memory_mb(loader.device), targets=sums["targets"], clipped=sums["clipped"] / steps,
             skipped=len(self.skipped), recompiles=self.recompiles, seconds=self.seconds,
             flops=self.flops_per_token * loader.tokens, **values)

    def forget_losses(self):
        """Resets the mean of check_divergence, as after a rollback to weights whose loss was higher."""
        self.mean_loss, self.mean_steps, self.lowest_mean = 0.0, 0, math.inf

    def check_divergence(self, iter_num, train_loss, steps):
        """Warns once if the mean of train_loss over about 100 steps has risen far above its lowest value."""
        self.mean_steps += steps
        self.mean_loss += (train_loss - self.mean_loss) * min(1, steps / min(self.mean_steps, 100))
        if self.mean_steps >= 100:  # before that it averages too few
            self.lowest_mean = min(self.lowest_mean, self.mean_loss)
        if self.mean_loss > DIVERGED * self.lowest_mean and not self.diverged:
            self.diverged = True
            print0(f"WARNING: step {iter_num}: the loss is rising: its mean over about 100 steps is "
                   f"{self.mean_loss:.3f}, up from {self.lowest_mean:.3f}; try a lower --learning_rate, more "
                   f"--warmup_iters, or --spike_loss=3, which rolls back")

    def __call__(self, iter_num, **values):
        if get_rank() > 0 or not values:
            return
        shown = [form.format(values[key]) for key, form in FORMATS.items() if key in values]
        if "eta_seconds" in values:
            shown.append(f"eta {datetime.timedelta(seconds=min(int(values['eta_seconds']), 10 ** 9))}")
        if shown:
            print(f"step {iter_num}/{self.max_iters}: {', '.join(shown)}", flush=True)
        if "eval_seconds" in values:
            self.last_eval_seconds = values["eval_seconds"]
            self.eval_seconds += self.last_eval_seconds
        if "val_loss" in values:
            self.rises = self.rises + 1 if values["val_loss"] > self.val_loss else 0
            self.val_loss = values["val_loss"]
            if self.rises >= 3:
                print("WARNING: val_loss rose three times in a row", flush=True)
        values = {"iter": iter_num, "tokens": self.loader.tokens, **values}
        try:
            with open(self.path, "a") as f:
                f.write(json.dumps(values) + "\n")
        except OSError as error:  # a full disk is no reason to stop
            print(f"WARNING: {self.path} could not be written: {error}")
        for tracker in self.trackers:
            tracker(values)


@torch.no_grad()
def find_nonfinite(model, batch, autocast):
    """
    Why a step is not finite, as text. Runs the forward pass of `batch` again and names the first module whose output
    is not finite. If all outputs are finite, names the parameter closest to the output whose gradient is not: backward
    reached it first, and a NaN spreads to everything below.
    """
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not gather(p.grad).isfinite().all()]
    bad.sort(key=lambda name: "wte." not in name and "wpe." not in name)  # in the order of forward: embeddings first
    names, found = {module: name for name, module in model.named_modules()}, []

    def look_at(module, inputs, output):
        if torch.is_tensor(output) and not output.isfinite().all():
            found.append(names[module])

    try:
        with autocast, torch.compiler.set_stance("force_eager"), register_module_forward_hook(look_at):
            model(**batch)
    except torch.OutOfMemoryError:  # packed rows on a GPU: uncompiled, FlexAttention keeps all scores
        return "it is not finite, and there is not enough memory to find out where"
    if found:  # the model itself has no name, and returns the loss
        return f"the output of {found[0]} is not finite" if found[0] else "its loss is not finite"
    return f"the gradient of {bad[-1]} is not finite" if bad else "it is not finite in another micro-batch"
