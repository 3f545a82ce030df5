"""
Turns a base model into one to talk to: supervised fine-tuning on conversations.

    python chat_sft.py --init_from=out/ckpt.pt --data=my-chats.jsonl          # {"messages": [{"role", "content"}, ...]} a line
    torchrun --nproc_per_node=8 chat_sft.py --data=HuggingFaceTB/smoltalk,my-chats.jsonl:3
    python chat_sft.py --print_batch=True                                     # what is about to be trained on, token by token
    python chat_sft.py --init_from=resume --out_dir=out-chat                  # goes on, exactly where it stopped

Whole conversations are packed into rows of one fixed length, so the compiled model sees one shape and next to no padding;
attention stays inside each conversation. The loss is that of what the assistant says.

In the order it runs: settings, process, data, model, optimizer, and the loop: save, evaluate, forward, backward, step, log.
"""
import functools
import json
import math
import os
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Literal, Optional

import numpy as np
import torch
import torch.distributed as dist

import runtime
from configurator import configure, expect_range, fail
from evaluate import evenly, load_problems, score_for_log, task_names, validation_loss
from model import GPT, GPTConfig, IGNORE, add_lora, packed
from optim import (check_schedule, clip_spikes, get_lr, mask_gradients, new_masks, new_optimizer, plan_pruning, prune, set_rates,
                   sparsity_of)
from prepare_data import chat_rows, chat_tokens, decode_chat, get_tokenizer, rows_to_windows, token_bytes

# ---------------------------------------------------------------------------------------------------
# settings
# output
out_dir: str = "out-chat"  # checkpoint, config.json, log.jsonl and loss.png go here
init_from: str = "out/ckpt.pt"  # whose weights to start from: a path, gpt2, gpt2-medium, ...; resume (from out_dir), or auto:PATH (resume if there is something to)
overwrite: bool = False  # remove the checkpoint of another run that lies in out_dir
keep_interval: int = 0  # steps between checkpoints that are kept for good, as ckpt_STEP.pt; 0: none
eval_interval: int = 100  # steps between evaluations; a checkpoint is saved before each
eval_iters: int = 64  # micro-batches an evaluation takes at most: always the first rows of val
eval_tasks: str = ""  # tasks of evaluate.py scored at each evaluation, e.g. hellaswag,arc_easy; empty: none
eval_problems: int = 64  # problems of each task then, always the same; at the end of the run all of them
task_dir: Optional[str] = None  # folder of local tasks, TASK/test.jsonl; None: from the Hugging Face hub
log_interval: int = 10  # steps between two lines of the log
sample_tokens: int = 128  # length at most of the answer shown at each evaluation, to the first question of val; 0: none
wandb_log: bool = False  # log to Weights & Biases as well (pip install wandb)
wandb_project: str = "train-gpt2"  # its project; the run is named after out_dir
tensorboard: bool = False  # log to OUT_DIR/tensorboard as well (pip install tensorboard)
# data
data: str = "HuggingFaceTB/smoltalk"  # .jsonl files and data sets of the hub (owner/name/config), each with :passes an epoch
val_data: Optional[str] = None  # the same for validation; None: one in 50 conversations, not trained on
chat_dir: str = "data/chat"  # the packed rows are made once and kept here
pack: bool = True  # as many whole conversations to a row as fit; False: one
print_batch: bool = False  # show the first micro-batch, [what is trained on] marked, and exit
batch_size: int = 4  # rows of a micro-batch, on each rank
gradient_accumulation_steps: int = 8  # micro-batches of a step, over all ranks: 1, 2, 4 or 8 of them train the same model
max_seq_len: Optional[int] = None  # tokens of a row; None: 2048, or the model's positions where those are fewer
# model
dropout: float = 0.0  # on embeddings, attention weights and what each layer adds
# LoRA: the model stays as it is, and small matrices beside its own train; a checkpoint holds those alone
lora_rank: int = 0  # their width; 0: off, the model itself trains
lora_alpha: float = 32.0  # what they add is scaled by lora_alpha / lora_rank: another rank needs no other learning rate
lora_dropout: float = 0.0  # on what they take in
lora_targets: str = "all"  # the matrices they stand beside: all, attn, mlp, or names as q_proj,v_proj,mlp.c_proj
# teacher
teacher: Optional[str] = None  # distil what it says of each token: a path, or gpt2, gpt2-medium, gpt2-large, gpt2-xl; None: no teacher
teacher_weight: float = 0.5  # of the KL divergence from it, times temperature squared; the data's cross entropy has the rest of 1
teacher_temperature: float = 1.0  # that softens both distributions; a cache of few ids knows little of what one above 1 brings up
learn_temperature: bool = False  # go on from it by gradient descent, which lowers it: the term vanishes at 0
teacher_cache: int = 0  # likeliest ids a token that are written beside the data once, and read instead of running the teacher; 0: none
# optimizer
optimizer: Literal["adamw", "muon", "adamw_spam"] = "adamw"  # muon: Muon for the hidden matrices; adamw_spam: AdamW that clips spikes
learning_rate: float = 1e-4  # peak
epochs: float = 1.0  # passes over the rows
max_iters: Optional[int] = None  # steps, counted from the start of the run; None: as many as the epochs take
weight_decay: float = 0.0  # of matrices and embeddings; norms and biases have none
beta1: float = 0.9  # of the mean of the gradients
beta2: float = 0.95  # of the mean of their squares
muon_lr: float = 0.002  # muon: peak of the hidden matrices; min_lr is in proportion
embedding_lr: Optional[float] = None  # peak of the embeddings, and of a head tied to them; None: learning_rate
head_lr: Optional[float] = None  # llama: peak of the head; None: learning_rate
vector_lr: Optional[float] = None  # peak of biases and of norms; None: learning_rate
grad_clip: float = 1.0  # norm to which gradients are clipped; 0: not at all
spam_interval: int = 500  # adamw_spam: steps between resets of its moments
# its schedule
lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: warmup-stable-decay, linear at the end
warmup_iters: Optional[int] = None  # steps of linear rise; None: a tenth of the run, 100 at most
lr_decay_iters: Optional[int] = None  # step at which min_lr is reached; None: max_iters
min_lr: float = 0.0  # the end of the decay
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
seed: int = 1337  # of the packed rows and their order, LoRA's matrices, dropout and samples
config, given = configure(globals())

# ---------------------------------------------------------------------------------------------------
# settings that a checkpoint brings along
if init_from == "auto":
    fail("--init_from=auto: a chat run starts from a model, so give --init_from=auto:PATH")
resuming = init_from == "resume" or init_from.startswith("auto:") and runtime.found_checkpoint(out_dir)
source = out_dir if resuming else init_from.removeprefix("auto:")
checkpoint = runtime.load_checkpoint(source, merge=not resuming)
if resuming:
    if checkpoint["stage"] != "chat":
        fail(f"--out_dir={out_dir}: holds a {checkpoint['stage']} model, whose run is not one of chat_sft.py; to tune it give "
             f"--init_from={out_dir}/ckpt.pt and another --out_dir")
    if "optimizer" not in checkpoint:
        fail(f"--init_from=resume: {out_dir} holds a model without the state of its training; start a new run with "
             f"--init_from={out_dir} --out_dir=...")
    if lora_rank and "lora" not in checkpoint:
        fail(f"--lora_rank={lora_rank}: the run in {out_dir} trains the model itself; to tune it with LoRA give --init_from={out_dir}/ckpt.pt "
             f"and another --out_dir")
    fixed = ("max_seq_len", "pack", "seed", "optimizer", "sparsity", "lora_rank", "lora_alpha", "lora_targets", "teacher_cache",
             "learn_temperature")
    config = runtime.settle_config(config, given, checkpoint, fixed, per_start=("out_dir", "init_from", "overwrite", "print_batch", "chat_dir"))
    if "epochs" in given and "max_iters" not in given:
        config["max_iters"] = None
if "epochs" in given and "max_iters" in given:
    fail("--epochs and --max_iters: give one of them, both say how long the run is")
positions = checkpoint["model_args"]["max_seq_len"]
if config["max_seq_len"] is None:
    config["max_seq_len"] = min(2048, positions)
globals().update(config)
if max_seq_len > positions:
    fail(f"--max_seq_len={max_seq_len}: the model in {source} has {positions} positions; give at most that")

# ---------------------------------------------------------------------------------------------------
# process
expect_range(config, 1, math.inf, "eval_interval", "eval_iters", "eval_problems", "log_interval", "batch_size", "gradient_accumulation_steps")
expect_range(config, 0, math.inf, "sample_tokens", "max_iters", "warmup_iters", "lr_decay_iters", "learning_rate", "min_lr",
             "muon_lr", "embedding_lr", "head_lr", "vector_lr", "weight_decay", "grad_clip", "epochs", "keep_interval", "spike_loss", "spike_norm",
             "lora_rank")
expect_range(config, 1e-6, math.inf, "lora_alpha")
expect_range(config, 4, math.inf, "max_seq_len")
expect_range(config, 1, math.inf, "max_faults", "spam_interval", "prune_end", "prune_interval")
expect_range(config, 0, math.inf, "prune_begin")
expect_range(config, 0, 1, "rollback_lr", "teacher_weight")
expect_range(config, 0.01, 100, "teacher_temperature")
expect_range(config, 0, 0.999999, "beta1", "beta2", "dropout", "sparsity", "lora_dropout")
expect_range(config, 0, 2 ** 63 - 1, "seed")

for name in ("lora_alpha", "lora_dropout", "lora_targets"):
    if name in given and not lora_rank:
        fail(f"--{name}={given[name]}: with --lora_rank=0 there is no LoRA; give its rank, e.g. --lora_rank=16")
if lora_rank and sparsity:
    fail(f"--sparsity={sparsity}: with --lora_rank={lora_rank} the matrices that would be pruned do not train; expected 0")
if lora_rank and (optimizer != "adamw" or (embedding_lr, head_lr, vector_lr) != (None, None, None)):
    fail(f"--lora_rank={lora_rank}: its matrices train with --optimizer=adamw and --learning_rate, and nothing else does; leave out "
         f"the other optimizer and rates")
if keep_interval % eval_interval:
    fail(f"--keep_interval={keep_interval}: checkpoints are saved every --eval_interval={eval_interval} steps: expected a multiple of it")

rank, world_size, compute_device = runtime.init_process(device)
micro_steps = runtime.micro_steps_of(gradient_accumulation_steps, world_size)  # on this rank
rows_per_step = batch_size * gradient_accumulation_steps
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
if not print_batch:
    runtime.check_out_dir(out_dir, keep=resuming, overwrite=overwrite)

# ---------------------------------------------------------------------------------------------------
# data
tokenizer = get_tokenizer(checkpoint["tokenizer"])
special = chat_tokens(tokenizer)
eot = tokenizer.eot_token
bytes_of = token_bytes(tokenizer)
problems = {task: load_problems(task, tokenizer, "chat", task_dir) for task in task_names(eval_tasks)}
train_rows, val_rows, plan = chat_rows(chat_dir, data, val_data, checkpoint["tokenizer"], max_seq_len, pack, seed,
                                       build=int(os.environ.get("LOCAL_RANK", 0)) == 0)
fingerprint = plan["train"]["fingerprint"]
if resuming and checkpoint["data"] != fingerprint:
    fail(f"--data={data}: these are not the rows the run was started with; to train these weights on other conversations start "
         f"a new run with --init_from={out_dir}/ckpt.pt --out_dir=...")


def count(rows):
    """rows (n, 2, T) -> how many targets are trained on, and how many places are not padding."""
    x, y = rows[:, 0], rows[:, 1]
    begins = np.append(x[:, 1:] != eot, np.zeros((len(x), 1), bool), axis=1)  # <|endoftext|> before other ids begins a conversation
    return int((y != eot).sum()), int(((x != eot) | begins).sum())


def to_device(array):
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(compute_device, non_blocking=True) if compute_device.type == "cuda" else tensor.to(compute_device)


def to_model(rows):
    """rows (B, 2, T) uint16 -> what the model takes: x, y (B, T) int64 and, for packed rows, positions (B, T) and a mask."""
    x, y = to_device(rows.astype(np.int64)).unbind(1)
    y = torch.where(y == eot, IGNORE, y)
    if not pack:
        return x.contiguous(), y  # what pads a row lies behind its conversation, where causal attention does not look
    x = x.contiguous()
    return x, y, *packed(x, eot)


def step_rows(first_row, n):
    """n rows of the run from first_row on: (n, 2, T) uint16."""
    return train_rows[rows_to_windows(range(first_row, first_row + n), len(train_rows), seed)]


def train_batch(indices):
    return to_model(train_rows[indices])


def get_batch(first_row):
    """What the model takes, and what the cached teacher said of these rows, if there is one."""
    indices = rows_to_windows(range(first_row, first_row + batch_size), len(train_rows), seed)
    return train_batch(indices), [to_device(array) for array in cache[indices]] if cache else []


def val_batch(indices):
    return to_model(val_rows[indices])


def show(row):
    """A row (2, T) as text, its tokens divided by |, [those that are trained on] in brackets."""
    x, y = row.tolist()
    useful = max((i + 1 for i in range(max_seq_len) if y[i] != eot), default=0)
    text = ""
    for i in range(useful):
        text += ("\n\n" if i and x[i] == eot else "") + ("<|endoftext|>|" if x[i] == eot else "")
        last = i + 1 == useful or x[i + 1] == eot
        token = decode_chat(tokenizer, [y[i] if last else x[i + 1]]).replace("\n", "\\n")
        text += (f"[{token}]" if y[i] != eot else token) + ("" if last else "|")
    return text + f"\n\n(padding: {max_seq_len - useful} of {max_seq_len} places)"


runtime.print_once(
    f"data: {data}, {plan['train']['conversations']:,} conversations in {len(train_rows):,} rows of {max_seq_len}; of the places "
    f"{100 * plan['train']['tokens'] / (len(train_rows) * max_seq_len):.1f}% are useful and "
    f"{100 * plan['train']['trained'] / (len(train_rows) * max_seq_len):.1f}% trained on; "
    f"{plan['val']['conversations']:,} conversations for validation")
for note, (n, where) in plan["notes"].items():
    runtime.print_once(f"  {n:,} {'conversation' if n == 1 else 'conversations'} {note} (the first: {where})")
lost = sum(n for note, (n, _) in plan["notes"].items() if note.startswith(("skipped", "dropped")))
if lost > 0.1 * (lost + plan["train"]["conversations"]):
    runtime.print_once(f"WARNING: {lost:,} conversations are not trained on, see above; a row is --max_seq_len={max_seq_len} long, "
                       f"and the model has {positions} positions")
if print_batch:
    if rank == 0:
        for i, row in enumerate(step_rows(0, min(batch_size, len(train_rows)))):
            print(f"----- row {i + 1}, [trained on]\n{runtime.printable(show(row))}")
    raise SystemExit(0)

if max_iters is None:
    before = checkpoint["config"] if resuming else config
    if rows_per_step != before["batch_size"] * before["gradient_accumulation_steps"]:
        fail(f"--batch_size={batch_size} --gradient_accumulation_steps={gradient_accumulation_steps}: a step has another number of rows than "
             f"before, and --epochs counts steps; give --max_iters too, or keep their product")
    max_iters = math.ceil(epochs * len(train_rows) / rows_per_step)
decay_iters = max_iters if lr_decay_iters is None else lr_decay_iters
if warmup_iters is None:
    warmup_iters = min(100, decay_iters // 10)
try:
    check_schedule(lr_schedule, learning_rate, min_lr, warmup_iters, decay_iters, wsd_decay_frac)
    pruning = plan_pruning(config, max_iters)
except ValueError as error:
    fail(error)

# ---------------------------------------------------------------------------------------------------
# model
model_args = {**checkpoint["model_args"], "dropout": dropout}
orig_model = GPT(GPTConfig(**model_args))
if not resuming:  # a resumed run's weights come with its optimizer's state, below
    orig_model.load_state_dict(checkpoint["model"])
orig_model.recompute = recompute
n_params = sum(p.numel() for p in orig_model.parameters())
lora = {}  # what a checkpoint says of the base that it does not hold
if lora_rank:
    if resuming:
        lora = {"lora": checkpoint["lora"]}
        orig_model.load_state_dict(runtime.load_base(checkpoint["lora"], checkpoint["path"]))
    else:
        lora = {"lora": {"alpha": lora_alpha, **runtime.new_base(source, checkpoint, out_dir)}}
    torch.manual_seed(seed)
    try:
        n_adapters = add_lora(orig_model, lora_rank, lora_alpha, lora_dropout, lora_targets)
    except ValueError as error:
        fail(f"--lora_targets={lora_targets}: {error}")
    n_trained = sum(p.numel() for p in orig_model.parameters() if p.requires_grad)
    runtime.print_once(f"LoRA: {n_trained:,} parameters train, beside {n_adapters} matrices of the model's {n_params:,}; a checkpoint takes "
                       f"{12 * n_trained / 2 ** 20:.1f} MiB")  # float32, each with AdamW's two means

# Compiled for one shape, (batch_size, max_seq_len), in training and validation alike. Whatever has another shape, and
# every checkpoint, uses orig_model, whose parameters are the very same tensors.
compile_options = dict(dynamic=False, fullgraph=True, mode=compile_mode, backend=compile_backend)
if compile:
    problem = runtime.compiler_problem(compute_device, compile_backend)
    if problem:
        runtime.print_once(f"WARNING: torch.compile cannot work here ({problem}): going on uncompiled, slower")
        compile = False
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
if "masks" in checkpoint and not sparsity and not lora_rank:
    runtime.print_once("WARNING: the weights that were pruned grow back; --sparsity, as it was, keeps them zero")
# the teacher is asked in each step, or, with a cache, beforehand, once for each row that the run will see
ask, teacher_digest, log_temperature = runtime.new_teacher(
    config, optimizer, checkpoint["tokenizer"], model_args["vocab_size"], compute_device, compute_dtype, compile_options if compile else None,
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
introduction = runtime.introduce(source, checkpoint, n_params)
tokenizer_name = checkpoint["tokenizer"]
checkpoint = None  # frees its memory

# ---------------------------------------------------------------------------------------------------
# what the loop calls now and then
how_to_go_on = f"go on with python chat_sft.py --init_from=resume --out_dir={shlex.quote(out_dir)}"


def from_teacher(inputs, cached):
    """What the model takes as `teacher` for a micro-batch: what the cache has of it, or what the teacher says now."""
    x, _, *packing = inputs
    return teacher_weight, log_temperature.exp(), *((cached[0], None, cached[1].long()) if cached else (*ask(x, *packing), None))


def sample():
    """What the model answers now to the first question of val."""
    x = val_rows[0, 0].tolist()
    prompt = x[:x.index(special["assistant"]) + 1]
    ids = []
    try:
        with autocast, eager():
            for token, in orig_model.generate([prompt], sample_tokens, temperature=0.8, top_k=200, seed=seed + iter_num,
                                              stop_ids=[eot, *special.values()], n_vocab=tokenizer.n_vocab + len(special)):
                ids.append(token)
    except ValueError as error:
        return f"(none: {error})"
    return runtime.printable(decode_chat(tokenizer, prompt[1:] + ids))


def save():
    """Begins to write a checkpoint -> a future, to be waited for before a weight changes: evaluation goes on meanwhile."""
    weights, state = runtime.get_state(orig_model, optimizer, fsdp)
    if rank > 0:
        return pool.submit(bool, True)
    keep_as = f"ckpt_{iter_num}.pt" if keep_interval and iter_num % keep_interval == 0 else None
    return pool.submit(runtime.save_checkpoint, out_dir, {
        "model": weights, "optimizer": state, "scaler": scaler.state_dict(), "health": dict(health),
        "model_args": model_args, "config": config, "tokenizer": tokenizer_name, "data": fingerprint, "stage": "chat",
        "iter_num": iter_num, "rows_seen": rows_seen, "best_val_loss": best_val_loss, "val_loss": val_loss,
        "val_iter": val_iter,  # val_loss is that of step val_iter: a step is saved before it is evaluated
        **lora, **({"masks": masks} if sparsity else {}),
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
    checkpoint = runtime.load_checkpoint(out_dir, merge=False)
    runtime.load_state(orig_model, optimizer, scaler, checkpoint, fsdp)
    runtime.set_aside_damaged(checkpoint)
    masks.update(new_masks(orig_model, checkpoint, sparsity))
    if learn_temperature:
        log_temperature.data.fill_(checkpoint["teacher"]["log_temperature"])
    return checkpoint["iter_num"]


if check_health:
    good = runtime.check_model(orig_model, get_batch(0)[0], optimizer, autocast if compute_dtype != "float16" else nullcontext(),
                               from_scratch=False)
    raise SystemExit(0 if good else 1)

if teacher_cache:
    made_from = dict(teacher=teacher_digest, tokenizer=tokenizer_name, data=fingerprint, max_seq_len=max_seq_len, k=teacher_cache)
    wanted = rows_seen + (max_iters - iter_num) * rows_per_step + world_size * batch_size  # rows; the last are read, and not trained on
    with autocast:
        cache = runtime.cache_teacher(chat_dir, made_from, len(train_rows), wanted, seed, ask, train_batch, batch_size, rank, world_size)
    ask = None  # frees its memory

# ---------------------------------------------------------------------------------------------------
# say what is about to happen
runtime.print_once(
    f"from {introduction}\n"
    f"run: {max_iters:,} steps of {rows_per_step} rows ({rows_per_step * max_seq_len:,} places), "
    f"{max_iters * rows_per_step / len(train_rows):.2f} epochs; {world_size} x {compute_device.type}, {compute_dtype}")
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
    inputs, cached = get_batch(0)
    with autocast:
        loss = model(*inputs) if not teacher else model(*inputs, teacher=from_teacher(inputs, cached))[0]
        loss.backward()
    optimizer.zero_grad(set_to_none=True)
    if compile and config["optimizer"] == "muon":
        optimizer.compile(compile_backend)
    with torch.no_grad(), autocast:
        compiled.eval()(*inputs).item()
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
# since the last line of the log
loss_sum, parts_sum, targets_summed, useful_summed, steps_summed, seconds, waited, t0 = 0.0, [0.0, 0.0], 0, 0, 0, 0.0, 0.0, time.time()
while True:
    # save, then evaluate and sample: whatever goes wrong there, the step is on disk
    if iter_num % eval_interval == 0 or iter_num >= max_iters:
        seconds += time.time() - t0
        saving = save() if iter_num != saved_at else None
        if saving is None:
            runtime.print_once("evaluating ...")
        with autocast:
            val_loss, val_bpb = validation_loss(compiled, val_batch, min(len(val_rows), eval_iters * batch_size), batch_size,
                                                bytes_of, rank, world_size)
        val_iter = iter_num
        best_val_loss = min(best_val_loss, val_loss)
        if rank == 0:
            print(f"step {iter_num}: val loss {val_loss:.4f}, {val_bpb:.4f} bits per byte of the assistant's text")
            runtime.write_log(out_dir, iter=iter_num, tokens=rows_seen * max_seq_len, val_loss=val_loss, val_bpb=val_bpb)
            drawn = runtime.plot_logs([f"{out_dir}/log.jsonl"], f"{out_dir}/loss.png")
        if sample_tokens and (rank == 0 or fsdp):
            runtime.print_once(f"----- sample\n{sample()}\n-----")
        for task in problems:  # some of each task, at the end of the run all
            with autocast, eager():
                line, figures = score_for_log(task, orig_model, tokenizer, "chat",
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
    targets, useful = count(step_rows(rows_seen, rows_per_step))  # of all micro-steps and ranks: the data order tells them to each
    for micro_step in range(micro_steps):
        waiting = time.time()
        inputs, cached = next_batch.result()
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
                loss = model(*inputs)  # summed over what is trained on in the micro-batch
            else:
                loss, both = model(*inputs, teacher=from_teacher(inputs, cached))
                parts += both
        nats += loss.detach()
        # DDP divides by the ranks, hence times world_size: the gradient is that of the mean over the step's targets
        scaler.scale(loss * (world_size / max(targets, 1))).backward()

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
    fault = runtime.find_fault(health, iter_num, nats / max(targets, 1), None if overflowed else grad_norm, spike_loss, spike_norm)
    if fault is None:
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    rows_seen += rows_per_step
    steps_summed += 1
    steps_taken += 1
    targets_summed += targets
    useful_summed += useful
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
        train_loss = loss_sum / max(targets_summed, 1)  # the mean over all targets since the last line
        seconds += time.time() - t0
        tok_per_sec = useful_summed / seconds  # padding is not counted
        useful_share = useful_summed / (steps_summed * rows_per_step * max_seq_len)
        mfu = orig_model.flops_per_token(max_seq_len) * steps_summed * rows_per_step * max_seq_len / seconds / flops
        left = (max_iters - iter_num) * seconds / steps_summed
        if rank == 0:
            scale = {"loss_scale": scaler.get_scale()} if scaler.is_enabled() else {}
            pruned = {"sparsity": sparsity_of(masks)} if sparsity else {}
            taught = {key: part / max(targets_summed, 1) for key, part in zip(("ce_loss", "kl_loss"), parts_sum)}
            taught |= {"temperature": log_temperature.exp().item()} if teacher else {}
            print(f"step {iter_num}/{max_iters}: loss {train_loss:.4f}, lr {lr:.2e}, norm {grad_norm:.2f}, "
                  f"{1000 * seconds / steps_summed:.0f} ms, {tok_per_sec:,.0f} useful tok/s ({100 * useful_share:.1f}%), "
                  f"mfu {100 * mfu:.1f}%, " + "".join(f"scale {s:.0f}, " for s in scale.values())
                  + "".join(f"sparsity {100 * s:.2f}%, " for s in pruned.values())
                  + "".join(f"{key.removesuffix('_loss')} {value:.4f}, " for key, value in taught.items())
                  + f"left {int(left // 3600)}:{int(left % 3600 // 60):02d}:{int(left % 60):02d}", flush=True)
            runtime.write_log(out_dir, iter=iter_num, tokens=rows_seen * max_seq_len, train_loss=train_loss, lr=lr,
                              grad_norm=grad_norm, ms=1000 * seconds / steps_summed, tok_per_sec=tok_per_sec, mfu=mfu,
                              useful=useful_share, targets=targets_summed, shape=list(inputs[0].shape),
                              peak_mem_mb=runtime.peak_memory_mb(compute_device), recompiles=recompiles, skipped=skipped,
                              rollbacks=rollbacks, clipped=clipped, wait=waited / seconds,
                              epoch=rows_seen / len(train_rows), **scale, **pruned, **taught)
        loss_sum, parts_sum, targets_summed, useful_summed, steps_summed, seconds, waited, t0 = 0.0, [0.0, 0.0], 0, 0, 0, 0.0, 0.0, time.time()

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
          f"checkpoint: {out_dir}/ckpt.pt; talk to it: python sample.py --checkpoint={out_dir}/ckpt.pt --chat=True\n"
          f"loss curve: {out_dir}/log.jsonl, {drawn}")
if dist.is_initialized():
    dist.destroy_process_group()
