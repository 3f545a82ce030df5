"""SPAM: clipping and resets against their formulas, and a spike that AdamW does not get over."""
import pytest
import torch

from conftest import TINY, chats, poisoned, read_log, refused, run
from extras import spam
from optim import configure_optimizer, set_lr
from test_chat import SFT, check_resumed
from test_cuda import COMPILED, check_losses_of_a_cpu, needs_gpu
from test_optim import optimizer_config, small_gpt


def learn(optimizer, steps, spike_at=None):
    """
    A GPT overfits which id follows which; at one step each gradient gets noise of 100,000 times its size.
    Returns losses and weights.
    """
    gpt = small_gpt("gpt2")
    groups = configure_optimizer(gpt, optimizer_config(optimizer, learning_rate=3e-3))
    hook = spam.spam_hook(groups) if optimizer == "adamw_spam" else lambda iter_num: None
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
    """A parameter that has taken a step, with second moments from 0 to 1e-3; its optimizer; and SPAM's hook."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer = configure_optimizer(model, optimizer_config("adamw_spam"))
    hook = spam.spam_hook(optimizer)
    model.weight.grad = torch.ones(shape)
    optimizer.step()
    optimizer.state[model.weight]["exp_avg_sq"] = torch.linspace(0, 1e-3, model.weight.numel()).view(shape)
    return model.weight, optimizer, hook


def test_spikes_are_clipped_by_the_formula(monkeypatch):
    """g^2 / v > 5000 -> sign(g) sqrt(5000 v); but not if v is zero or g not finite, nor in the first 20 steps."""
    g = torch.randn(1000) * torch.logspace(-3, 3, 1000)
    g[:3], g[500], g[501] = 1e6, torch.nan, -torch.inf
    v, expected = torch.linspace(0, 1e-3, 1000).tolist(), g.tolist()
    spikes = [i for i in range(1000) if v[i] > 0 and abs(expected[i]) < 1e30 and expected[i] ** 2 / v[i] > 5000]
    for i in spikes:
        expected[i] = (1 if expected[i] > 0 else -1) * (5000 * v[i]) ** 0.5
    assert 100 < len(spikes) < 900
    for step, clipped in ((0, False), (19, False), (20, True), (499, True), (500, False), (519, False), (520, True)):
        p, _, hook = with_moments()
        p.grad = g.clone()
        hook(step)
        torch.testing.assert_close(p.grad, torch.tensor(expected) if clipped else g, rtol=1e-6, atol=0, equal_nan=True)
    for interval, step, clipped in ((50, 51, False), (50, 52, True), (5000, 19, False), (5000, 20, True)):
        monkeypatch.setattr(spam, "spam_interval", interval)  # 2 steps of 50, but 20 of 5000
        p, _, hook = with_moments()
        p.grad = g.clone()
        hook(step)
        assert (p.grad[spikes] != g[spikes]).any() == clipped


def test_moments_are_reset_and_the_rate_warms_up_again(monkeypatch):
    """
    The factors are 1 - 0.99 (1 + cos(pi t / 150)) / 2, worked out by hand at thirds and halves; none before the first
    reset.
    """
    p, optimizer, hook = with_moments()
    for step, factor in ((0, 1), (75, 1), (499, 1), (500, 0.01), (550, 0.2575), (575, 0.505), (600, 0.7525), (650, 1),
                         (999, 1), (1000, 0.01)):
        p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        set_lr(optimizer, 2e-4, step)
        hook(step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(factor * 2e-4), step
        state = optimizer.state[p]
        assert all((state[name] == 0).all() == (step % 500 == 0) for name in ("step", "exp_avg", "exp_avg_sq")), step
    before = p.detach().clone()
    optimizer.step()  # like AdamW's first: whatever the gradient, it moves by the rate, here 2e-6, and decays
    decay = 2e-6 * optimizer.param_groups[0]["weight_decay"]
    torch.testing.assert_close(p.detach(), before * (1 - decay) - 2e-6, rtol=0, atol=1e-10)
    monkeypatch.setattr(spam, "spam_interval", 10)  # 3 of 10, as 150 of 500
    for step, factor in ((9, 1), (10, 0.01), (11, 0.2575), (12, 0.7525), (13, 1)):
        set_lr(optimizer, 2e-4, step)
        hook(step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(factor * 2e-4), step


def test_theta_and_warmup_are_settings(monkeypatch):
    """As config/gpt2_spam.py has them: g^2 > 50 v, and 1,000 steps of warm-up after each 1,000."""
    for name, value in (("spam_theta", 50.0), ("spam_interval", 1000), ("spam_warmup", 1000)):
        monkeypatch.setattr(spam, name, value)
    for step, factor in ((999, 1), (1000, 0.01), (1500, 0.505), (2000, 0.01)):
        p, optimizer, hook = with_moments()
        set_lr(optimizer, 2e-4, step)
        p.grad = torch.ones(1000)
        hook(step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(factor * 2e-4), step
        clipped = torch.linspace(0, 1e-3, 1000).mul(50).sqrt()  # all but the first, whose v is zero
        expected = torch.cat((torch.ones(1), clipped[1:])) if step % 1000 >= 20 else torch.ones(1000)
        torch.testing.assert_close(p.grad, expected)


# ---------------------------------------------------------------------------------------------------
# runs

def test_it_clips_what_noise_brings(tmp_path):
    """
    Letters that the text does not have get tiny second moments; then the rows of step 25 are noise. Up to that
    gradient the run is AdamW's.
    """
    data = poisoned(tmp_path / "data", [25])
    logs = []
    for optimizer in ("adamw", "adamw_spam"):
        run("train_gpt2.py", *TINY, f"--data_dir={data}", f"--out_dir={tmp_path / optimizer}", "--max_iters=26",
            "--sample_tokens=0", f"--optimizer={optimizer}")
        logs.append(read_log(tmp_path / optimizer, "train_loss", "grad_norm"))
    adamw, clipped = logs
    assert all(adamw[key] == clipped[key] for key in adamw if key != ("grad_norm", 26))
    assert clipped["grad_norm", 26] < 0.9 * adamw["grad_norm", 26]


RESETS = ["--optimizer=adamw_spam", "--spam_interval=7"]  # two in 20 steps


def test_pretraining_interrupted_twice_equals_uninterrupted(shards, tmp_path):
    check_resumed("train_gpt2.py", [*TINY, *RESETS, f"--data_dir={shards}"], tmp_path)


def test_chat_tuning_interrupted_twice_equals_uninterrupted(trained, tmp_path):
    data = chats(tmp_path / "chats.jsonl")
    check_resumed("chat_sft.py", [*SFT, *RESETS, f"--init_from={trained}", f"--data={data}"], tmp_path)


@needs_gpu
def test_a_run_on_a_gpu_has_the_losses_of_a_cpu(shards, tmp_path):
    check_losses_of_a_cpu("train_gpt2.py", [*TINY, *RESETS, f"--data_dir={shards}"], COMPILED, 2e-3, tmp_path)


def test_an_interval_of_no_steps_is_refused(shards, tmp_path):
    line = refused("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--spam_interval=0")
    assert "spam_interval=0" in line and "at least 1" in line
    line = refused("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--optimizer=adamw_spam",
                   "--spam_interval=9", "--spam_warmup=10")
    assert "--spam_warmup=10: longer than --spam_interval=9" in line
