"""Muon for the hidden matrices and AdamW for the rest, as one optimizer (--optimizer=muon)."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor
from torch.optim import _muon

newton_schulz = _muon._zeropower_via_newtonschulz  # torch's own, which has no public name


class MuonAdamW(torch.optim.Optimizer):
    """
    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), which orthogonalizes each matrix's update, for one
    group, the first, and AdamW for the others: torch's own two, as one optimizer. adamw: AdamW's settings.

    Under DDP each matrix has an owner, the rank that updates and broadcasts it. Momentum buffers stay on the owner
    until state_dict, a collective call, gathers them. Under FSDP every rank gathers and orthogonalizes every matrix,
    and keeps its shard.
    """

    def __init__(self, groups, adamw):
        self.muon = torch.optim.Muon(groups[:1])  # each completes its groups in place with its own settings
        self.adamw = torch.optim.AdamW(groups[1:], **adamw)
        super().__init__(groups, {})
        matrices = groups[0]["params"]
        self.sharded = hasattr(matrices[0], "full_tensor")
        self.owner = {}  # matrix -> the rank that updates it, where several share the work
        if dist.is_initialized() and not self.sharded:
            by_size = sorted(matrices, key=torch.numel)  # so that each rank gets as many of each size
            self.owner = {p: i % dist.get_world_size() for i, p in enumerate(by_size)}
        _muon._zeropower_via_newtonschulz = newton_schulz_sharded if self.sharded else newton_schulz

    @torch.no_grad()
    def compile(self, backend):
        """
        Compiles Newton-Schulz for all shapes there are. Not all of step, which would recompile at each learning rate.
        """
        if self.sharded:
            return
        _muon._zeropower_via_newtonschulz = torch.compile(newton_schulz, dynamic=False, backend=backend)
        group = self.param_groups[0]
        for shape in {p.shape for p in group["params"]}:
            _muon._zeropower_via_newtonschulz(torch.zeros(shape, device=group["params"][0].device),
                                              group["ns_coefficients"], group["ns_steps"], group["eps"])

    @torch.no_grad()
    def step(self, closure=None):
        """One step of both optimizers. Drops (sets to None) the gradients of matrices that other ranks own."""
        # load_state_dict replaces these objects, so re-link them each time
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self.muon.state = self.adamw.state = self.state
        self.adamw.step()
        for p, rank in self.owner.items():
            if rank != dist.get_rank():
                p.grad = None
        self.muon.step()
        for broadcast in [dist.broadcast(p, rank, async_op=True) for p, rank in self.owner.items()]:
            broadcast.wait()

    def state_dict(self):
        for p, rank in self.owner.items():
            dist.broadcast(self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)), rank)
        return super().state_dict()


def newton_schulz_sharded(update, *args):
    """
    A sharded matrix (DTensor), gathered and orthogonalized on each rank: sharing it out would send more than it
    saves.
    """
    full = newton_schulz(update.full_tensor(), *args)
    return distribute_tensor(full, update.device_mesh, update.placements, src_data_rank=None)
