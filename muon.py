"""Muon for the hidden matrices and AdamW for the rest, as one optimizer (--optimizer=muon)."""
import math
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from distributed import gather

MOMENTUM = 0.9  # Jordan et al. have 0.95; with small batches and rates that fall from the start 0.9 is better


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


def muon_updates(matrices, mean_square, skip, beta2=0.95):
    """
    Orthogonalizes `matrices` (n, rows, cols) and gives each row, the weights of one neuron, its own step size
    (NorMuon, Li et al. 2025): divides the row by the root of its mean square, which mean_square (n, rows, 1) averages
    over the steps, and keeps the norm of each matrix. Returns float32 updates and the new mean_square; if skip, a
    scalar bool tensor, zeros and mean_square as it was.
    """
    updates = newton_schulz(matrices).float()
    new_mean_square = mean_square.lerp(updates.square().mean(2, keepdim=True), 1 - beta2)
    scaled = updates * new_mean_square.clamp(min=1e-10).rsqrt()
    norms, scaled_norms = (x.norm(dim=(1, 2), keepdim=True) for x in (updates, scaled))
    updates = scaled * (norms / scaled_norms.clamp(min=1e-10))
    return updates.masked_fill(skip, 0.0), new_mean_square.where(~skip, mean_square)


class MuonAdamW(torch.optim.Optimizer):
    """
    One optimizer for the whole model. The first of `groups` gets Muon, which orthogonalizes the update of each matrix
    (Jordan et al. 2024, kellerjordan.github.io/posts/muon), with NorMuon's step size for each row. The other groups
    get torch's AdamW with the settings `adamw`.

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
            matrices = torch.stack(batch)
            self.muon_updates(matrices, matrices.new_zeros(*matrices.shape[:2], 1), self.found_inf.bool())

    @torch.no_grad()
    def step(self, closure=None):
        """One step of AdamW, then one of Muon."""
        # load_state_dict replaces these objects, so re-link them each time
        group, *self.adamw.param_groups = self.param_groups
        self.adamw.state, self.adamw.found_inf = self.state, self.found_inf
        self.adamw.step()
        skip = self.found_inf.bool()
        for batch in self.batches:
            states, grads, p = [self.matrix_state(p) for p in batch], [p.grad for p in batch], batch[0]
            momenta, means = ([state[name] for state in states] for name in ("momentum_buffer", "row_mean_square"))
            if skip.is_cuda or skip:  # if skipped, keep the momenta; on a CPU asking is free, with CUDA it waits
                grads = [torch.where(skip, m, grad) for m, grad in zip(momenta, grads)]
            torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
            directions = [gather(grad.lerp(m, MOMENTUM)) for grad, m in zip(grads, momenta)]  # Nesterov's
            updates, mean_square = self.muon_updates(torch.stack(directions), torch.stack(means), skip)
            torch._foreach_copy_(means, mean_square.unbind())
            if self.sharded:  # then a batch is one matrix
                updates = distribute_tensor(updates[0], p.device_mesh, p.placements, src_data_rank=None)[None]
            torch._foreach_mul_(batch, torch.where(skip, 1.0, 1 - group["lr"] * group["weight_decay"]))
            torch._foreach_add_(batch, updates.unbind(), alpha=-group["lr"] * math.sqrt(max(1, p.size(0) / p.size(1))))
        for broadcast in [dist.broadcast(p, rank, async_op=True) for p, rank in self.owner.items()]:
            broadcast.wait()

    def matrix_state(self, p):
        """Muon's state of a matrix: momentum_buffer, shaped like p, and row_mean_square (rows, 1) float32."""
        if "row_mean_square" not in self.state[p]:
            self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))  # a checkpoint older than NorMuon has it
            self.state[p]["row_mean_square"] = torch.zeros(p.size(0), 1, device=p.device)
        return self.state[p]

    def state_dict(self):
        for p, rank in self.owner.items():
            for tensor in self.matrix_state(p).values():
                dist.broadcast(tensor, rank)
        return super().state_dict()
