"""SPAM: clipping and resets against their formulas, and a spike that AdamW does not get over."""
import pytest
import torch

from conftest import error_line, optimizer_config, poisoned, read_log, small_gpt
from extras.spam import spam_hook
from optim import configure_optimizer, set_lr


def new_spam(model, interval=500, warmup=None, theta=5000.0):
    """An optimizer with SPAM's hook."""
    config = {**optimizer_config("adamw_spam"), "spam_interval": interval, "spam_warmup": warmup, "spam_theta": theta}
    optimizer = configure_optimizer(model, config)
    return optimizer, spam_hook(optimizer, config)


def learn(spam):
    """
    The losses of a GPT that overfits which id follows which; in step 25 each gradient gets noise of 100,000 times its
    size.
    """
    gpt, losses = small_gpt("gpt2"), []
    optimizer, hook = new_spam(gpt)
    idx = torch.arange(64).view(8, 8) * 7 % 32
    for step in range(100):
        loss = gpt(idx, (5 * idx + 1) % 32) / 64
        loss.backward()
        losses.append(loss.item())
        torch.manual_seed(step)
        for p in gpt.parameters() if step == 25 else ():
            p.grad += 1e5 * p.grad.abs().mean() * torch.randn_like(p)
        set_lr(optimizer, 1e-2)
        if spam:
            hook(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_spam_learns_on_after_a_spike_that_stops_adamw():
    """AdamW's second moments take hundreds of steps to forget it. Without spikes and resets the two are the same."""
    adamw, spam = learn(False), learn(True)
    assert adamw[:26] == spam[:26] and spam[25] < 0.85
    assert spam[-1] < 0.3 and adamw[-1] > 0.9


def with_moments(**settings):
    """A parameter that has taken a step, with second moments from 0 to 1e-3; its optimizer; and SPAM's hook."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer, hook = new_spam(model, **settings)
    model.weight.grad = torch.ones(1000)
    optimizer.step()
    optimizer.state[model.weight]["exp_avg_sq"] = torch.linspace(0, 1e-3, 1000)
    return model.weight, optimizer, hook


def test_spikes_are_clipped_by_the_formula():
    """g^2 / v > theta -> sign(g) sqrt(theta v); but not if v is zero or g not finite, nor in the first steps."""
    g = torch.randn(1000) * torch.logspace(-3, 3, 1000)
    g[:3], g[500], g[501] = 1e6, torch.nan, -torch.inf
    v = torch.linspace(0, 1e-3, 1000).tolist()
    for interval, theta, step, clips in (
            (500, 5000, 0, False), (500, 5000, 19, False), (500, 5000, 20, True), (500, 5000, 499, True),
            (500, 5000, 500, False), (500, 5000, 519, False), (500, 50, 520, True), (50, 5000, 51, False),
            (50, 5000, 52, True), (5000, 5000, 19, False), (5000, 5000, 20, True)):  # 2 steps of 50, but 20 of 5000
        expected = g.tolist()
        spikes = [i for i in range(1000) if v[i] > 0 and abs(g[i]) < 1e30 and g[i] ** 2 / v[i] > theta]
        assert 100 < len(spikes) < 900
        for i in spikes if clips else ():
            expected[i] = (1 if expected[i] > 0 else -1) * (theta * v[i]) ** 0.5
        p, _, hook = with_moments(interval=interval, theta=theta)
        p.grad = g.clone()
        hook(step)
        torch.testing.assert_close(p.grad, torch.tensor(expected), rtol=1e-6, atol=0, equal_nan=True)


def test_moments_are_reset_and_the_rate_warms_up_again():
    """
    The factors are 1 - 0.99 (1 + cos(pi t / 150)) / 2, worked out by hand at thirds and halves; none before the first
    reset.
    """
    p, optimizer, hook = with_moments()
    for step, factor in ((0, 1), (75, 1), (499, 1), (500, 0.01), (550, 0.2575), (575, 0.505), (600, 0.7525), (650, 1),
                         (999, 1), (1000, 0.01)):
        p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        set_lr(optimizer, 2e-4)
        hook(step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(factor * 2e-4), step
        state = optimizer.state[p]
        assert all((state[name] == 0).all() == (step % 500 == 0) for name in ("step", "exp_avg", "exp_avg_sq")), step
    before = p.detach().clone()
    optimizer.step()  # like AdamW's first: whatever the gradient, it moves by the rate, here 2e-6, and decays
    decay = 2e-6 * optimizer.param_groups[0]["weight_decay"]
    torch.testing.assert_close(p.detach(), before * (1 - decay) - 2e-6, rtol=0, atol=1e-10)


@pytest.mark.parametrize("settings, factors", [
    (dict(interval=10), {9: 1, 10: 0.01, 11: 0.2575, 12: 0.7525, 13: 1}),  # 3 steps of 10, as 150 of 500
    (dict(interval=1000, warmup=1000), {999: 1, 1000: 0.01, 1500: 0.505, 2000: 0.01})])  # config/gpt2_spam.py's
def test_interval_and_warmup_are_settings(settings, factors):
    p, optimizer, hook = with_moments(**settings)
    for step, factor in factors.items():
        set_lr(optimizer, 2e-4)
        hook(step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(factor * 2e-4), step


def test_a_warmup_longer_than_the_interval_is_refused():
    line = error_line(lambda: with_moments(interval=9, warmup=10))
    assert "--spam_warmup=10: longer than --spam_interval=9" in line


# ---------------------------------------------------------------------------------------------------
# runs; a resumed one is in test_prune.py, and in test_chat.py

def test_it_clips_what_noise_brings(train, tmp_path):
    """
    Letters that the text does not have get tiny second moments; then the rows of step 25 are noise. Up to that
    gradient the run is AdamW's.
    """
    data = poisoned(tmp_path / "data", 25)
    logs = []
    for optimizer in ("adamw", "adamw_spam"):
        train(tmp_path / optimizer, f"--data_dir={data}", "--max_iters=26", "--sample_tokens=0",
              f"--optimizer={optimizer}")
        logs.append(read_log(tmp_path / optimizer, "train_loss", "grad_norm"))
    adamw, clipped = logs
    assert all(adamw[key] == clipped[key] for key in adamw if key != ("grad_norm", 26))
    assert clipped["grad_norm", 26] < 0.9 * adamw["grad_norm", 26]
