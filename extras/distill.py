"""
Knowledge distillation (Hinton et al. 2015): loss = (1 - w) CE + w T^2 KL(teacher || student).

The teacher is live and runs in each step, or it is cached: its top-k log-probabilities are written to disk once.
"""
import math
import zlib
from itertools import zip_longest

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from chat_format import chat_tokens, decode_chat
from checkpoint import check_tokenizer, digest_weights, load_model
from configurator import fail, one_line_errors
from dataloader import epoch_permutation
from distributed import all_reduce, barrier, make_autocast, print0
from model import IGNORE, LOSS_CHUNK, compute_logits, linear_cross_entropy, matmul_dtype
from tokenizer import get_tokenizer


# -----------------------------------------------------------------------------
# the loss

FLOATS = {torch.int16: torch.float16, torch.int32: torch.float32}  # a cache's integers -> the floats they hold


def distill_chunk(x, weight, T, targets, w, teacher, teacher_head):
    """
    The loss of Distillation.forward for some positions, and the sums that metrics() reports. KL is summed over the
    columns of s and t, the student's and teacher's logits. A live teacher has one per id. A cached teacher knows its
    top k; all other ids have the same t, so they share one column, where s is their mean.
    """
    logits, valid = compute_logits(x, weight.to(x.dtype)).float(), targets != IGNORE  # (N, V), (N,)
    ce = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    if teacher_head is None:
        k = teacher.size(-1) // 2
        n_others, ids = logits.size(-1) - k, teacher[:, :k].long() & (256 ** teacher.itemsize - 1)  # unsigned
        t, top = teacher[:, k:].view(FLOATS[teacher.dtype]).float(), logits.gather(-1, ids)
        s = torch.hstack((top, (logits.sum(-1, keepdim=True) - top.sum(-1, keepdim=True)) / n_others))
        log_count = F.pad(t.new_zeros(k), (0, 1), value=math.log(n_others))
    else:
        t, s, log_count = compute_logits(teacher, teacher_head).float(), logits, 0.0
        ids = t.argmax(-1, keepdim=True)
    log_q = s / T - (logits / T).logsumexp(-1, keepdim=True)  # of one id in each column
    log_p = t / T - (t / T + log_count).logsumexp(-1, keepdim=True)
    kl = (((log_p + log_count).exp() * (log_p - log_q)).sum(-1) * valid).sum()
    agreements = ((logits.argmax(-1) == ids[:, 0]) & valid).sum()  # same top id
    return (1 - w) * ce + w * T * T * kl, torch.stack((ce, kl, agreements, valid.sum()))


class DistillLoss(torch.autograd.Function):
    """
    distill_chunk of LOSS_CHUNK positions at a time, with its gradients, which torch derives: as in model.py's
    LinearCrossEntropy they are computed in forward, so neither model's full logits ever exist.
    """

    @staticmethod
    def forward(ctx, x, weight, T, targets, w, teacher, teacher_head):
        learned = (0, *(i for i in (1, 2) if ctx.needs_input_grad[i]))  # not a frozen head or a fixed temperature
        chunk_gradients = torch.func.grad_and_value(distill_chunk, learned, has_aux=True)
        loss, sums, dx, others = 0.0, 0.0, [], [0.0, 0.0]
        for xc, tc, teacher_c in zip(x.split(LOSS_CHUNK), targets.split(LOSS_CHUNK), teacher.split(LOSS_CHUNK)):
            (dxc, *new), (chunk_loss, chunk_sums) = chunk_gradients(xc, weight, T, tc, w, teacher_c, teacher_head)
            loss, sums, others = loss + chunk_loss, sums + chunk_sums, [a + b for a, b in zip(others, new)]
            dx.append(dxc)
        ctx.learned = learned
        ctx.save_for_backward(torch.cat(dx), *others)
        return loss, sums

    @staticmethod
    def backward(ctx, grad_loss, _):
        gradients = dict(zip(ctx.learned, ctx.saved_tensors))
        return *(gradients[i] * grad_loss if i in gradients else None for i in range(3)), None, None, None, None


distill_loss = DistillLoss.apply


class Distillation(nn.Module):
    """
    The training loss of a student. Its constructor makes it model.loss_fn and attaches the teacher to the loader: a
    live teacher as a transform, so it runs whenever a batch is taken; a cached one as a source, after all rows of the
    run have been labelled.
    """

    def __init__(self, model, loader, max_iters, config, dtype, options, checkpoint):
        """
        Call it before the model is wrapped. options: arguments of torch.compile, or None; checkpoint: a resumed run's,
        or None.
        """
        super().__init__()
        data, k, vocab_size = loader.dataset, config["teacher_cache"], model.config.vocab_size
        self.teacher_weight = config["teacher_weight"]
        if model.loss_fn is not linear_cross_entropy:
            fail(f"--teacher={config['teacher']}: its loss, distill_loss, would replace the one in model.loss_fn")
        if k >= vocab_size:
            fail(f"--teacher_cache={k}: expected less than the vocabulary, {vocab_size}")
        self.log_temperature = torch.tensor([math.log(config["teacher_temperature"])], device=loader.device)
        if config["learn_temperature"]:
            if config.get("fsdp"):
                fail("--learn_temperature=True: not with --fsdp=True; give a fixed --teacher_temperature")
            self.log_temperature = nn.Parameter(self.log_temperature)
            # a checkpoint has it in its entry "teacher" and not among the model's weights
            self.register_load_state_dict_post_hook(
                lambda _, keys: keys.missing_keys.remove("loss_fn.log_temperature"))
        self.sums = nn.Buffer(torch.zeros(4, device=loader.device), persistent=False)  # CE, KL, agreements, targets
        teacher_forward, self.digest = load_teacher(model, loader, config, dtype, options)
        if checkpoint and checkpoint["teacher"]["digest"] != self.digest:
            fail(f"--teacher={config['teacher']}: the run was started with another teacher; to continue with this "
                 f"one, start a new run with --init_from={checkpoint['path']} --out_dir=...")
        if k:
            begun = checkpoint or {"rows_seen": 0, "iter_num": 0}
            global_batch_size = config["batch_size"] * config["gradient_accumulation_steps"]
            n_rows = begun["rows_seen"] + (max_iters - begun["iter_num"]) * global_batch_size  # as in the loops
            n_rows += 2 * loader.world_size * loader.batch_size  # one batch is trained on, the next one is read ahead
            # the fingerprint does not cover all tokens of shards; nanoGPT's have no recorded checksum
            shards = zip_longest(getattr(data, "checksums", ()), getattr(data, "shards", ()))
            checksums = [recorded or zlib.crc32(shard) for recorded, shard in shards]
            key = digest_weights([self.digest, data.fingerprint, checksums, data.max_seq_len, k, dtype, vocab_size],
                                 {})
            folder = config.get("chat_dir") or config["data_dir"]
            cache = TeacherCache(f"{folder}/teacher-{key[:16]}.cache", data, k, vocab_size)
            cache.fill(np.sort(epoch_permutation(len(data), loader.seed, 0)[:n_rows]), teacher_forward, loader)
            loader.sources.append(cache)
        else:
            loader.transforms.append(teacher_forward)
        model.loss_fn = self

    def forward(self, x, weight, targets, teacher, teacher_head=None):
        """
        Sum over targets that are not IGNORE of (1 - w) cross entropy + w T^2 KL(teacher || student), KL at temperature
        T; T^2 keeps the size of the gradient as T varies. x (N, C), weight (V, C) and targets (N,) as in
        linear_cross_entropy. A live teacher: its hidden states (B, T, C_t) and teacher_head (V, C_t). A cached one:
        rows of the cache (B, T, 2 k + 1), and no teacher_head.
        """
        loss, sums = distill_loss(x.to(matmul_dtype(x)), weight, self.log_temperature.exp()[0], targets,
                                  self.teacher_weight, teacher.flatten(0, 1), teacher_head)
        self.sums.add_(sums.detach().where(loss.detach().isfinite(), 0.0))  # else the step will be skipped
        return loss

    def metrics(self):
        ce, kl, agreements, n = all_reduce(*self.sums).tolist()
        self.sums.zero_()
        n = n or math.nan  # all steps were skipped
        return {"ce_loss": ce / n, "kl_loss": kl / n, "agreement": agreements / n,
                "temperature": self.log_temperature.exp().item()}

    def state_dict(self, **_):  # a checkpoint's entry "teacher"; the state dict of the model gets nothing
        return {"digest": self.digest, "log_temperature": self.log_temperature.item()}

    def load_state_dict(self, state):
        self.sums.zero_()  # a rollback takes back the step that they end with
        if self.log_temperature.requires_grad:  # a fixed one is a setting, which may change on resume
            self.log_temperature.data.fill_(state["log_temperature"])


def special_tokens(tokenizer, chat):
    """{id: text} of the special tokens; with chat also of the chat format's, unless a chat template has its own."""
    ids = set(tokenizer.special)
    if chat and not tokenizer.chat_template:
        ids.update(chat_tokens(tokenizer).values())
    return {i: decode_chat(tokenizer, [i]) for i in ids}


def load_teacher(model, loader, config, dtype, options):
    """
    Returns a function from a batch to what distill_chunk needs from the teacher of `model`, and a digest of the
    teacher. The teacher's ids above the student's vocabulary are padding, and are left out.
    """
    data, device, vocab_size = loader.dataset, loader.device, model.config.vocab_size
    net, checkpoint = load_model(config["teacher"], "cpu")
    ours, theirs = (special_tokens(tokenizer, "chat_dir" in config)
                    for tokenizer in (data.tokenizer, get_tokenizer(checkpoint["tokenizer"])))
    for i in ours.keys() & theirs.keys():
        if ours[i] != theirs[i]:
            fail(f"--teacher={config['teacher']}: its token {i} is {theirs[i]}, the student's {ours[i]}")
    check_tokenizer("the student", data.tokenizer, checkpoint)
    if data.max_seq_len > net.config.max_seq_len:
        fail(f"--max_seq_len={data.max_seq_len}: the teacher has {net.config.max_seq_len} positions; give at most "
             f"that")
    if net.config.vocab_size < vocab_size:
        fail(f"--teacher={config['teacher']}: has {net.config.vocab_size} ids, the student {vocab_size}; give a "
             f"teacher with at least as many")
    model_args = {**checkpoint["model_args"], "dropout": 0.0}
    for name in ("head_dim", "tied_head", "qkv_bias"):  # the weights, in the digest too, show them
        del model_args[name]
    if model_args["rope_factor"] == 1:  # older digests have none
        del model_args["rope_factor"]
    digest = digest_weights(model_args, net.state_dict())
    net.requires_grad_(False)
    for block in net.transformer.h:
        block.attn.attend = model.transformer.h[0].attn.attend  # in blocks, if the student does
    if config.get("fsdp") or config.get("shard_teacher"):
        from extras.fsdp import apply_fsdp
        apply_fsdp(net, device, dtype, options)
    else:
        net.to(device)
        if options:
            net.hidden_states = torch.compile(net.hidden_states, **options)

    def teacher_forward(batch):
        with make_autocast(device, dtype):
            hidden = net.hidden_states(batch["idx"], batch.get("positions"), batch.get("mask"))
        # copy: with reduce-overhead the next call overwrites it. Under FSDP the head is whole, too: it belongs to the
        # root, which stays gathered after its forward
        head = net.lm_head.weight[:vocab_size].to(getattr(torch, dtype))
        return {"teacher": hidden.to(head.dtype, copy=True), "teacher_head": head}

    return teacher_forward, digest


# -----------------------------------------------------------------------------
# the cache

def encode_top_k(log_probs, k):
    """
    Log-probabilities (T, V) -> (T, 2 k + 1) int16: the k likeliest ids, modulo 2^16, and the bits of k + 1 float16:
    the log-probabilities of these ids, then the one that every other id gets. Those ids share the remaining
    probability evenly. With more than 2^16 ids int32, and the bits of float32.
    """
    top, ids = log_probs.topk(k)
    others = log_probs.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True) - math.log(log_probs.size(-1) - k)
    dtype = torch.int32 if log_probs.size(-1) > 2 ** 16 else torch.int16
    return torch.hstack((ids.to(dtype), torch.hstack((top, others)).to(FLOATS[dtype]).view(dtype)))


class TeacherCache:
    """
    A teacher's outputs for each row of a data set, by row number, so they serve any order of the rows: a sparse file
    (rows, T, 2 k + 1), see encode_top_k, with 4 k + 2 bytes per token (int32: twice that). A row whose last number is
    zero is missing: a sparse file reads as zeros, and a log-probability is below log 1 = 0.
    """

    def __init__(self, path, dataset, k, vocab_size):
        open(path, "a").close()
        self.k, self.vocab_size = k, vocab_size
        self.rows = np.memmap(path, "<i2" if vocab_size <= 2 ** 16 else "<i4", "r+",
                              shape=(len(dataset), dataset.max_seq_len, 2 * k + 1))

    def __getitem__(self, indices):
        rows = self.rows[indices]
        if (rows[..., :self.k].astype(f"<u{rows.itemsize}") >= self.vocab_size).any():
            fail(f"{self.rows.filename}: holds an id that is not in the vocabulary; it is damaged: remove it",
                 alone=True)
        if not rows[:, -1, -1].all():
            fail(f"{self.rows.filename}: a row is missing, because a rollback has moved the run on to more rows, or "
                 f"because machines do not share the folder; --init_from=resume labels it", alone=True)
        return {"teacher": rows}

    def fill(self, indices, teacher_forward, loader):
        """Labels the missing rows among `indices`; the ranks share the work. What an interrupted call wrote stays."""
        missing = indices[self.rows[indices, -1, -1] == 0]
        barrier()  # all ranks have read what is missing
        path, row_bytes = self.rows.filename, self.rows[0].nbytes
        print0(f"teacher: labelling {len(missing):,} of {len(indices):,} rows, "
               f"{len(missing) * row_bytes / 2 ** 20:,.1f} MiB, in {path}")
        # every rank runs the same number of batches, as FSDP needs: the last ones may repeat some rows
        steps = math.ceil(len(missing) / (loader.world_size * loader.batch_size))
        batches = np.resize(missing, (steps, loader.world_size, loader.batch_size))
        with open(path, "r+b", buffering=0) as file:  # not self.rows: with a full disk that would kill the process
            for batch in tqdm(batches[:, loader.rank], "teacher", disable=loader.rank > 0, delay=2, mininterval=2):
                output = teacher_forward(loader.dataset.get_batch(batch, loader.device))
                for i, hidden in zip(batch.tolist(), output["teacher"]):
                    log_probs = compute_logits(hidden, output["teacher_head"]).float().log_softmax(-1)  # (T, V)
                    row = encode_top_k(log_probs, self.k).cpu().numpy().astype(self.rows.dtype)
                    with one_line_errors(f"--teacher_cache={self.k}: {path}", "make room; the same command labels the "
                                         "rest", OSError, alone=True):
                        file.seek(i * row_bytes)
                        if file.write(row) < row_bytes:
                            raise OSError("the disk is full")
        barrier()  # all have written
        # again: other machines may have written to it
        self.rows = np.memmap(path, self.rows.dtype, "r+", shape=self.rows.shape)
