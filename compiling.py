"""torch.compile and DDP around a model: one fixed shape, and everything compiled before the first step."""
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from configurator import fail, format_error
from distributed import is_sharded, print0
from model import IGNORE

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile


def compile_options(config, device):
    """
    Returns the arguments of torch.compile; None with --compile=False, or, with a warning, if it cannot work here (no
    C++ compiler, no Triton, ...).
    """
    if not config["compile"]:
        print0("not compiled")
        return None
    backend = config["compile_backend"]
    # not cudagraphs, whose gradients wrap_model would have to clone; --compile_mode=reduce-overhead has CUDA graphs
    backends = [name for name in torch.compiler.list_backends(None) if name != "cudagraphs"]
    if backend not in backends:
        fail(f"--compile_backend={backend}: expected one of {', '.join(backends)}")
    try:
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(8, device=device))
    except Exception as error:
        print0(f"WARNING: torch.compile cannot work here ({format_error(error.__cause__ or error)}): running "
               f"uncompiled, slower")
        return None
    if device.type == "cuda":
        # else inductor fuses the sums over the loss's chunks, and keeps the logits of all chunks (torch 2.15)
        torch._inductor.config.max_fusion_unique_io_buffers = 16
    # recompute GELU's and the norms' outputs in the backward pass: less memory, a step 1 % longer on a CPU
    torch._functorch.config.ban_recompute_materialized_backward = False
    return dict(dynamic=False, fullgraph=True, mode=config["compile_mode"], backend=backend)


def wrap_model(orig_model, device, options):
    """
    Moves a model to the device, compiles it (options: for torch.compile, or None) and distributes it. Returns the one
    that trains, and the one that evaluates, without DDP. FSDP has compiled and sharded its blocks already.
    """
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)  # else a compiled embedding's gradient is summed in any order
    if is_sharded(orig_model):
        return orig_model, orig_model
    compiled = orig_model.to(device)
    if options:
        compiled = torch.compile(orig_model, **options)
        if options["mode"] in CUDA_GRAPHS:
            # CUDA graphs overwrite a gradient when they run again, so accumulate into a copy
            for p in orig_model.parameters():
                if p.requires_grad:
                    p.register_hook(torch.clone)
    if not dist.is_initialized():
        return compiled, compiled
    ddp = DDP(compiled, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True)
    # buffers are constants, or sums that are reduced when logged; set here, as torch 2.13 renamed the argument
    ddp.broadcast_buffers = False
    return ddp, compiled


def warm_up(model, eval_model, optimizer, batch, autocast, options):
    """
    Compiles the graphs of training and evaluation: a graph compiled later counts as a recompile. DDP needs the
    backward as well: its first one fixes the gradient buckets. With three or more ranks their layout sets the order
    of summation, so a resumed run would otherwise differ in the last bits. Returns seconds.
    """
    if not options and not dist.is_initialized():
        return 0.0
    start = time.perf_counter()
    if options:
        print0(f"compiling, backend {options['backend']}, mode {options['mode'] or 'default'} ... "
               f"(a minute or two the first time)")
    batch = {**batch, "targets": torch.full_like(batch["targets"], IGNORE)}
    with autocast:
        model(**batch).backward()
    optimizer.zero_grad()
    if options:
        if hasattr(optimizer, "compile"):
            optimizer.compile(options["backend"])
        inputs = ("idx", "targets", "positions", "mask")  # not a teacher's: evaluation uses the plain loss
        with torch.no_grad(), autocast:
            eval_model.eval()(**{name: batch[name] for name in inputs if name in batch}).item()
        eval_model.train()
        print0(f"compiled in {time.perf_counter() - start:.0f} s")
    return time.perf_counter() - start


def graphs_compiled():
    """Graphs that torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
