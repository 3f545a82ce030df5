"""What both training loops need around them: ranks, device, precision, compiling, DDP, signals and the log."""
import datetime
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import timeit
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from configurator import fail, format_error, load_extra
from model import IGNORE

# Linux: CPU tensors of 2 MB or more lie in huge pages, as NumPy's arrays do: one page fault in place of 512. Set here,
# as PyTorch reads it with its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# -----------------------------------------------------------------------------
# ranks, device, precision


def rank():
    return int(os.environ.get("RANK", 0))


def print0(*words):
    """Prints on rank 0 only."""
    if rank() == 0:
        print(*words, flush=True)


def init_process(device):
    """
    Init torch.distributed under torchrun; pick the device. device: auto, cpu, cuda, cuda:N or mps.
    Returns rank, world_size, torch.device.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    sys.excepthook = excepthook
    for stream in (sys.stdin, sys.stdout):  # a character that a terminal cannot show is no reason to stop
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda":  # under torchrun one GPU per rank
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    elif world_size > 1 and device != "cpu":
        fail(f"--device={device}: torchrun needs cuda, which gives each rank a GPU of its own, or cpu")
    try:
        torch.empty(1, device=device)
    except Exception as error:  # maybe on this rank alone: more ranks than GPUs
        fail(f"--device={device}: {format_error(error)}; expected auto, cpu, cuda, cuda:N or mps, and a device that "
             f"is here, for each rank one", alone=True)
    device = torch.device(device)
    torch.set_float32_matmul_precision("high")  # TF32
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        # Workers restarted by torchrun --max-restarts would find the addresses of their predecessors in the store
        # (torch 2.13, gloo), so each start has its own prefix. With several machines no number tells one start from
        # another.
        start = os.environ["TORCHELASTIC_RESTART_COUNT"] if os.environ.get("GROUP_WORLD_SIZE") == "1" else ""
        store = dist.PrefixStore(f"start {start}", next(dist.rendezvous("env://"))[0])
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank(), world_size=world_size,
                                device_id=device if cuda else None)
    return rank(), world_size, device


def local_grad_accum_steps(gradient_accumulation_steps, world_size, batch_size):
    """Micro-steps of each rank: the setting counts those of the whole job and must be divisible by world_size."""
    if gradient_accumulation_steps % world_size:
        rows = batch_size * gradient_accumulation_steps
        multiples = range(gradient_accumulation_steps // world_size * world_size + world_size, rows + 1, world_size)
        advice = next((f"give --gradient_accumulation_steps={steps} --batch_size={rows // steps}: the same {rows} rows"
                       for steps in multiples if rows % steps == 0), f"{rows} rows cannot be shared equally")
        fail(f"--gradient_accumulation_steps={gradient_accumulation_steps}: expected a multiple of {world_size}, the "
             f"number of ranks; {advice}")
    return gradient_accumulation_steps // world_size


def all_reduce(first, *more):
    """Sums over the ranks of a scalar tensor and of more numbers, as floats."""
    values = torch.stack([first, *(torch.as_tensor(value).to(first) for value in more)])
    if dist.is_initialized():
        dist.all_reduce(values)
    return values.tolist()


def pick_dtype(dtype, device):
    """auto -> bfloat16 if the device supports (and does not emulate) it, else float16 with CUDA, float32 elsewhere."""
    if dtype != "auto":
        return dtype
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return "bfloat16"
    return "float32"


def autocast(device, dtype):
    """The context for forward passes; weights and optimizer stay in float32."""
    return torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")


def step_seed(seed, step, rank):
    """Seeds everything random in one step on one rank, so no random state has to be saved."""
    return ((seed * 1_000_003 + step) * 65_537 + rank) % 2 ** 63


# dense bfloat16 / float16 peaks in FLOP/s, from the vendors' data sheets; without sparsity
PEAK_FLOPS = {
    "GB200": 2.5e15, "B200": 2.25e15, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "H20": 148e12, "A100": 312e12, "A10G": 70e12, "A40": 150e12, "L40S": 362e12, "L4": 121e12,
    "V100": 125e12, "T4": 65e12, "RTX 5090": 210e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12,
    "MI250X": 191.5e12}  # one of the two devices that an MI250X is to torch


def peak_flops(device, dtype):
    """
    FLOP/s of one device, for MFU: its data sheet's if PEAK_FLOPS has it, or else those of a matmul measured here.
    """
    if device.type == "cuda" and dtype != "float32":
        found = re.search(rf"\b({'|'.join(PEAK_FLOPS)})\b(?! (Ti|D|Laptop)\b)", torch.cuda.get_device_name(device))
        if found:
            return PEAK_FLOPS[found[1]]
    n = 1024 if device.type == "cpu" else 4096
    a = torch.randn(n, n, device=device, dtype=getattr(torch, dtype))
    seconds = min(timeit.repeat(lambda: (a @ a)[0, 0].item(), number=1, repeat=8))  # item waits for the device
    return 2 * n ** 3 / seconds


def peak_memory_mb(device):
    """Peak memory of this process in MiB: allocated on the GPU if it uses one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 20
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2 ** 10 if sys.platform != "darwin" else 2 ** 20)


# -----------------------------------------------------------------------------
# signals and errors

stop_requested = False
interrupt_message = ""  # printed on Ctrl-C: what is saved, and how to resume


def catch_signals():
    """
    From here on SIGTERM, SIGINT and SIGUSR1 (Slurm's, with --signal=USR1@60) ask the loop to stop after its step.
    Schedulers and torchrun both forward them to every worker, so repeats within 5 seconds count as one; a later one
    ends the program at once.
    """
    first_request = 0.0

    def request_stop(number, frame):
        global stop_requested
        nonlocal first_request
        if not stop_requested:
            stop_requested, first_request = True, time.monotonic()
            if rank() == 0:  # not print, which may be what was interrupted
                name = signal.Signals(number).name
                os.write(2, f"\n{name}: stopping after this step; again, after 5 seconds, ends at once\n".encode())
        elif time.monotonic() - first_request > 5:
            raise KeyboardInterrupt

    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), request_stop)


def resume_hint(out_dir):
    start = "torchrun ..." if "RANK" in os.environ else "python"
    return f"resume with {start} {shlex.quote(sys.argv[0])} --init_from=resume --out_dir={shlex.quote(str(out_dir))}"


def excepthook(kind, error, tb):
    """One line for expected errors, the traceback for the rest."""
    if issubclass(kind, KeyboardInterrupt):
        print(f"\ninterrupted{interrupt_message}", file=sys.stderr)
    elif issubclass(kind, BrokenPipeError):  # stdout closed, e.g. by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif issubclass(kind, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        reason = str(error).split("DefaultCPUAllocator: ")[-1].split(". ")[0]
        fail(f"out of memory ({reason}): lower --batch_size (in training raise --gradient_accumulation_steps by the "
             f"same factor: the same model)", alone=True)
    elif dist.is_initialized() and any(word in str(error) for word in ("gloo", "NCCL", "Connection closed by peer")):
        print(f"error: another rank is gone or unreachable ({' '.join(str(error).split())[:150]}); start all of them "
              f"again with --init_from=auto", file=sys.stderr)
    elif issubclass(kind, OSError):  # the disk
        fail(f"{kind.__name__}: {error}", alone=True)
    else:
        sys.__excepthook__(kind, error, tb)


# -----------------------------------------------------------------------------
# compiling, DDP, and what FSDP asks of a loop

def compile_error(device, backend):
    """Why torch.compile cannot work here (no C++ compiler, no Triton, ...), in one line; None if it can."""
    if backend not in torch._dynamo.list_backends(None):
        fail(f"--compile_backend={backend}: expected one of {', '.join(torch._dynamo.list_backends(None))}")
    try:
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(8, device=device))
    except Exception as error:
        return format_error(error.__cause__ or error)


def compile_options(config, device):
    """Arguments of torch.compile; None with --compile=False, and, with a warning, where it cannot work."""
    if config["compile"]:
        error = compile_error(device, config["compile_backend"])
        if not error:
            return dict(dynamic=False, fullgraph=True, mode=config["compile_mode"], backend=config["compile_backend"])
        print0(f"WARNING: torch.compile cannot work here ({error}): running uncompiled, slower")
    print0("not compiled")


def wrap_model(orig_model, device, dtype, options, config):
    """Compiles and distributes a model. Returns the one that trains, and the one that evaluates, without DDP."""
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)  # or a compiled embedding's gradient is summed in any order
    if options and device.type == "cpu":
        block_attention = load_extra("block_attention", config)
        if block_attention:
            block_attention.install()
    if config["fsdp"]:
        return [load_extra("fsdp", config, "fsdp").apply_fsdp(orig_model, device, dtype, options)] * 2
    orig_model.to(device)
    compiled = torch.compile(orig_model, **options) if options else orig_model
    if options and options["mode"] in ("reduce-overhead", "max-autotune"):
        # CUDA graphs overwrite a gradient when they run again; micro-batches add theirs to a copy
        for p in orig_model.parameters():
            if p.requires_grad:
                p.register_hook(torch.clone)
    if not dist.is_initialized():
        return compiled, compiled
    ddp = DDP(compiled, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True)
    # buffers are constants, or sums that are reduced when logged; set here, as torch 2.13 renamed the argument
    ddp.broadcast_buffers = False
    return ddp, compiled


def warm_up(model, compiled, optimizer, batch, autocast, options):
    """
    Compiles the graphs of training and evaluation: one that is compiled later counts as a recompile. DDP needs the
    backward as well: its first one fixes the gradient buckets, and from three ranks on their layout is the order of
    summation, so a resumed run would otherwise differ in the last bits. Returns seconds, or None if there was nothing
    to do.
    """
    if not options and not dist.is_initialized():
        return None
    start = time.perf_counter()
    if options:
        print0(f"compiling, backend {options['backend']}, mode {options['mode'] or 'default'} ...")
    batch = {**batch, "targets": torch.full_like(batch["targets"], IGNORE)}
    with autocast:
        model(**batch).backward()
    optimizer.zero_grad()
    if options and hasattr(optimizer, "compile"):
        optimizer.compile(options["backend"])
    with torch.no_grad(), autocast:
        inputs = ("idx", "targets", "positions", "mask")  # without a teacher's
        compiled.eval()(**{name: batch[name] for name in inputs if name in batch}).item()
    compiled.train()
    if options:
        print0(f"compiled in {time.perf_counter() - start:.0f} s")
    return time.perf_counter() - start


def graphs_compiled():
    """Graphs that torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def is_sharded(model):
    return hasattr(model, "set_requires_gradient_sync")  # an FSDP module


def set_gradient_sync(model, sync):
    """Whether the next backward averages gradients over the ranks: only a step's last needs to."""
    if is_sharded(model):
        model.set_requires_gradient_sync(sync)
    elif dist.is_initialized():
        model.require_backward_grad_sync = sync


def gather(tensor):
    """The whole of a tensor that may be sharded. All ranks call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip_grad_norm(model, max_norm):
    """
    Clips the gradients, but for a loss function's own, to max_norm (0: off). Returns their norm before. If that is not
    finite they stay as they are.
    """
    params = [p for name, p in model.named_parameters() if not name.startswith("loss_fn.")]
    total = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    norm = gather(total).item()
    if max_norm and math.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return norm


def eval_share(model):
    """rank, world_size for sharing out sampling and scoring: a sharded model does all of it on all ranks together."""
    return (0, 1) if is_sharded(model) or not dist.is_initialized() else (dist.get_rank(), dist.get_world_size())


# -----------------------------------------------------------------------------
# the log

FORMATS = {"train_loss": "loss {:.4f}", "val_loss": "val loss {:.4f}", "val_ppl": "perplexity {:.2f}",
           "val_bpb": "{:.4f} bits per byte", "lr": "lr {:.2e}", "grad_norm": "norm {:.2f}", "ms": "{:.0f} ms",
           "tok_per_sec": "{:,.0f} tok/s", "mfu": "mfu {:.1%}", "loss_scale": "scale {:.0f}",
           "sparsity": "sparsity {:.2%}", "ce_loss": "ce {:.4f}", "kl_loss": "kl {:.4f}", "temperature": "T {:.4f}",
           "agreement": "agreement {:.1%}", "shape": "shape {}"}
TRENDS = {"val_loss": 1, "loss_scale": -1}  # three times in a row in this direction is a warning


class Logger:
    """
    log(iter_num, name=value, ...) appends a line to out_dir/log.jsonl, prints what FORMATS has, and calls the
    trackers. log.step(...) adds up a step's numbers; log.train(...) logs those since its last call, with `metrics`:
    functions that return a dict, called on all ranks. Rank 0 writes. Create it after the warm-up: a graph compiled
    later is a recompile.
    """

    def __init__(self, out_dir, config, max_iters, loader, model, dtype, metrics, iter_num, resuming):
        self.path, self.max_iters, self.loader, self.metrics = Path(out_dir) / "log.jsonl", max_iters, loader, metrics
        self.model, self.dtype = model, dtype
        self.trackers, self.sums, self.seconds, self.trends = [], Counter(), 0.0, {}
        self.flops_per_token = model.flops_per_token(loader.dataset.max_seq_len)
        self.peak_flops = peak_flops(loader.device, dtype) * loader.world_size
        self.skipped, self.recompiles, self.graphs = 0, 0, graphs_compiled()
        loader.wait_seconds = 0.0  # without the first batch, which the warm-up waited for
        if rank() == 0:
            if not resuming:  # what an overwritten run left
                self.path.unlink(missing_ok=True)
            elif self.path.exists():
                found = re.findall(r'"seconds": ([0-9.]+),', self.path.read_text(errors="replace"))
                self.seconds = float(found[-1]) if found else 0.0
            (self.path.parent / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        if resuming:
            print0(f"resumed at step {iter_num}, {loader.rows_seen:,} rows seen")
            self(iter_num, event="resume")

    def step(self, **sums):
        """Adds up one step of the whole job: loss_sum, targets, tokens (no padding), rows, clipped or not, seconds."""
        self.sums.update(sums, steps=1)
        if graphs_compiled() > self.graphs + self.recompiles:
            self.recompiles = graphs_compiled() - self.graphs
            print(f"WARNING: rank {rank()} recompiled the model, {self.recompiles} times so far; "
                  f"TORCH_LOGS=recompiles says why")

    def skip(self, iter_num, loss_sum):
        """Counts a step that is not finite, and says so; float16's loss scale finds its range that way."""
        self.skipped += 1
        if self.dtype != "float16" or not math.isfinite(loss_sum):
            first = next((name for name, p in self.model.named_parameters()
                          if p.grad is not None and not gather(p.grad.abs().max()).isfinite()), "none")
            print0(f"WARNING: step {iter_num} is skipped, its {'norm' if math.isfinite(loss_sum) else 'loss'} is not "
                   f"finite (first among its gradients: {first}); {self.skipped} skipped so far")

    def train(self, iter_num, **values):
        """Logs the steps since the last call: their mean loss, tokens/s, ..."""
        for metric in self.metrics:
            values = dict(**values, **metric())  # a name that is taken is an error
        sums, self.sums = self.sums, Counter()
        seconds, positions = sums["seconds"], sums["rows"] * self.loader.dataset.max_seq_len
        self.seconds += seconds
        wait_seconds, self.loader.wait_seconds = self.loader.wait_seconds, 0.0
        self(iter_num, train_loss=sums["loss_sum"] / sums["targets"], ms=1000 * seconds / sums["steps"],
             tok_per_sec=sums["tokens"] / seconds, useful=sums["tokens"] / positions,
             mfu=self.flops_per_token * positions / seconds / self.peak_flops,
             eta_seconds=(self.max_iters - iter_num) * seconds / sums["steps"], wait=wait_seconds / seconds,
             epoch=self.loader.rows_seen / len(self.loader.dataset), peak_mem_mb=peak_memory_mb(self.loader.device),
             targets=sums["targets"], clipped=sums["clipped"] / sums["steps"], skipped=self.skipped,
             recompiles=self.recompiles, seconds=self.seconds,
             flops=self.flops_per_token * self.loader.tokens, **values)

    def __call__(self, iter_num, **values):
        if rank() > 0 or not values:
            return
        shown = [form.format(values[key]) for key, form in FORMATS.items() if key in values]
        if "eta_seconds" in values:
            shown.append(f"eta {datetime.timedelta(seconds=int(values['eta_seconds']))}")
        if shown:
            print(f"step {iter_num}/{self.max_iters}: {', '.join(shown)}", flush=True)
        for name in TRENDS.keys() & values.keys():
            last, times = self.trends.get(name, (values[name], 0))
            times = times + 1 if TRENDS[name] * (values[name] - last) > 0 else 0
            self.trends[name] = values[name], times
            if times >= 3:
                print(f"WARNING: {name} {'rose' if TRENDS[name] > 0 else 'fell'} {times} times in a row", flush=True)
        values = {"iter": iter_num, "tokens": self.loader.tokens, **values}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            with open(self.path, "a+b") as f:
                if f.tell() > 0:  # a run that was killed may have left half a line
                    f.seek(-1, os.SEEK_END)
                    f.write(b"\n" if f.read(1) != b"\n" else b"")
                f.write(json.dumps(values).encode() + b"\n")
        except OSError as error:  # a full disk is no reason to stop
            print(f"WARNING: {self.path} could not be written: {error}")
        for tracker in self.trackers if "event" not in values else ():
            tracker(values)


def finish(iter_num, out_dir, stopped, facts, command):
    """The last lines of a run; command: what to try next."""
    if stopped:
        print0(f"stopped after step {iter_num}, which is saved; {resume_hint(out_dir)}")
    else:
        print0(f"done after {iter_num} steps: val loss {facts['val_loss']:.4f} (best {facts['best_val_loss']:.4f})\n"
               f"checkpoint: {out_dir}/ckpt.pt, log: {out_dir}/log.jsonl; try it: {command}")
    if dist.is_initialized():
        time.sleep(0.1)  # else gloo can hang: its thread needs the GIL to free the last tensor (torch 2.13)
        dist.destroy_process_group()


def report_settings(config, overrides):
    """Prints the overrides, and warns of those that nothing in this run reads: they may be part of a recipe."""
    print0("settings given:", ", ".join(f"{key}={value}" for key, value in overrides.items()) or "none, all defaults")
    for needs, met, names in (
            ("--optimizer=muon", config["optimizer"] == "muon", "muon_lr"),
            ("--optimizer=adamw_spam", config["optimizer"] == "adamw_spam", "spam_interval spam_warmup spam_theta"),
            ("llama blocks", config["arch"] == "llama", "head_lr rope_theta"),
            ("--lr_schedule=wsd", config["lr_schedule"] == "wsd", "wsd_decay_frac"),
            ("another --lr_schedule", config["lr_schedule"] != "constant", "min_lr lr_decay_iters"),
            ("--sparsity", config["sparsity"], "prune_by prune_scope prune_begin prune_end prune_interval"),
            ("--teacher", config["teacher"],
             "teacher_weight teacher_temperature learn_temperature teacher_cache shard_teacher"),
            ("--lora_rank", config.get("lora_rank"), "lora_alpha lora_dropout lora_targets"),
            ("--lora_rank=0", not config.get("lora_rank"), "embedding_lr head_lr vector_lr"),
            ("--wandb_log=True", config["wandb_log"], "wandb_project"),
            ("--compile=True", config["compile"], "compile_mode compile_backend"),
            ("--compile_backend=inductor", config["compile_backend"] == "inductor", "compile_mode"),
            ("--eval_tasks", config["eval_tasks"], "eval_problems task_dir")):
        for name in names.split():
            if name in overrides and not met:
                print0(f"WARNING: --{name}={overrides[name]} has no effect without {needs}")
