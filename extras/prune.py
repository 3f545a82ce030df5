"""
Gradual magnitude pruning (Zhu & Gupta 2017, arXiv 1710.01878): sparsity rises along a cubic ramp during training.

The lowest scores are pruned: |w|, or |w| v^(1/4) with AdamW's second moment v, so a weight whose gradients are
small, too, goes first. A pruned weight stays zero and gets no gradient; in the paper it keeps its value behind the
mask.
"""
from typing import Literal

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from configurator import NonNegative, Positive, fail
from optim import param_group_of
from runtime import print0

prune_by: Literal["magnitude", "state"] = "magnitude"  # |w|, or |w| v^(1/4)
prune_scope: Literal["layer", "global"] = "layer"  # the share of each matrix, or of all together
prune_begin: NonNegative | None = None  # step at which sparsity begins to rise; None: a tenth of max_iters
prune_end: Positive | None = None  # step at which it is reached; None: three quarters of max_iters
prune_interval: Positive | None = None  # steps between prunings; None: a hundredth of the ramp


class Pruner:
    """
    Masks of a model's hidden matrices: a gradient hook, an optimizer step post-hook, and the entry "masks" of a
    checkpoint, {name: bool tensor, True where a weight is pruned}. A run that starts from pruned weights keeps their
    masks.
    """

    def __init__(self, model, optimizer, config, max_iters, checkpoint):
        self.optimizer, self.sparsity, self.step, self.reached = optimizer, config["sparsity"], 0, 0
        # begin when weights have left their initialisation, end while the rate is high enough to make up for it
        self.begin = max_iters // 10 if prune_begin is None else prune_begin
        self.end = 3 * max_iters // 4 if prune_end is None else prune_end
        self.interval = prune_interval or max(1, (self.end - self.begin) // 100)
        if self.begin > self.end:
            fail(f"--prune_begin={self.begin}: after --prune_end={self.end}; give both")
        if prune_by == "state" and config["optimizer"] == "muon":
            fail("--prune_by=state: --optimizer=muon has no second moments of the hidden matrices; expected magnitude")
        if config["fsdp"] or config.get("lora_rank"):
            fail(f"--sparsity={self.sparsity}: not with --fsdp=True, where no rank has a whole matrix to sort, nor "
                 f"with --lora_rank, which freezes the matrices")
        self.params = {name: p for name, p in model.named_parameters() if param_group_of(name, p) == "matrices"}
        self.masks = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in self.params.items()}
        if checkpoint and "masks" in checkpoint:
            self.load_state_dict(checkpoint["masks"])
            if self.metrics()["sparsity"] > self.sparsity + 0.001:  # counts are rounded, matrix by matrix
                fail(f"--sparsity={self.sparsity}: {self.metrics()['sparsity']:.4f} of the weights are pruned "
                     f"already; give at least that")
        optimizer.register_step_post_hook(self.prune)
        print0(f"pruning: to {self.sparsity} from step {self.begin} to {self.end}, every {self.interval}, {prune_by}, "
               f"scope {prune_scope}; the run ends at step {max_iters}")

    def mask_gradients(self, iter_num):
        """
        Zeros the gradients of pruned weights, so they do not count towards norm or momentum; notes the step for
        prune.
        """
        self.step = iter_num + 1
        for name, mask in self.masks.items():
            self.params[name].grad.masked_fill_(mask, 0.0)

    def sparsity_at(self, step):
        """The share of weights to be pruned after `step` steps."""
        progress = 1.0 if step >= self.end else max(0, step - self.begin) / max(1, self.end - self.begin)
        return self.sparsity * (1 - (1 - progress) ** 3)

    def score(self, name):
        p = self.params[name]
        return p.abs() if prune_by == "magnitude" else p.abs() * self.optimizer.state[p]["exp_avg_sq"] ** 0.25

    @torch.no_grad()
    def prune(self, *_):
        """
        Updates the masks if it is time, and zeros the pruned weights: round(sparsity n) of each matrix, or of all
        together, which then differ in sparsity. Equal scores go in order, so ranks with the same weights have the
        same masks.
        """
        sparsity = self.sparsity_at(self.step)
        if sparsity > self.reached and (self.step >= self.end or (self.step - self.begin) % self.interval == 0):
            self.reached = sparsity
            for names in [list(self.masks)] if prune_scope == "global" else [[name] for name in self.masks]:
                masks = [self.masks[name] for name in names]
                pruned = parameters_to_vector(masks)
                score = parameters_to_vector(self.score(name) for name in names)
                score[pruned] = -1  # the lowest, so they stay pruned
                pruned[score.argsort(stable=True)[:round(sparsity * len(pruned))]] = True
                vector_to_parameters(pruned, masks)
        for name, mask in self.masks.items():
            self.params[name].masked_fill_(mask, 0.0)

    def metrics(self):
        pruned = parameters_to_vector(self.masks.values())
        return {"sparsity": pruned.sum().item() / len(pruned)}

    def state_dict(self):
        return self.masks

    def load_state_dict(self, masks):
        self.reached = 0
        for name, mask in masks.items():
            self.masks[name].copy_(mask)
