"""
Fully sharded data parallelism (Zhao et al. 2023), with torch's fully_shard: parameters, gradients and optimizer state
are sharded over the ranks, block by block, for a model that does not fit on one GPU. Checkpoints stay one file.
"""
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import distribute_tensor

from checkpoint import kept_out
from configurator import fail


def apply_fsdp(model, device, dtype, options):
    """
    Compiles (options: of torch.compile, or None) and shards a GPT in place, and returns it. Parameters are gathered in
    `dtype`, gradients are reduced in float32.
    """
    if not dist.is_initialized() or dtype == "float16":
        fail(f"--fsdp=True: expected several ranks (start with torchrun), and bfloat16 or float32 (it is {dtype})")
    policy = MixedPrecisionPolicy(getattr(torch, dtype), torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.transformer.h:
        if options:
            block.compile(**options)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "hidden_states")
    return model


def map_tensors(function, tree):
    """Nested dicts, with function(tensor) in place of each tensor."""
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    return function(tree) if isinstance(tree, torch.Tensor) else tree


def get_state(model, optimizer):
    """
    The state dicts of a sharded model and its optimizer, whole, on the CPU of rank 0; elsewhere None stands for each
    tensor. Collective.
    """
    def gather(tensor):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return whole.cpu() if dist.get_rank() == 0 else None

    left_out = kept_out(model)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    return map_tensors(gather, weights), map_tensors(gather, optimizer.state_dict())


def load_state(model, optimizer, checkpoint):
    """The reverse, from a checkpoint that every rank has read. The settings of the optimizer's groups stay."""
    like = optimizer.param_groups[0]["params"][0]  # all parameters are sharded alike, and so are their moments

    def shard(tensor):
        if tensor.dim() == 0:  # a count of steps
            return tensor
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

    model.load_state_dict(map_tensors(shard, checkpoint["model"]), strict="lora" not in checkpoint)
    optimizer.load_state_dict({"state": map_tensors(shard, checkpoint["optimizer"]["state"]),
                               "param_groups": optimizer.state_dict()["param_groups"]})
