"""
What a training process needs around its loop: its rank and device, its precision, the compiler, checkpoints, the log
and its picture.

    python runtime.py out other-out   # draws the losses of several runs into runs.png
"""
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import traceback
import zipfile
from contextlib import nullcontext
from dataclasses import asdict
from inspect import signature
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from configurator import expect_range, fail
from model import GPT, GPTConfig, IGNORE, LOSS_CHUNK, config_from_hf, from_hf, merge_lora
from prepare_data import TeacherCache, epoch_order, take_lock

# ---------------------------------------------------------------------------------------------------
# ranks, device, precision


def init_process(device):
    """
    Joins the process group where torchrun started one, and settles the device.
    device: auto, cpu, cuda, cuda:N or mps. -> rank, world_size, torch.device.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    sys.excepthook = explain
    for stream in (sys.stdin, sys.stdout):  # a character that a terminal or file cannot show or send is no reason to stop
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda", "mps") or not (index == "" or index.isdigit()):
        fail(f"--device={device}: expected auto, cpu, cuda, cuda:N or mps")
    if kind == "cuda" and not torch.cuda.is_available() or kind == "mps" and not torch.backends.mps.is_available():
        fail(f"--device={device}: torch {torch.__version__} finds no such device here; --device=auto takes what there is")
    if kind == "cuda":
        count = torch.cuda.device_count()
        if world_size > 1 and index:
            fail(f"--device={device}: torchrun gives each rank its own GPU, so give --device=cuda")
        index = int(index or local_rank)
        if index >= count:
            fail(f"--device={device}: GPU {index} is wanted, and there are {count}: "
                 + (f"start at most {count} ranks on this machine" if world_size > 1 else f"expected cuda:0 to cuda:{count - 1}"))
        device = f"cuda:{index}"
        torch.cuda.set_device(index)
    if "RANK" in os.environ and kind == "mps":
        fail("--device=mps: torch has no process group for it; start without torchrun, or with --device=cpu")
    device = torch.device(device)
    torch.set_float32_matmul_precision("high")  # TF32 where float32 matmuls meet tensor cores
    if kind == "cpu":
        torch.use_deterministic_algorithms(True)  # a compiled embedding's gradient is summed in any order without it
    if "RANK" in os.environ:
        store = None
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # Workers that torchrun --max-restarts starts again find the store of those before them, with addresses where nobody
            # answers any more (torch 2.13, gloo), so each start has its own names in it. On several machines the count of
            # restarts is each machine's own, and nothing that all of them know tells one start from another.
            store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", next(dist.rendezvous("env://"))[0])
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=device if kind == "cuda" else None, store=store,
                                **({"rank": rank, "world_size": world_size} if store else {}))
    return rank, world_size, device


stop_asked = None  # (signal's name, when) of the first one that asked for a stop


def catch_signals():
    """
    From here on SIGTERM, SIGINT and SIGUSR1 (Slurm's, with --signal=USR1@60) ask the loop to stop behind its step; it looks
    at stop_asked. Schedulers and torchrun both forward them to every worker, so repeats within 5 seconds count as one. One
    that comes later ends the program at once.
    """
    def ask(number, frame):
        global stop_asked
        name, now = signal.Signals(number).name, time.monotonic()
        if stop_asked is None:
            stop_asked = name, now
            if int(os.environ.get("RANK", 0)) == 0:  # not print, which may be what was interrupted
                os.write(2, f"\n{name}: stopping behind this step; once more, after 5 seconds, ends at once\n".encode())
        elif now - stop_asked[1] > 5:
            raise KeyboardInterrupt

    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), ask)


after_interrupt = ""  # what a training loop has to say then: what is saved, and how to go on


def explain(kind, error, tb):
    """For sys.excepthook: one line for what is nobody's bug, the traceback for the rest."""
    if issubclass(kind, KeyboardInterrupt):
        print(f"\ninterrupted{after_interrupt}", file=sys.stderr)
    elif issubclass(kind, BrokenPipeError):  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif issubclass(kind, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        reason = str(error).split("DefaultCPUAllocator: ")[-1].split(". ")[0]
        fail(f"out of memory ({reason}): lower --batch_size (in training raise --gradient_accumulation_steps by the same factor: "
             f"it trains the same model)", alone=True)
    elif dist.is_initialized() and any(word in str(error) for word in ("gloo", "NCCL", "Connection closed by peer")):
        print(f"error: another rank is gone or unreachable ({' '.join(str(error).split())[:150]}); start all of them again with "
              f"--init_from=auto", file=sys.stderr)
    elif issubclass(kind, OSError):  # the disk, or a file that is not what it should be
        fail(f"{kind.__name__}: {error}", alone=True)
    else:
        traceback.print_exception(kind, error, tb)


def pick_dtype(dtype, device):
    """auto -> bfloat16 where the device computes in it rather than emulating it, else float16 on GPUs, float32 on CPUs."""
    if dtype != "auto":
        return dtype
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return "bfloat16"
    return "float32"


def autocast(device, dtype):
    """The context for forward passes; weights and optimizer stay in float32 outside of it."""
    return torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")


def step_seed(seed, step, rank):
    """The seed of everything random in one step on one rank, so that no random state has to be saved."""
    return ((seed * 1_000_003 + step) * 65_537 + rank) % 2 ** 63


# dense bfloat16 / float16 peaks in FLOP/s, from the vendors' data sheets; without sparsity
PEAK_FLOPS = {"GB200": 2.5e15, "B200": 2.25e15, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
              "H20": 148e12, "A100": 312e12, "A10G": 70e12, "A40": 150e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12, "T4": 65e12,
              "RTX 5090": 210e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12, "MI250X": 191.5e12}  # MI250X: is two devices


def data_sheet_flops(device, dtype):
    """FLOP/s of a GPU by its data sheet; None where PEAK_FLOPS has none for it, and for float32."""
    if device.type == "cuda" and dtype != "float32":
        found = re.search(rf"\b({'|'.join(PEAK_FLOPS)})\b(?! (Ti|D|Laptop)\b)", torch.cuda.get_device_name(device))
        return PEAK_FLOPS[found[1]] if found else None


def peak_flops(device, dtype):
    """FLOP/s of one device at most, for MFU: the data sheet's where there is one, else that of a matmul here."""
    sheet = data_sheet_flops(device, dtype)
    if sheet:
        return sheet
    n = 1024 if device.type == "cpu" else 4096
    a = torch.randn(n, n, device=device, dtype=getattr(torch, dtype))
    best = math.inf
    for _ in range(8):
        t = time.perf_counter()
        (a @ a)[0, 0].item()  # item waits for the device
        best = min(best, time.perf_counter() - t)
    return 2 * n ** 3 / best


def peak_memory_mb(device):
    """MiB this process had at most: on the GPU where it uses one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 20
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2 ** 10 if sys.platform != "darwin" else 2 ** 20)


# ---------------------------------------------------------------------------------------------------
# the compiler

def compiler_problem(device, backend):
    """Why torch.compile cannot work here (no C++ compiler, no Triton, ...), in one line; None where it can."""
    if backend not in torch._dynamo.list_backends(None):
        fail(f"--compile_backend={backend}: expected one of {', '.join(torch._dynamo.list_backends(None))}")
    if device.type == "mps":
        return "torch.compile is not ready for MPS"
    try:
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(8, device=device))
    except Exception as error:
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {' '.join(str(cause).split())[:150]}"
    return None


def graphs_compiled():
    """Graphs that torch.compile has made in this process so far: what it gains after the warm-up are recompiles."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def distribute(model, device):
    """The model, compiled or not, in torch's DistributedDataParallel where there are ranks to share its gradients with."""
    if not dist.is_initialized():
        return model
    # the model's only buffers are constants; the argument that leaves them alone has another name from torch 2.13 on
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in signature(DDP).parameters else "broadcast_buffers"
    return DDP(model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True,
               **{sync_buffers: False})


def shard(model, device, dtype, compile_options=None):
    """
    Shards parameters, gradients and optimizer state over the ranks, block by block (torch's fully_shard; Zhao et al. 2023), for a
    model that one device does not hold. compile_options: of torch.compile, for each block; None: not compiled. dtype: what the
    parameters are gathered in; gradients are reduced in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh  # here and in the next two: they take a second to import
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == "float32" else getattr(torch, dtype), reduce_dtype=torch.float32,
                                  cast_forward_inputs=False)  # the residual stream stays as autocast has it
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.transformer.h:
        if compile_options is not None:
            block.compile(**compile_options)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "hidden_states")


def micro_steps_of(gradient_accumulation_steps, world_size):
    """The micro-batches that each rank takes of a step's; a number that cannot be shared out is refused."""
    if gradient_accumulation_steps % world_size:
        near = gradient_accumulation_steps // world_size * world_size
        fail(f"--gradient_accumulation_steps={gradient_accumulation_steps}: does not divide by {world_size} ranks; "
             f"{f'{near} or ' if near else ''}{near + world_size} would")
    return gradient_accumulation_steps // world_size


def get_state(model, optimizer, sharded):
    """
    The state dicts of a model, without what is frozen in it (LoRA), and of its optimizer. Those of a sharded one as of a whole one,
    on the CPU of rank 0 and nowhere else; it is called by all ranks together.
    """
    if not sharded:
        weights = model.state_dict()
        for name, p in model.named_parameters(remove_duplicate=False):
            if not p.requires_grad:
                del weights[name]
        return weights, optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    weights, theirs = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() > 0:
        return {}, {}
    number = {name: i for i, name in enumerate(name for group in theirs["param_groups"] for name in group["params"])}
    return weights, {"state": {number[name]: state for name, state in theirs["state"].items()},
                     "param_groups": [{**group, "params": [number[name] for name in group["params"]]} for group in theirs["param_groups"]]}


def load_state(model, optimizer, scaler, checkpoint, sharded):
    """
    The reverse of get_state, from a checkpoint that every rank has read. The groups' settings stay those of `optimizer`: on
    resume they may have changed. What is frozen in the model stays. The loss scale, too, where there was one: a run may go on in float16.
    """
    if scaler.is_enabled() and checkpoint["scaler"]:
        scaler.load_state_dict(checkpoint["scaler"])
    weights, state, groups = checkpoint["model"], checkpoint["optimizer"]["state"], optimizer.param_groups
    if not sharded:
        frozen = {name: p for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        model.load_state_dict({**frozen, **weights})
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
    options = StateDictOptions(full_state_dict=True, strict="lora" not in checkpoint)
    set_model_state_dict(model, weights, options=options)
    named = {id(p): name for name, p in model.named_parameters()}
    names = [named[id(p)] for group in groups for p in group["params"]]  # in the order of the numbers
    set_optimizer_state_dict(model, optimizer, options=options, optim_state_dict={
        "state": {names[i]: values for i, values in state.items()},
        "param_groups": [{**group, "params": [named[id(p)] for p in group["params"]]} for group in groups]})


# ---------------------------------------------------------------------------------------------------
# health

def new_health():
    """What find_fault remembers, kept in the checkpoint: moving averages, and how long the last fault is ago."""
    return {"loss": 0.0, "norm": 0.0, "steps": 0, "faults": 0, "fault_at": -1, "calm_until": 0}


def find_fault(health, iter_num, loss, grad_norm, spike_loss, spike_norm):
    """
    What is wrong with a step, in words, or None; health is brought up to date. A loss (nats a target) or gradient norm that is
    not finite is wrong, and one that is a spike: over spike_loss, or spike_norm, times its moving average over about 100 steps,
    from the 50th on (0: off). grad_norm None: not looked at. health["faults"] counts those that no good step beyond the last has
    ended: a run that is rolled back and fails at the same place again gets no further.
    """
    fault, values = None, {"loss": (loss, spike_loss), "norm": (grad_norm, spike_norm)}
    for name, (value, limit) in values.items():
        if value is not None and not math.isfinite(value):
            fault = f"its {name} is not finite"
        elif value is not None and limit and health["steps"] >= 50 and value > limit * health[name]:
            fault = f"its {name}, {value:.4g}, is a spike: over {limit:g} times its average, {health[name]:.4g}"
    if fault:
        health["faults"] += 1
        health["fault_at"] = max(iter_num, health["fault_at"])
        return fault
    health["steps"] += 1
    for name, (value, _) in values.items():
        if value is not None:
            health[name] += (value - health[name]) / min(health["steps"], 100)
    if iter_num > health["fault_at"]:
        health["faults"] = 0
    return None


def check_model(model, x_y, optimizer, autocast=nullcontext(), steps=100, from_scratch=True):
    """
    Looks for what keeps a model from learning, on one micro-batch x_y (what model.forward takes), and prints it: the first loss
    against ln(vocabulary), parameters that get no gradient, units of the MLPs that get none, and whether that micro-batch can be
    learned by heart within `steps` steps. autocast: for the forward passes; none for float16, as no loss is scaled here. The model
    and its optimizer are not the same afterwards. -> whether all is well.
    """
    model.train()
    targets, good = max(int((x_y[1] != IGNORE).sum()), 1), True
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def report(ok, text):
        nonlocal good
        good = good and ok
        print(f"{'ok      ' if ok else 'PROBLEM '}{text}", flush=True)

    losses, norms = [], {}
    for step in range(steps):
        with autocast:  # anew in each step: it keeps the weights it has cast until it is left
            loss = model(*x_y) / targets
        loss.backward()
        losses.append(loss.item())
        if step == 0 and from_scratch:
            expected = math.log(model.config.vocab_size)
            report(abs(losses[0] / expected - 1) < 0.05, f"the first loss is {losses[0]:.3f}; ln(vocabulary) is {expected:.3f}")
        if step < 3:  # behind LoRA's zeros gradients come a step later
            for name, p in trained.items():
                norms[name] = max(norms.get(name, 0.0), p.grad.norm().item() if p.grad is not None else 0.0)
        if step == 2:
            unfed = [name for name, norm in norms.items() if norm == 0]
            typical = sorted(norms.values())[len(norms) // 2]
            vanishing = [name for name, norm in norms.items() if 0 < norm < 1e-6 * typical]
            report(not unfed, f"{len(norms) - len(unfed)} of {len(norms)} parameters get a gradient" + "".join(f"; not {name}" for name in unfed[:5]))
            report(not vanishing, f"{len(vanishing)} gradients vanish (below a millionth of the median norm, {typical:.2e})"
                   + "".join(f"; {name}" for name in vanishing[:5]))
            dead = {name.rpartition(".")[0]: (p.grad.abs().sum(1) == 0).float().mean().item() for name, p in trained.items()
                    if p.grad is not None and name.endswith(("mlp.c_fc.weight", "mlp.up_proj.weight", "mlp.c_fc.lora_B", "mlp.up_proj.lora_B"))}
            for worst in sorted(dead, key=dead.get)[-1:]:  # none where LoRA leaves out the MLPs
                report(dead[worst] < 0.5, f"{100 * dead[worst]:.1f}% of the units of {worst} are dead, at most of all layers")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    report(losses[-1] < 0.5 * losses[0], f"one micro-batch, again and again: its loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps")
    return good


# ---------------------------------------------------------------------------------------------------
# settings of a resumed run

def settle_config(config, given, checkpoint, fixed, per_start):
    """
    The settings of a resumed run: the checkpoint's, changed where a file or flag said so (`given`). One of `fixed`
    that differs is refused; those of `per_start` (where it runs, how it starts) are this start's; other changes are printed.
    """
    settled = dict(config)
    for key, before in checkpoint["config"].items():
        if key not in config or key in per_start:
            continue
        if key in given and given[key] != before:
            if key in fixed:
                fail(f"--{key}={given[key]}: the checkpoint was trained with {before}, and a resumed run cannot change it")
            print_once(f"changed on resume: {key} {before} -> {given[key]}")
        elif key not in given:
            settled[key] = before
    return settled


def warn_unused(config, given):
    """Says which of the settings given nothing reads in this run. Not refused: a recipe with another --optimizer is no mistake."""
    for needs, met, names in (
            ("--optimizer=muon", config["optimizer"] == "muon", ["muon_lr"]),
            ("--optimizer=adamw_spam", config["optimizer"] == "adamw_spam", ["spam_interval"]),
            ("llama blocks", config["arch"] == "llama", ["head_lr", "rope_theta"]),
            ("--lr_schedule=wsd", config["lr_schedule"] == "wsd", ["wsd_decay_frac"]),
            ("another --lr_schedule", config["lr_schedule"] != "constant", ["min_lr", "lr_decay_iters"]),
            ("--sparsity", config["sparsity"], ["prune_by", "prune_scope", "prune_begin", "prune_end", "prune_interval"]),
            ("--teacher", config["teacher"], ["teacher_weight", "teacher_temperature"]),
            ("--compile=True", config["compile"], ["compile_mode", "compile_backend"]),
            ("--eval_tasks", config["eval_tasks"], ["eval_problems", "task_dir"])):
        for name in names:
            if name in given and not met:
                print_once(f"WARNING: --{name}={given[name]} has no effect without {needs}")


def print_once(*words):
    """Prints on rank 0 only."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(*words, flush=True)


# ---------------------------------------------------------------------------------------------------
# checkpoints

CHECKPOINTS = ("ckpt.pt", "ckpt_prev.pt")  # the newest, and the one before it


def found_checkpoint(out_dir):
    """Whether there is something in out_dir that a run could go on from: the newest checkpoint, or the one before it."""
    return any((Path(out_dir) / name).exists() for name in CHECKPOINTS)


def check_out_dir(out_dir, keep, overwrite):
    """
    Finds out before training, not after, whether checkpoints can be written to out_dir, and that no other run does so now.
    A checkpoint that lies there already is refused, unless `keep` (the run goes on from it) or `overwrite`.
    """
    found = sorted(Path(out_dir).glob("ckpt*.pt")) if os.path.isdir(out_dir) else []
    if found and not keep and not overwrite:
        fail(f"--out_dir={out_dir}: holds a checkpoint, {found[0].name}: go on from it with --init_from=resume, replace it with "
             f"--overwrite=True, or give another --out_dir")
    theirs = Path(out_dir) / "config.json"
    if theirs.exists() and '"model_type"' in theirs.read_text(encoding="utf-8", errors="replace"):
        fail(f"--out_dir={out_dir}: holds a model in Hugging Face's format; give another folder")
    if int(os.environ.get("RANK", 0)) == 0:
        try:
            os.makedirs(out_dir, exist_ok=True)
            probe = Path(out_dir) / "ckpt.pt.tmp"
            probe.write_bytes(b"can be written")
            probe.unlink()
            global lock
            lock = take_lock(Path(out_dir) / "lock",
                             f"--out_dir={out_dir}: another run is writing to it now; wait for its end, or give another --out_dir")
        except OSError as error:
            fail(f"--out_dir={out_dir}: cannot be written: {error}", alone=True)


def clear_out_dir(out_dir):
    """Removes what another run left in out_dir. Called when nothing can be refused any more."""
    for path in [*Path(out_dir).glob("ckpt*.pt*"), Path(out_dir) / "log.jsonl"]:
        path.unlink(missing_ok=True)


def save_checkpoint(out_dir, checkpoint, keep_as=None):
    """
    checkpoint (dict of tensors and plain values) -> out_dir/ckpt.pt, and the one before it -> ckpt_prev.pt; and with another
    name (`keep_as`) it stays there for good. At every moment at least one of the two is whole: the new one is on disk before
    the old one is renamed. -> whether it could be written: where it could not, that is said, and the one before stays.
    """
    path, previous, temporary = (Path(out_dir) / name for name in (*CHECKPOINTS, "ckpt.pt.tmp"))
    try:
        os.makedirs(out_dir, exist_ok=True)  # somebody may have removed it
        size = sum(tensor.nbytes for tensor in tensors_in(checkpoint))
        free = shutil.disk_usage(out_dir).free
        if size > free:
            raise OSError(f"it takes {size / 2 ** 20:,.1f} MiB, and {free / 2 ** 20:,.1f} MiB are free")
        with open(temporary, "wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        if path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
        if keep_as:
            link(path, keep_as)
        if hasattr(os, "O_DIRECTORY"):  # the new names, too, are to survive a power cut
            directory = os.open(out_dir, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(directory)
            os.close(directory)
        return True
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        print(f"WARNING: --out_dir={out_dir}: the checkpoint of step {checkpoint.get('iter_num')} could not be written "
              f"({type(error).__name__}: {error}). The one before it stays; make room", flush=True)
        try:
            temporary.unlink(missing_ok=True)
        except OSError:  # the disk is read-only, or gone
            pass
        return False


def tensors_in(value):
    """All tensors in nested dicts and lists, those that share their memory once."""
    found, seen = [value], set()
    while found:
        value = found.pop()
        if isinstance(value, (dict, list, tuple)):
            found += value.values() if isinstance(value, dict) else value
        elif isinstance(value, torch.Tensor) and value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            yield value


def link(path, name):
    """A second name for a checkpoint in the same folder, without a copy where the file system has hard links."""
    path = Path(path)
    temporary, name = path.with_name(name + ".tmp"), path.with_name(name)
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:  # a file system without them
            shutil.copyfile(path, temporary)
        os.replace(temporary, name)
    except OSError as error:
        print(f"WARNING: {name} could not be written: {error}")


def set_aside_damaged(checkpoint):
    """
    Where a run goes on from ckpt_prev.pt: renames the ckpt.pt that could not be read, so that the next save does not put it in
    the place of the whole one before it, which gets its name. Rank 0 does it.
    """
    previous = Path(checkpoint["path"])
    if previous.name != CHECKPOINTS[1] or int(os.environ.get("RANK", 0)) > 0:
        return
    path = previous.with_name(CHECKPOINTS[0])
    if path.exists():
        os.replace(path, path.with_name("ckpt_damaged.pt"))
    link(previous, path.name)


OPENAI = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # what the hub has of theirs
VOCABULARIES = {50257: "gpt2", 50304: "gpt2", 384: "bytes"}  # whose tokens a model of others takes, by the size of its vocabulary


def load_checkpoint(path, merge=True):
    """
    Whatever holds a model, on the CPU. path: a ckpt.pt of ours or of nanoGPT, or the out_dir it lies in; a Hugging Face
    folder of one of the four architectures; or one of OPENAI, from the hub. Nothing in it is executed (weights_only).
    -> a dict with at least model, model_args, config, tokenizer, stage, iter_num, val_loss (nan where unknown) and val_iter.
    Where ckpt.pt is missing or damaged, the one before it is taken, and said.
    A checkpoint of a LoRA run holds adapters and says where their base lies: they are merged into it, or with merge=False come
    alone, as the run itself wants them.
    """
    if str(path) in OPENAI and not os.path.exists(path):
        path = download(path)
    path = Path(path)
    candidates = [path / name for name in CHECKPOINTS] if path.is_dir() else [path]
    problem = "there is none"
    for candidate in candidates:
        if not candidate.exists():
            continue
        try:
            damaged = zipfile.ZipFile(candidate).testzip()  # torch.load compares no checksums
            assert damaged is None, f"{damaged} in it is damaged"
            checkpoint = torch.load(candidate, map_location="cpu", weights_only=True, mmap=True)
            if "block_size" in checkpoint.get("model_args", ()):
                checkpoint = from_nanogpt(checkpoint)
            missing = {"model", "model_args", "config", "tokenizer", "stage", "iter_num", "val_loss", "val_iter"} - set(checkpoint)
            assert not missing, f"it lacks {', '.join(sorted(missing))}"
            checkpoint["model_args"] = asdict(GPTConfig(**checkpoint["model_args"]))
            check_facts(checkpoint)
            if merge:
                merge_into_base(checkpoint, candidate)
            if merge or "lora" not in checkpoint:
                check_shapes(checkpoint)
        except Exception as error:  # a damaged file raises whatever its bytes lead to
            problem = in_words(error)
            continue
        checkpoint["path"] = str(candidate)
        if candidate != candidates[0]:
            print_once(f"WARNING: {candidates[0]} cannot be read ({problem}): going on from the checkpoint before it, {candidate}, "
                       f"iteration {checkpoint['iter_num']}")
        return checkpoint
    theirs = path / "config.json"
    if theirs.exists() and "model_type" in theirs.read_text(encoding="utf-8", errors="replace") and not any(c.exists() for c in candidates):
        try:
            return load_hf(path)
        except ImportError:
            fail(f"{path}: to read its model.safetensors: pip install safetensors")
        except Exception as error:  # see above
            problem = in_words(error)
    fail(f"{path}: no checkpoint that can be read there ({problem}); expected a ckpt.pt of train_gpt2.py or of nanoGPT, the folder it "
         f"lies in, a Hugging Face folder, or one of {', '.join(OPENAI)}")


def new_base(path, checkpoint, out_dir):
    """
    What the checkpoints of a LoRA run say of the model it starts from, `checkpoint` from load_checkpoint(path): where it lies, as
    given and absolute, and its fingerprint. One that the run would remove is refused.
    """
    place = checkpoint.get("path", str(path))
    absolute = place if place in OPENAI and not os.path.exists(place) else os.path.abspath(place)
    if os.path.dirname(absolute) == os.path.abspath(out_dir):
        fail(f"--out_dir={out_dir}: holds {place}, the base of this LoRA run, which its checkpoints do not contain; give another folder")
    return {"path": place, "absolute": absolute, "fingerprint": fingerprint(checkpoint)}


def load_base(lora, adapters):
    """
    The weights that a LoRA run started from, merged where its base was one itself. lora: what its checkpoint says of them, see
    new_base; adapters: that checkpoint's path, for the error where they are gone or others.
    """
    places = list(dict.fromkeys((lora["absolute"], lora["path"])))
    problem = "there is nothing"
    for place in places:
        if os.path.exists(place) or place in OPENAI:
            base = load_checkpoint(place, merge=False)
            if fingerprint(base) == lora["fingerprint"]:
                return merge_into_base(base, place)["model"]
            problem = "other weights are there now"
    fail(f"{adapters}: holds the adapters of a LoRA run without the weights they were trained on, which are to lie in "
         f"{' or '.join(places)}: {problem}")


def merge_into_base(checkpoint, path):
    """A checkpoint of a LoRA run, from load_checkpoint(path, merge=False), as one of a plain model; others are left as they are."""
    if "lora" in checkpoint:
        checkpoint["fingerprint"] = fingerprint(checkpoint)
        checkpoint["model"] = merge_lora({**load_base(checkpoint["lora"], path), **checkpoint["model"]}, checkpoint["lora"]["alpha"])
    return checkpoint


def fingerprint(checkpoint):
    """
    SHA-256 of a checkpoint's weights; of a LoRA run's, of its adapters and what it says of its base, for merged weights end in
    bits that differ from machine to machine. So do the means that `foreign` pads a vocabulary with, from row 50257 on.
    """
    if "fingerprint" in checkpoint:  # taken before its adapters were merged
        return checkpoint["fingerprint"]
    return digest_of(checkpoint.get("lora"), checkpoint["model"], rows=50257)


def digest_of(said, state_dict, rows=None):
    """SHA-256 of a plain value and of weights, of each tensor the first `rows`; None: all of it."""
    digest = hashlib.sha256(json.dumps(said).encode())
    for name, tensor in sorted(state_dict.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor[:rows].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def in_words(error):
    """What an exception says, in one line, with its type where the words are not ours."""
    words = " ".join(str(error).split())[:300]
    return words if type(error) in (ValueError, AssertionError) else f"{type(error).__name__}: {words}"


def check_facts(checkpoint):
    """AssertionError where what a checkpoint says of its run is not of the kind that the scripts reckon with."""
    assert isinstance(checkpoint["val_loss"], float), "its val_loss is no number"
    assert all(type(checkpoint.get(key, 0)) is int for key in ("iter_num", "val_iter", "rows_seen")), "its iter_num, val_iter or rows_seen is no number"
    assert isinstance(checkpoint["config"], dict) and type(checkpoint["config"].get("max_seq_len", 0)) is int, "its config is not one"
    assert checkpoint["stage"] in ("base", "chat"), f"its stage is {checkpoint['stage']!r}"


def check_shapes(checkpoint):
    """AssertionError, naming the first tensors, where the weights are not those of the model that model_args describe."""
    args = checkpoint["model_args"]
    assert all(type(args[name]) is int for name in ("n_layer", "n_head", "n_embd", "max_seq_len", "vocab_size")), "a size in it is no int"
    layers = len({name.split(".")[2] for name in checkpoint["model"] if name.startswith("transformer.h.")})
    assert layers == args["n_layer"], f"it has the weights of {layers} layers, and its settings speak of {args['n_layer']}"
    assert all(tensor.is_floating_point() and tensor.itemsize > 1 for tensor in checkpoint["model"].values()), "a weight in it is no float"
    with torch.device("meta"):  # shapes alone
        expected = GPT(GPTConfig(**checkpoint["model_args"])).state_dict()
    given, expected = ({name: tuple(tensor.shape) for name, tensor in d.items()} for d in (checkpoint["model"], expected))
    odd = [f"{name} {given.get(name, 'missing')}, expected {expected.get(name, 'none')}"
           for name in sorted({*given, *expected}) if given.get(name) != expected.get(name)]
    assert not odd, f"its weights do not fit its model_args: {'; '.join(odd[:3])}{' ...' if odd[3:] else ''}"


def foreign(model, gpt_config, **known):
    """
    The dict of load_checkpoint for a model that others trained, its vocabulary padded to ours. New rows start at the mean of
    the others: a row of zeros has the logit 0, far above what GPT-2 gives its likeliest token, and would win the softmax.
    """
    if gpt_config.vocab_size not in VOCABULARIES:
        raise ValueError(f"its vocabulary has {gpt_config.vocab_size} ids; expected 50257 or 50304 (gpt2's tokens) or 384 (bytes)")
    tokenizer = VOCABULARIES[gpt_config.vocab_size]
    gpt_config.vocab_size = {"gpt2": 50304, "bytes": 384}[tokenizer]
    for name in ("transformer.wte.weight", "lm_head.weight"):
        if name in model and len(model[name]) == 50257 < gpt_config.vocab_size:
            mean = model[name].mean(0, dtype=torch.float32).type_as(model[name])
            model[name] = torch.cat((model[name], mean.expand(gpt_config.vocab_size - 50257, -1)))
    if gpt_config.arch == "gpt2":
        model["lm_head.weight"] = model["transformer.wte.weight"]
    checkpoint = {"model": model, "model_args": asdict(gpt_config), "config": {}, "tokenizer": tokenizer, "stage": "base", "iter_num": 0,
                  "val_loss": math.nan, "val_iter": 0, **known}
    check_facts(checkpoint)
    check_shapes(checkpoint)
    return checkpoint


def from_nanogpt(theirs):
    """A checkpoint of nanoGPT's train.py in our format. Its GELU is exact, and its bias=False is a GPT-2 whose biases are zero."""
    args = theirs["model_args"]
    if args["vocab_size"] == 384:
        raise ValueError("its vocabulary has 384 ids, made by its own prepare.py; expected 50257 or 50304, gpt2's tokens")
    config = GPTConfig(gelu="exact", max_seq_len=args["block_size"], vocab_size=args["vocab_size"], n_layer=args["n_layer"],
                       n_head=args["n_head"], n_embd=args["n_embd"])
    # _orig_mod. comes from saving a compiled model; attn.bias was the causal mask before torch 2
    model = {name.removeprefix("_orig_mod."): tensor for name, tensor in theirs["model"].items() if not name.endswith(".attn.bias")}
    if not args.get("bias", True):
        biased = ("ln_1.weight", "ln_2.weight", "ln_f.weight", "c_attn.weight", "c_proj.weight", "c_fc.weight")
        model |= {name.removesuffix("weight") + "bias": torch.zeros(len(model[name])) for name in model if name.endswith(biased)}
    return foreign(model, config, config=theirs["config"], iter_num=theirs["iter_num"], val_loss=float(theirs.get("best_val_loss", math.nan)),
                   val_iter=theirs["iter_num"])


def load_hf(folder):
    """
    A folder as transformers saves it, in the dict of load_checkpoint: config.json, and weights as safetensors or
    pytorch_model.bin, in one file or several with an index. run.json, which export_hf.py adds, says how it was trained.
    Raises what is wrong with it; ImportError where safetensors is missing.
    """
    config = config_from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (folder / name).exists():
            break
    else:
        raise ValueError("it has a config.json, but neither model.safetensors nor pytorch_model.bin, nor an index of them")
    files = [name]
    if name.endswith("index.json"):
        files = sorted(set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values()))
    theirs = {}
    for file in files:
        if file.endswith(".bin"):
            theirs |= torch.load(folder / file, map_location="cpu", weights_only=True)
        else:
            from safetensors.torch import load_file
            theirs |= load_file(folder / file)
    # causal masks and rotary angles are constants; OpenAI's own file lacks the prefix, and the head, which is tied
    theirs = {name: tensor for name, tensor in theirs.items() if not name.endswith((".attn.bias", ".attn.masked_bias", ".inv_freq"))}
    if config.arch == "gpt2":
        theirs = {name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": tensor
                  for name, tensor in theirs.items()}
    run = folder / "run.json"
    known = json.loads(run.read_text(encoding="utf-8")) if run.exists() else {}
    if not isinstance(known.get("val_loss", 0.0), float):
        known.pop("val_loss")
    known = {key: known[key] for key in ("stage", "iter_num", "rows_seen", "val_loss", "val_iter", "config") if key in known}
    tokenizer = folder / "tokenizer.json"
    if tokenizer.exists() and VOCABULARIES.get(config.vocab_size) == "gpt2":  # others' vocabularies have 50304 ids, too
        vocabulary = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
        if vocabulary.get("\u0120the") != 262:  # " the"
            raise ValueError("its tokenizer.json is not that of gpt2")
    return foreign(from_hf(theirs, config), config, **known)


def download(name):
    """One of OPENAI's from the Hugging Face hub, or from the hub's cache on this machine -> the folder it lies in."""
    from huggingface_hub import snapshot_download  # comes with datasets
    try:
        return snapshot_download(f"openai-community/{name}", allow_patterns=["config.json", "model.safetensors"])
    except Exception as error:  # whatever the network raises
        fail(f"{name}: cannot be fetched from the Hugging Face hub ({type(error).__name__}); where there is no network, give the path "
             f"of a folder with its config.json and model.safetensors", alone=True)


def introduce(path, checkpoint, n_params):
    """Which model this is, in one line."""
    trained = "" if not math.isfinite(checkpoint["val_loss"]) else \
        f", step {checkpoint['iter_num']}, val loss {checkpoint['val_loss']:.4f} at step {checkpoint['val_iter']}"
    args = checkpoint["model_args"]
    trained += f", LoRA on {checkpoint['lora']['path']}" if "lora" in checkpoint else ""
    return (f"{path}: {checkpoint['stage']} model, {args['arch']}{', mla' if args['attention'] == 'mla' else ''}, {args['n_layer']} layers, "
            f"{args['n_embd']} wide, {n_params / 1e6:.1f}M parameters, {args['max_seq_len']} positions, tokenizer {checkpoint['tokenizer']}{trained}")


def load_model(path, device):
    """The GPT in a checkpoint, in eval mode on `device`, and the checkpoint without its weights and optimizer."""
    checkpoint = load_checkpoint(path)
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    model.load_state_dict(checkpoint.pop("model"))
    checkpoint.pop("optimizer", None)
    return model.to(device).eval(), checkpoint


# ---------------------------------------------------------------------------------------------------
# the teacher of a run that distils one

def load_teacher(path, tokenizer, vocab_size, max_seq_len, device, dtype, sharded, compile_options):
    """
    -> ask, what it says of a micro-batch, and a digest of its weights. tokenizer, vocab_size, max_seq_len: the student's; a teacher
    that cannot take them is refused. sharded and compile_options as in shard; a whole one is compiled by itself.
    """
    model, checkpoint = load_model(path, "cpu")
    args = checkpoint["model_args"]
    if (checkpoint["tokenizer"], args["vocab_size"]) != (tokenizer, vocab_size):
        fail(f"--teacher={path}: its tokens are {checkpoint['tokenizer']}'s, {args['vocab_size']} ids, but the student's are "
             f"{tokenizer}'s, {vocab_size} ids")
    if max_seq_len > args["max_seq_len"]:
        fail(f"--max_seq_len={max_seq_len}: the teacher, {path}, has {args['max_seq_len']} positions; give at most that")
    digest = digest_of({**args, "dropout": 0.0}, model.state_dict())
    print_once(f"teacher: {introduce(path, checkpoint, sum(p.numel() for p in model.parameters()))}")
    model.requires_grad_(False)
    if sharded:
        shard(model, device, dtype, compile_options)
        states = model.hidden_states
    else:
        model.to(device)
        states = torch.compile(model.hidden_states, **compile_options) if compile_options else model.hidden_states

    def ask(x, positions=None, mask=None):
        """-> hidden states (B, T, C_t) and the head (V, C_t)."""
        with torch.no_grad():  # not inference_mode: a learned temperature takes them into autograd
            return states(x, positions, mask).clone(), model.lm_head.weight  # with reduce-overhead the next call writes to its memory

    return ask, digest


def new_teacher(config, optimizer, tokenizer, vocab_size, device, dtype, compile_options, resumed):
    """
    What a loop's settings say of a teacher -> ask and the digest, from load_teacher, and log T, a scalar tensor, which optimizer steps
    where it is learned; None three times without one. resumed: the checkpoint of the run that goes on, or None; a run goes on with
    the teacher it had, or is refused, and from the T it had.
    """
    ask, digest, log_temperature = None, None, None
    if config["teacher"]:
        expect_range(config, 0, vocab_size, "teacher_cache")
        ask, digest = load_teacher(config["teacher"], tokenizer, vocab_size, config["max_seq_len"], device, dtype, config["fsdp"],
                                   compile_options)
        log_temperature = torch.tensor(math.log(config["teacher_temperature"]), device=device, requires_grad=config["learn_temperature"])
        if config["learn_temperature"]:
            optimizer.add_param_group({**optimizer.param_groups[-1], "params": [log_temperature], "weight_decay": 0.0})  # as vectors
    before = (resumed or {}).get("teacher", {})
    if resumed and before.get("digest") != digest:
        fail(f"--teacher={config['teacher']}: the run in {config['out_dir']} has {'another' if before else 'none'}; to train its weights "
             f"with this one start a new run with --init_from={config['out_dir']}/ckpt.pt --out_dir=...")
    if before and config["learn_temperature"]:
        log_temperature.data.fill_(before["log_temperature"])
    return ask, digest, log_temperature


def cache_teacher(where, made_from, n_rows, wanted, seed, ask, read, batch_size, rank, world_size):
    """
    A TeacherCache that has the first `wanted` rows of a run with this seed: what is missing the ranks ask the teacher together. ask: from
    load_teacher. read(indices): what model.forward takes, x, y (B, T) and perhaps positions and a mask. Autocast is the caller's. It can
    be interrupted: what is written stays.
    """
    k = made_from["k"]
    if rank > 0:
        dist.barrier()  # rank 0 creates it
    cache = TeacherCache(where, made_from, n_rows, create=rank == 0)
    if rank == 0 and dist.is_initialized():
        dist.barrier()
    wanted = np.sort(epoch_order(n_rows, seed, 0)[:wanted])  # more than an epoch are all of them
    missing = cache.missing(wanted)
    size, free = len(missing) * cache.row.itemsize, shutil.disk_usage(where).free
    if size > free:
        fail(f"--teacher_cache={k}: takes {size / 2 ** 30:,.1f} GiB more in {where}, {4 * k + 2} bytes a token, and "
             f"{free / 2 ** 30:,.1f} GiB are free; give less, or 0 to ask the teacher in each step")
    lock = take_lock(cache.folder / "lock", f"{cache.folder}: another run is writing to it now; wait until it trains") \
        if rank == 0 and len(missing) else nullcontext()
    if dist.is_initialized():
        dist.barrier()  # all have read what is missing
    print_once(f"teacher: its {k} likeliest ids for {len(wanted):,} rows are kept in {cache.folder}"
               + (f"; {len(missing):,} are missing, {size / 2 ** 20:,.1f} MiB, {4 * k + 2} bytes a token" if len(missing) else ""))
    t0 = told = time.time()
    for first in range(0, len(missing), world_size * batch_size):  # as often on each rank: a sharded teacher is run by all together
        mine = np.arange(batch_size) + first + rank * batch_size
        x, _, *packing = read(missing[mine.clip(max=len(missing) - 1)])
        states, head = ask(x, *packing)
        parts = []
        for chunk in states.flatten(0, 1).split(LOSS_CHUNK):
            log_probs = F.linear(chunk, head).float().log_softmax(-1)  # (chunk, V)
            top, ids = log_probs.topk(k)
            rest = log_probs.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True) - math.log(max(len(head) - k, 1))
            parts.append((torch.cat((top, rest.clamp(min=-60000)), -1), ids))  # float16 ends at -65504
        log_probs, ids = (torch.cat(part).view(*x.shape, -1).cpu() for part in zip(*parts))
        real = int((mine < len(missing)).sum())  # a last batch that is not full is filled up
        cache.write(missing[mine[:real]], log_probs[:real].half().numpy(), ids[:real].numpy())
        if rank == 0 and time.time() > told + 2:
            told, done = time.time(), min(first + world_size * batch_size, len(missing))
            print(f"  teacher: {done:,} of {len(missing):,} rows, {(told - t0) * (len(missing) / done - 1):,.0f} s left ", end="\r",
                  file=sys.stderr, flush=True)
    with lock:
        if dist.is_initialized():
            dist.barrier()
    return TeacherCache(where, made_from, n_rows, create=False)  # opened anew, where others write over a network


# ---------------------------------------------------------------------------------------------------
# the log

def printable(text):
    """Text as a model may write it, without the control characters that would upset a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


trackers = []  # who else is told: functions of a line of the log, from start_trackers


def start_trackers(out_dir, config, wandb_log, wandb_project, tensorboard):
    """
    Has write_log send its figures to Weights & Biases and to TensorBoard (out_dir/tensorboard), as far as asked for. Neither
    can stop a run: what fails is said in one line, and the log goes on without it.
    """
    if wandb_log:
        try:
            import wandb
            run = wandb.init(project=wandb_project, name=Path(out_dir).resolve().name, dir=out_dir, config=config,
                             settings=wandb.Settings(init_timeout=60))
            trackers.append(lambda figures: run.log(figures, step=figures["iter"]))
        except Exception as error:  # not installed, no account, no network, ...
            print(f"WARNING: no Weights & Biases ({type(error).__name__}: {' '.join(str(error).split())[:200]}); WANDB_MODE=offline "
                  f"keeps its files here")
    if tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(Path(out_dir) / "tensorboard")
            trackers.append(lambda figures: [writer.add_scalar(key, value, figures["iter"]) for key, value in figures.items()
                                             if isinstance(value, (int, float)) and key != "iter"] and writer.flush())
        except Exception as error:
            print(f"WARNING: no TensorBoard ({type(error).__name__}: {error}): pip install tensorboard")


def write_log(out_dir, **figures):
    """Appends one line to out_dir/log.jsonl, floats but the losses rounded to 6 significant digits, and tells the trackers."""
    for key, value in figures.items():
        if isinstance(value, float) and not key.endswith("loss"):
            figures[key] = float(f"{value:.6g}")
    try:
        os.makedirs(out_dir, exist_ok=True)  # somebody may have removed it
        with open(Path(out_dir) / "log.jsonl", "a+b") as f:
            if f.tell() > 0:  # a run that was killed may have left half a line
                f.seek(-1, os.SEEK_END)
                f.write(b"\n" if f.read(1) != b"\n" else b"")
            f.write(json.dumps(figures).encode() + b"\n")
    except OSError as error:  # a full disk is no reason to stop
        print(f"WARNING: {out_dir}/log.jsonl could not be written: {error}")
    for tracker in list(trackers) if "iter" in figures and "event" not in figures else []:
        try:
            tracker(figures)
        except Exception as error:
            print(f"WARNING: a tracker failed and is left out from here on: {type(error).__name__}: {error}")
            trackers.remove(tracker)


def read_log(path):
    """
    A log.jsonl as curves {key: {tokens: value}} and events {"resume" | "rollback" | "skipped" | "recompiled": [tokens, ...]}. What was
    logged after the checkpoint that a resumed run went on from is not part of the run.
    """
    curves, events = {}, {"resume": [], "rollback": [], "skipped": [], "recompiled": []}
    for line in open(path, encoding="utf-8", errors="replace"):
        try:
            entry = json.loads(line)
        except ValueError:  # the half line of a run that was killed
            continue
        at = entry.get("tokens") if isinstance(entry, dict) else None
        if not isinstance(at, int):
            continue
        if entry.get("event") == "resume":
            curves = {key: {t: value for t, value in points.items() if t <= at} for key, points in curves.items()}
            events = {key: [t for t in marks if t <= at] for key, marks in events.items()}
        if isinstance(entry.get("event"), str) and entry["event"] in events:
            events[entry["event"]].append(at)
        for key, value in entry.items():
            if isinstance(value, (int, float)) and key not in ("tokens", "event"):
                curves.setdefault(key, {})[at] = value
        for event, key in (("skipped", "skipped"), ("recompiled", "recompiles")):
            counts = list(curves.get(key, {}).values())[-2:]
            if key in entry and entry[key] > (counts[0] if len(counts) > 1 else 0):
                events[event].append(at)
    return curves, events


def plot_logs(paths, picture):
    """
    Draws the runs logged in `paths` over tokens: train and validation loss, learning rate, gradient norm, tokens/s;
    resumed runs and steps that were skipped are marked. -> "drawn in PICTURE", or "not drawn: " and why.
    """
    try:
        import matplotlib
    except ImportError:
        return "not drawn: pip install matplotlib"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, MaxNLocator
    figure, axes = plt.subplot_mosaic([["loss", "lr"], ["loss", "grad_norm"], ["loss", "tok_per_sec"]], figsize=(11, 5), dpi=110,
                                      width_ratios=[2.2, 1], layout="constrained")
    for i, path in enumerate(paths):
        curves, events = read_log(path)
        name = Path(path).resolve().parent.name.lstrip("_")  # matplotlib hides labels that begin so
        for key, style in (("train_loss", dict(linewidth=0.8, alpha=0.5)), ("val_loss", dict(linewidth=1.6, marker="o", markersize=3))):
            points = sorted(curves.get(key, {}).items())
            if points:
                label = f"{name}: {key.replace('_', ' ')}" + (f", last {points[-1][1]:.3f}" if key == "val_loss" else "")
                axes["loss"].plot(*zip(*points), color=f"C{i}", label=label, **style)
        for key in ("lr", "grad_norm", "tok_per_sec"):
            points = sorted(curves.get(key, {}).items())
            if points:
                axes[key].plot(*zip(*points), color=f"C{i}", linewidth=0.9)
        for event, style in (("resume", dict(color="0.5", linestyle=":")), ("skipped", dict(color="red", alpha=0.5)),
                             ("rollback", dict(color="red", linestyle="--"))):
            for j, at in enumerate(events[event]):
                axes["loss"].axvline(at, linewidth=1, label=None if j else f"{name}: {event}", **style)
    for key, label in (("loss", "loss (nats per token)"), ("lr", "learning rate"), ("grad_norm", "gradient norm"), ("tok_per_sec", "tokens/s")):
        axes[key].set_ylabel(label)
        axes[key].grid(alpha=0.3)
        axes[key].xaxis.set(major_formatter=EngFormatter(), major_locator=MaxNLocator(7 if key == "loss" else 4))
    axes["tok_per_sec"].yaxis.set_major_formatter(EngFormatter())
    axes["tok_per_sec"].set_ylim(bottom=0)
    for key in ("loss", "tok_per_sec"):
        axes[key].set_xlabel("tokens")
    axes["loss"].legend(fontsize=8)
    temporary = f"{picture}.tmp"
    try:
        figure.savefig(temporary, format="png")  # a viewer that refreshes never sees half of it
        os.replace(temporary, picture)
    except OSError as error:  # a full disk is no reason to stop
        return f"not drawn: {error}"
    finally:
        plt.close(figure)
    return f"drawn in {picture}"


if __name__ == "__main__":
    sys.excepthook = explain
    if {"--help", "-h"} & set(sys.argv):
        print(__doc__.strip())
        raise SystemExit(0)
    logs = [os.path.join(arg, "log.jsonl") if os.path.isdir(arg) else arg for arg in sys.argv[1:]]
    missing = [log for log in logs if not os.path.isfile(log)]
    if missing or not logs:
        fail(f"{missing[0]}: no such file" if missing else "expected the out_dir, or the log.jsonl, of one run or more")
    drawn = plot_logs(logs, "runs.png")
    if drawn.startswith("not"):
        fail(f"runs.png: {drawn}")
    print(drawn)
