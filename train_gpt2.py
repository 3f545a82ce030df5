"""
Pretrains a GPT on token shards. The defaults are GPT-2 124M on FineWeb-Edu.

    python train_gpt2.py config/quickstart.py                        # minutes, on a laptop
    torchrun --nproc_per_node=8 train_gpt2.py --compile=True         # eight GPUs, the same model as on one
    python train_gpt2.py --init_from=resume --out_dir=out            # resume (bit-exact on a CPU)

Read it in the order it runs: settings, setup, data, model, optimizer; then evaluate, forward, backward, step, log.
"""
import math
import time
from typing import Annotated, Literal

# before torch, whose import takes seconds: from here on Ctrl-C prints one line
from configurator import (BelowOne, Fraction, NonNegative, NonNegativeFloat, Positive, Seed, configure,
                          one_line_errors, update_settings)

import torch

from checkpoint import Checkpointer, check_tokenizer
from compiling import compile_options, warm_up, wrap_model
from dataloader import BatchLoader, TokenDataset, validation_loss
from distributed import (all_reduce, check_ranks_agree, clip_grad_norm, get_rank, get_world_size, init_process,
                         local_grad_accum_steps, make_autocast, pick_dtype, print0, step_seed)
from features import change_model, change_training, check_sanity, evaluation_hooks
from interrupt import StopSignal, drop_failed_writes, finish
from log import Logger, find_nonfinite
from machine import peak_flops
from model import GPT, GPTConfig
from optim import build_schedule, configure_optimizer, set_lr, step_if_finite
from start import check_out_dir, load_init_from, lock_out_dir, report_settings
from tokenizer import tokenizer_entry

# -----------------------------------------------------------------------------
# settings
out_dir: str | None = "out"  # checkpoints, config.json, log.jsonl and loss.png; None: keep nothing
init_from: str = "scratch"  # scratch | resume | auto, auto:PATH (resume if possible) | gpt2, gpt2-medium, ... | a path
overwrite: bool = False  # replace the run in out_dir
eval_interval: Positive = 500  # evaluate and save a checkpoint every this many steps
eval_iters: Positive = 64  # micro-batches per evaluation, from the start of val: 64 * 16 * 1024 is 1M tokens
save_interval: Positive | None = None  # also save every this many steps, without an evaluation
eval_tasks: str = ""  # tasks of evaluate.py to score at each evaluation, e.g. hellaswag,arc_easy
task_dir: str | None = None  # folder of local tasks, TASK/test.jsonl; None: use the Hugging Face hub
log_interval: Positive = 10
sample_tokens: NonNegative = 64  # length of the sample printed at each evaluation after step 0; 0 = off
wandb_log: bool = False  # log to Weights & Biases
wandb_project: str | None = None  # None: $WANDB_PROJECT, or forkgpt; the run is named $WANDB_NAME, or after out_dir
tensorboard: bool = False  # log to out_dir/tensorboard
# data
data_dir: str = "data/fineweb-edu"  # shards from prepare_data.py, llm.c's, or nanoGPT's train.bin and val.bin
batch_size: Positive = 16  # rows per micro-batch and rank
gradient_accumulation_steps: Positive = 8  # micro-batches per step, of all ranks together
max_seq_len: Positive = 1024
# model
arch: Literal["gpt2", "llama"] = "gpt2"
attention: Literal["mha", "mla"] = "mha"  # multi-head or multi-head latent
n_layer: Positive = 12
n_head: Positive = 12
n_embd: Positive = 768
n_kv_head: Positive | None = None  # llama: grouped-query attention; None: n_head
qk_norm: bool = False  # llama: normalize queries and keys
embed_norm: bool = False  # llama: normalize the embedding
local_heads: bool = False  # llama: begin with heads that look back and one that copies; needs both norms
intermediate_size: Positive | None = None  # MLP width; None: 4 n_embd, llama: 8/3 n_embd
rope_theta: Annotated[float, 1, math.inf] = 10000.0  # llama: base of the rotary frequencies
kv_lora_rank: Positive | None = None  # mla: latent width, cached per token; None: min(128, n_embd / 2)
q_lora_rank: Positive | None = None  # mla, llama: latent width of queries; None: no latent
dropout: BelowOne = 0.0  # on embeddings, attention weights and residual branches
recompute: bool = False  # activation checkpointing: less memory, a third slower
# optimizer
optimizer: Literal["adamw", "muon", "adamw_spam"] = "adamw"  # muon: for the hidden matrices; adamw_spam: clips spikes
learning_rate: NonNegativeFloat = 6e-4  # peak
max_iters: NonNegative = 50000
weight_decay: NonNegativeFloat = 0.1  # of matrices, embeddings and head
beta1: BelowOne = 0.9
beta2: BelowOne = 0.95
muon_lr: NonNegativeFloat = 0.02  # muon: peak for the hidden matrices at 12 layers, 768 wide; optim.py scales it
embedding_lr: NonNegativeFloat | None = None  # peak for the embeddings; None here and in the next two: learning_rate
head_lr: NonNegativeFloat | None = None  # llama: peak for an output matrix 768 wide; optim.py scales it
vector_lr: NonNegativeFloat | None = None  # peak for norms and biases
grad_clip: NonNegativeFloat = 1.0  # 0 = off
lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: warmup-stable-decay
warmup_iters: NonNegative | None = None  # None: a tenth of lr_decay_iters, at most 2000; ends before wsd's decay
lr_decay_iters: NonNegative | None = None  # None: max_iters
min_lr: NonNegativeFloat = 6e-5
wsd_decay_frac: Fraction = 0.2  # wsd: share of lr_decay_iters over which the rate falls
# SPAM: --optimizer=adamw_spam
spam_interval: Positive = 500  # steps between momentum resets
spam_warmup: NonNegative | None = None  # warm-up steps after each reset; None: min(150, 0.3 spam_interval)
spam_theta: Annotated[float, 1, math.inf] = 5000.0  # a spike: an element whose square is over this times its average
# pruning
sparsity: BelowOne = 0.0  # share of the hidden matrices' weights to prune to zero; 0 = off
prune_by: Literal["magnitude", "state"] = "magnitude"  # |w|, or |w| v^(1/4) with AdamW's second moment v
prune_begin: NonNegative | None = None  # step at which sparsity begins to rise; None: a tenth of max_iters
prune_end: Positive | None = None  # step at which it is reached; None: three quarters of max_iters
# distillation
teacher: str | None = None  # distil from this model, a path or gpt2, ...
teacher_weight: Fraction = 0.5  # w of the loss (1 - w) cross entropy + w T^2 KL(teacher || student)
teacher_temperature: Annotated[float, 0.01, 100] = 1.0  # T; with a small teacher_cache, near 1
learn_temperature: bool = False  # learn T; it collapses towards 0, so prefer a fixed one
teacher_cache: NonNegative = 0  # cache the teacher's top-k log-probs on disk; 0 = off: the teacher runs every step
shard_teacher: bool = False  # shard only the teacher over the ranks; the student stays whole
# safety
spike_loss: NonNegativeFloat = 0.0  # roll back if the loss is this many times its mean, e.g. 3; 0 = off
spike_norm: NonNegativeFloat = 0.0  # roll back if the gradient norm is this many times its mean, e.g. 100; 0 = off
rollback_lr: Fraction = 1.0  # factor on the learning rate for 100 steps after a rollback
sanity_check: bool = False  # can the model learn at all? try on one micro-batch, then exit
# system
fsdp: bool = False  # shard parameters, gradients and optimizer state over the ranks
device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of the matmuls; auto: bfloat16 if supported
compile: bool = True
compile_mode: Literal["default", "reduce-overhead", "max-autotune"] | None = None
compile_backend: str = "inductor"
seed: Seed = 1337
config, overrides = configure(globals())

# -----------------------------------------------------------------------------
# setup
drop_failed_writes()
lock = lock_out_dir(config)  # before anything there is read
checkpoint, resuming = load_init_from(config, overrides, "base")
update_settings(globals(), config, checkpoint and checkpoint["path"])  # config may hold a checkpoint's settings
check_out_dir(config, resuming, checkpoint)
torch_device = init_process(device)
rank, world_size = get_rank(), get_world_size()
amp_dtype = pick_dtype(dtype, torch_device)
autocast = make_autocast(torch_device, amp_dtype)
scaler = torch.amp.GradScaler(torch_device.type, enabled=amp_dtype == "float16")
micro_steps = local_grad_accum_steps(gradient_accumulation_steps, world_size)
global_batch_size = batch_size * gradient_accumulation_steps  # rows per step
tokens_per_step = global_batch_size * max_seq_len
get_lr = build_schedule(config, max_iters)

train_data, val_data = (TokenDataset(data_dir, split, max_seq_len) for split in ("train", "val"))
tokenizer = train_data.tokenizer
loader = BatchLoader(train_data, batch_size, seed, rank, world_size, torch_device)
check_ranks_agree({"step": checkpoint["iter_num"] if resuming else None, "data": train_data.fingerprint})

torch.manual_seed(seed)  # the same weights on every rank
if checkpoint:
    check_tokenizer(f"--data_dir={data_dir}", tokenizer, checkpoint)
    model_args = {**checkpoint["model_args"], "dropout": dropout}
else:
    model_args = {name: config[name] for name in GPTConfig.__annotations__ if name in config}
    model_args["vocab_size"] = train_data.vocab_size
with one_line_errors(errors=ValueError):
    orig_model = GPT(GPTConfig(**model_args))
if checkpoint and not resuming:
    with one_line_errors(init_from):
        orig_model.load_state_dict(checkpoint["model"])
orig_model.recompute = recompute

# -----------------------------------------------------------------------------
# Optional features attach here (features.py). state: entries of a checkpoint, anything with state_dict and
# load_state_dict. gradient_hooks: called with iter_num before clipping; they may change gradients and learning rates.
# metrics: functions that return a dict for the log. eval_hooks: called at each evaluation.
state, metrics = {"model": orig_model, "scaler": scaler, "rows_seen": loader}, []
options = compile_options(config, torch_device)
change_model(orig_model, loader, max_iters, config, amp_dtype, options, checkpoint, resuming, state, metrics)

# The model is compiled for one shape, (batch_size, max_seq_len), in training and validation. Everything that has
# another shape, and every checkpoint, uses orig_model, whose parameters are the same tensors.
model, eval_model = wrap_model(orig_model, torch_device, options)
state["optimizer"] = opt = configure_optimizer(orig_model, config)
gradient_hooks, guard, trackers = change_training(orig_model, opt, max_iters, config, checkpoint, state, metrics)
eval_hooks = evaluation_hooks(orig_model, tokenizer, autocast, [tokenizer.eot_token], config, "base")

facts = dict(model_args=vars(orig_model.config), config=config, data=train_data.fingerprint, stage="base",
             tokenizer=checkpoint["tokenizer"] if checkpoint else tokenizer_entry(tokenizer))  # keeps a chat template
checkpointer = Checkpointer(out_dir, state, facts)
iter_num = checkpointer.resume(checkpoint, max_iters) if resuming else 0
if sanity_check:
    check_sanity(orig_model, loader.peek(), opt, autocast, checkpoint is None, world_size)
checkpoint = None  # frees its memory

num_rows = loader.rows_seen + (max_iters - iter_num) * global_batch_size  # of the whole run, resumed or not
print0(f"""\
model: {arch}, {attention}, {sum(p.numel() for p in orig_model.parameters()) / 1e6:.1f}M parameters
data: {data_dir}, {train_data.tokens:,} tokens: {len(train_data):,} rows of {max_seq_len}, and \
{train_data.dropped_tokens:,} left over at the ends of shards; {val_data.tokens:,} tokens for validation
run: {max_iters:,} steps of {global_batch_size} rows, {tokens_per_step:,} tokens, \
{num_rows / len(train_data):.2f} epochs; {world_size} x {torch_device.type}, {amp_dtype}""")
report_settings(config, overrides, torch_device)
compile_seconds = warm_up(model, eval_model, opt, loader.peek(), autocast, options)
log = Logger(out_dir, max_iters, eval_interval, loader, orig_model.flops_per_token(max_seq_len),
             world_size * peak_flops(torch_device, amp_dtype), metrics, trackers, resuming)
log(iter_num, event="resume" if resuming else "start", compile_seconds=compile_seconds)

# -----------------------------------------------------------------------------
# training loop; iter_num counts steps, skipped ones too
stop = StopSignal(out_dir)
finite = True  # loss and gradient of the last step
while True:
    done = iter_num >= max_iters
    if iter_num % eval_interval == 0 or done:
        print0("evaluating ...")
        t0 = time.perf_counter()
        with autocast:
            val_loss, val_bpb = validation_loss(eval_model, val_data, batch_size, eval_iters, torch_device)
        log(iter_num, val_loss=val_loss, val_ppl=math.exp(min(val_loss, 700)), val_bpb=val_bpb)
        if finite or done:  # after a skipped step weights may be NaN; two such saves would replace both files
            checkpointer.save(iter_num, val_loss)  # before the hooks, which may fail
        for hook in eval_hooks:  # a sample, tasks, the plot
            log(iter_num, **hook(iter_num, done))
        log(iter_num, eval_seconds=time.perf_counter() - t0)
    elif save_interval and iter_num % save_interval == 0 and finite:
        checkpointer.save(iter_num)
    if done:
        break

    # forward and backward; the gradient is that of the mean over the step's tokens
    t0 = time.perf_counter()
    torch.manual_seed(step_seed(seed, iter_num, rank))  # dropout
    loss_sum = torch.zeros((), device=torch_device)
    for micro_step in range(micro_steps):
        batch = next(loader)
        if world_size > 1:  # DDP averages over the ranks in the last backward pass alone, FSDP in each
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        with autocast:
            loss = model(**batch)  # summed over the micro-batch
        loss_sum += loss.detach()
        scaler.scale(loss * (world_size / tokens_per_step)).backward()  # DDP averages over the ranks

    # optimizer step, unless the step is not finite (then it is skipped); after a spike the run is rolled back
    lr = get_lr(iter_num)
    set_lr(opt, lr)
    scaler.unscale_(opt)
    for hook in gradient_hooks:
        hook(iter_num)
    grad_norm = clip_grad_norm(orig_model, grad_clip)
    loss_sum, stopping = all_reduce(loss_sum, torch.full_like(loss_sum, stop.requested))
    finite, loss_sum, grad_norm, stopping = step_if_finite(opt, loss_sum, grad_norm, stopping)  # the CPU waits here
    scaler.update()
    if not finite:
        overflow = scaler.is_enabled() and math.isfinite(loss_sum)  # float16 only: the loss scale adapts
        log.skip(iter_num, "" if overflow else find_nonfinite(orig_model, batch, autocast))
        iter_num += 1
    elif guard and guard.is_spike(iter_num, loss_sum / tokens_per_step, grad_norm):
        iter_num = guard.roll_back(iter_num, checkpointer, log)  # undoes the step; the data is not rewound
        loss_sum = math.nan  # so the mean loss leaves it out
    else:
        iter_num += 1

    # log
    log.step(loss_sum=loss_sum, targets=tokens_per_step, tokens=tokens_per_step, rows=global_batch_size,
             clipped=0 < grad_clip < grad_norm < math.inf, seconds=time.perf_counter() - t0)
    if iter_num % log_interval == 0 or iter_num == 1 or iter_num == max_iters or stopping:
        log.train(iter_num, lr=lr, grad_norm=grad_norm)
    opt.zero_grad()  # after the log, whose metrics may read gradients
    if stopping:
        checkpointer.save(iter_num)
        break

finish(iter_num, done, checkpointer, log, stop)
