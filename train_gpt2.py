"""
Pretrains a GPT on token shards. The defaults are GPT-2 124M on FineWeb-Edu.

    python train_gpt2.py config/quickstart.py                                # minutes, on a laptop
    torchrun --nproc_per_node=8 train_gpt2.py --compile=True                 # eight GPUs, the same model as one
    python train_gpt2.py --init_from=resume --out_dir=out                    # goes on, exactly where it stopped

In the order it runs: settings, process, data, model, optimizer, and the loop: save, evaluate, forward, backward, step, log.
"""
import functools
import json
import math
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, fields
from typing import Literal, Optional

import numpy as np
import torch
import torch.distributed as dist

import runtime
from configurator import configure, expect_range, fail
from evaluate import evenly, load_problems, score_for_log, task_names, validation_loss
from model import GPT, GPTConfig
from optim import (check_schedule, clip_spikes, get_lr, mask_gradients, new_masks, new_optimizer, plan_pruning, prune, set_rates,
                   sparsity_of)
from prepare_data import END_OF_TEXT, Windows, get_tokenizer, padded_vocab_size, read_meta, rows_to_windows, token_bytes

# ---------------------------------------------------------------------------------------------------
# settings
# output
out_dir: str = "out"  # checkpoint, config.json, log.jsonl and loss.png go here
init_from: str = "scratch"  # scratch, resume (from out_dir), auto (resume if there is something to, else scratch), or whose weights to start from: gpt2, gpt2-medium, gpt2-large, gpt2-xl, a path
overwrite: bool = False  # remove the checkpoint of another run that lies in out_dir
keep_interval: int = 0  # steps between checkpoints that are kept for good, as ckpt_STEP.pt; 0: none
eval_interval: int = 500  # steps between evaluations; a checkpoint is saved before each
eval_iters: int = 64  # micro-batches an evaluation takes at most: always the first rows of val; 64 * 16 * 1024 are 1M tokens
eval_tasks: str = ""  # tasks of evaluate.py scored at each evaluation, e.g. hellaswag,arc_easy; empty: none
eval_problems: int = 64  # problems of each task then, always the same; at the end of the run all of them
task_dir: Optional[str] = None  # folder of local tasks, TASK/test.jsonl; None: from the Hugging Face hub
log_interval: int = 10  # steps between two lines of the log
sample_tokens: int = 64  # length of the sample shown at each evaluation; 0: none
wandb_log: bool = False  # log to Weights & Biases as well (pip install wandb)
wandb_project: str = "train-gpt2"  # its project; the run is named after out_dir
tensorboard: bool = False  # log to OUT_DIR/tensorboard as well (pip install tensorboard)
# data
data_dir: str = "data/fineweb-edu"  # shards from prepare_data.py, or any in the layout of llm.c
batch_size: int = 16  # rows of a micro-batch, on each rank
gradient_accumulation_steps: int = 8  # micro-batches of a step, over all ranks: 1, 2, 4 or 8 of them train the same model
max_seq_len: int = 1024  # tokens of a row; a step takes batch_size * gradient_accumulation_steps * max_seq_len
# model
arch: Literal["gpt2", "llama"] = "gpt2"  # GPT-2, or what came after: RMSNorm, rotary positions, SwiGLU
attention: Literal["mha", "mla"] = "mha"  # multi-head, or multi-head latent
n_layer: int = 12  # blocks
n_head: int = 12  # attention heads, n_embd / n_head wide each
n_embd: int = 768  # width of the residual stream
n_kv_head: Optional[int] = None  # llama: key/value heads; None: n_head
qk_norm: bool = False  # llama: normalise queries and keys
embed_norm: bool = False  # llama: normalise the embedding, drawn from N(0, 1)
intermediate_size: Optional[int] = None  # width of the MLP; None: 4 n_embd, for llama 8/3 n_embd
gelu: Literal["tanh", "exact"] = "tanh"  # gpt2: GPT-2's approximation, or nanoGPT's exact one
rope_theta: float = 10000.0  # llama: base of the rotary frequencies
kv_lora_rank: Optional[int] = None  # mla: width of the latent cached for each token; None: 128, at most n_embd / 2
q_lora_rank: Optional[int] = None  # mla, llama: width of a latent for the queries; None: they have none
qk_nope_head_dim: Optional[int] = None  # mla: width of a head's query without the rotated part; None: fills up n_embd / n_head
qk_rope_head_dim: Optional[int] = None  # mla, llama: width of the rotated part; None: half of n_embd / n_head
v_head_dim: Optional[int] = None  # mla: width of a head's value; None: n_embd / n_head
dropout: float = 0.0  # on embeddings, attention weights and what each layer adds
# teacher
teacher: Optional[str] = None  # distil what it says of each token: a path, or gpt2, gpt2-medium, gpt2-large, gpt2-xl; None: no teacher
teacher_weight: float = 0.5  # of the KL divergence from it, times temperature squared; the data's cross entropy has the rest of 1
teacher_temperature: float = 1.0  # that softens both distributions; a cache of few ids knows little of what one above 1 brings up
learn_temperature: bool = False  # go on from it by gradient descent, which lowers it: the term vanishes at 0
teacher_cache: int = 0  # likeliest ids a token that are written beside the data once, and read instead of running the teacher; 0: none
# optimizer
optimizer: Literal["adamw", "muon", "adamw_spam"] = "adamw"  # muon: Muon for the hidden matrices; adamw_spam: AdamW that clips spikes
learning_rate: float = 6e-4  # peak
max_iters: int = 50000  # steps, counted from the start of the run
weight_decay: float = 0.1  # of matrices and embeddings; norms and biases have none
beta1: float = 0.9  # of the mean of the gradients
beta2: float = 0.95  # of the mean of their squares
muon_lr: float = 0.02  # muon: peak of the hidden matrices; min_lr is in proportion
embedding_lr: Optional[float] = None  # peak of the embeddings, and of a head tied to them; None: learning_rate
head_lr: Optional[float] = None  # llama: peak of the head; None: learning_rate
vector_lr: Optional[float] = None  # peak of biases and of norms; None: learning_rate
grad_clip: float = 1.0  # norm to which gradients are clipped; 0: not at all
spam_interval: int = 500  # adamw_spam: steps between resets of its moments
# its schedule
lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: warmup-stable-decay, linear at the end
warmup_iters: int = 2000  # steps of linear rise
lr_decay_iters: Optional[int] = None  # step at which min_lr is reached; None: max_iters
min_lr: float = 6e-5  # the end of the decay
wsd_decay_frac: float = 0.2  # wsd: the part of lr_decay_iters in which the rate falls
# pruning
sparsity: float = 0.0  # part of the hidden matrices' weights that is zero in the end; 0: dense
prune_by: Literal["magnitude", "state"] = "magnitude"  # what goes first: small weights; state: those with small gradients, too
prune_scope: Literal["layer", "global"] = "layer"  # the part of each matrix, or of all together
prune_begin: Optional[int] = None  # step at which sparsity begins to rise; None: a tenth of max_iters
prune_end: Optional[int] = None  # step at which it is reached; None: three quarters of max_iters
prune_interval: Optional[int] = None  # steps between two prunings; None: a hundredth of the rise
# health
spike_loss: float = 3.0  # a loss over this many times its moving average rolls the run back to its last checkpoint; 0: off
spike_norm: float = 100.0  # so does a gradient norm over this many times its own; 0: off
rollback_lr: float = 1.0  # factor on the learning rate for the 100 steps after that
max_faults: int = 5  # so many rolled back or skipped steps without one good step beyond them end the run
check_health: bool = False  # look for what keeps the model from learning, on one micro-batch, and exit
# system
device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of the matmuls; auto: what the device is good at
fsdp: bool = False  # shard the model over the ranks, for one that a GPU does not hold
recompute: bool = False  # keep only what enters each block and compute the rest again in backward: less memory, a third slower
compile: bool = True  # torch.compile, one graph for one shape
compile_mode: Optional[Literal["default", "reduce-overhead", "max-autotune"]] = None  # None: torch's default
compile_backend: str = "inductor"  # of torch.compile
seed: int = 1337  # of the weights and of the order of the data
config, given = configure(globals())

# ---------------------------------------------------------------------------------------------------
# settings that a checkpoint brings along
MODEL = [field.name for field in fields(GPTConfig) if field.name in config and field.name not in ("max_seq_len", "dropout")]
resuming = init_from == "resume" or init_from == "auto" and runtime.found_checkpoint(out_dir)
checkpoint = None
if resuming or init_from not in ("scratch", "auto"):
    source = out_dir if resuming else init_from
    checkpoint = runtime.load_checkpoint(source)
    if resuming and checkpoint["stage"] == "chat":
        fail(f"--out_dir={out_dir}: holds a chat model, whose run goes on with chat_sft.py --init_from=resume")
    if resuming and "optimizer" not in checkpoint:
        fail(f"--init_from=resume: {out_dir} holds a model without the state of its training; start a new run with "
             f"--init_from={out_dir} --out_dir=...")
    for name in set(MODEL) & set(checkpoint["model_args"]):
        if name in given and given[name] != checkpoint["model_args"][name]:
            fail(f"--{name}={given[name]}: the model in {source} has {checkpoint['model_args'][name]}")
        config[name] = checkpoint["model_args"][name]
    if resuming:
        config = runtime.settle_config(config, given, checkpoint,
                                       fixed=("max_seq_len", "seed", "optimizer", "sparsity", "teacher_cache", "learn_temperature"),
                                       per_start=("out_dir", "init_from", "overwrite", *MODEL))
    elif "max_seq_len" not in given:
        config["max_seq_len"] = checkpoint["model_args"]["max_seq_len"]
    globals().update(config)

# ---------------------------------------------------------------------------------------------------
# process
expect_range(config, 1, math.inf, "eval_interval", "eval_iters", "eval_problems", "log_interval", "batch_size", "gradient_accumulation_steps",
             "max_seq_len")
expect_range(config, 0, math.inf, "sample_tokens", "max_iters", "warmup_iters", "lr_decay_iters", "learning_rate", "min_lr",
             "muon_lr", "embedding_lr", "head_lr", "vector_lr", "weight_decay", "grad_clip", "keep_interval", "spike_loss", "spike_norm")
expect_range(config, 1, math.inf, "max_faults", "spam_interval", "prune_end", "prune_interval")
expect_range(config, 0, math.inf, "prune_begin")
expect_range(config, 0, 1, "rollback_lr", "teacher_weight")
expect_range(config, 0.01, 100, "teacher_temperature")
expect_range(config, 0, 0.999999, "beta1", "beta2", "sparsity")
expect_range(config, 0, 2 ** 63 - 1, "seed")
decay_iters = max_iters if lr_decay_iters is None else lr_decay_iters
try:
    check_schedule(lr_schedule, learning_rate, min_lr, warmup_iters, decay_iters, wsd_decay_frac)
    pruning = plan_pruning(config, max_iters)
except ValueError as error:
    fail(error)

if keep_interval % eval_interval:
    fail(f"--keep_interval={keep_interval}: checkpoints are saved every --eval_interval={eval_interval} steps: expected a multiple of it")

rank, world_size, compute_device = runtime.init_process(device)
micro_steps = runtime.micro_steps_of(gradient_accumulation_steps, world_size)  # on this rank
rows_per_step = batch_size * gradient_accumulation_steps
tokens_per_step = rows_per_step * max_seq_len
compute_dtype = runtime.pick_dtype(dtype, compute_device)
if check_health and world_size > 1:
    fail("--check_health=True: start it without torchrun")
if fsdp and (not dist.is_initialized() or compute_dtype == "float16"):
    fail(f"--fsdp=True: expected ranks to share the model among (start with torchrun), and bfloat16 or float32 (it is {compute_dtype})")
if not teacher and (learn_temperature or teacher_cache):
    fail("--learn_temperature and --teacher_cache: of which teacher? Give --teacher")
if learn_temperature and fsdp:
    fail("--learn_temperature=True: not with --fsdp=True; give a fixed --teacher_temperature")
autocast = runtime.autocast(compute_device, compute_dtype)
runtime.check_out_dir(out_dir, keep=resuming, overwrite=overwrite)

# ---------------------------------------------------------------------------------------------------
# data
meta = read_meta(data_dir)
train_windows = Windows(data_dir, "train", max_seq_len)
val_windows = Windows(data_dir, "val", max_seq_len)
tokenizer = get_tokenizer(meta["tokenizer"])
bytes_of = token_bytes(tokenizer)
problems = {task: load_problems(task, tokenizer, "base", task_dir) for task in task_names(eval_tasks)}
if meta["vocab_size"] != padded_vocab_size(tokenizer):
    fail(f"{data_dir}/meta.json: vocab_size {meta['vocab_size']} is not that of its tokenizer, "
         f"{padded_vocab_size(tokenizer)} for {meta['tokenizer']}")
if checkpoint and (checkpoint["tokenizer"], checkpoint["model_args"]["vocab_size"]) != (meta["tokenizer"], meta["vocab_size"]):
    fail(f"--data_dir={data_dir}: its tokens are {meta['tokenizer']}'s, {meta['vocab_size']} ids, but the checkpoint was "
         f"trained on {checkpoint['tokenizer']}'s, {checkpoint['model_args']['vocab_size']} ids")
fingerprint = train_windows.fingerprint()
if resuming and checkpoint["data"] != fingerprint:
    fail(f"--data_dir={data_dir}: its train shards are not those the run was started with (more or fewer tokens, or others); "
         f"to train these weights on other data start a new run with --init_from={out_dir}/ckpt.pt --out_dir=...")


def read_rows(windows, indices):
    """x and y of some windows. An id that the model has no embedding for is found here, before it is looked up."""
    x, y = windows[indices]
    highest = max(x.max(), y.max())
    if highest >= meta["vocab_size"]:
        fail(f"--data_dir={data_dir}: holds the token {highest}, but the vocabulary of its tokenizer, {meta['tokenizer']}, ends at "
             f"{meta['vocab_size'] - 1}: its shards come from another tokenizer, or are damaged", alone=True)
    return x, y


def to_device(array):
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(compute_device, non_blocking=True) if compute_device.type == "cuda" else tensor.to(compute_device)


def train_batch(indices):
    """x and y (batch_size, max_seq_len) int64 of some windows."""
    return [to_device(array) for array in read_rows(train_windows, indices)]


def get_batch(first_row):
    """x and y of the rows of the run from first_row on, and what the cached teacher said of them, if there is one."""
    indices = rows_to_windows(range(first_row, first_row + batch_size), len(train_windows), seed)
    return [*train_batch(indices), *(map(to_device, cache[indices]) if cache else ())]


# ---------------------------------------------------------------------------------------------------
# model
torch.manual_seed(seed)  # the same weights on every rank
try:
    orig_model = GPT(GPTConfig(**{name: config[name] for name in MODEL}, dropout=dropout, vocab_size=meta["vocab_size"],
                               max_seq_len=checkpoint["model_args"]["max_seq_len"] if checkpoint else max_seq_len))
except ValueError as error:
    fail(error)
model_args = asdict(orig_model.config)
if max_seq_len > model_args["max_seq_len"]:
    fail(f"--max_seq_len={max_seq_len}: the model in {init_from} has {model_args['max_seq_len']} positions; give at most that")
if checkpoint and not resuming:  # a resumed run's weights come with its optimizer's state, below
    orig_model.load_state_dict(checkpoint["model"])
orig_model.recompute = recompute

# Compiled for one shape, (batch_size, max_seq_len), in training and validation alike. Whatever has another shape, and
# every checkpoint, uses orig_model, whose parameters are the very same tensors.
compile_options = dict(dynamic=False, fullgraph=True, mode=compile_mode, backend=compile_backend)
if compile:
    problem = runtime.compiler_problem(compute_device, compile_backend)
    if problem:
        runtime.print_once(f"WARNING: torch.compile cannot work here ({problem}): going on uncompiled, slower")
        compile = False
n_params = sum(p.numel() for p in orig_model.parameters())
if fsdp:  # block by block, and compiled so: what lies between the blocks is not
    runtime.shard(orig_model, compute_device, compute_dtype, compile_options if compile else None)
    model = compiled = orig_model
else:
    orig_model.to(compute_device)
    compiled = torch.compile(orig_model, **compile_options) if compile else orig_model
    model = runtime.distribute(compiled, compute_device)
# sampling and scoring: with fsdp the blocks themselves are compiled, for their one shape, and all ranks run them together
eager = functools.partial(torch.compiler.set_stance, "force_eager") if fsdp else nullcontext

optimizer = new_optimizer(orig_model, optimizer, learning_rate, beta1, beta2, weight_decay, embedding_lr, head_lr, vector_lr, muon_lr,
                          spam_interval)
masks = new_masks(orig_model, checkpoint, sparsity)  # what is pruned
if not sparsity and "masks" in (checkpoint or {}):
    runtime.print_once("WARNING: the weights that were pruned grow back; --sparsity, as it was, keeps them zero")
# the teacher is asked in each step, or, with a cache, beforehand, once for each row that the run will see
ask, teacher_digest, log_temperature = runtime.new_teacher(
    config, optimizer, meta["tokenizer"], meta["vocab_size"], compute_device, compute_dtype, compile_options if compile else None,
    checkpoint if resuming else None)
cache = None
scaler = torch.amp.GradScaler(compute_device.type, enabled=compute_dtype == "float16")
iter_num, rows_seen, best_val_loss, val_loss, val_iter = 0, 0, math.inf, math.inf, 0
health = runtime.new_health()
if resuming:
    runtime.load_state(orig_model, optimizer, scaler, checkpoint, fsdp)
    runtime.set_aside_damaged(checkpoint)
    iter_num, rows_seen, best_val_loss, val_loss, val_iter = (
        checkpoint[key] for key in ("iter_num", "rows_seen", "best_val_loss", "val_loss", "val_iter"))
    health.update(checkpoint.get("health", {}))
    if max_iters < iter_num:
        fail(f"--max_iters={max_iters}: the checkpoint in {out_dir} has taken {iter_num} steps already; give more")
checkpoint = None  # frees its memory

# ---------------------------------------------------------------------------------------------------
# what the loop calls now and then
how_to_go_on = f"go on with python train_gpt2.py --init_from=resume --out_dir={shlex.quote(out_dir)}"


def val_batch(indices):
    """x and y of some rows of val, for validation_loss."""
    return [to_device(array) for array in read_rows(val_windows, indices)]


def from_teacher(x, cached):
    """What the model takes as `teacher` for a micro-batch: what the cache has of it, or what the teacher says now."""
    return teacher_weight, log_temperature.exp(), *((cached[0], None, cached[1].long()) if cached else (*ask(x), None))


def sample():
    """A text from the model as it is now."""
    ids = [tokenizer.eot_token]
    try:
        with autocast, eager():
            for token, in orig_model.generate([ids], sample_tokens, temperature=0.8, top_k=200, seed=seed + iter_num,
                                              stop_ids=[tokenizer.eot_token], n_vocab=tokenizer.n_vocab):
                ids.append(token)
    except ValueError as error:
        return f"(none: {error})"
    return runtime.printable(tokenizer.decode(ids[1:]).removesuffix(END_OF_TEXT))


def save():
    """Begins to write a checkpoint -> a future, to be waited for before a weight changes: evaluation goes on meanwhile."""
    weights, state = runtime.get_state(orig_model, optimizer, fsdp)
    if rank > 0:
        return pool.submit(bool, True)
    keep_as = f"ckpt_{iter_num}.pt" if keep_interval and iter_num % keep_interval == 0 else None
    return pool.submit(runtime.save_checkpoint, out_dir, {
        "model": weights, "optimizer": state, "scaler": scaler.state_dict(), "health": dict(health),
        "model_args": model_args, "config": config, "tokenizer": meta["tokenizer"], "data": fingerprint, "stage": "base",
        "iter_num": iter_num, "rows_seen": rows_seen, "best_val_loss": best_val_loss, "val_loss": val_loss,
        "val_iter": val_iter,  # val_loss is that of step val_iter: a step is saved before it is evaluated
        **({"masks": masks} if sparsity else {}),
        **({"teacher": {"digest": teacher_digest, "log_temperature": log_temperature.item()}} if teacher else {})}, keep_as)


def saved(saving):
    """Waits for a checkpoint -> whether it was written, which rank 0 tells the others: to save takes all of them."""
    done = torch.tensor(saving.result(), device=compute_device)
    if dist.is_initialized():
        dist.broadcast(done, 0)
    if done:
        runtime.after_interrupt = f": step {iter_num} is saved; {how_to_go_on}"
    return bool(done)


def keep_best():
    """Names the checkpoint of the lowest validation loss so far, once it is both saved and evaluated."""
    if rank == 0 and saved_at == val_iter == iter_num > 0 and val_loss == best_val_loss:
        runtime.link(f"{out_dir}/ckpt.pt", "ckpt_best.pt")


def roll_back():
    """Takes model and optimizer back to the last checkpoint, but not the data: what comes next are other rows."""
    checkpoint = runtime.load_checkpoint(out_dir)
    runtime.load_state(orig_model, optimizer, scaler, checkpoint, fsdp)
    runtime.set_aside_damaged(checkpoint)
    masks.update(new_masks(orig_model, checkpoint, sparsity))
    if learn_temperature:
        log_temperature.data.fill_(checkpoint["teacher"]["log_temperature"])
    return checkpoint["iter_num"]


if check_health:
    good = runtime.check_model(orig_model, get_batch(0)[:2], optimizer, autocast if compute_dtype != "float16" else nullcontext(),
                               from_scratch=init_from in ("scratch", "auto") and not resuming)
    raise SystemExit(0 if good else 1)

if teacher_cache:
    made_from = dict(teacher=teacher_digest, tokenizer=meta["tokenizer"], data=fingerprint, max_seq_len=max_seq_len, k=teacher_cache)
    wanted = rows_seen + (max_iters - iter_num) * rows_per_step + world_size * batch_size  # rows; the last are read, and not trained on
    with autocast:
        cache = runtime.cache_teacher(data_dir, made_from, len(train_windows), wanted, seed, ask, train_batch, batch_size, rank, world_size)
    ask = None  # frees its memory

# ---------------------------------------------------------------------------------------------------
# say what is about to happen
runtime.print_once(
    f"model: {arch}, {attention}, {n_layer} layers, {n_embd} wide, {n_params / 1e6:.1f}M parameters, vocabulary "
    f"{model_args['vocab_size']} ({meta['tokenizer']})\n"
    f"data: {data_dir}, {train_windows.tokens:,} tokens in {len(train_windows):,} rows of {max_seq_len} (the tails of the shards, "
    f"{train_windows.tail:,} tokens, are left out), {val_windows.tokens:,} for validation\n"
    f"run: {max_iters:,} steps of {tokens_per_step:,} tokens ({rows_per_step} rows), "
    f"{max_iters * rows_per_step / len(train_windows):.2f} epochs; {world_size} x {compute_device.type}, {compute_dtype}")
if sparsity:
    runtime.print_once(f"pruning: {pruning}" + (f"; the run ends before that, at step {max_iters}" if max_iters < pruning["end"] else ""))
changed = ", ".join(f"{name}={value}" for name, value in given.items())
runtime.print_once(f"settings given: {changed or 'none, all defaults'}")
runtime.warn_unused({**config, **model_args}, given)
if rank == 0:
    if not resuming:
        runtime.clear_out_dir(out_dir)
    with open(f"{out_dir}/config.json", "w", encoding="utf-8") as f:
        json.dump(config, f, indent=1)
        f.write("\n")
    runtime.start_trackers(out_dir, config, wandb_log, wandb_project, tensorboard)
    if resuming:
        runtime.write_log(out_dir, event="resume", iter=iter_num, tokens=rows_seen * max_seq_len)
        lr = get_lr(iter_num, lr_schedule, learning_rate, min_lr, warmup_iters, decay_iters, wsd_decay_frac)
        print(f"resumed at step {iter_num}, {rows_seen:,} rows seen, " + (
            f"learning rate {lr:.2e}" if iter_num < max_iters else f"nothing left to train: --max_iters={max_iters}"))
    runtime.after_interrupt = f": step {iter_num} is saved, nothing since" if resuming else ": nothing is saved yet"

# ---------------------------------------------------------------------------------------------------
# the graphs of training and evaluation are made now: one that is made later is a recompile. So is DDP's layout of the gradients, which
# it settles behind its first backward: where they lie is the order in which three ranks or more sum them, in a resumed run as in any
if compile or world_size > 1:
    t0 = time.time()
    if compile:
        runtime.print_once("compiling ...")
    x, y = torch.zeros(2, batch_size, max_seq_len, dtype=torch.int64, device=compute_device).unbind()
    with autocast:
        loss = model(x, y) if not teacher else model(x, y, teacher=from_teacher(x, get_batch(0)[2:]))[0]
        loss.backward()
    optimizer.zero_grad(set_to_none=True)
    if compile and config["optimizer"] == "muon":
        optimizer.compile(compile_backend)
    with torch.no_grad(), autocast:
        compiled.eval()(x, y).item()
    compiled.train()
if compile:
    runtime.print_once(f"compiled in {time.time() - t0:.0f} s")
    if rank == 0:
        runtime.write_log(out_dir, event="compiled", seconds=time.time() - t0)
graphs_expected = runtime.graphs_compiled()
flops = runtime.peak_flops(compute_device, compute_dtype) * world_size

# ---------------------------------------------------------------------------------------------------
# the loop; iter_num counts the steps taken
pool = ThreadPoolExecutor(2)  # reads the next micro-batch while this one is computed, and writes checkpoints
next_batch = pool.submit(get_batch, rows_seen + rank * batch_size)
resumed_at, saved_at = (iter_num, val_iter) if resuming else None, iter_num
skipped, rollbacks, clipped, steps_taken, recompiles, stopping = 0, 0, 0, 0, 0, False
runtime.catch_signals()
loss_sum, parts_sum, steps_summed, seconds, waited, t0 = 0.0, [0.0, 0.0], 0, 0.0, 0.0, time.time()  # since the last line of the log
while True:
    # save, then evaluate and sample: whatever goes wrong there, the step is on disk
    if iter_num % eval_interval == 0 or iter_num >= max_iters:
        seconds += time.time() - t0
        saving = save() if iter_num != saved_at else None
        if saving is None:
            runtime.print_once("evaluating ...")
        with autocast:
            val_loss, val_bpb = validation_loss(compiled, val_batch, min(len(val_windows), eval_iters * batch_size), batch_size,
                                                bytes_of, rank, world_size)
        val_iter = iter_num
        best_val_loss = min(best_val_loss, val_loss)
        if rank == 0:
            val_ppl = math.exp(min(val_loss, 700))
            print(f"step {iter_num}: val loss {val_loss:.4f}, perplexity {val_ppl:.2f}, {val_bpb:.4f} bits per byte")
            runtime.write_log(out_dir, iter=iter_num, tokens=rows_seen * max_seq_len, val_loss=val_loss, val_ppl=val_ppl,
                              val_bpb=val_bpb)
            drawn = runtime.plot_logs([f"{out_dir}/log.jsonl"], f"{out_dir}/loss.png")
        if sample_tokens and iter_num > 0 and (rank == 0 or fsdp):
            runtime.print_once(f"----- sample\n{sample()}\n-----")
        for task in problems:  # some of each task, at the end of the run all
            with autocast, eager():
                line, figures = score_for_log(task, orig_model, tokenizer, "base",
                                              evenly(problems[task], eval_problems if iter_num < max_iters else None), batch_size,
                                              rank=0 if fsdp else rank, world_size=1 if fsdp else world_size)
            runtime.print_once(f"step {iter_num}: {line}")
            if rank == 0 and figures:
                runtime.write_log(out_dir, iter=iter_num, tokens=rows_seen * max_seq_len, **figures)
        if saving and saved(saving):
            saved_at = iter_num
        keep_best()
        if clipped > 0.1 * steps_taken:
            runtime.print_once(f"WARNING: since the last evaluation {clipped} of {steps_taken} gradients were clipped to --grad_clip={grad_clip}")
        clipped = steps_taken = 0
        t0 = time.time()
    if iter_num >= max_iters:
        break

    # forward and backward
    torch.manual_seed(runtime.step_seed(seed, iter_num, rank))  # dropout
    nats = torch.zeros((), device=compute_device)  # of this step
    parts = torch.zeros(2 if teacher else 0, device=compute_device)  # its cross entropy and KL divergence
    for micro_step in range(micro_steps):
        waiting = time.time()
        x, y, *cached = next_batch.result()
        waited += time.time() - waiting
        # micro-batch m of rank r is number m * world_size + r of the step, so any number of ranks shares out the same rows
        next_batch = pool.submit(get_batch, rows_seen + ((micro_step + 1) * world_size + rank) * batch_size)
        if dist.is_initialized():  # gradients are averaged over the ranks once a step
            if fsdp:
                model.set_requires_gradient_sync(micro_step == micro_steps - 1)
            else:
                model.require_backward_grad_sync = micro_step == micro_steps - 1
        with autocast:
            if not teacher:
                loss = model(x, y)  # summed over the micro-batch
            else:
                loss, both = model(x, y, teacher=from_teacher(x, cached))
                parts += both
        nats += loss.detach()
        # DDP divides by the ranks, hence times world_size: the gradient is that of the mean over the step
        scaler.scale(loss * (world_size / tokens_per_step)).backward()

    if learn_temperature and dist.is_initialized():  # as DDP does with the model's
        dist.all_reduce(log_temperature.grad)
        log_temperature.grad /= world_size

    # what the ranks have to know of each other: the loss of the whole step, and whether one of them was asked to stop
    shared = torch.stack((nats, torch.full_like(nats, runtime.stop_asked is not None), *parts))
    if dist.is_initialized():
        dist.all_reduce(shared)
    nats, stopping, *parts = shared.tolist()
    parts_sum = [a + b for a, b in zip(parts_sum, parts)]
    loss_sum += nats

    # step
    lr = get_lr(iter_num, lr_schedule, learning_rate, min_lr, warmup_iters, decay_iters, wsd_decay_frac)
    lr *= rollback_lr if iter_num < health["calm_until"] else 1.0
    set_rates(optimizer, lr, iter_num)
    scaler.unscale_(optimizer)
    if sparsity:
        mask_gradients(orig_model, masks)
    if config["optimizer"] == "adamw_spam":
        clip_spikes(optimizer, iter_num)
    grad_norm = torch.nn.utils.clip_grad_norm_(orig_model.parameters(), grad_clip or math.inf)
    grad_norm = (grad_norm.full_tensor() if fsdp else grad_norm).item()
    clipped += grad_clip > 0 and grad_norm > grad_clip
    # a loss scale that is too high overflows gradients: the scaler skips the step then, and lowers it
    overflowed = scaler.is_enabled() and not math.isfinite(grad_norm)
    fault = runtime.find_fault(health, iter_num, nats / tokens_per_step, None if overflowed else grad_norm, spike_loss, spike_norm)
    if fault is None:
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    rows_seen += rows_per_step
    steps_summed += 1
    steps_taken += 1
    if fault is None:
        skipped += overflowed
        iter_num += 1
    else:
        if health["faults"] >= max_faults:
            fail(f"step {iter_num}: {fault}, fault {health['faults']} without a good step beyond the first: stopped. "
                 + (f"The last good checkpoint, step {saved_at}, is in {out_dir}" if runtime.found_checkpoint(out_dir) else "Nothing is saved")
                 + "; try a lower --learning_rate")
        if "spike" in fault and runtime.found_checkpoint(out_dir):
            rollbacks += 1
            faulty, iter_num = iter_num, roll_back()
            saved_at = iter_num
            runtime.print_once(f"WARNING: step {faulty}: {fault}: back to step {iter_num}, and on past these rows")
            health["calm_until"] = iter_num + 100
            if rank == 0:
                runtime.write_log(out_dir, event="rollback", iter=iter_num, tokens=rows_seen * max_seq_len)
        else:
            skipped += 1
            runtime.print_once(f"WARNING: step {iter_num}: {fault}: it is skipped, {skipped} so far")
            iter_num += 1
    if sparsity:
        prune(orig_model, optimizer, masks, iter_num, **pruning)

    # log
    if runtime.graphs_compiled() > graphs_expected + recompiles:
        recompiles = runtime.graphs_compiled() - graphs_expected
        print(f"WARNING: rank {rank} recompiled the model in step {iter_num}, {recompiles} times so far "
              f"(TORCH_LOGS=recompiles says why)")
    if iter_num % log_interval == 0 or iter_num == 1 or iter_num == max_iters or stopping:
        train_loss = loss_sum / (steps_summed * tokens_per_step)  # the mean over all steps since the last line
        seconds += time.time() - t0
        tok_per_sec = steps_summed * tokens_per_step / seconds
        mfu = orig_model.flops_per_token(max_seq_len) * tok_per_sec / flops
        left = (max_iters - iter_num) * seconds / steps_summed
        if rank == 0:
            scale = {"loss_scale": scaler.get_scale()} if scaler.is_enabled() else {}
            pruned = {"sparsity": sparsity_of(masks)} if sparsity else {}
            taught = {key: part / (steps_summed * tokens_per_step) for key, part in zip(("ce_loss", "kl_loss"), parts_sum)}
            taught |= {"temperature": log_temperature.exp().item()} if teacher else {}
            print(f"step {iter_num}/{max_iters}: loss {train_loss:.4f}, lr {lr:.2e}, norm {grad_norm:.2f}, "
                  f"{1000 * seconds / steps_summed:.0f} ms, {tok_per_sec:,.0f} tok/s, mfu {100 * mfu:.1f}%, "
                  + "".join(f"scale {s:.0f}, " for s in scale.values())
                  + "".join(f"sparsity {100 * s:.2f}%, " for s in pruned.values())
                  + "".join(f"{key.removesuffix('_loss')} {value:.4f}, " for key, value in taught.items())
                  + f"left {int(left // 3600)}:{int(left % 3600 // 60):02d}:{int(left % 60):02d}", flush=True)
            runtime.write_log(out_dir, iter=iter_num, tokens=rows_seen * max_seq_len, train_loss=train_loss, lr=lr,
                              grad_norm=grad_norm, ms=1000 * seconds / steps_summed, tok_per_sec=tok_per_sec, mfu=mfu,
                              peak_mem_mb=runtime.peak_memory_mb(compute_device), recompiles=recompiles, skipped=skipped,
                              rollbacks=rollbacks, clipped=clipped, wait=waited / seconds,
                              epoch=rows_seen / len(train_windows), **scale, **pruned, **taught)
        loss_sum, parts_sum, steps_summed, seconds, waited, t0 = 0.0, [0.0, 0.0], 0, 0.0, 0.0, time.time()

    if stopping:
        break

if (iter_num, val_iter) != resumed_at:  # there is something new to save
    tries = 20
    while not saved(save()):  # at the end again, with its own validation loss
        tries -= 1
        if tries == 0:
            fail(f"--out_dir={out_dir}: the last steps, from {saved_at} to {iter_num}, could not be saved")
        runtime.print_once(f"trying again in 30 seconds, {tries} times more")
        time.sleep(30)
    saved_at = iter_num
    keep_best()
pool.shutdown()
if stopping:
    runtime.print_once(f"stopped after step {iter_num}, which is saved; {how_to_go_on}")
elif rank == 0:
    print(f"done: val loss {val_loss:.4f} (best {best_val_loss:.4f}) after {iter_num} steps\n"
          f"checkpoint: {out_dir}/ckpt.pt; try it: python sample.py --checkpoint={out_dir}/ckpt.pt\n"
          f"loss curve: {out_dir}/log.jsonl, {drawn}")
if dist.is_initialized():
    dist.destroy_process_group()
