"""
Turns a base model into a chat model: supervised fine-tuning on conversations.

    python chat_sft.py --init_from=out/ckpt.pt --data=my-chats.jsonl  # lines of {"messages": [{"role", "content"}]}
    torchrun --nproc_per_node=8 chat_sft.py --data=HuggingFaceTB/smoltalk/all,my-chats.jsonl:3
    python chat_sft.py --print_batch=True                             # what is trained on, token by token
    python chat_sft.py --init_from=resume --out_dir=out-chat          # resume (bit-exact on a CPU)

Rows have one fixed length, max_seq_len, so the compiled model sees one shape. By default a row packs as many whole
conversations as fit, with attention inside each conversation only, and is padded; with --pack=False each conversation
gets its own padded row. The loss is the same either way, on assistant tokens only. The loop is train_gpt2.py's, but
the data differs, and the number of targets varies and is counted at each step.
"""
import math
import time
from typing import Annotated, Literal

# before torch, whose import takes seconds: from here on Ctrl-C prints one line
from configurator import (BelowOne, Fraction, NonNegative, NonNegativeFloat, Positive, Seed, configure, fail,
                          one_line_errors, update_settings)

import torch

from chat_data import build_datasets
from chat_format import check_chat_format
from checkpoint import Checkpointer, describe_model
from compiling import compile_options, warm_up, wrap_model
from dataloader import BatchLoader, validation_loss
from distributed import (all_reduce, check_ranks_agree, clip_grad_norm, get_rank, get_world_size, init_process,
                         local_grad_accum_steps, make_autocast, pick_dtype, print0, step_seed)
from features import change_model, change_training, check_sanity, evaluation_hooks
from interrupt import StopSignal, drop_failed_writes, finish
from log import Logger, find_nonfinite
from machine import peak_flops
from model import GPT, GPTConfig
from optim import build_schedule, configure_optimizer, set_lr, step_if_finite
from start import check_out_dir, load_init_from, lock_out_dir, report_settings
from tokenizer import get_tokenizer, tokenizer_entry

# -----------------------------------------------------------------------------
# settings
out_dir: str | None = "out-chat"  # checkpoints, config.json, log.jsonl and loss.png; None: keep nothing
init_from: str = "out/ckpt.pt"  # a path | gpt2, gpt2-medium, ... | resume | auto:PATH (resume if possible)
overwrite: bool = False  # replace the run in out_dir
eval_interval: Positive = 100  # evaluate and save a checkpoint every this many steps
eval_iters: Positive = 64  # micro-batches per evaluation, from the start of val
save_interval: Positive | None = None  # also save every this many steps, without an evaluation
eval_tasks: str = ""  # tasks of evaluate.py to score at each evaluation, e.g. hellaswag,arc_easy
task_dir: str | None = None  # folder of local tasks, TASK/test.jsonl; None: use the Hugging Face hub
log_interval: Positive = 10
sample_tokens: NonNegative = 128  # length of the answer to val's first question, printed at each evaluation; 0 = off
wandb_log: bool = False  # log to Weights & Biases
wandb_project: str | None = None  # None: $WANDB_PROJECT, or forkgpt; the run is named $WANDB_NAME, or after out_dir
tensorboard: bool = False  # log to out_dir/tensorboard
# data
data: str = "HuggingFaceTB/smoltalk/all"  # files, hub data sets (owner/name/config@split); :3 repeats a source
val_data: str | None = None  # sources for validation; None: hold out one in 50 conversations
chat_dir: str = "data/chat"  # tokenized conversations are cached here
pack: bool = True  # as many whole conversations per row as fit; False: one
print_batch: bool = False  # print the first micro-batch, [what is trained on] marked, and exit
batch_size: Positive = 4  # rows per micro-batch and rank
gradient_accumulation_steps: Positive = 8  # micro-batches per step, of all ranks together
max_seq_len: Annotated[int, 4, math.inf] | None = None  # None: 2048, or the model's positions if fewer
dropout: BelowOne = 0.0  # on embeddings, attention weights and residual branches
recompute: bool = False  # activation checkpointing: less memory, a third slower
lora_rank: NonNegative = 0  # freeze the model and train low-rank adapters of this rank; 0 = off
lora_alpha: Annotated[float, 1e-6, math.inf] = 32.0  # adapters are scaled by lora_alpha / lora_rank
lora_dropout: BelowOne = 0.0  # on the adapters' input
lora_targets: str = "all"  # matrices that get an adapter: all, attn, mlp, or names, e.g. q_proj,v_proj,mlp.c_proj
# optimizer
optimizer: Literal["adamw", "muon", "adamw_spam"] = "adamw"  # muon: for the hidden matrices; adamw_spam: clips spikes
learning_rate: NonNegativeFloat = 1e-4  # peak
epochs: Annotated[float, 0, 1e6] = 1.0  # passes over the rows, unless max_iters is given
max_iters: NonNegative | None = None  # None: as many as the epochs take
weight_decay: NonNegativeFloat = 0.0  # of matrices, embeddings and head
beta1: BelowOne = 0.9
beta2: BelowOne = 0.95
muon_lr: NonNegativeFloat = 0.002  # muon: peak for the hidden matrices at 12 layers, 768 wide; optim.py scales it
embedding_lr: NonNegativeFloat | None = None  # peak for the embeddings; None here and in the next two: learning_rate
head_lr: NonNegativeFloat | None = None  # llama: peak for an output matrix 768 wide; optim.py scales it
vector_lr: NonNegativeFloat | None = None  # peak for norms and biases
grad_clip: NonNegativeFloat = 1.0  # 0 = off
lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: warmup-stable-decay
warmup_iters: NonNegative | None = None  # None: a tenth of lr_decay_iters, at most 2000; ends before wsd's decay
lr_decay_iters: NonNegative | None = None  # None: max_iters
min_lr: NonNegativeFloat = 0.0
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
checkpoint, resuming = load_init_from(config, overrides, "chat")
if "epochs" in overrides and overrides.get("max_iters") is None:
    config["max_iters"] = None  # not that of the run to resume
elif "epochs" in overrides:
    print0(f"--max_iters={config['max_iters']} sets the length of the run, not --epochs={config['epochs']}")
update_settings(globals(), config, checkpoint and checkpoint["path"])  # config may hold a checkpoint's settings
if not print_batch:
    check_out_dir(config, resuming, checkpoint)
torch_device = init_process(device)
rank, world_size = get_rank(), get_world_size()
amp_dtype = pick_dtype(dtype, torch_device)
autocast = make_autocast(torch_device, amp_dtype)
scaler = torch.amp.GradScaler(torch_device.type, enabled=amp_dtype == "float16")
if pack:  # with a mask cuDNN's attention may have NaN gradients (torch 2.13, pytorch/pytorch#196678)
    torch.backends.cuda.enable_cudnn_sdp(False)
micro_steps = local_grad_accum_steps(gradient_accumulation_steps, world_size)
global_batch_size = batch_size * gradient_accumulation_steps  # rows per step

tokenizer = get_tokenizer(checkpoint["tokenizer"])
check_chat_format(init_from, tokenizer, checkpoint["model_args"]["vocab_size"])
train_rows, val_rows, description = build_datasets(chat_dir, data, val_data, tokenizer, max_seq_len, pack, seed)
loader = BatchLoader(train_rows, batch_size, seed, rank, world_size, torch_device)
print0(description)
if print_batch:
    for i in loader.indices(0, min(batch_size, len(train_rows))):
        print0(f"----- row {i}, [trained on]\n{train_rows.format_row(i)}")
    raise SystemExit(0)
check_ranks_agree({"step": checkpoint["iter_num"] if resuming else None, "data": train_rows.fingerprint})

before = {**config, **checkpoint["config"]}
if resuming and max_iters is None and (
        global_batch_size != before["batch_size"] * before["gradient_accumulation_steps"]):
    fail(f"--batch_size={batch_size} --gradient_accumulation_steps={gradient_accumulation_steps}: with another number "
         f"of rows per step --epochs has no meaning on resume; give --max_iters, or keep their product")
num_iters = max_iters
if num_iters is None:
    num_iters = math.ceil(round(epochs * len(train_rows) / global_batch_size, 6))  # 1.1 * 50 is a little over 55
get_lr = build_schedule(config, num_iters)

orig_model = GPT(GPTConfig(**{**checkpoint["model_args"], "dropout": dropout}))
if not resuming:
    with one_line_errors(init_from):
        orig_model.load_state_dict(checkpoint["model"])
orig_model.recompute = recompute

# -----------------------------------------------------------------------------
# Optional features attach here (features.py), as in train_gpt2.py.
state, metrics = {"model": orig_model, "scaler": scaler, "rows_seen": loader}, []
options = compile_options(config, torch_device)
# FlexAttention, within its limits: steps take half the time; with older GPUs (T4) it is reported to fail
if (options and torch_device.type == "cuda" and torch.cuda.get_device_capability(torch_device) >= (8, 0)
        and dropout == 0 and orig_model.config.head_dim >= 16):
    train_rows.block_mask = val_rows.block_mask = True
change_model(orig_model, loader, num_iters, config, amp_dtype, options, checkpoint, resuming, state, metrics)

# The model is compiled for one shape, (batch_size, max_seq_len), in training and validation. Everything that has
# another shape, and every checkpoint, uses orig_model, whose parameters are the same tensors.
model, eval_model = wrap_model(orig_model, torch_device, options)
state["optimizer"] = opt = configure_optimizer(orig_model, config)
gradient_hooks, guard, trackers = change_training(orig_model, opt, num_iters, config, checkpoint, state, metrics)
eval_hooks = evaluation_hooks(orig_model, tokenizer, autocast, val_rows.first_question(), config, "chat")

facts = dict(model_args=vars(orig_model.config), config=config, tokenizer=tokenizer_entry(tokenizer),
             data=train_rows.fingerprint, stage="chat")
checkpointer = Checkpointer(out_dir, state, facts)
iter_num = checkpointer.resume(checkpoint, num_iters) if resuming else 0
if sanity_check:
    check_sanity(orig_model, loader.peek(), opt, autocast, False, world_size)
print0(f"from {describe_model(checkpoint)}")
checkpoint = None  # frees its memory

num_rows = loader.rows_seen + (num_iters - iter_num) * global_batch_size  # of the whole run, resumed or not
print0(f"run: {num_iters:,} steps of {global_batch_size} rows of {max_seq_len}, "
       f"{num_rows / len(train_rows):.2f} epochs; {world_size} x {torch_device.type}, {amp_dtype}")
if num_iters < 20:
    print0(f"WARNING: {num_iters} steps teach a model little; for few conversations use smaller batches and more "
           f"epochs, e.g. --gradient_accumulation_steps=1 --batch_size=1 --epochs=30")
report_settings(config, overrides, torch_device)
compile_seconds = warm_up(model, eval_model, opt, loader.peek(), autocast, options)
log = Logger(out_dir, num_iters, eval_interval, loader, orig_model.flops_per_token(max_seq_len),
             world_size * peak_flops(torch_device, amp_dtype), metrics, trackers, resuming)
log(iter_num, event="resume" if resuming else "start", compile_seconds=compile_seconds)

# -----------------------------------------------------------------------------
# training loop; iter_num counts steps, skipped ones too
stop = StopSignal(out_dir)
finite = True  # loss and gradient of the last step
while True:
    done = iter_num >= num_iters
    if iter_num % eval_interval == 0 or done:
        print0("evaluating ...")
        t0 = time.perf_counter()
        with autocast:
            val_loss, val_bpb = validation_loss(eval_model, val_rows, batch_size, eval_iters, torch_device)
        log(iter_num, val_loss=val_loss, val_bpb=val_bpb)  # of the assistant's text
        if finite or done:  # after a skipped step weights may be NaN; two such saves would replace both files
            checkpointer.save(iter_num, val_loss)  # before the hooks, which may fail
        for hook in eval_hooks:  # a sample, tasks, the plot
            log(iter_num, **hook(iter_num, done))
        log(iter_num, eval_seconds=time.perf_counter() - t0)
    elif save_interval and iter_num % save_interval == 0 and finite:
        checkpointer.save(iter_num)
    if done:
        break

    # forward and backward; the gradient is that of the mean over all targets of the step. Every rank knows the order
    # of the rows, so it can count the targets of all ranks before its first backward
    t0 = time.perf_counter()
    torch.manual_seed(step_seed(seed, iter_num, rank))  # dropout
    loss_sum = torch.zeros((), device=torch_device)
    n_targets, n_tokens = train_rows.count_targets(loader.indices(loader.rows_seen, global_batch_size))
    for micro_step in range(micro_steps):
        batch = next(loader)
        if world_size > 1:  # DDP averages over the ranks in the last backward pass alone, FSDP in each
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        with autocast:
            loss = model(**batch)  # summed over the targets of the micro-batch
        loss_sum += loss.detach()
        scaler.scale(loss * (world_size / n_targets)).backward()  # DDP averages over the ranks

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
    elif guard and guard.is_spike(iter_num, loss_sum / n_targets, grad_norm):
        iter_num = guard.roll_back(iter_num, checkpointer, log)  # undoes the step; the data is not rewound
        loss_sum = math.nan  # so the mean loss leaves it out
    else:
        iter_num += 1

    # log; padding does not count in tokens per second
    log.step(loss_sum=loss_sum, targets=n_targets, tokens=n_tokens, rows=global_batch_size,
             clipped=0 < grad_clip < grad_norm < math.inf, seconds=time.perf_counter() - t0)
    if iter_num % log_interval == 0 or iter_num == 1 or iter_num == num_iters or stopping:
        log.train(iter_num, lr=lr, grad_norm=grad_norm, shape=list(batch["idx"].shape))
    opt.zero_grad()  # after the log, whose metrics may read gradients
    if stopping:
        checkpointer.save(iter_num)
        break

finish(iter_num, done, checkpointer, log, stop, " --chat=True")
