"""
Knowledge distillation (Hinton et al. 2015): loss = (1 - w) CE + w T^2 KL(teacher || student).

The teacher runs in each step (online), or its top-k log-probabilities are cached on disk once. Attaches as the model's
loss function, and as a transform or a source of the loader.
"""
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import runtime
from checkpoint import check_tokenizer, describe_model, digest_weights, load_model
from configurator import Fraction, NonNegative, fail, load_extra, one_line_errors
from dataloader import epoch_permutation
from model import IGNORE, LOSS_CHUNK, linear_cross_entropy

teacher_weight: Fraction = 0.5  # of T^2 KL(teacher || student); the cross entropy has 1 - teacher_weight
teacher_temperature: Annotated[float, 0.01, 100] = 1.0  # T; with a small cache keep it near 1
learn_temperature: bool = False  # learn T; it collapses towards 0, so prefer a fixed one
teacher_cache: NonNegative = 0  # cache the teacher's top-k log-probs on disk; 0 = off, run it in each step


class DistillLoss(torch.autograd.Function):
    """
    LinearCrossEntropy of model.py mixed with KL(teacher || student), in the same chunks, so that neither model's full
    logits exist; see Distillation.forward. With u = 1 / T, student logits s, teacher logits t, p = softmax(u t),
    q = softmax(u s):
        d T^2 KL(p || q) / ds = T (q - p)
        d KL / du = sum p (t - E_p t) (log p - log q) - (E_p s - E_q s)
    Over ids with equal p all of this needs only the sum of s, because log q is u s plus a constant. So the ids that a
    cache leaves out, which share their probability evenly, are treated as one place with their mean logit: k + 1 places
    instead of V.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, w, T, learned, teacher, teacher_head, teacher_ids):
        dx = torch.empty_like(x)
        dweight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        weight_x, V, u = weight.to(x.dtype), weight.size(0), 1 / T
        ce, kl, dT = torch.zeros(3, dtype=torch.float32, device=x.device).unbind()
        log_count = 0.0  # of how many ids each place stands for
        if teacher_head is not None:
            teacher_head = teacher_head.to(x.dtype)
        else:
            k = teacher_ids.size(1)
            # not F.pad, whose compiled form torch 2.11's CPU compiler gets wrong
            rest = math.log(V - k) if k < V else -math.inf
            log_count = torch.where(torch.arange(k + 1, device=x.device) < k, 0.0, rest)
        for i in range(0, x.size(0), LOSS_CHUNK):
            xc, tc, teacher_c = x[i:i + LOSS_CHUNK], targets[i:i + LOSS_CHUNK, None], teacher[i:i + LOSS_CHUNK]
            logits = (xc @ weight_x.t()).float()  # (chunk, V)
            lse, lse_T = logits.logsumexp(-1, keepdim=True), (logits * u).logsumexp(-1, keepdim=True)
            valid = tc != IGNORE
            onehot = torch.arange(V, device=x.device) == tc
            # t and s: both models' logits at each place, which is an id, or the cached k ids and the rest
            if teacher_head is not None:
                t, s = (teacher_c.to(x.dtype) @ teacher_head.t()).float(), logits  # (chunk, V)
            else:
                t, ids = teacher_c.float(), teacher_ids[i:i + LOSS_CHUNK]  # (chunk, k + 1), (chunk, k)
                s = logits.gather(-1, ids)
                s = torch.cat((s, (logits.sum(-1, keepdim=True) - s.sum(-1, keepdim=True)) / max(V - k, 1)), -1)
            log_p = t * u - (t * u + log_count).logsumexp(-1, keepdim=True)
            probs, log_ratio = (log_p + log_count).exp(), log_p - (s * u - lse_T)
            ce += ((lse - logits.gather(-1, tc.clamp(min=0))) * valid).sum()
            kl_c = (probs * log_ratio).sum(-1, keepdim=True)
            kl += (kl_c * valid).sum()
            if learned:
                E_p_s = (probs * s).sum(-1, keepdim=True)
                E_q_s = ((logits * u - lse_T).exp() * logits).sum(-1, keepdim=True)
                centred = t - (probs * t).sum(-1, keepdim=True)
                dkl_du = (probs * centred * log_ratio).sum(-1, keepdim=True) - (E_p_s - E_q_s)
                dT += ((2 * T * kl_c - dkl_du) * valid).sum()

            def gradient(z, onehot, log_p):  # with respect to the student's logits z
                ce_grad, kl_grad = (z - lse).exp() - onehot.float(), (z * u - lse_T).exp() - log_p.exp()
                return (((1 - w) * ce_grad + w * T * kl_grad) * valid).to(x.dtype)

            if teacher_head is not None:
                dlogits = gradient(logits, onehot, log_p)
            else:
                top = gradient(s[:, :k], ids == tc, log_p[:, :k])
                dlogits = gradient(logits, onehot, log_p[:, k:]).scatter(-1, ids, top)
            dx[i:i + LOSS_CHUNK] = dlogits @ weight_x
            if dweight is not None:
                dweight += dlogits.t() @ xc
        ctx.save_for_backward(dx, None if dweight is None else dweight.to(weight.dtype), w * dT)
        loss_terms = torch.stack((ce, kl))
        ctx.mark_non_differentiable(loss_terms)
        return (1 - w) * ce + w * T * T * kl, loss_terms

    @staticmethod
    def backward(ctx, grad_loss, _):
        dx, dweight, dT = ctx.saved_tensors
        dweight = None if dweight is None else dweight * grad_loss
        return dx * grad_loss, dweight, None, None, dT * grad_loss, *[None] * 4


class Distillation(nn.Module):
    """
    Becomes `model.loss_fn` on construction. Then attach(loader, ...) provides each batch with the teacher's outputs.
    """

    def __init__(self, model, dataset, device, dtype, options, config):
        """dataset: of training; options: of torch.compile, or None."""
        super().__init__()
        if model.loss_fn is not linear_cross_entropy:
            fail(f"--teacher={config['teacher']}: its loss, DistillLoss, would replace the one in model.loss_fn")
        if teacher_cache > model.config.vocab_size:
            fail(f"--teacher_cache={teacher_cache}: expected at most the vocabulary, {model.config.vocab_size}")
        log_T = torch.tensor([math.log(teacher_temperature)], device=device)
        if learn_temperature:
            if config["fsdp"]:
                fail("--learn_temperature=True: not with --fsdp=True; give a fixed --teacher_temperature")
            self.log_temperature = nn.Parameter(log_T)
        else:
            self.register_buffer("log_temperature", log_T, persistent=False)
        self.register_buffer("sums", torch.zeros(3, device=device), persistent=False)  # CE, KL, targets
        self.autocast = runtime.autocast(device, dtype)
        net, checkpoint = load_model(config["teacher"], "cpu")
        check_tokenizer("the student", dataset.tokenizer, checkpoint)
        if dataset.max_seq_len > net.config.max_seq_len:
            fail(f"--max_seq_len={dataset.max_seq_len}: the teacher has {net.config.max_seq_len} positions; give at "
                 f"most that")
        self.digest = digest_weights({**checkpoint["model_args"], "dropout": 0.0}, net.state_dict())
        runtime.print0(f"teacher: {describe_model(config['teacher'], checkpoint)}")
        net.requires_grad_(False)
        if config["fsdp"]:
            load_extra("fsdp", config, "fsdp").apply_fsdp(net, device, dtype, options)
            hidden_states = net.hidden_states
        else:
            net.to(device)
            hidden_states = torch.compile(net.hidden_states, **options) if options else net.hidden_states

        @torch.no_grad()  # not inference_mode: a learned temperature takes its outputs into autograd
        def teacher_forward(batch):
            with self.autocast:
                hidden = hidden_states(batch["idx"], batch.get("positions"), batch.get("mask"))
            # clone: with reduce-overhead the next call overwrites it. The head is whole under FSDP, too: it belongs to
            # the root, which stays gathered after its forward
            return {"teacher_hidden": hidden.clone(), "teacher_head": net.lm_head.weight}

        self.teacher_forward = teacher_forward
        model.loss_fn = self

    def forward(self, x, weight, targets, teacher_hidden=None, teacher_head=None, teacher_log_probs=None,
                teacher_ids=None):
        """
        Sum of (1 - w) cross entropy + w T^2 KL(teacher || student), both softened by T, over targets that are not
        IGNORE. T^2 keeps the gradient's size as T varies. x (N, C), weight (V, C), targets (N,) as in
        linear_cross_entropy.
        Online: teacher_hidden (B, T, C_t) and teacher_head (V, C_t). Cached: teacher_ids (B, T, k), distinct, and
        teacher_log_probs (B, T, k + 1): theirs, and that of each other id; with k = V the last is any finite number.
        """
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        outputs = teacher_log_probs if teacher_hidden is None else teacher_hidden
        ids = None if teacher_ids is None else teacher_ids.flatten(0, 1)
        loss, loss_terms = DistillLoss.apply(x, weight, targets, teacher_weight, self.log_temperature.exp()[0],
                                             learn_temperature, outputs.flatten(0, 1), teacher_head, ids)
        with torch.no_grad():
            self.sums += torch.cat((loss_terms, (targets != IGNORE).sum()[None]))
        return loss

    def attach(self, loader, n_rows, folder):
        """Has the loader add the teacher's outputs to each batch; a cache in `folder` gets the next n_rows rows."""
        if not teacher_cache:
            loader.transforms.append(self.teacher_forward)
            return
        data = loader.dataset
        key = [self.digest, data.tokenizer.name, data.fingerprint, data.max_seq_len, teacher_cache]
        folder = Path(folder) / f"teacher-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
        shape = len(data), data.max_seq_len, teacher_cache
        read_ahead = loader.world_size * loader.batch_size
        indices = epoch_permutation(len(data), loader.seed, 0)[:loader.rows_seen + n_rows + read_ahead]
        TeacherCache(folder, *shape).fill(np.sort(indices), self, loader)
        loader.sources.append(TeacherCache(folder, *shape))  # opened again: other machines may have written to it
        self.teacher_forward = None  # frees its memory

    def metrics(self):
        ce, kl, n = runtime.all_reduce(self.sums[0], *self.sums[1:].tolist())
        self.sums.zero_()
        return {"ce_loss": ce / max(n, 1), "kl_loss": kl / max(n, 1), "temperature": self.log_temperature.exp().item()}

    def state_dict(self, **_):  # of its own in a checkpoint; the model's has nothing of the loss function
        return {"digest": self.digest, "log_temperature": self.log_temperature.item()}

    def load_state_dict(self, state):
        if state["digest"] != self.digest:
            raise ValueError("--teacher: the run was started with another one; to train its weights with this one "
                             "start a new run with --init_from=...")
        if learn_temperature:  # a fixed one is a setting, which may change on resume
            self.log_temperature.data.fill_(state["log_temperature"])


class TeacherCache:
    """
    For each position of each row of a data set: the teacher's k likeliest next ids, their log-probabilities, and that
    of each other id, which share the rest evenly; 4 k + 2 bytes per token. By row number, so it serves any order of
    the rows. A sparse file, {folder}/rows.npy.
    """

    def __init__(self, folder, n_rows, T, k):
        path = Path(folder) / "rows.npy"
        row = np.dtype([("log_probs", "<f2", (T, k + 1)), ("ids", "<u2", (T, k)), ("done", "u1")])
        with one_line_errors(path, "remove the folder, it is made again"):
            if runtime.rank() == 0 and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                np.lib.format.open_memmap(path, "w+", row, (n_rows,))
            if dist.is_initialized():
                dist.barrier()
            self.rows = np.lib.format.open_memmap(path, "r+")
            if self.rows.shape != (n_rows,) or self.rows.dtype != row:
                raise ValueError("another version wrote it")

    def fill(self, indices, distillation, loader):
        """
        Labels those of the rows `indices` that are missing; the ranks share them. If interrupted, what is written
        stays.
        """
        missing = indices[self.rows["done"][indices] == 0]
        if dist.is_initialized():
            dist.barrier()  # all have read what is missing
        runtime.print0(f"teacher: labelling {len(missing):,} of {len(indices):,} rows, the others are in "
                       f"{self.rows.filename} already; {len(missing) * self.rows.itemsize / 2 ** 20:,.1f} MiB")
        group, k = loader.world_size * loader.batch_size, self.rows.dtype["ids"].shape[-1]
        bar = tqdm(range(0, len(missing), group), "teacher", disable=runtime.rank() > 0, delay=2,
                   mininterval=1 if sys.stderr.isatty() else 10)
        for first in bar:  # as often on each rank: FSDP runs all of them together; a batch that is not full is padded
            mine = np.arange(loader.batch_size) + first + loader.rank * loader.batch_size
            batch = loader.dataset.get_batch(missing[mine.clip(max=len(missing) - 1)], loader.device)
            output = distillation.teacher_forward(batch)
            for i, hidden in zip(missing[mine[mine < len(missing)]], output["teacher_hidden"]):
                with distillation.autocast:
                    log_probs = F.linear(hidden, output["teacher_head"]).float().log_softmax(-1)  # (T, V)
                top, ids = log_probs.topk(k)
                others = log_probs.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
                others = (others - math.log(max(log_probs.size(-1) - k, 1))).clamp(min=-60000)  # float16 ends at -65504
                self.rows[i] = torch.cat((top, others), -1).half().cpu().numpy(), ids.cpu().numpy(), 1
        self.rows.flush()
        if dist.is_initialized():
            dist.barrier()

    def __getitem__(self, indices):
        """indices (B,) -> teacher_log_probs (B, T, k + 1) float16, teacher_ids (B, T, k) int64."""
        rows = self.rows[indices]
        if not rows["done"].all():
            fail(f"{self.rows.filename}: a row is missing (a run that was rolled back needs more than planned); "
                 f"--init_from=resume adds it", alone=True)
        return {"teacher_log_probs": np.ascontiguousarray(rows["log_probs"]),
                "teacher_ids": rows["ids"].astype(np.int64)}
