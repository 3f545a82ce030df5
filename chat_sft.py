"""
Turns a base model into a chat model: supervised fine-tuning on conversations.

    python chat_sft.py --init_from=out/ckpt.pt --data=my-chats.jsonl  # lines of {"messages": [{"role", "content"}]}
    torchrun --nproc_per_node=8 chat_sft.py --data=HuggingFaceTB/smoltalk,my-chats.jsonl:3
    python chat_sft.py --print_batch=True                             # what is trained on, token by token
    python chat_sft.py --init_from=resume --out_dir=out-chat          # resume (on a CPU bit-exact)

Rows have one fixed length, max_seq_len, so the compiled model sees one shape. By default as many whole conversations
as fit are packed into a row, with attention inside each only, and the rest of the row is padding; with --pack=False
each conversation is padded to a row of its own. The loss is the same either way, on assistant tokens only. The loop is
train_gpt2.py's; what differs is the data, and the targets, counted per step.
"""
import math
import os
import time
from dataclasses import asdict
from typing import Annotated, Literal

import torch

import runtime
from chat_data import build_datasets
from checkpoint import Checkpointer, describe_model, start_run
from configurator import (BelowOne, Fraction, NonNegative, NonNegativeFloat, Positive, Seed, configure, fail,
                          load_extra, one_line_errors)
from dataloader import BatchLoader, validation_loss
from model import GPT, GPTConfig
from optim import build_schedule, configure_optimizer, set_lr
from tokenizer import chat_tokens, get_tokenizer

# -----------------------------------------------------------------------------
# settings
out_dir: str = "out-chat"  # checkpoints, config.json, log.jsonl and loss.png
init_from: str = "out/ckpt.pt"  # a path | gpt2, gpt2-medium, ... | resume | auto:PATH (resume if possible)
overwrite: bool = False  # replace the run in out_dir
save_interval: Positive | None = None  # steps between more saves, without an evaluation; None: none
keep_interval: NonNegative = 0  # steps between saves that are kept, as ckpt_STEP.pt; 0 = none
eval_interval: Positive = 100  # steps between evaluations; before each, but for step 0's, a checkpoint is saved
eval_iters: Positive = 64  # micro-batches per evaluation, always the same
eval_tasks: str = ""  # tasks of evaluate.py scored at each evaluation, e.g. hellaswag,arc_easy
eval_problems: Positive = 64  # problems of each task; at the end of the run all of them
task_dir: str | None = None  # folder of local tasks, TASK/test.jsonl; None: from the Hugging Face hub
log_interval: Positive = 10
sample_tokens: NonNegative = 128  # length of the answer to val's first question, printed at each evaluation; 0 = off
wandb_log: bool = False  # log to Weights & Biases
tensorboard: bool = False  # log to out_dir/tensorboard
# data
data: str = "HuggingFaceTB/smoltalk"  # .jsonl files, hub data sets (owner/name/config); :3 repeats a source
val_data: str | None = None  # the same for validation; None: one in 50 conversations, not trained on
chat_dir: str = "data/chat"  # the rows are made once and kept here
pack: bool = True  # as many whole conversations per row as fit; False: one
print_batch: bool = False  # print the first micro-batch, [what is trained on] marked, and exit
batch_size: Positive = 4  # rows per micro-batch and rank
gradient_accumulation_steps: Positive = 8  # micro-batches per step over all ranks, which share them
max_seq_len: Annotated[int, 4, math.inf] | None = None  # None: 2048, or the model's positions if fewer
dropout: BelowOne = 0.0
recompute: bool = False  # activation checkpointing: less memory, a third slower
# optimizer
optimizer: Literal["adamw", "muon", "adamw_spam"] = "adamw"  # muon: for the hidden matrices; adamw_spam: clips spikes
learning_rate: NonNegativeFloat = 1e-4  # peak
epochs: NonNegativeFloat = 1.0  # passes over the rows
max_iters: NonNegative | None = None  # None: as many as the epochs take
weight_decay: NonNegativeFloat = 0.0  # of matrices, embeddings and head
beta1: BelowOne = 0.9
beta2: BelowOne = 0.95
muon_lr: NonNegativeFloat = 0.002  # muon: peak of the hidden matrices
embedding_lr: NonNegativeFloat | None = None  # peaks of other groups; None: learning_rate
head_lr: NonNegativeFloat | None = None  # llama: of the output matrix
vector_lr: NonNegativeFloat | None = None  # norms and biases
grad_clip: NonNegativeFloat = 1.0  # 0 = off
lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: warmup-stable-decay
warmup_iters: NonNegative | None = None  # None: a tenth of the run, at most 100 and none of wsd's decay
lr_decay_iters: NonNegative | None = None  # None: max_iters
min_lr: NonNegativeFloat = 0.0
wsd_decay_frac: Fraction = 0.2  # wsd: share of lr_decay_iters in which the rate falls
# optional features; the details of each are settings of its file in extras/
lora_rank: NonNegative = 0  # lora.py: freeze the model and train adapters of this rank; 0 = off
teacher: str | None = None  # distill.py: knowledge distillation from this model, a path or gpt2, ...
sparsity: BelowOne = 0.0  # prune.py: share of the hidden matrices' weights that ends at zero
spike_loss: NonNegativeFloat = 3.0  # rollback.py: roll back at this many times the mean loss; 0 = off
spike_norm: NonNegativeFloat = 100.0  # rollback.py: the same for the gradient norm
fsdp: bool = False  # fsdp.py: shard parameters, gradients and optimizer state over the ranks
sanity_check: bool = False  # sanity.py: can the model learn at all? on one micro-batch, then exit
# system
device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of the matmuls; auto: bfloat16 if supported
compile: bool = True
compile_mode: Literal["default", "reduce-overhead", "max-autotune"] | None = None
compile_backend: str = "inductor"
seed: Seed = 1337
config, overrides = configure(globals(), extras=("lora", "distill", "prune", "spam", "rollback", "trackers"))

# -----------------------------------------------------------------------------
# setup
if "epochs" in overrides and "max_iters" in overrides:
    fail("--epochs and --max_iters: give one of them, both set the length of the run")
checkpoint, resuming = start_run(config, overrides, "chat")
if "epochs" in overrides:
    config["max_iters"] = None
globals().update(config)  # a resumed run has the settings of its checkpoint
rank, world_size, device = runtime.init_process(device)
dtype = runtime.pick_dtype(dtype, device)
autocast = runtime.autocast(device, dtype)
scaler = torch.amp.GradScaler(device.type, enabled=dtype == "float16")
micro_steps = runtime.local_grad_accum_steps(gradient_accumulation_steps, world_size, batch_size)
global_batch_size = batch_size * gradient_accumulation_steps  # rows per step

tokenizer = get_tokenizer(checkpoint["tokenizer"])
train_data, val_data, description = build_datasets(chat_dir, data, val_data, tokenizer, max_seq_len, pack, seed,
                                                   build=int(os.environ.get("LOCAL_RANK", 0)) == 0)
loader = BatchLoader(train_data, batch_size, seed, rank, world_size, device)
runtime.print0(description)
if print_batch:
    for i in loader.indices(0, min(batch_size, len(train_data))):
        runtime.print0(f"----- row {i}, [trained on]\n{train_data.format_row(i)}")
    raise SystemExit(0)

if max_iters is None:
    before = checkpoint["config"]
    if resuming and global_batch_size != before["batch_size"] * before["gradient_accumulation_steps"]:
        fail(f"--batch_size={batch_size} --gradient_accumulation_steps={gradient_accumulation_steps}: with another "
             f"number of rows per step --epochs has no meaning on resume; give --max_iters, or keep their product")
    max_iters = math.ceil(epochs * len(train_data) / global_batch_size)
get_lr = build_schedule(config, max_iters)

orig_model = GPT(GPTConfig(**{**checkpoint["model_args"], "dropout": dropout}))
if not resuming:
    with one_line_errors(init_from):
        orig_model.load_state_dict(checkpoint["model"])
orig_model.recompute = recompute

# -----------------------------------------------------------------------------
# Optional features attach to these, as in train_gpt2.py
state, gradient_hooks, metrics, eval_hooks = {"model": orig_model, "scaler": scaler, "rows_seen": loader}, [], [], []
if scaler.is_enabled():
    metrics.append(lambda: {"loss_scale": scaler.get_scale()})
options = runtime.compile_options(config, device)
if lora_rank:
    state["lora"] = load_extra("lora", config, "lora_rank").Lora(orig_model, config, checkpoint, resuming)
if teacher:
    state["teacher"] = distillation = load_extra("distill", config, "teacher").Distillation(
        orig_model, train_data, device, dtype, options, config)
    metrics.append(distillation.metrics)

# Compiled for one shape, (batch_size, max_seq_len), in training and validation. Whatever has another shape, and every
# checkpoint, uses orig_model, whose parameters are the same tensors.
model, compiled = runtime.wrap_model(orig_model, device, dtype, options, config)
state["optimizer"] = optimizer = configure_optimizer(orig_model, config)

if sparsity:
    state["masks"] = pruner = load_extra("prune", config, "sparsity").Pruner(
        orig_model, optimizer, config, max_iters, checkpoint)
    gradient_hooks.append(pruner.mask_gradients)
    metrics.append(pruner.metrics)
if config["optimizer"] == "adamw_spam":
    gradient_hooks.append(load_extra("spam", config, "optimizer").spam_hook(optimizer))
rollback = load_extra("rollback", config, *overrides.keys() & {"spike_loss", "spike_norm"})
guard = rollback and rollback.SpikeGuard(config, optimizer, scaler)
if guard:
    state["health"] = guard
    gradient_hooks.append(guard.scale_lr)
    metrics.append(guard.metrics)
if sample_tokens:
    from sample import sample_hook
    question = val_data.rows[0, 0].tolist()
    question = question[:question.index(chat_tokens(tokenizer)["assistant"]) + 1]
    eval_hooks.append(sample_hook(orig_model, tokenizer, autocast, question, sample_tokens, seed, chat=True))
if eval_tasks:
    from evaluate import task_hook
    eval_hooks.append(task_hook(orig_model, tokenizer, autocast, "chat", config))
if wandb_log or tensorboard:
    state["trackers"] = trackers = load_extra("trackers", config, "wandb_log", "tensorboard").Trackers(config)
plot = load_extra("plot", config)
if plot:
    eval_hooks.append(plot.plot_hook(out_dir))

facts = dict(model_args=asdict(orig_model.config), config=config, tokenizer=tokenizer.name,
             data=train_data.fingerprint, stage="chat")
checkpointer = Checkpointer(out_dir, state, facts, resuming)
iter_num = checkpointer.resume(checkpoint, max_iters) if resuming else 0
runtime.print0(f"from {describe_model(checkpoint)}")
checkpoint = None  # frees its memory
if teacher:
    distillation.attach(loader, (max_iters - iter_num) * global_batch_size, chat_dir)
if sanity_check:
    load_extra("sanity", config, "sanity_check").check(
        orig_model, loader.peek(), optimizer, autocast, False, world_size)

runtime.print0(f"run: {max_iters:,} steps of {global_batch_size} rows of {max_seq_len}, "
               f"{max_iters * global_batch_size / len(train_data):.2f} epochs; {world_size} x {device.type}, {dtype}")
runtime.report_settings({**config, **facts["model_args"]}, overrides)
seconds = runtime.warm_up(model, compiled, optimizer, loader.peek(), autocast, options)
if not resuming:
    checkpointer.remove_old()
log = runtime.Logger(out_dir, config, max_iters, loader, orig_model, dtype, metrics, iter_num, resuming)
if rank == 0 and (wandb_log or tensorboard):
    log.trackers = trackers.start(iter_num)
if options:
    log(iter_num, event="compiled", compile_seconds=seconds)

# -----------------------------------------------------------------------------
# training loop; iter_num counts the steps taken
runtime.catch_signals()
while True:
    # the checkpoint is written by a thread during the evaluation, so a failure in there loses no step
    done = iter_num >= max_iters
    if iter_num % eval_interval == 0 or done:
        runtime.print0("evaluating ...")
        checkpointer.save(iter_num)
        with autocast:
            val_loss, val_bpb = validation_loss(compiled, val_data, batch_size, eval_iters, device, rank, world_size)
        log(iter_num, val_loss=val_loss, val_bpb=val_bpb)  # of the assistant's text
        checkpointer.evaluated(iter_num, val_loss)  # waits for the write: a hook may swap the weights
        for hook in eval_hooks:  # a sample, tasks, the plot
            log(iter_num, **hook(iter_num, done))
    elif save_interval and iter_num % save_interval == 0 or keep_interval and iter_num % keep_interval == 0:
        checkpointer.save(iter_num)
        checkpointer.wait()  # before a weight changes
    if done:
        break

    # forward and backward; the gradient is that of the mean over all targets of the step. Every rank knows the order
    # of the rows, so it can count them before its first backward
    t0 = time.perf_counter()
    torch.manual_seed(runtime.step_seed(seed, iter_num, rank))  # dropout
    loss_sum = torch.zeros((), device=device)
    targets, tokens = train_data.count_targets(loader.indices(loader.rows_seen, global_batch_size))
    for micro_step in range(micro_steps):
        batch = next(loader)
        runtime.set_gradient_sync(model, micro_step == micro_steps - 1)
        with autocast:
            loss = model(**batch)  # summed over the targets of the micro-batch
        loss_sum += loss.detach()
        scaler.scale(loss * (world_size / targets)).backward()  # DDP averages over the ranks
    loss_sum, stopping = runtime.all_reduce(loss_sum, runtime.stop_requested)

    # optimizer step
    lr = get_lr(iter_num)
    set_lr(optimizer, lr, iter_num)
    scaler.unscale_(optimizer)
    for hook in gradient_hooks:
        hook(iter_num)
    grad_norm = runtime.clip_grad_norm(orig_model, grad_clip)
    if guard and guard.is_spike(iter_num, loss_sum / targets, grad_norm):
        iter_num = guard.recover(iter_num, checkpointer, log)  # the data is not rewound
    else:
        if math.isfinite(loss_sum) and math.isfinite(grad_norm):
            scaler.step(optimizer)
        else:
            log.skip(iter_num, loss_sum)
        iter_num += 1
    scaler.update()

    # log; padding is not counted as tokens
    log.step(loss_sum=loss_sum, targets=targets, tokens=tokens, rows=global_batch_size,
             clipped=0 < grad_clip < grad_norm < math.inf, seconds=time.perf_counter() - t0)
    if iter_num % log_interval == 0 or iter_num == 1 or iter_num == max_iters or stopping:
        log.train(iter_num, lr=lr, grad_norm=grad_norm, shape=list(batch["idx"].shape))
    optimizer.zero_grad()  # after the log, whose metrics may read gradients
    if stopping:
        break

checkpointer.finish(iter_num)
runtime.finish(iter_num, out_dir, not done, checkpointer.facts,
               f"python sample.py --checkpoint={out_dir}/ckpt.pt --chat=True")
