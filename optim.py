"""Parameter groups, the optimizer and the learning-rate schedule."""
import math

import torch

from configurator import fail


def param_group_of(name, p):
    """The group of a model's parameter: matrices (the hidden ones), embeddings, head (if untied) or vectors."""
    if p.dim() < 2 or name.startswith("loss_fn."):
        return "vectors"
    if ".h." in name:
        return "matrices"
    return "head" if "lm_head" in name else "embeddings"


def configure_optimizer(model, config):
    """
    The optimizer of a model's trainable parameters, in groups: hidden matrices, embeddings (and a head tied to them),
    an untied head, and vectors (biases, the weights of norms, what a loss function learns), which do not decay.

    config["optimizer"]: adamw (Loshchilov & Hutter 2019), fused; muon: Muon for the hidden matrices,
    AdamW for the rest; adamw_spam: AdamW, with the gradient hook of extras/spam.py.
    muon_lr, embedding_lr, head_lr and vector_lr are the peak rates of their groups; the others use learning_rate.
    muon_lr and head_lr are meant for 12 layers, 768 wide. As we measured (docs/lab_notes.md), Muon's rate falls with
    depth^(1/3) and width^(1/10), the head's with width^(3/4). A group's "lr_scale" is its rate / learning_rate: one
    schedule scales them all.
    """
    learning_rate, muon = config["learning_rate"], config["optimizer"] == "muon"
    rates = {"matrices": config["muon_lr"] * (model.config.n_layer / 12) ** (-1 / 3)
                         * (model.config.n_embd / 768) ** -0.1 if muon else None,
             "embeddings": config["embedding_lr"],
             "head": config["head_lr"] and config["head_lr"] * (model.config.n_embd / 768) ** -0.75,
             "vectors": config["vector_lr"]}
    if learning_rate == 0 and any(rates.values()):
        fail("--learning_rate=0: the other rates are in proportion to it, on one schedule; give one above 0")
    groups = []
    for kind, rate in rates.items():
        params = [p for name, p in model.named_parameters() if p.requires_grad and param_group_of(name, p) == kind]
        if params:
            rate = learning_rate if rate is None else rate
            groups.append({"params": params, "lr": rate, "lr_scale": rate / learning_rate if learning_rate else 1.0,
                           "weight_decay": 0.0 if kind == "vectors" else config["weight_decay"]})
        elif kind == "matrices" and muon:
            fail("--optimizer=muon: it trains hidden matrices, but none is trainable here; give adamw")
    adamw = dict(betas=(config["beta1"], config["beta2"]), fused=True)
    if muon:
        from muon import MuonAdamW
        optimizer = MuonAdamW(groups, adamw)
    elif config["optimizer"].startswith("adamw"):
        optimizer = torch.optim.AdamW(groups, **adamw)
    else:
        raise ValueError(f"optimizer={config['optimizer']}: it has no branch here")
    optimizer.register_load_state_dict_pre_hook(keep_group_settings)
    optimizer.register_load_state_dict_post_hook(check_moments)
    return optimizer


def keep_group_settings(optimizer, loaded):
    """Before load_state_dict: keeps this run's settings of the groups, which may have changed; the state is loaded."""
    return {**loaded, "param_groups": [{**own, "params": saved["params"]} for own, saved in
                                       zip(optimizer.param_groups, loaded["param_groups"], strict=True)]}


def check_moments(optimizer):
    """After load_state_dict: raises ValueError for moments of another shape; fused AdamW would read beyond them."""
    for p, state in optimizer.state.items():
        for name in state.keys() & {"exp_avg", "exp_avg_sq", "momentum_buffer"}:
            if state[name].shape != p.shape:
                raise ValueError(f"its optimizer's {name} has the shape {tuple(state[name].shape)}, the parameter "
                                 f"{tuple(p.shape)}: it trained other parameters, or in another order")


def set_lr(optimizer, lr):
    """Sets the learning rate of each group to lr times its lr_scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def step_if_finite(optimizer, *numbers):
    """
    optimizer.step(), unless one of `numbers`, scalar tensors, is not finite. Returns whether all are, and their
    values. With CUDA an optimizer marked _step_supports_amp_scaling looks at found_inf on the device, so that the CPU
    waits only for the numbers.
    """
    numbers = torch.stack(numbers)
    if numbers.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False):
        values, copied = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()
        optimizer.found_inf = 1.0 - numbers.isfinite().all().float()
        optimizer.step()
        copied.synchronize()
    else:
        values = numbers.cpu()
        if values.isfinite().all():
            optimizer.step()
    return values.isfinite().all().item(), *values.tolist()


def build_schedule(config, max_iters):
    """
    Returns get_lr(it), the learning rate of step `it`, counted from 0. It rises linearly over warmup_iters, then

        cosine    falls to min_lr along half a cosine until lr_decay_iters (Loshchilov & Hutter 2017),
        wsd       stays, then falls linearly to min_lr over the last wsd_decay_frac of lr_decay_iters:
                  warmup-stable-decay (Hu et al. 2024; the linear form: Hagele et al. 2024),
        constant  stays.
    """
    schedule, learning_rate, min_lr, warmup_iters, decay_iters, wsd_decay_frac = (config[key] for key in (
        "lr_schedule", "learning_rate", "min_lr", "warmup_iters", "lr_decay_iters", "wsd_decay_frac"))
    if decay_iters is None or schedule == "constant":
        decay_iters = max_iters
    if schedule == "wsd" and wsd_decay_frac == 0:
        fail("--wsd_decay_frac=0.0: expected a number above 0, at most 1")
    before_decay = decay_iters - (round(wsd_decay_frac * decay_iters) if schedule == "wsd" else 0)
    if warmup_iters is None:
        warmup_iters = min(2000, decay_iters // 10, before_decay)
    if warmup_iters > before_decay:
        fail(f"--warmup_iters={warmup_iters}: expected at most {before_decay} steps; or change --max_iters, "
             f"--lr_decay_iters or --wsd_decay_frac")
    if schedule != "constant" and min_lr > learning_rate:
        fail(f"--min_lr={min_lr}: above --learning_rate={learning_rate}, so the rate would rise; give at most that")

    def get_lr(it):
        if it < warmup_iters:
            return learning_rate * (it + 1) / warmup_iters
        if schedule == "constant":
            return learning_rate
        if it >= decay_iters:
            return min_lr
        if schedule == "cosine":
            progress = (it - warmup_iters) / (decay_iters - warmup_iters)
            coeff = 0.5 * (1 + math.cos(math.pi * progress))
        elif schedule == "wsd":
            coeff = min(1.0, (decay_iters - it) / (wsd_decay_frac * decay_iters))
        else:
            raise ValueError(f"lr_schedule={schedule}: it has no formula here")
        return min_lr + coeff * (learning_rate - min_lr)

    get_lr(max(warmup_iters, decay_iters - 1))  # fail now rather than mid-run if a schedule has no formula
    return get_lr
