"""The schedule against torch's own, and which parameters decay."""
import pytest
import torch

from model import GPT, GPTConfig
from optim import get_lr, new_optimizer


def rates(schedule, steps=101, **changes):
    settings = dict(learning_rate=0.6, min_lr=0.06, warmup_iters=10, decay_iters=100, wsd_decay_frac=0.2)
    return [get_lr(it, schedule, **{**settings, **changes}) for it in range(steps)]


def torch_rates(scheduler):
    lrs = []
    for _ in range(101):
        lrs.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return lrs


def new_sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.6)


def test_cosine_equals_torch():
    lrs = rates("cosine")
    theirs = torch_rates(torch.optim.lr_scheduler.CosineAnnealingLR(new_sgd(), T_max=90, eta_min=0.06))
    assert lrs[:10] == pytest.approx([0.06 * (i + 1) for i in range(10)])
    assert lrs[10:] == pytest.approx(theirs[:91])
    assert rates("cosine", steps=200)[100:] == [0.06] * 100


def test_wsd_equals_torch():
    theirs = torch_rates(torch.optim.lr_scheduler.LinearLR(new_sgd(), start_factor=1.0, end_factor=0.1, total_iters=20))
    lrs = rates("wsd")
    assert lrs[10:81] == pytest.approx([0.6] * 71)
    assert lrs[80:101] == pytest.approx(theirs[:21])


def test_constant_stays():
    assert rates("constant", steps=200)[10:] == [0.6] * 190


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_matrices_decay_and_norms_and_biases_do_not(arch):
    gpt = GPT(GPTConfig(arch=arch, n_layer=1, n_head=2, n_embd=8, vocab_size=16, max_seq_len=4))
    optimizer = new_optimizer(gpt, 1e-3, 0.9, 0.95, 0.1)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(gpt.parameters()))
    for name, p in gpt.named_parameters():
        assert (id(p) in decayed) == (name.endswith("weight") and "ln_" not in name), name
