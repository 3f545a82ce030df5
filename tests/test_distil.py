"""Distillation: the loss against its plain formula, the cache against the live teacher, and both loops with either."""
import json
import math

import pytest
import torch
import torch.nn.functional as F

import model as model_module
from model import IGNORE, distillation, linear_cross_entropy

N, C, V = 21, 12, 40  # in chunks of 8, and a last one that is not full


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(model_module, "LOSS_CHUNK", 8)


def inputs(T=2.0, teacher_width=20):
    """x, weight, targets, temperature, and a teacher's hidden states and head."""
    torch.manual_seed(0)
    x, weight, hidden, head = (torch.randn(*shape) for shape in ((N, C), (V, C), (N, teacher_width), (V, teacher_width)))
    targets = torch.randint(0, V, (N,))
    targets[::3] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets, torch.tensor(T, requires_grad=True), hidden, head


def formula(x, weight, targets, alpha, T, teacher_logits):
    logits = x @ weight.t()
    ce = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    kl = F.kl_div((logits / T).log_softmax(-1), (teacher_logits / T).log_softmax(-1), reduction="none", log_target=True).sum(-1)
    kl = kl[targets != IGNORE].sum()
    return (1 - alpha) * ce + alpha * T ** 2 * kl, torch.stack((ce, kl))


def top_k(logits, k):
    """A cache's rows: log-probabilities of the k likeliest and of each other id, and the k ids."""
    log_probs, ids = logits.log_softmax(-1).sort(descending=True)
    rest = log_probs[:, k:].logsumexp(-1, keepdim=True) - math.log(V - k) if k < V else torch.zeros(len(logits), 1)
    return torch.cat((log_probs[:, :k], rest), -1), ids[:, :k]


def check(ours, parts, theirs, their_parts, wanted):
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5) and torch.allclose(parts, their_parts, rtol=1e-5)
    for mine, other in zip(torch.autograd.grad(ours * 0.37, wanted), torch.autograd.grad(theirs * 0.37, wanted)):
        assert (mine - other).abs().max() < 1e-5 * max(1, other.abs().max())


@pytest.mark.parametrize("T, alpha, compiled", [(1.0, 0.5, False), (2.0, 0.9, False), (0.5, 1.0, False), (4.0, 0.3, False), (2.0, 0.5, True)])
def test_chunks_equal_the_formula_with_all_gradients(T, alpha, compiled):
    x, weight, targets, temperature, hidden, head = inputs(T)
    loss = torch.compile(distillation, fullgraph=True, dynamic=False) if compiled else distillation
    wanted = x, weight, temperature
    check(*loss(x, weight, targets, alpha, temperature, hidden, head), *formula(x, weight, targets, alpha, temperature, hidden @ head.t()), wanted)
    for k in (V,) if compiled else (1, 5, V - 1, V):  # against the formula on the whole row that the cache stands for
        told, ids = top_k(hidden @ head.t(), k)
        row = told[:, -1:].expand(N, V).scatter(-1, ids, told[:, :-1])
        assert row.exp().sum(-1).sub(1).abs().max() < 1e-5
        check(*loss(x, weight, targets, alpha, temperature, told, None, ids), *formula(x, weight, targets, alpha, temperature, row), wanted)


def test_a_cache_of_the_whole_vocabulary_is_the_live_teacher():
    x, weight, targets, temperature, hidden, head = inputs()
    told, ids = top_k(hidden @ head.t(), V)
    wanted = x, weight, temperature
    check(*distillation(x, weight, targets, 0.5, temperature, told, None, ids), *distillation(x, weight, targets, 0.5, temperature, hidden, head), wanted)


def test_weight_zero_is_plain_cross_entropy_and_a_teacher_like_the_student_teaches_nothing():
    x, weight, targets, temperature, hidden, head = inputs()
    for told in ((hidden, head), (top_k(hidden @ head.t(), 5)[0], None, top_k(hidden @ head.t(), 5)[1])):
        ours, theirs = distillation(x, weight, targets, 0.0, temperature, *told)[0], linear_cross_entropy(x, weight, targets)
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
        for mine, other in zip(torch.autograd.grad(ours, (x, weight)), torch.autograd.grad(theirs, (x, weight))):
            assert (mine - other).abs().max() < 1e-5
    loss, parts = distillation(x, weight, targets, 1.0, temperature, x.detach(), weight.detach())
    assert abs(loss.item()) < 1e-4 and abs(parts[1].item()) < 1e-4
    assert all(gradient.abs().max() < 1e-4 for gradient in torch.autograd.grad(loss, (x, weight, temperature)))


def test_a_fixed_temperature_has_no_gradient_and_bfloat16_is_near():
    x, weight, targets, temperature, hidden, head = inputs()
    exact, _ = distillation(x, weight, targets, 0.5, temperature.detach(), hidden, head)
    exact.backward()
    assert temperature.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        near, _ = distillation(x, weight, targets, 0.5, temperature.detach(), hidden, head)
    assert near.item() == pytest.approx(exact.item(), rel=0.02)
