"""
SPAM (Huang et al. 2025, arXiv 2501.06842) for AdamW: clips gradient elements that are spikes, and resets the moments.

The constants are those of the authors' code (github.com/TianjinYellow/SPAM-Optimizer), which does not clip norms. Our
loop still does, after this: where norms are many times grad_clip, v is small and more than spikes are clipped, so use
--grad_clip=0 there.
"""
import math
from typing import Annotated

import torch

from configurator import NonNegative, Positive, fail

spam_interval: Positive = 500  # steps between momentum resets
spam_warmup: NonNegative | None = None  # steps the rate rises over after a reset; None: 150, at most 0.3 spam_interval
spam_theta: Annotated[float, 1, math.inf] = 5000.0  # an element is a spike if its square is over spam_theta times v


def spam_hook(optimizer):
    """
    A gradient hook. Each element g of a gradient with g^2 > theta v becomes sign(g) sqrt(theta v), v being its second
    moment before this step. One whose v is zero stays, as does one that is not finite: the loop looks for those.

    Every spam_interval steps the moments, and the step count that corrects their bias (the authors keep it), start at
    zero again, and the learning rate rises from a hundredth along half a cosine over the next spam_warmup. Nothing is
    clipped in the first 20 steps (at most 0.04 spam_interval) after a reset, in which v is not settled. iter_num alone
    determines all of it, so there is nothing to save.
    """
    if (spam_warmup or 0) > spam_interval:
        fail(f"--spam_warmup={spam_warmup}: longer than --spam_interval={spam_interval}; give at most that")

    def hook(iter_num):
        since = iter_num % spam_interval  # steps
        warmup = min(150, 0.3 * spam_interval) if spam_warmup is None else spam_warmup
        for group in optimizer.param_groups:
            if iter_num >= spam_interval and since < warmup:
                group["lr"] *= 1 - 0.99 * 0.5 * (1 + math.cos(math.pi * since / warmup))
            for p in group["params"]:
                state = optimizer.state.get(p)
                if not state:
                    continue
                if since == 0:
                    for tensor in state.values():
                        tensor.zero_()
                if since >= min(20, 0.04 * spam_interval):
                    g, v = p.grad, state["exp_avg_sq"]
                    if hasattr(g, "to_local"):  # FSDP: element by element, so each rank does its own
                        g, v = g.to_local(), v.to_local()
                    limit = (spam_theta * v).sqrt()
                    g.copy_(torch.where((v > 0) & g.isfinite(), g.clamp(-limit, limit), g))

    return hook
