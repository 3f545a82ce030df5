"""
Fully sharded data parallelism (Zhao et al. 2023), with torch's fully_shard: parameters, gradients and optimizer state
are sharded over the ranks, block by block, for a model that does not fit on one GPU. Checkpoints stay one file.
"""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import distribute_tensor

from compiling import CUDA_GRAPHS
from configurator import fail
from distributed import gather, get_rank


def apply_fsdp(model, device, dtype, options):
    """
    Compiles (options: for torch.compile, or None) and shards a GPT in place. Parameters are gathered in `dtype`; on a
    CPU in float32, because its LayerNorm does not take bfloat16 weights. Gradients are reduced in float32.
    """
    if not dist.is_initialized():
        fail("--shard_teacher=True or --fsdp=True: expected several ranks; start with torchrun")
    if dtype == "float16":
        fail("--dtype=float16 --shard_teacher=True or --fsdp=True: expected --dtype=bfloat16 or float32")
    if options and options["mode"] in CUDA_GRAPHS:
        fail(f"--compile_mode={options['mode']} --shard_teacher=True or --fsdp=True: CUDA graphs need weights that "
             f"stay in place; expected default")
    policy = MixedPrecisionPolicy(param_dtype=torch.float32 if device.type == "cpu" else getattr(torch, dtype),
                                  reduce_dtype=torch.float32, cast_forward_inputs=False)
    settings = {"mesh": dist.init_device_mesh(device.type, (dist.get_world_size(),)), "mp_policy": policy}
    for block in model.transformer.h:
        if options:
            block.compile(**options)
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    register_fsdp_forward_method(model, "hidden_states")


def gather_on_cpu(value):
    """
    A state dict with its tensors gathered on the CPU of rank 0; on other ranks they are None. All ranks call it.
    """
    if isinstance(value, dict):
        return {key: gather_on_cpu(entry) for key, entry in value.items()}
    if not torch.is_tensor(value):
        return value
    whole = gather(value)
    return whole.cpu() if get_rank() == 0 else None


def shard_like(whole, sharded):
    """This rank's shard of a tensor that all ranks have; `sharded` shows how to cut it."""
    return distribute_tensor(whole.to(sharded.device), sharded.device_mesh, sharded.placements, src_data_rank=None)


class ShardedModel:
    """
    The entry "model" of a checkpoint: the weights that `entry` (a sharded model or its adapters) holds, gathered on
    the CPU of rank 0. All ranks call both methods; each has read the whole checkpoint before load_state_dict.
    """

    def __init__(self, entry):
        self.entry = entry

    def state_dict(self):
        return gather_on_cpu(self.entry.state_dict())

    def load_state_dict(self, weights):
        own = self.entry.state_dict()
        missing = own.keys() - weights.keys()
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        self.entry.load_state_dict({name: shard_like(tensor, own[name]) for name, tensor in weights.items()})


class ShardedOptimizer:
    """The entry "optimizer", gathered in the same way."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return gather_on_cpu(self.optimizer.state_dict())

    def load_state_dict(self, saved):
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = {i: {name: shard_like(tensor, params[i]) if torch.is_tensor(tensor) and tensor.dim() else tensor
                     for name, tensor in values.items()} for i, values in saved["state"].items()}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
