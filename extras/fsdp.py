"""
Fully sharded data parallelism (Zhao et al. 2023), with torch's fully_shard: parameters, gradients and optimizer state
are sharded over the ranks, block by block, for a model that does not fit on one GPU. Checkpoints stay one file.
"""
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from compiling import CUDA_GRAPHS
from configurator import fail

WHOLE = dict(full_state_dict=True, cpu_offload=True)


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


class ShardedModel:
    """
    The entry "model" of a checkpoint: those weights of a sharded model that `entry` (the model or its adapters) holds,
    gathered on the CPU of rank 0; {} on other ranks. All ranks call both methods; each has read the whole checkpoint
    before load_state_dict.
    """

    def __init__(self, model, entry):
        self.model, self.names = model, list(entry.state_dict())

    def state_dict(self):
        adapters = len(self.names) < len(self.model.state_dict())  # then the frozen rest is not gathered
        weights = get_model_state_dict(self.model, options=StateDictOptions(**WHOLE, ignore_frozen_params=adapters))
        return {name: tensor for name, tensor in weights.items() if name in self.names}  # {} on the other ranks

    def load_state_dict(self, weights):
        missing = set(self.names) - weights.keys()  # torch would keep them as they are
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        set_model_state_dict(self.model, weights, options=StateDictOptions(full_state_dict=True))


class ShardedOptimizer:
    """The entry "optimizer", gathered in the same way. Its parameters are numbered, as in torch's own state dicts."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        named = {"state": {}, "param_groups": []}
        if self.optimizer.state:  # before the first step torch would take (and count) one to create the state
            named = get_optimizer_state_dict(self.model, self.optimizer, options=StateDictOptions(**WHOLE))
        if dist.get_rank() > 0:
            return {}
        names = [name for group in named["param_groups"] for name in group["params"]]
        return {"state": {i: named["state"][name] for i, name in enumerate(names) if name in named["state"]},
                "param_groups": self.optimizer.state_dict()["param_groups"]}

    def load_state_dict(self, numbered):
        if not numbered["state"]:
            self.optimizer.state.clear()
            return
        groups = get_optimizer_state_dict(self.model, self.optimizer)["param_groups"]  # their settings stay
        names = [name for group in groups for name in group["params"]]
        state = {names[i]: values for i, values in numbered["state"].items()}
        set_optimizer_state_dict(self.model, self.optimizer, {"state": state, "param_groups": groups},
                                 options=StateDictOptions(full_state_dict=True))
