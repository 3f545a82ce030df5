"""SPAM: clipping and resets against their formulas, and a spike that AdamW does not get over."""
import numpy as np
import pytest
import torch

from conftest import TINY, read_log, refused, run, write_shards
from extras import spam
from optim import configure_optimizer, set_lr
from test_chat import base, chats, check_resumed, SFT  # noqa: F401 two fixtures
from test_optim import optimizer_config, small_gpt


def learn(optimizer, steps, spike_at=None):
    """
    A GPT overfits which id follows which; at one step each gradient gets noise of 100,000 times its size.
    Returns losses and weights.
    """
    gpt = small_gpt("gpt2")
    groups = configure_optimizer(gpt, optimizer_config(optimizer, learning_rate=3e-3))
    hook = spam.Spam(groups) if optimizer == "adamw_spam" else lambda iter_num: None
    idx = torch.arange(64).view(8, 8) * 7 % 32
    losses = []
    for step in range(steps):
        loss = gpt(idx, (5 * idx + 1) % 32) / 64
        loss.backward()
        losses.append(loss.item())
        torch.manual_seed(step)
        for p in gpt.parameters() if step == spike_at else ():
            p.grad += 1e5 * p.grad.abs().mean() * torch.randn_like(p)
        set_lr(groups, 3e-3, step)
        hook(step)
        groups.step()
        groups.zero_grad()
    return losses, list(gpt.parameters())


def test_spam_learns_on_after_a_spike_that_stops_adamw():
    """AdamW's second moments take hundreds of steps to forget it, in which next to nothing moves."""
    clean, adamw, clipped = (learn(*args, steps=240, **spike)[0] for args, spike in (
        (["adamw_spam"], {}), (["adamw"], {"spike_at": 60}), (["adamw_spam"], {"spike_at": 60})))
    assert clean[60] == adamw[60] == clipped[60] < 1.2
    assert clean[-1] < 0.01 and clipped[-1] < 0.1 and adamw[-1] > 0.9


def test_without_spikes_and_resets_it_is_torchs_adamw():
    for p, q in zip(learn("adamw", 50)[1], learn("adamw_spam", 50)[1]):
        assert (p - q).abs().max() <= 1e-6


def with_moments(shape=(1000,)):
    """One parameter that has taken a step, its second moments from 0 to 1e-3, its optimizer, and SPAM's hook."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer = configure_optimizer(model, optimizer_config("adamw_spam"))
    hook = spam.Spam(optimizer)
    model.weight.grad = torch.ones(shape)
    optimizer.step()
    optimizer.state[model.weight]["exp_avg_sq"] = torch.linspace(0, 1e-3, model.weight.numel()).view(shape)
    return model.weight, optimizer, hook


def test_spikes_are_clipped_by_the_formula(monkeypatch):
    """g^2 / v > 5000 -> sign(g) sqrt(5000 v); not where v is zero, nor what is not finite, nor in the first 20 steps."""
    g = torch.randn(1000) * torch.logspace(-3, 3, 1000)
    g[:3], g[500], g[501] = 1e6, torch.nan, -torch.inf
    v, expected = with_moments()[1].param_groups[0]["params"][0], g.tolist()
    v = torch.linspace(0, 1e-3, 1000).tolist()
    spikes = [i for i in range(1000) if v[i] > 0 and abs(expected[i]) < 1e30 and expected[i] ** 2 / v[i] > 5000]
    for i in spikes:
        expected[i] = (1 if expected[i] > 0 else -1) * (5000 * v[i]) ** 0.5
    assert 100 < len(spikes) < 900
    for step, clipped in ((0, False), (19, False), (20, True), (499, True), (500, False), (519, False), (520, True)):
        p, _, hook = with_moments()  # a reset zeros its moments
        p.grad = g.clone()
        hook(step)
        torch.testing.assert_close(p.grad, torch.tensor(expected) if clipped else g, rtol=1e-6, atol=0, equal_nan=True)
    for interval, step, clipped in ((50, 51, False), (50, 52, True), (5000, 19, False), (5000, 20, True)):
        monkeypatch.setattr(spam, "spam_interval", interval)  # 2 steps of 50, but 20 of 5000
        p, _, hook = with_moments()
        p.grad = g.clone()
        hook(step)
        assert (p.grad[spikes] != g[spikes]).any() == clipped
