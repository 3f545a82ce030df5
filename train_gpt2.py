"""
Pretrains a GPT on token shards. The defaults are GPT-2 124M on FineWeb-Edu.

    python train_gpt2.py config/quickstart.py                        # minutes, on a laptop
    torchrun --nproc_per_node=8 train_gpt2.py --compile=True         # eight GPUs, the same model as one
    python train_gpt2.py --init_from=resume --out_dir=out            # resume (on a CPU bit-exact)

In the order it runs: settings, setup, data, model, optimizer; then evaluate, forward, backward, step, log.
"""
import math
import time
from dataclasses import asdict, fields
from typing import Annotated, Literal

import torch

import runtime
from checkpoint import Checkpointer, check_tokenizer, start_run
from configurator import (BelowOne, Fraction, NonNegative, NonNegativeFloat, Positive, Seed, configure, load_extra,
                          one_line_errors)
from dataloader import BatchLoader, TokenDataset, validation_loss
from model import GPT, GPTConfig
from optim import build_schedule, configure_optimizer, set_lr

# -----------------------------------------------------------------------------
# settings
out_dir: str = "out"  # checkpoints, config.json, log.jsonl and loss.png
init_from: str = "scratch"  # scratch | resume | auto (resume if possible) | gpt2, gpt2-medium, ... | a path
overwrite: bool = False  # replace the run in out_dir
save_interval: Positive | None = None  # steps between more saves, without an evaluation; None: none
keep_interval: NonNegative = 0  # steps between saves that are kept, as ckpt_STEP.pt; 0 = none
eval_interval: Positive = 500  # steps between evaluations; before each, but for step 0's, a checkpoint is saved
eval_iters: Positive = 64  # micro-batches per evaluation, always the same: 64 * 16 * 1024 are 1M tokens
eval_tasks: str = ""  # tasks of evaluate.py scored at each evaluation, e.g. hellaswag,arc_easy
eval_problems: Positive = 64  # problems of each task; at the end of the run all of them
task_dir: str | None = None  # folder of local tasks, TASK/test.jsonl; None: from the Hugging Face hub
log_interval: Positive = 10
sample_tokens: NonNegative = 64  # length of the sample printed at each evaluation; 0 = off
wandb_log: bool = False  # log to Weights & Biases
tensorboard: bool = False  # log to out_dir/tensorboard
# data
data_dir: str = "data/fineweb-edu"  # shards from prepare_data.py, or any in llm.c's layout
batch_size: Positive = 16  # rows per micro-batch and rank
gradient_accumulation_steps: Positive = 8  # micro-batches per step over all ranks, which share them
max_seq_len: Positive = 1024
# model
arch: Literal["gpt2", "llama"] = "gpt2"
attention: Literal["mha", "mla"] = "mha"  # multi-head or multi-head latent
n_layer: Positive = 12
n_head: Positive = 12
n_embd: Positive = 768
n_kv_head: Positive | None = None  # llama: grouped-query attention; None: n_head
qk_norm: bool = False  # llama: normalise queries and keys
embed_norm: bool = False  # llama: normalise the embedding; with qk_norm, heads begin by attending a few positions back
intermediate_size: Positive | None = None  # MLP width; None: 4 n_embd, llama: 8/3 n_embd
gelu: Literal["tanh", "exact"] = "tanh"  # gpt2: GPT-2's approximation, or nanoGPT's exact one
rope_theta: Annotated[float, 1, math.inf] = 10000.0  # llama: base of the rotary frequencies
kv_lora_rank: Positive | None = None  # mla: latent width, cached per token; None: 128, at most n_embd / 2
q_lora_rank: Positive | None = None  # mla, llama: latent width of queries; None: no latent
qk_nope_head_dim: Positive | None = None  # mla: width of the unrotated part of a query; None: the rest
qk_rope_head_dim: NonNegative | None = None  # mla, llama: width of the rotated part; None: half of n_embd / n_head
v_head_dim: Positive | None = None  # mla: None: n_embd / n_head
dropout: BelowOne = 0.0  # on embeddings, attention weights and residual branches
recompute: bool = False  # activation checkpointing: less memory, a third slower
# optimizer
optimizer: Literal["adamw", "muon", "adamw_spam"] = "adamw"  # muon: for the hidden matrices; adamw_spam: clips spikes
learning_rate: NonNegativeFloat = 6e-4  # peak
max_iters: NonNegative = 50000
weight_decay: NonNegativeFloat = 0.1  # of matrices, embeddings and head
beta1: BelowOne = 0.9
beta2: BelowOne = 0.95
muon_lr: NonNegativeFloat = 0.02  # muon: peak of the hidden matrices
embedding_lr: NonNegativeFloat | None = None  # peaks of other groups; None: learning_rate
head_lr: NonNegativeFloat | None = None  # llama: of the output matrix
vector_lr: NonNegativeFloat | None = None  # norms and biases
grad_clip: NonNegativeFloat = 1.0  # 0 = off
lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: warmup-stable-decay
warmup_iters: NonNegative = 2000
lr_decay_iters: NonNegative | None = None  # None: max_iters
min_lr: NonNegativeFloat = 6e-5
wsd_decay_frac: Fraction = 0.2  # wsd: share of lr_decay_iters in which the rate falls
# optional features; the details of each are settings of its file in extras/
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
config, overrides = configure(globals(), extras=("distill", "prune", "spam", "rollback", "trackers"))

# -----------------------------------------------------------------------------
# setup
checkpoint, resuming = start_run(config, overrides, "base")
globals().update(config)  # a resumed run has the settings of its checkpoint
rank, world_size, device = runtime.init_process(device)
dtype = runtime.pick_dtype(dtype, device)
autocast = runtime.autocast(device, dtype)
scaler = torch.amp.GradScaler(device.type, enabled=dtype == "float16")
micro_steps = runtime.local_grad_accum_steps(gradient_accumulation_steps, world_size, batch_size)
global_batch_size = batch_size * gradient_accumulation_steps  # rows per step
tokens_per_step = global_batch_size * max_seq_len
get_lr = build_schedule(config, max_iters)

train_data, val_data = (TokenDataset(data_dir, split, max_seq_len) for split in ("train", "val"))
tokenizer = train_data.tokenizer
loader = BatchLoader(train_data, batch_size, seed, rank, world_size, device)

torch.manual_seed(seed)  # the same weights on every rank
model_args = {field.name: config[field.name] for field in fields(GPTConfig) if field.name in config}
model_args["vocab_size"] = train_data.vocab_size
from_scratch = checkpoint is None
if checkpoint:
    check_tokenizer(f"--data_dir={data_dir}", tokenizer, checkpoint)
    model_args = {**checkpoint["model_args"], "dropout": dropout}
with one_line_errors(errors=ValueError):
    orig_model = GPT(GPTConfig(**model_args))
if checkpoint and not resuming:
    with one_line_errors(init_from):
        orig_model.load_state_dict(checkpoint["model"])
orig_model.recompute = recompute

# -----------------------------------------------------------------------------
# Optional features attach to these. state: what a checkpoint holds, anything with a state_dict. gradient_hooks: called
# with iter_num after set_lr and before clipping; they may change gradients and learning rates. metrics: functions that
# return a dict for the log. eval_hooks: called at each evaluation.
state, gradient_hooks, metrics, eval_hooks = {"model": orig_model, "scaler": scaler, "rows_seen": loader}, [], [], []
if scaler.is_enabled():
    metrics.append(lambda: {"loss_scale": scaler.get_scale()})
options = runtime.compile_options(config, device)
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
    eval_hooks.append(sample_hook(orig_model, tokenizer, autocast, [tokenizer.eot_token], sample_tokens, seed))
if eval_tasks:
    from evaluate import task_hook
    eval_hooks.append(task_hook(orig_model, tokenizer, autocast, "base", config))
if wandb_log or tensorboard:
    state["trackers"] = trackers = load_extra("trackers", config, "wandb_log", "tensorboard").Trackers(config)
plot = load_extra("plot", config)
if plot:
    eval_hooks.append(plot.plot_hook(out_dir))

facts = dict(model_args=asdict(orig_model.config), config=config, tokenizer=tokenizer.name,
             data=train_data.fingerprint, stage="base")
checkpointer = Checkpointer(out_dir, state, facts, resuming)
iter_num = checkpointer.resume(checkpoint, max_iters) if resuming else 0
checkpoint = None  # frees its memory
if teacher:
    distillation.attach(loader, (max_iters - iter_num) * global_batch_size, data_dir)
if sanity_check:
    load_extra("sanity", config, "sanity_check").check(
        orig_model, loader.peek(), optimizer, autocast, from_scratch, world_size)

runtime.print0(f"""\
model: {arch}, {attention}, {sum(p.numel() for p in orig_model.parameters()) / 1e6:.1f}M parameters
data: {data_dir}, {train_data.tokens:,} tokens: {len(train_data):,} rows of {max_seq_len}, and \
{train_data.dropped_tokens:,} left over at the ends of shards; {val_data.tokens:,} tokens for validation
run: {max_iters:,} steps of {tokens_per_step:,} tokens, {max_iters * global_batch_size / len(train_data):.2f} epochs; \
{world_size} x {device.type}, {dtype}""")
runtime.report_settings(config, overrides)
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
        log(iter_num, val_loss=val_loss, val_ppl=math.exp(min(val_loss, 700)), val_bpb=val_bpb)
        checkpointer.evaluated(iter_num, val_loss)  # waits for the write: a hook may swap the weights
        for hook in eval_hooks:  # a sample, tasks, the plot
            log(iter_num, **hook(iter_num, done))
    elif save_interval and iter_num % save_interval == 0 or keep_interval and iter_num % keep_interval == 0:
        checkpointer.save(iter_num)
        checkpointer.wait()  # before a weight changes
    if done:
        break

    # forward and backward; the gradient is that of the mean over the step's tokens
    t0 = time.perf_counter()
    torch.manual_seed(runtime.step_seed(seed, iter_num, rank))  # dropout
    loss_sum = torch.zeros((), device=device)
    for micro_step in range(micro_steps):
        batch = next(loader)
        runtime.set_gradient_sync(model, micro_step == micro_steps - 1)
        with autocast:
            loss = model(**batch)  # summed over the micro-batch
        loss_sum += loss.detach()
        scaler.scale(loss * (world_size / tokens_per_step)).backward()  # DDP averages over the ranks
    loss_sum, stopping = runtime.all_reduce(loss_sum, runtime.stop_requested)

    # optimizer step
    lr = get_lr(iter_num)
    set_lr(optimizer, lr, iter_num)
    scaler.unscale_(optimizer)
    for hook in gradient_hooks:
        hook(iter_num)
    grad_norm = runtime.clip_grad_norm(orig_model, grad_clip)
    if guard and guard.is_spike(iter_num, loss_sum / tokens_per_step, grad_norm):
        iter_num = guard.recover(iter_num, checkpointer, log)  # the data is not rewound
    else:
        if math.isfinite(loss_sum) and math.isfinite(grad_norm):
            scaler.step(optimizer)
        else:
            log.skip(iter_num, loss_sum)
        iter_num += 1
    scaler.update()

    # log
    log.step(loss_sum=loss_sum, targets=tokens_per_step, tokens=tokens_per_step, rows=global_batch_size,
             clipped=0 < grad_clip < grad_norm < math.inf, seconds=time.perf_counter() - t0)
    if iter_num % log_interval == 0 or iter_num == 1 or iter_num == max_iters or stopping:
        log.train(iter_num, lr=lr, grad_norm=grad_norm)
    optimizer.zero_grad()  # after the log, whose metrics may read gradients
    if stopping:
        break

checkpointer.finish(iter_num)
runtime.finish(iter_num, out_dir, not done, checkpointer.facts, f"python sample.py --checkpoint={out_dir}/ckpt.pt")
