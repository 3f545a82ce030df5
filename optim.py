"""Parameter groups, optimizers, the learning rate's schedule and pruning: what both training loops must agree on."""
import math

import torch
import torch.distributed as dist
from torch.optim import _muon

from configurator import fail

ORTHOGONALISE = _muon._zeropower_via_newtonschulz  # torch's, of which there is no public name


def new_optimizer(model, optimizer, learning_rate, beta1, beta2, weight_decay, embedding_lr=None, head_lr=None, vector_lr=None,
                  muon_lr=0.02, spam_interval=500):
    """
    The optimizer of a GPT's parameters, in groups: hidden matrices, embeddings (and a head that is tied to them), an untied
    head, and vectors, which are biases and the weights of norms. Vectors do not decay.

    optimizer: adamw (Loshchilov & Hutter 2019), fused where torch has it: one kernel a step instead of several a tensor;
    muon: Muon for the hidden matrices, AdamW for the rest; adamw_spam: AdamW, whose gradients go through clip_spikes and whose
    moments set_rates resets every spam_interval steps.
    learning_rate is the peak of each group that has none of its own, embedding_lr, head_lr or vector_lr; Muon's is muon_lr.
    A group's "lr_scale" is its rate over learning_rate; one schedule moves them all, see set_rates.
    """
    groups = {"matrices": [], "embeddings": [], "head": [], "vectors": []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups[kind_of(name, p)].append(p)
    if learning_rate == 0 and (optimizer == "muon" or any((embedding_lr, head_lr, vector_lr))):
        fail("--learning_rate=0: the schedule is made for it and takes the other rates along; give one above 0")
    rates = {"matrices": muon_lr if optimizer == "muon" else None, "embeddings": embedding_lr, "head": head_lr, "vectors": vector_lr}
    groups = [{"params": params, "lr": learning_rate if rates[kind] is None else rates[kind],
               "weight_decay": weight_decay if kind != "vectors" else 0.0,
               "lr_scale": 1.0 if rates[kind] is None else rates[kind] / (learning_rate or 1.0)} for kind, params in groups.items() if params]
    if optimizer == "adamw_spam":
        groups = [{**group, "spam_interval": spam_interval} for group in groups]
    adamw = dict(lr=learning_rate, betas=(beta1, beta2), fused=groups[0]["params"][0].device.type in ("cpu", "cuda"))
    if optimizer == "muon":
        return MuonAdamW(groups[0], groups[1:], adamw)
    return torch.optim.AdamW(groups, **adamw)


def kind_of(name, p):
    """The group of a GPT's parameter: vectors, matrices (the hidden ones), head (untied) or embeddings."""
    return "vectors" if p.dim() < 2 else "matrices" if ".h." in name else "head" if name.startswith("lm_head") else "embeddings"


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
    def compile(self, backend):
        """Compiles the orthogonalisation, for all shapes there are. Not all of step, which would be anew for each learning rate."""
        if self.sharded:
            return
        _muon._zeropower_via_newtonschulz = torch.compile(ORTHOGONALISE, dynamic=False, backend=backend)
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

    adamw_spam: every spam_interval steps the moments, and the count of steps that corrects their bias, start at zero again, and the
    rate rises from a hundredth along half a cosine over the next 150 (SPAM, see clip_spikes; the count is not reset there). iter_num
    alone says when, so there is nothing to save.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
        if "momentum" in group:
            group["momentum"] = 0.85 + 0.1 * min(1.0, iter_num / 100)
        if "spam_interval" in group:
            interval = group["spam_interval"]
            since, warmup = iter_num % interval, min(150, 0.3 * interval)  # steps
            if since == 0:
                for tensor in (tensor for p in group["params"] for tensor in optimizer.state.get(p, {}).values()):
                    tensor.zero_()
            if iter_num >= interval and since < warmup:
                group["lr"] *= 1 - 0.99 * 0.5 * (1 + math.cos(math.pi * since / warmup))


@torch.no_grad()
def clip_spikes(optimizer, iter_num):
    """
    SPAM's clipping of spikes (Huang et al. 2025, arXiv 2501.06842), for adamw_spam, before the norm is taken: each element g of a
    gradient with g^2 > 5000 v becomes sign(g) sqrt(5000 v), v being its second moment before this step. One whose v is zero has
    no past to compare with and stays; so does one that is not finite, a fault for the loop to see. Theirs comes with no clipping of
    norms: behind it no spike stands out; but where norms are many times grad_clip, v is small and this clips more than spikes.

    5000, an interval of 500 steps, 150 of them to warm up, and none clipped in its first 20, in which v is not settled, are the
    values of the authors' code (github.com/TianjinYellow/SPAM-Optimizer); an interval below 500 shortens the two in proportion.
    """
    for group in optimizer.param_groups:
        if iter_num % group["spam_interval"] < min(20, 0.04 * group["spam_interval"]):
            continue
        for p in group["params"]:
            if p.grad is not None and optimizer.state.get(p):
                g, v = p.grad, optimizer.state[p]["exp_avg_sq"]
                if hasattr(g, "to_local"):  # sharded: element by element, so each rank does its own
                    g, v = g.to_local(), v.to_local()
                limit = (5000 * v).sqrt()
                g.copy_(torch.where((v > 0) & g.isfinite(), g.clamp(-limit, limit), g))


def check_schedule(schedule, learning_rate, min_lr, warmup_iters, decay_iters, wsd_decay_frac):
    """Raises ValueError, naming the setting, for a schedule that get_lr could not follow as it is meant."""
    if not 0 < wsd_decay_frac <= 1:
        raise ValueError(f"--wsd_decay_frac={wsd_decay_frac}: expected a number above 0, to 1")
    steady = decay_iters - (round(wsd_decay_frac * decay_iters) if schedule == "wsd" else 0)  # steps before the rate falls
    if warmup_iters > steady:
        raise ValueError(f"--warmup_iters={warmup_iters}: longer than the schedule, {steady} steps (max_iters, or lr_decay_iters"
                         f"{', less wsd_decay_frac of it' if schedule == 'wsd' else ''})")
    if schedule != "constant" and min_lr > learning_rate:
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
    left = (decay_iters - it) / (wsd_decay_frac * decay_iters)  # wsd
    return min_lr + min(1.0, left) * (learning_rate - min_lr)


# ---------------------------------------------------------------------------------------------------
# pruning

def plan_pruning(config, max_iters):
    """
    A loop's settings -> those of sparsity_at and prune, with what None stands for: the rise begins after a tenth of the run, when
    weights have left their initialisation, and ends after three quarters, while the rate is still high enough to make up for it;
    masks are renewed about a hundred times in it. Raises ValueError, naming the setting, for what cannot be pruned as it is meant.
    """
    sparsity, by = config["sparsity"], config["prune_by"]
    begin = max_iters // 10 if config["prune_begin"] is None else config["prune_begin"]
    end = max(1, 3 * max_iters // 4) if config["prune_end"] is None else config["prune_end"]
    interval = config["prune_interval"] or max(1, (end - begin) // 100)
    if sparsity and begin > end:
        raise ValueError(f"--prune_begin={begin}: sparsity would have to rise until before that, --prune_end={end}; give both")
    if sparsity and by == "state" and config["optimizer"] == "muon":
        raise ValueError("--prune_by=state: --optimizer=muon has no second moments of the hidden matrices; expected magnitude")
    if sparsity and config["fsdp"]:
        raise ValueError(f"--sparsity={sparsity}: not with --fsdp=True, where no rank has a whole matrix to sort; expected 0")
    return dict(sparsity=sparsity, by=by, scope=config["prune_scope"], begin=begin, end=end, interval=interval)


def sparsity_at(step, sparsity, begin, end):
    """The part of the weights that is pruned behind so many steps: Zhu & Gupta 2017 (arXiv 1710.01878), from 0, cubic."""
    if step >= end:
        return sparsity
    return sparsity * (1 - (1 - (step - begin) / (end - begin)) ** 3) if step > begin else 0.0


def new_masks(model, checkpoint, sparsity):
    """
    {name: bool tensor, True where a weight is pruned} for the hidden matrices; {} for sparsity 0. Those of a checkpoint (or None)
    that has some: what is pruned stays so, in the run that goes on and in one that starts from its weights.
    """
    if not sparsity:
        return {}
    saved = (checkpoint or {}).get("masks", {})
    masks = {name: saved[name].to(p.device, copy=True) if saved else torch.zeros_like(p, dtype=torch.bool)
             for name, p in model.named_parameters() if kind_of(name, p) == "matrices"}
    if sparsity_of(masks) > sparsity + len(masks) / sum(mask.numel() for mask in masks.values()):  # rounding aside
        fail(f"--sparsity={sparsity}: of this model's weights {sparsity_of(masks):.4f} are pruned already; give at least that")
    return masks


def sparsity_of(masks):
    """The part of the weights that is pruned."""
    return sum(mask.sum().item() for mask in masks.values()) / sum(mask.numel() for mask in masks.values())


@torch.no_grad()
def prune(model, optimizer, masks, iter_num, sparsity, by, scope, begin, end, interval):
    """
    Behind step iter_num: renews the masks where it is time, and sets what is pruned to zero. What has the lowest score goes:
    magnitude  |w|,
    state      |w| v^(1/4), v being AdamW's second moment: a weight whose gradients are small, too, is missed less;
    layer      round(sparsity n) of each matrix,
    global     of all together, whose matrices then differ in sparsity.
    A pruned weight stays pruned (its score would be zero) and gets no gradient; in Zhu & Gupta's it keeps its value behind the mask.
    Equal scores go in order, so ranks with the same weights have the same masks.
    """
    params = dict(model.named_parameters())
    ready = by == "magnitude" or all(params[name] in optimizer.state for name in masks)  # a first step that was skipped left no moments
    if ready and (iter_num >= end or iter_num > begin and (iter_num - begin) % interval == 0):
        for names in [list(masks)] if scope == "global" else [[name] for name in masks]:
            pruned = torch.cat([masks[name].flatten() for name in names])
            count = round(sparsity_at(iter_num, sparsity, begin, end) * len(pruned))
            if count > pruned.sum():
                score = torch.cat([(params[name].abs() if by == "magnitude" else
                                    params[name].abs() * optimizer.state[params[name]]["exp_avg_sq"] ** 0.25).flatten() for name in names])
                score[pruned] = -1
                pruned[score.argsort(stable=True)[:count]] = True
                for name, part in zip(names, pruned.split([masks[name].numel() for name in names])):
                    masks[name].copy_(part.view_as(masks[name]))
    for name, mask in masks.items():
        params[name].masked_fill_(mask, 0.0)


@torch.no_grad()
def mask_gradients(model, masks):
    """What is pruned counts in no gradient norm and no momentum."""
    for name, p in model.named_parameters():
        if name in masks:
            p.grad.masked_fill_(masks[name], 0.0)
