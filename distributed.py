"""The processes of a run: ranks, device, precision, errors; sums, gradients and seeds that the ranks agree on."""
import os
import re
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import configurator
from configurator import fail, format_error, one_line_errors

# Linux: use transparent huge pages for CPU tensors of 2 MB or more (1 page fault instead of 512), as NumPy does. Must
# be set before PyTorch allocates its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


# both from torchrun's environment, so they work before init_process, too; without torchrun they are 0 and 1
def get_rank():
    return int(os.environ.get("RANK", 0))


def get_world_size():
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def print0(*words):
    """Print on rank 0 only."""
    if get_rank() == 0:
        print(*words, flush=True)


def init_process(device):
    """
    Init torch.distributed under torchrun and pick the device. device: auto, cpu, cuda, cuda:N or mps.
    Also allows TF32. Returns the torch.device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda":  # under torchrun one GPU per rank
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    elif get_world_size() > 1 and device != "cpu":
        fail(f"--device={device}: under torchrun expected cuda, which gives each rank its own GPU, or cpu")
    with one_line_errors(f"--device={device}", "expected auto, cpu, cuda, cuda:N or mps; torchrun needs one GPU per "
                         "rank", alone=True):  # with more ranks than GPUs only some ranks fail
        torch.empty(1, device=device).item()  # the meta device has no values
    device = torch.device(device)
    torch.set_float32_matmul_precision("high")  # TF32
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        # Workers restarted by torchrun --max-restarts would find the addresses of their predecessors in the store
        # (torch 2.13, gloo), so each start has its own prefix. Machines may differ in their restart counts, so several
        # share a fixed prefix.
        start = os.environ["TORCHELASTIC_RESTART_COUNT"] if os.environ.get("GROUP_WORLD_SIZE") == "1" else ""
        store = dist.PrefixStore(f"start {start}", next(dist.rendezvous("env://"))[0])
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=get_rank(), world_size=get_world_size(),
                                timeout=timedelta(hours=1),  # rank 0 may write a large checkpoint to a slow disk
                                device_id=device if cuda else None)
        sys.excepthook = excepthook  # torch wraps it, and drops what a hook prints before it exits
    return device


def excepthook(kind, error, tb):
    """One line for errors that torch raises and a user can do something about; configurator.py handles the others."""
    text = str(error)
    if issubclass(kind, torch.OutOfMemoryError) or "DefaultCPUAllocator" in text:
        reason = text.split("DefaultCPUAllocator: ")[-1].split(". ")[0]
        fail(f"out of memory ({reason}): lower --batch_size (in training raise --gradient_accumulation_steps and "
             f"--eval_iters by the same factor, to train the same model), or take a smaller model", alone=True)
    elif (dist.is_initialized() and re.search("gloo|NCCL|Connection closed by peer", text)
          and "unhandled" not in text):  # NCCL's word for a fault of this machine, such as a full /dev/shm
        print(f"error: another rank is gone or unreachable ({format_error(error)}); start all of them again "
              f"with --init_from=auto", file=sys.stderr)
    else:
        configurator.excepthook(kind, error, tb)


sys.excepthook = excepthook  # at import: loading a checkpoint, before init_process, may take long and fail, too


def check_ranks_agree(start):
    """Exits with an error unless `start`, a plain value, is the same on all ranks; machines may not share a disk."""
    if dist.is_initialized():
        starts = [None] * dist.get_world_size()
        dist.all_gather_object(starts, start)
        for rank, other in enumerate(starts):
            if other != starts[0]:
                fail(f"the ranks disagree: rank 0 starts with {starts[0]}, rank {rank} with {other}; all machines "
                     f"must read the same --out_dir and the same data")


def local_grad_accum_steps(gradient_accumulation_steps, world_size):
    """Micro-steps of each rank: the setting counts those of the whole job and must be divisible by world_size."""
    if gradient_accumulation_steps % world_size:
        fail(f"--gradient_accumulation_steps={gradient_accumulation_steps}: expected a multiple of {world_size}, the "
             f"number of ranks; its product with --batch_size is the number of rows per step, so change both")
    return gradient_accumulation_steps // world_size


def pick_dtype(dtype, device):
    """auto -> bfloat16 if the device supports (and does not emulate) it, else float16 with CUDA, float32 elsewhere."""
    if dtype != "auto":
        return dtype
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return "bfloat16"
    return "float32"


def make_autocast(device, dtype):
    """The context for forward passes, with --dtype; weights and optimizer state stay in float32."""
    dtype = pick_dtype(dtype, device)
    return torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")


def step_seed(seed, step, rank):
    """The seed of everything random in one step on one rank. With it no random state has to be saved."""
    return ((seed * 1_000_003 + step) * 65_537 + rank) % 2 ** 63


def all_reduce(*scalars):
    """Sums each of these scalar tensors over the ranks. Returns a tensor with an element for each."""
    values = torch.stack(scalars)
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def barrier():
    """Waits until all ranks are here."""
    if dist.is_initialized():
        dist.barrier()


def is_sharded(model):
    return hasattr(model, "set_requires_gradient_sync")  # an FSDP module


def gather(tensor):
    """The whole of a tensor that may be sharded. All ranks call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip_grad_norm(model, max_norm):
    """
    Clips the gradients of a model, except those of its loss function, to max_norm (0: off). Returns their norm before
    clipping, a scalar tensor. If the norm is not finite, they stay as they are.
    """
    params = [p for name, p in model.named_parameters() if not name.startswith("loss_fn.")]
    norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm.nan_to_num(0, 0))
    return gather(norm)
