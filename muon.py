"""Muon for the hidden matrices and AdamW for the rest, as one optimizer (--optimizer=muon)."""
import math
from itertools import groupby

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import distribute_tensor

from distributed import gather

MOMENTUM = 0.85  # Jordan et al. have 0.95; with small batches and rates that fall from the start 0.85 is better


def newton_schulz(matrices):
    """
    Approximately orthogonalizes each of `matrices` (n, rows, cols): divides it by its norm, then takes five steps of
    a quintic iteration that brings its singular values, if not tiny, to between 0.68 and 1.2 (Jordan et al. 2024).
    Returns bfloat16.
    """
    tall = matrices.size(1) > matrices.size(2)
    X = (matrices.mT if tall else matrices).bfloat16()
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)
        X = torch.baddbmm(X, B, X, beta=3.4445)
    return X.mT if tall else X


def muon_updates(matrices, skip):
    """
    Orthogonalizes `matrices` (n, rows, cols), then gives all rows of a matrix, each the weights of a neuron, the same
    norm, without changing that of the matrix. Returns float32 updates; zeros if skip, a scalar bool tensor.

    So all neurons move equally far, as with NorMuon (Li et al. 2025), but without its mean over the steps.
    """
    updates = newton_schulz(matrices).float()
    row_norms = updates.norm(dim=(1, 2), keepdim=True) / math.sqrt(updates.size(1))
    return (F.normalize(updates, dim=2) * row_norms).masked_fill(skip, 0.0)


class MuonAdamW(torch.optim.Optimizer):
    """
    One optimizer for the whole model. The first of `groups` gets Muon, which orthogonalizes the update of each matrix
    (Jordan et al. 2024, kellerjordan.github.io/posts/muon). The other groups get torch's AdamW with the settings
    `adamw`.

    Under DDP each matrix has an owner, the rank that updates and broadcasts it. Its state stays on the owner until
    state_dict, a collective call, gathers it. Under FSDP every rank gathers and orthogonalizes every matrix and keeps
    its shard; dividing the matrices among the ranks would send more than it saves.

    found_inf: a scalar tensor; 1 makes step() change nothing, as in torch's fused optimizers. Only the device looks at
    it, so the CPU need not wait.
    """
    _step_supports_amp_scaling = True  # torch's mark of optimizers with found_inf

    def __init__(self, groups, adamw):
        self.adamw = torch.optim.AdamW(groups[1:], **adamw)  # adds its defaults to the groups, in place
        super().__init__(groups, {})
        by_shape = sorted(groups[0]["params"], key=lambda p: p.shape)
        self.sharded = hasattr(by_shape[0], "full_tensor")
        self.owner = {}  # matrix -> the rank that updates it; empty on one rank and under FSDP
        mine = by_shape
        if dist.is_initialized() and not self.sharded:
            self.owner = {p: i % dist.get_world_size() for i, p in enumerate(by_shape)}  # evenly by shape
            mine = by_shape[dist.get_rank()::dist.get_world_size()]
        # matrices of one shape are orthogonalized together; under FSDP only one at a time is gathered
        self.batches = [[p] for p in mine] if self.sharded else [list(g) for _, g in groupby(mine, lambda p: p.shape)]
        self.muon_updates = muon_updates
        self.found_inf = torch.zeros((), device=by_shape[0].device)

    @torch.no_grad()
    def compile(self, backend):
        """Compiles muon_updates for each shape; a compiled step would recompile at each learning rate."""
        if self.sharded:
            return
        self.muon_updates = torch.compile(muon_updates, dynamic=False, backend=backend)
        for batch in self.batches:
            self.muon_updates(torch.stack(batch), self.found_inf.bool())

    @torch.no_grad()
    def step(self, closure=None):
        """One step of AdamW, then one of Muon."""
        # load_state_dict replaces these objects, so re-link them each time
        group, *self.adamw.param_groups = self.param_groups
        self.adamw.state, self.adamw.found_inf = self.state, self.found_inf
        self.adamw.step()
        skip = self.found_inf.bool()
        for batch in self.batches:
            momenta, grads, p = [self.momentum(p) for p in batch], [p.grad for p in batch], batch[0]
            if skip.is_cuda or skip:  # if skipped, keep the momenta; reading skip is free on a CPU; with CUDA it waits
                grads = [torch.where(skip, m, grad) for m, grad in zip(momenta, grads)]
            torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
            directions = [gather(grad.lerp(m, MOMENTUM)) for grad, m in zip(grads, momenta)]  # Nesterov's
            updates = self.muon_updates(torch.stack(directions), skip)
            if self.sharded:  # then a batch is one matrix
                updates = distribute_tensor(updates[0], p.device_mesh, p.placements, src_data_rank=None)[None]
            torch._foreach_mul_(batch, torch.where(skip, 1.0, 1 - group["lr"] * group["weight_decay"]))
            torch._foreach_add_(batch, updates.unbind(), alpha=-group["lr"] * math.sqrt(max(1, p.size(0) / p.size(1))))
        for broadcast in [dist.broadcast(p, rank, async_op=True) for p, rank in self.owner.items()]:
            broadcast.wait()

    def momentum(self, p):
        """Muon's state of a matrix, shaped like it; zeros at first."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]

    def state_dict(self):
        for p, rank in self.owner.items():
            dist.broadcast(self.momentum(p), rank)
        return super().state_dict()
