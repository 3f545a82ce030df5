"""
Fully sharded data parallelism (Zhao et al. 2023), with torch's fully_shard: parameters, gradients and optimizer state
are sharded over the ranks, block by block, for a model that does not fit on one GPU. Checkpoints stay one file.
"""
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from configurator import fail


def apply_fsdp(model, device, dtype, options):
    """
    Compiles (options: of torch.compile, or None) and shards a GPT in place, and returns it. Parameters are gathered in
    `dtype`, gradients are reduced in float32.
    """
    if not dist.is_initialized():
        fail("--shard_teacher=True or --fsdp=True: expected several ranks; start with torchrun")
    if dtype == "float16":
        fail("--dtype=float16 --shard_teacher=True or --fsdp=True: expected --dtype=bfloat16 or float32")
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32,
                                  cast_forward_inputs=False)
    settings = {"mesh": dist.init_device_mesh(device.type, (dist.get_world_size(),)), "mp_policy": policy}
    for block in model.transformer.h:
        if options:
            block.compile(**options)
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    register_fsdp_forward_method(model, "hidden_states")
    return model


def get_state(model, optimizer):
    """
    The state dicts of a sharded model and its optimizer, whole, on the CPU of rank 0, and {} elsewhere; collective.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    weights = get_model_state_dict(model, options=options)
    named = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() > 0:
        return {}, {}
    number = {name: i for i, name in enumerate(name for group in named["param_groups"] for name in group["params"])}
    return weights, {"state": {number[name]: state for name, state in named["state"].items()},
                     "param_groups": optimizer.state_dict()["param_groups"]}


def load_state(model, optimizer, checkpoint):
    """The reverse, from a checkpoint that every rank has read. The settings of the optimizer's groups stay."""
    options = StateDictOptions(full_state_dict=True, strict="lora" not in checkpoint)
    set_model_state_dict(model, checkpoint["model"], options=options)
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    names = [name for group in groups for name in group["params"]]  # by their numbers
    state = {names[i]: values for i, values in checkpoint["optimizer"]["state"].items()}
    set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups}, options=options)
