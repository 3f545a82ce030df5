"""
Gradual magnitude pruning (Zhu & Gupta 2017, arXiv 1710.01878): sparsity rises along a cubic ramp during training.

The weights with the lowest scores are pruned: |w|, or |w| v^(1/4) with AdamW's second moment v, so that weights whose
gradients are small as well go first. A pruned weight stays zero and gets no gradient; in the paper it keeps its value
behind the mask.
"""
import torch

from configurator import fail
from distributed import print0
from optim import param_group_of


class Pruner:
    """
    Masks of a model's hidden matrices: a gradient hook, an optimizer step post-hook, and the entry "masks" of a
    checkpoint, {name: bool tensor, True where a weight is pruned}. A run that starts from pruned weights keeps their
    masks.
    """

    def __init__(self, model, optimizer, config, max_iters, checkpoint):
        self.optimizer, self.sparsity, self.step, self.reached = optimizer, config["sparsity"], 0, 0
        self.by, begin, end = config["prune_by"], config["prune_begin"], config["prune_end"]
        # begin when weights have left their initialization, end while the rate is high enough to recover
        self.begin = max_iters // 10 if begin is None else begin
        self.end = 3 * max_iters // 4 if end is None else end
        self.interval = max(1, (self.end - self.begin) // 100)  # steps between prunings
        if self.begin > self.end:
            fail(f"--prune_begin={self.begin}: after --prune_end={self.end}; give both")
        if self.by == "state" and config["optimizer"] not in ("adamw", "adamw_spam"):
            fail(f"--prune_by=state: --optimizer={config['optimizer']} has no second moments of the hidden matrices; "
                 f"expected magnitude")
        if config.get("fsdp") or config.get("lora_rank"):
            fail(f"--sparsity={self.sparsity}: not with --fsdp=True, where no rank has a whole matrix to sort, nor "
                 f"with --lora_rank, which freezes the matrices")
        self.params = {name: p for name, p in model.named_parameters()
                       if p.requires_grad and param_group_of(name, p) == "matrices"}
        self.masks = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in self.params.items()}
        if checkpoint and "masks" in checkpoint:
            self.load_state_dict(checkpoint["masks"])
            if any(mask.sum() > round(self.sparsity * mask.numel()) for mask in self.masks.values()):
                fail(f"--sparsity={self.sparsity}: {self.metrics()['sparsity']:.4f} of the weights are pruned "
                     f"already; give at least that")
        optimizer.register_step_post_hook(self.prune)
        print0(f"{'WARNING: ' if self.end > max_iters else ''}pruning by {self.by}: to {self.sparsity} from step "
               f"{self.begin} to {self.end}, every {self.interval} steps; the run ends at step {max_iters}")

    def mask_gradients(self, iter_num):
        """
        Zeros the gradients of pruned weights, so that they do not count towards norm or momentum, and records the step
        for prune.
        """
        self.step = iter_num + 1
        for name, mask in self.masks.items():
            self.params[name].grad.masked_fill_(mask, 0.0)

    def sparsity_at(self, step):
        """The share of weights to be pruned after `step` steps."""
        progress = 1.0 if step >= self.end else max(0, step - self.begin) / max(1, self.end - self.begin)
        return self.sparsity * (1 - (1 - progress) ** 3)

    @torch.no_grad()
    def prune(self, *_):
        """
        After an optimizer step: if a pruning is due, extends the masks to round(sparsity n) of each matrix's n
        weights; then zeros the pruned weights. Equal scores are pruned in order, so ranks with the same weights get
        the same masks.
        """
        sparsity = self.sparsity_at(self.step)
        due = sparsity > self.reached and (self.step >= self.end or (self.step - self.begin) % self.interval == 0)
        if due and not getattr(self.optimizer, "found_inf", 0):  # on a GPU it is also called after a skipped step
            self.reached = sparsity
            for name, mask in self.masks.items():
                p = self.params[name]
                score = p.abs() if self.by == "magnitude" else p.abs() * self.optimizer.state[p]["exp_avg_sq"] ** 0.25
                score = score.masked_fill(mask, -1).flatten()  # the lowest: what is pruned stays pruned
                mask.view(-1)[score.argsort(stable=True)[:round(sparsity * len(score))]] = True
        for name, mask in self.masks.items():
            self.params[name].masked_fill_(mask, 0.0)

    def metrics(self):
        masks = self.masks.values()
        return {"sparsity": sum(mask.sum().item() for mask in masks) / sum(mask.numel() for mask in masks)}

    def state_dict(self):
        return self.masks

    def load_state_dict(self, masks):
        self.reached = 0
        for name in masks.keys() & self.masks.keys():  # all, unless matrices have been frozen since
            self.masks[name].copy_(masks[name])
