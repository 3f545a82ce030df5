"""
SPAM (Huang et al. 2025, arXiv 2501.06842) for AdamW: clips gradient elements that are spikes, and resets the moments.

The constants are those of the authors' code (github.com/TianjinYellow/SPAM-Optimizer), which does not clip norms. Our
loop still does, after this hook. If norms are many times grad_clip, v is small and SPAM clips more than spikes: then
use --grad_clip=0.
"""
import math

import torch

from configurator import fail


def spam_hook(optimizer, config):
    """
    Returns a gradient hook. Each element g of a gradient with g^2 > theta v becomes sign(g) sqrt(theta v), where v is
    its second moment before this step. Elements with v = 0 stay, as do elements that are not finite: the loop handles
    those.

    Every spam_interval steps the moments start at zero again, and so does the step count that corrects their bias (the
    authors keep it). The learning rate then rises from a hundredth along half a cosine over spam_warmup steps. Nothing
    is clipped in the first 20 steps (at most 0.04 spam_interval) after a reset, while v settles. iter_num alone
    determines all of it, so there is nothing to save.
    """
    interval, warmup, theta = config["spam_interval"], config["spam_warmup"], config["spam_theta"]
    if warmup is None:
        warmup = min(150, 0.3 * interval)
    if warmup > interval:
        fail(f"--spam_warmup={warmup}: longer than --spam_interval={interval}; give at most that")

    def hook(iter_num):
        since = iter_num % interval  # steps since the last reset
        for group in optimizer.param_groups:
            if iter_num >= interval and since < warmup:
                group["lr"] *= 1 - 0.99 * 0.5 * (1 + math.cos(math.pi * since / warmup))
            for p in group["params"]:
                state = optimizer.state.get(p)
                if not state:
                    continue
                if since == 0:
                    for tensor in state.values():
                        tensor.zero_()
                if since >= min(20, 0.04 * interval):
                    g, v = p.grad, state["exp_avg_sq"]
                    if hasattr(g, "to_local"):  # FSDP: element by element, so each rank does its own
                        g, v = g.to_local(), v.to_local()
                    limit = (theta * v).sqrt()
                    g.copy_(torch.where((v > 0) & g.isfinite(), g.clamp(-limit, limit), g))

    return hook
