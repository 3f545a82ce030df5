"""
Knowledge distillation (Hinton et al. 2015): loss = (1 - w) CE + w T^2 KL(teacher || student).

The teacher runs in each step (online), or its top-k log-probabilities are cached on disk once. Attaches as the model's
loss function, and as a transform or a source of the loader.
"""
import math
import shutil
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn as nn
from tqdm import tqdm

import runtime_gone
from checkpoint import check_tokenizer, digest_weights, load_model
from configurator import Fraction, NonNegative, fail, load_extra
from dataloader import epoch_permutation
from model import IGNORE, LOSS_CHUNK, linear_cross_entropy

teacher_weight: Fraction = 0.5  # of T^2 KL(teacher || student); the cross entropy has 1 - teacher_weight
teacher_temperature: Annotated[float, 0.01, 100] = 1.0  # T; with a small cache keep it near 1
learn_temperature: bool = False  # learn T; it collapses towards 0, so prefer a fixed one
shard_teacher: bool = False  # shard only the teacher over the ranks (fsdp.py); the student stays whole
teacher_cache: NonNegative = 0  # cache the teacher's top-k log-probs on disk; 0 = off, run it in each step


def row_sum(z):
    return z.sum(-1, keepdim=True)


def row_lse(z):
    return z.logsumexp(-1, keepdim=True)


class DistillLoss(torch.autograd.Function):
    """
    LinearCrossEntropy of model.py mixed with KL(teacher || student), in the same chunks, so that neither model's full
    logits exist; see Distillation.forward. With u = 1 / T, student logits s, teacher logits t, p = softmax(u t),
    q = softmax(u s):
        d T^2 KL(p || q) / ds = T (q - p)
        d KL / du = sum p (t - E_p t) (log p - log q) - (E_p s - E_q s)
    Over ids with equal p all of this needs only the sum of s, because log q is u s plus a constant. So the ids that a
    cache leaves out, which share their probability evenly, are treated as one place with their mean logit: k + 1
    places instead of V.
    """

    @staticmethod
    def forward(ctx, x, weight, T, targets, w, teacher, teacher_head):
        dx, weight_x, V, u = torch.empty_like(x), weight.to(x.dtype), weight.size(0), 1 / T
        # a scalar where the head is frozen (LoRA): autograd ignores the gradient of what needs none
        dweight = torch.zeros_like(weight if ctx.needs_input_grad[1] else T, dtype=torch.float32)
        ce, kl, agree, dT = 0.0, 0.0, 0, torch.zeros_like(T)
        k = teacher_cache
        for xc, dxc, tc, t in zip(*[z.split(LOSS_CHUNK) for z in (x, dx, targets[:, None], teacher)]):
            logits = (xc @ weight_x.t()).float()  # (chunk, V)
            lse, lse_T, valid = row_lse(logits), row_lse(logits * u), tc != IGNORE
            # t and s: both models' logits at each place, which is an id, or the cached k ids and the rest;
            # log_count: of how many ids a place stands for
            if k:
                ids, t = t[:, :k].long() & 0xFFFF, t[:, k:].view(torch.float16).float()  # (chunk, k), (chunk, k + 1)
                top = logits.gather(-1, ids)
                s = torch.hstack((top, (row_sum(logits) - row_sum(top)) / (V - k)))
                log_count = t.new_zeros(k + 1)
                log_count[k] = math.log(V - k)
            else:
                t, s, log_count = (t @ teacher_head.t()).float(), logits, 0.0  # (chunk, V)
            favourite = ids[:, :1] if k else t.argmax(-1, keepdim=True)  # the teacher's likeliest id
            agree += ((logits.argmax(-1, keepdim=True) == favourite) & valid).sum()
            log_p = t * u - row_lse(t * u + log_count)
            probs, log_ratio = (log_p + log_count).exp(), log_p - (s * u - lse_T)
            ce += ((lse - logits.gather(-1, tc.clamp(min=0))) * valid).sum()
            kl_c = row_sum(probs * log_ratio)
            kl += (kl_c * valid).sum()
            if ctx.needs_input_grad[2]:
                dkl_du = (row_sum(probs * (t - row_sum(probs * t)) * log_ratio)
                          - (row_sum(probs * s) - row_sum((logits * u - lse_T).exp() * logits)))
                dT += ((2 * T * kl_c - dkl_du) * valid).sum()

            def gradient(z, onehot, log_p):  # with respect to the student's logits z
                ce_grad, kl_grad = (z - lse).exp() - onehot.float(), (z * u - lse_T).exp() - log_p.exp()
                return (((1 - w) * ce_grad + w * T * kl_grad) * valid).to(x.dtype)

            dlogits = gradient(logits, torch.arange(V, device=x.device) == tc, log_p[:, k:])
            if k:
                dlogits = dlogits.scatter(-1, ids, gradient(top, ids == tc, log_p[:, :k]))
            dxc[:] = dlogits @ weight_x
            if ctx.needs_input_grad[1]:
                dweight += dlogits.t() @ xc
        ctx.save_for_backward(dx, dweight.to(weight.dtype), w * dT)
        return (1 - w) * ce + w * T * T * kl, torch.stack((ce, kl, agree, (targets != IGNORE).sum()))

    @staticmethod
    def backward(ctx, grad_loss, _):
        return *[gradient * grad_loss for gradient in ctx.saved_tensors], *[None] * 4


class Distillation(nn.Module):
    """
    Becomes `model.loss_fn` on construction. Then attach(loader, ...) provides each batch with the teacher's outputs.
    """

    def __init__(self, model, dataset, device, dtype, options, config):
        """dataset: of training; options: of torch.compile, or None."""
        super().__init__()
        if model.loss_fn is not linear_cross_entropy:
            fail(f"--teacher={config['teacher']}: its loss, DistillLoss, would replace the one in model.loss_fn")
        if teacher_cache >= model.config.vocab_size:
            fail(f"--teacher_cache={teacher_cache}: expected less than the vocabulary, {model.config.vocab_size}")
        if learn_temperature and config["fsdp"]:
            fail("--learn_temperature=True: not with --fsdp=True; give a fixed --teacher_temperature")
        log_T = torch.tensor([math.log(teacher_temperature)], device=device)
        self.log_temperature = nn.Parameter(log_T) if learn_temperature else log_T
        self.sums = nn.Buffer(torch.zeros(4, device=device), persistent=False)  # CE, KL, agreements, targets
        self.dtype = getattr(torch, dtype)
        net, checkpoint = load_model(config["teacher"], "cpu")
        check_tokenizer("the student", dataset.tokenizer, checkpoint)
        if dataset.max_seq_len > net.config.max_seq_len:
            fail(f"--max_seq_len={dataset.max_seq_len}: the teacher has {net.config.max_seq_len} positions; give at "
                 f"most that")
        self.digest = digest_weights({**checkpoint["model_args"], "dropout": 0.0}, net.state_dict())
        net.requires_grad_(False)
        if config["fsdp"] or shard_teacher:
            load_extra("fsdp", config, "fsdp", "shard_teacher").apply_fsdp(net, device, dtype, options)
        else:
            net.to(device)
            if options:
                net.hidden_states = torch.compile(net.hidden_states, **options)

        def teacher_forward(batch):
            with runtime.autocast(device, dtype):
                hidden = net.hidden_states(batch["idx"], batch.get("positions"), batch.get("mask"))
            # copy: with reduce-overhead the next call overwrites it. The head is whole under FSDP, too: it belongs to
            # the root, which stays gathered after its forward
            return {"teacher": hidden.to(self.dtype, copy=True), "teacher_head": net.lm_head.weight.to(self.dtype)}

        self.teacher_forward = teacher_forward
        model.loss_fn = self

    def forward(self, x, weight, targets, teacher, teacher_head=None):
        """
        Sum of (1 - w) cross entropy + w T^2 KL(teacher || student), which compares both at temperature T, over targets
        that are not IGNORE. T^2 keeps the gradient's size as T varies. x (N, C), weight (V, C), targets (N,) as in
        linear_cross_entropy.
        Online: teacher (B, T, C_t), its hidden states, and teacher_head (V, C_t). Cached: teacher (B, T, 2 k + 1)
        int16, see TeacherCache.
        """
        loss, loss_terms = DistillLoss.apply(x.to(self.dtype), weight, self.log_temperature.exp()[0], targets,
                                             teacher_weight, teacher.flatten(0, 1), teacher_head)
        self.sums.add_(loss_terms.detach())
        return loss

    def attach(self, loader, n_rows, folder):
        """Has the loader add the teacher's outputs to each batch; a cache in `folder` gets the next n_rows rows."""
        if not teacher_cache:
            loader.transforms.append(self.teacher_forward)
            return
        data = loader.dataset
        key = [self.digest, data.fingerprint, data.max_seq_len, teacher_cache]
        path = f"{folder}/teacher-{digest_weights(key, {})[:16]}.cache"
        n_rows += loader.rows_seen + loader.world_size * loader.batch_size  # a batch is read ahead
        TeacherCache(path, data).fill(np.sort(epoch_permutation(len(data), loader.seed, 0)[:n_rows]), self, loader)
        loader.sources.append(TeacherCache(path, data))  # opened again: other machines may have written to it
        del self.teacher_forward  # frees its memory

    def metrics(self):
        ce, kl, agree, n = runtime.all_reduce(*self.sums)
        self.sums.zero_()
        return {"ce_loss": ce / n, "kl_loss": kl / n, "agreement": agree / n,
                "temperature": self.log_temperature.exp().item()}

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
    the rows. A sparse file of int16, (rows, T, 2 k + 1): the ids, modulo 2^16, and the bits of k + 1 float16. A row
    is written if its last number is not zero: a log-probability is below log 1 = 0, and a sparse file reads as zeros.
    """

    def __init__(self, path, dataset):
        open(path, "a").close()
        self.rows = np.memmap(path, "<i2", "r+", shape=(len(dataset), dataset.max_seq_len, 2 * teacher_cache + 1))

    def __getitem__(self, indices):
        rows = self.rows[indices]
        if not rows[:, -1, -1].all():
            fail(f"{self.rows.filename}: a row is missing (a run that was rolled back needs more than planned); "
                 f"--init_from=resume adds it", alone=True)
        return {"teacher": rows}

    def fill(self, indices, distillation, loader):
        """
        Labels those of the rows `indices` that are missing; the ranks share them. If interrupted, what is written
        stays.
        """
        missing = indices[self.rows[indices, -1, -1] == 0]
        runtime.all_reduce(distillation.sums[0])  # wait until all ranks have read what is missing
        runtime.print0(f"teacher: labelling {len(missing):,} of {len(indices):,} rows, the others are in "
                       f"{self.rows.filename} already; {len(missing) * self.rows[0].nbytes / 2 ** 20:,.1f} MiB")
        free = shutil.disk_usage(Path(self.rows.filename).parent).free
        if len(missing) * self.rows[0].nbytes > free:  # writing to a mapped file on a full disk would kill the process
            fail(f"--teacher_cache={teacher_cache}: {free / 2 ** 20:,.1f} MiB are free; give less, or make room")
        # as many batches on each rank, because FSDP runs all of them together: the last may repeat some rows
        steps = math.ceil(len(missing) / (loader.world_size * loader.batch_size))
        batches = np.resize(missing, (steps, loader.world_size, loader.batch_size))
        for batch in tqdm(batches[:, loader.rank], "teacher", disable=loader.rank > 0, delay=2, mininterval=2):
            output = distillation.teacher_forward(loader.dataset.get_batch(batch, loader.device))
            for i, hidden in zip(batch, output["teacher"]):
                log_probs = (hidden @ output["teacher_head"].t()).float().log_softmax(-1)  # (T, V)
                top, ids = log_probs.topk(teacher_cache)
                others = row_lse(log_probs.scatter(-1, ids, -math.inf)) - math.log(log_probs.size(-1) - teacher_cache)
                bits = torch.hstack((top, others)).half().view(torch.int16)
                self.rows[i] = torch.hstack((ids.short(), bits)).cpu().numpy()
        self.rows.flush()
        runtime.all_reduce(distillation.sums[0])  # wait until all have written
