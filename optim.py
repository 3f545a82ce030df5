"""Parameter groups, the optimizer and the learning rate's schedule: what both training loops must agree on."""
import math

import torch


def new_optimizer(model, learning_rate, beta1, beta2, weight_decay):
    """
    AdamW (Loshchilov & Hutter 2019) over a GPT's parameters. Matrices and embeddings decay, biases and the
    weights of norms do not. Fused where torch has it: one kernel a step instead of several a tensor.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
    fused = params[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), fused=fused)


def check_schedule(schedule, learning_rate, min_lr, warmup_iters, decay_iters, wsd_decay_frac):
    """Raises ValueError, naming the setting, for a schedule that get_lr could not follow as it is meant."""
    if not 0 < wsd_decay_frac <= 1:
        raise ValueError(f"--wsd_decay_frac={wsd_decay_frac}: expected a number above 0, to 1")
    if schedule == "constant":
        return
    steady = decay_iters - (round(wsd_decay_frac * decay_iters) if schedule == "wsd" else 0)  # steps before the rate falls
    if warmup_iters > steady:
        raise ValueError(f"--warmup_iters={warmup_iters}: longer than the schedule, {steady} steps (max_iters, or lr_decay_iters"
                         f"{', less wsd_decay_frac of it' if schedule == 'wsd' else ''})")
    if min_lr > learning_rate:
        raise ValueError(f"--min_lr={min_lr}: above --learning_rate={learning_rate}, so the rate would rise; give at most that")


def get_lr(it, schedule, learning_rate, min_lr, warmup_iters, decay_iters, wsd_decay_frac):
    """
    The learning rate of step `it` (0 is the first). It rises linearly over warmup_iters, then
    cosine    falls to min_lr along half a cosine until decay_iters (Loshchilov & Hutter 2017),
    wsd       stays, then falls linearly to min_lr over the last wsd_decay_frac of decay_iters: warmup-stable-decay
              (Hu et al. 2024; the linear form: Hagele et al. 2024),
    constant  stays.
    """
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    if schedule == "constant":
        return learning_rate
    if it >= decay_iters:
        return min_lr
    if schedule == "cosine":
        progress = (it - warmup_iters) / (decay_iters - warmup_iters)
        return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (learning_rate - min_lr)
    if schedule == "wsd":
        left = (decay_iters - it) / (wsd_decay_frac * decay_iters)
        return min_lr + min(1.0, left) * (learning_rate - min_lr)
    raise ValueError(f"lr_schedule={schedule}: no such schedule")
