"""Parameter groups, optimizers and the learning rate's schedule: what both training loops must agree on."""
import math

import torch
import torch.distributed as dist
from torch.optim import _muon

from configurator import fail

ORTHOGONALISE = _muon._zeropower_via_newtonschulz  # torch's, of which there is no public name


def new_optimizer(model, optimizer, learning_rate, beta1, beta2, weight_decay, embedding_lr=None, head_lr=None, vector_lr=None,
                  muon_lr=0.02):
    """
    The optimizer of a GPT's parameters, in groups: hidden matrices, embeddings (and a head that is tied to them), an untied
    head, and vectors, which are biases and the weights of norms. Vectors do not decay.

    optimizer: adamw (Loshchilov & Hutter 2019), fused where torch has it: one kernel a step instead of several a tensor;
    muon: Muon for the hidden matrices, AdamW for the rest.
    learning_rate is the peak of each group that has none of its own, embedding_lr, head_lr or vector_lr; Muon's is muon_lr.
    A group's "lr_scale" is its rate over learning_rate; one schedule moves them all, see set_rates.
    """
    groups = {"matrices": [], "embeddings": [], "head": [], "vectors": []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            kind = "vectors" if p.dim() < 2 else "matrices" if ".h." in name else "head" if name.startswith("lm_head") else "embeddings"
            groups[kind].append(p)
    if learning_rate == 0 and (optimizer == "muon" or any((embedding_lr, head_lr, vector_lr))):
        fail("--learning_rate=0: the schedule is made for it and takes the other rates along; give one above 0")
    rates = {"matrices": muon_lr if optimizer == "muon" else None, "embeddings": embedding_lr, "head": head_lr, "vectors": vector_lr}
    groups = [{"params": params, "weight_decay": weight_decay if kind != "vectors" else 0.0,
               "lr_scale": 1.0 if rates[kind] is None else rates[kind] / (learning_rate or 1.0)} for kind, params in groups.items() if params]
    adamw = dict(lr=learning_rate, betas=(beta1, beta2), fused=groups[0]["params"][0].device.type in ("cpu", "cuda"))
    if optimizer == "muon":
        return MuonAdamW(groups[0], groups[1:], adamw)
    return torch.optim.AdamW(groups, **adamw)


class MuonAdamW(torch.optim.Optimizer):
    """
    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), which makes each matrix's update orthogonal, for one group, and
    AdamW for the others: torch's own two, as one optimizer.

    To orthogonalise costs each rank the same however many there are, so they share out the matrices: each updates its own and
    sends them to the others. Momenta stay where they are used, until state_dict gathers them, which all ranks call together. A
    sharded model's matrices each rank gathers and orthogonalises, and keeps its part.
    """

    def __init__(self, muon_group, adamw_groups, adamw):
        self.muon = torch.optim.Muon([muon_group], lr=adamw["lr"])
        self.adamw = torch.optim.AdamW(adamw_groups, **adamw)
        super().__init__(self.muon.param_groups + self.adamw.param_groups, {})
        matrices = muon_group["params"]
        self.sharded = hasattr(matrices[0], "full_tensor")
        self.owner = {}  # rank of each matrix, where there are ranks to share with
        if dist.is_initialized() and not self.sharded:
            load = [0] * dist.get_world_size()
            for p in sorted(matrices, key=orthogonalising_cost, reverse=True):  # the dearest first, to the rank with the least
                self.owner[p] = min(range(len(load)), key=load.__getitem__)
                load[self.owner[p]] += orthogonalising_cost(p)
        _muon._zeropower_via_newtonschulz = orthogonalise_sharded if self.sharded else ORTHOGONALISE

    @torch.no_grad()
    def compile(self):
        """Compiles the orthogonalisation, for all shapes there are. Not all of step, which would be anew for each learning rate."""
        if self.sharded:
            return
        _muon._zeropower_via_newtonschulz = torch.compile(ORTHOGONALISE, dynamic=False)
        group = self.param_groups[0]
        for shape in sorted({p.shape for p in group["params"]}):
            _muon._zeropower_via_newtonschulz(torch.zeros(shape, device=group["params"][0].device), group["ns_coefficients"],
                                              group["ns_steps"], group["eps"])

    @torch.no_grad()
    def step(self, closure=None):
        """One step of both, from the gradients in place. A closure is not taken: None."""
        # load_state_dict puts new objects in the place of the old, so the two are shown them each time
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self.muon.state = self.adamw.state = self.state
        self.adamw.step()
        for p, rank in self.owner.items():
            if rank != dist.get_rank():
                p.grad = None
        self.muon.step()
        for sent in [dist.broadcast(p, rank, async_op=True) for p, rank in self.owner.items()]:
            sent.wait()

    def state_dict(self):
        for p, rank in self.owner.items() if self.state else ():
            dist.broadcast(self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)), rank)
        return super().state_dict()


def orthogonalise_sharded(update, *args):
    """A sharded matrix (DTensor), gathered and orthogonalised by each rank: sharing it out would send more than it saves."""
    from torch.distributed.tensor import distribute_tensor
    whole = ORTHOGONALISE(update.full_tensor(), *args)
    return distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)


def orthogonalising_cost(p):
    """Multiplications of one Newton-Schulz step for a matrix (m, n), m <= n: m^2 n for X X^T, m^3 for its square, m^2 n for the update."""
    m, n = sorted(p.shape)
    return m * m * (2 * n + m)


def set_rates(optimizer, lr, iter_num):
    """
    Sets each group's learning rate for step iter_num, lr times its scale, and Muon's momentum, which rises from 0.85 to 0.95 over
    the first 100 steps: early gradients are soon out of date.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
        if "momentum" in group:
            group["momentum"] = 0.85 + 0.1 * min(1.0, iter_num / 100)


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
