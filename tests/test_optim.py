"""The schedule against torch's own, and which parameters decay; Muon and SPAM against their formulas."""

import pytest
import torch

from model import GPT, GPTConfig
from optim import clip_spikes, get_lr, new_optimizer, set_rates


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
    optimizer = new_optimizer(gpt, "adamw", 1e-3, 0.9, 0.95, 0.1)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(gpt.parameters()))
    for name, p in gpt.named_parameters():
        assert (id(p) in decayed) == (name.endswith("weight") and "ln_" not in name), name


def small_gpt(arch, **changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**dict(arch=arch, n_layer=2, n_head=2, n_embd=16, vocab_size=32, max_seq_len=8), **changes}))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_group_has_its_own_rate_and_the_schedule_moves_them_all(optimizer):
    gpt = small_gpt("llama")
    groups = new_optimizer(gpt, optimizer, 1e-3, 0.9, 0.95, 0.1, embedding_lr=0.1, head_lr=0.004, muon_lr=0.02)
    rates = {group["lr"] for group in groups.param_groups}  # the peaks
    assert rates == {1e-3, 0.1, 0.004} | ({0.02} if optimizer == "muon" else set())
    set_rates(groups, 5e-4, iter_num=50)  # the schedule is at half of its peak
    rate = {id(p): group["lr"] for group in groups.param_groups for p in group["params"]}
    for name, p in gpt.named_parameters():
        expected = 5e-4 if p.dim() < 2 else 0.05 if "wte" in name else 0.002 if "lm_head" in name else 0.01 if optimizer == "muon" else 5e-4
        assert rate[id(p)] == pytest.approx(expected), name
    momenta = [group["momentum"] for group in groups.param_groups if "momentum" in group]
    assert momenta == ([pytest.approx(0.9)] if optimizer == "muon" else [])
    set_rates(groups, 5e-4, iter_num=1000)
    assert [group["momentum"] for group in groups.param_groups if "momentum" in group] == [pytest.approx(0.95)] * len(momenta)


def orthogonalised(g):
    """Five steps of the quintic Newton-Schulz iteration (kellerjordan.github.io/posts/muon), in float64."""
    x = g.double() / g.double().norm()
    x = x.T if g.size(0) > g.size(1) else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.size(0) > g.size(1) else x


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
@pytest.mark.parametrize("compile", [False, True])
def test_muon_is_its_formula_on_hidden_matrices_and_adamw_elsewhere(arch, compile):
    """Three steps with random gradients; its products are in bfloat16, hence the tolerance."""
    gpt, twin = small_gpt(arch), small_gpt(arch)
    optimizer = new_optimizer(gpt, "muon", 1e-3, 0.9, 0.95, 0.1, muon_lr=0.02)
    if compile:
        optimizer.compile("inductor")
    hidden = {name: p for name, p in twin.named_parameters() if p.dim() == 2 and "transformer.h." in name}
    rest = [p for name, p in twin.named_parameters() if name not in hidden]
    adamw = torch.optim.AdamW([{"params": [p for p in rest if p.dim() == 2], "weight_decay": 0.1},
                               {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95), fused=False)
    momentum = {name: torch.zeros_like(p) for name, p in hidden.items()}
    for step in range(3):
        for p, q in zip(gpt.parameters(), twin.parameters()):
            p.grad, q.grad = (g := torch.randn_like(p)), g.clone()
        set_rates(optimizer, 1e-3, step)
        optimizer.step()
        adamw.step()
        with torch.no_grad():
            mu = 0.85 + 0.001 * step
            for name, p in hidden.items():
                momentum[name] = mu * momentum[name] + (1 - mu) * p.grad
                update = orthogonalised(mu * momentum[name] + (1 - mu) * p.grad)  # Nesterov
                p -= 0.02 * (0.1 * p + max(1, p.size(0) / p.size(1)) ** 0.5 * update)
    for (name, p), q in zip(gpt.named_parameters(), twin.parameters()):
        if name in hidden:  # of three updates, each with entries of about 0.02 / sqrt(16)
            assert (p - q).abs().mean() < 0.02 * 0.02, name
        else:
            torch.testing.assert_close(p, q)


def take_steps(rank, world_size, folder):
    """Three Muon steps from gradients that are the same on every rank; rank 0 saves weights and state, before and after a load."""
    if world_size > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    gpt = small_gpt("llama")
    optimizer = new_optimizer(gpt, "muon", 1e-3, 0.9, 0.95, 0.1)
    for step in range(4):
        torch.manual_seed(step)
        for p in gpt.parameters():
            p.grad = torch.randn_like(p)
        set_rates(optimizer, 1e-3, step)
        optimizer.step()
        if step == 1:  # a save, and a resume from it
            state = optimizer.state_dict()
            optimizer = new_optimizer(gpt, "muon", 1e-3, 0.9, 0.95, 0.1)
            optimizer.load_state_dict(state)
    state = optimizer.state_dict()
    torch.save([gpt.state_dict(), state, {name: optimizer.owner[p] for name, p in gpt.named_parameters() if p in optimizer.owner}],
               f"{folder}/{world_size}_{rank}.pt")
    if world_size > 1:
        torch.distributed.destroy_process_group()


def test_ranks_that_share_out_the_orthogonalising_have_the_update_of_one(tmp_path):
    """From identical gradients, to the last bit, on each rank; the state that is saved is whole; each rank has its share."""
    from test_train import same
    take_steps(0, 1, tmp_path)
    torch.multiprocessing.start_processes(take_steps, (2, tmp_path), nprocs=2, start_method="forkserver")
    one, first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("1_0", "2_0", "2_1"))
    assert same(one[:2], first[:2]) and same(first, second)
    owners = list(first[2].values())
    assert one[2] == {} and len(owners) == 14 and owners.count(0) == owners.count(1) == 7


# ---------------------------------------------------------------------------------------------------
# adamw_spam

def learn(optimizer, steps, spike_at=None):
    """A GPT learns by heart which id follows which; at one step each gradient gets noise of 100,000 times its size. -> losses, weights."""
    gpt = small_gpt("gpt2")
    groups = new_optimizer(gpt, optimizer, 3e-3, 0.9, 0.95, 0.1)
    x = torch.arange(64).view(8, 8) * 7 % 32
    losses = []
    for step in range(steps):
        loss = gpt(x, (5 * x + 1) % 32) / 64
        loss.backward()
        losses.append(loss.item())
        torch.manual_seed(step)
        for p in gpt.parameters() if step == spike_at else ():
            p.grad += 1e5 * p.grad.abs().mean() * torch.randn_like(p)
        set_rates(groups, 3e-3, step)
        if optimizer == "adamw_spam":
            clip_spikes(groups, step)
        groups.step()
        groups.zero_grad()
    return losses, list(gpt.parameters())


def test_spam_learns_on_behind_a_spike_where_adamw_stands_still():
    """AdamW's second moments take hundreds of steps to forget it, in which next to nothing moves."""
    clean, adamw, spam = (learn(*args, steps=240, **spike)[0] for args, spike in
                          ((["adamw_spam"], {}), (["adamw"], {"spike_at": 60}), (["adamw_spam"], {"spike_at": 60})))
    assert clean[60] == adamw[60] == spam[60] < 1.2
    assert clean[-1] < 0.01 and spam[-1] < 0.1 and adamw[-1] > 0.9


def test_spam_without_spikes_and_resets_is_torchs_adamw():
    for p, q in zip(learn("adamw", 50)[1], learn("adamw_spam", 50)[1]):
        assert (p - q).abs().max() <= 1e-6


def with_moments(shape=(1000,), **settings):
    """One parameter of an adamw_spam optimizer that has taken a step, its second moments from 0 to 1e-3."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer = new_optimizer(model, "adamw_spam", 1e-3, 0.9, 0.95, 0.1, **settings)
    model.weight.grad = torch.ones(shape)
    optimizer.step()
    optimizer.state[model.weight]["exp_avg_sq"] = torch.linspace(0, 1e-3, model.weight.numel()).view(shape)
    return model.weight, optimizer


def test_spikes_are_clipped_by_the_formula():
    """g^2 / v > 5000 -> sign(g) sqrt(5000 v); not where v is zero, nor what is not finite, nor in the first 20 steps."""
    p, optimizer = with_moments()
    g = torch.randn(1000) * torch.logspace(-3, 3, 1000)
    g[:3], g[500], g[501] = 1e6, torch.nan, -torch.inf
    v, expected = optimizer.state[p]["exp_avg_sq"].tolist(), g.tolist()
    spikes = [i for i in range(1000) if v[i] > 0 and abs(expected[i]) < 1e30 and expected[i] ** 2 / v[i] > 5000]
    for i in spikes:
        expected[i] = (1 if expected[i] > 0 else -1) * (5000 * v[i]) ** 0.5
    assert 100 < len(spikes) < 900
    for step, clipped in ((0, False), (19, False), (20, True), (499, True), (500, False), (519, False), (520, True)):
        p.grad = g.clone()
        clip_spikes(optimizer, step)
        torch.testing.assert_close(p.grad, torch.tensor(expected) if clipped else g, rtol=1e-6, atol=0, equal_nan=True)
    for interval, step, clipped in ((50, 51, False), (50, 52, True), (5000, 19, False), (5000, 20, True)):  # 2 steps of 50, 20 of 5000
        p, optimizer = with_moments(spam_interval=interval)
        p.grad = g.clone()
        clip_spikes(optimizer, step)
        assert (p.grad[spikes] != g[spikes]).any() == clipped


def test_spam_resets_its_moments_and_warms_up_again():
    """The factors are 1 - 0.99 (1 + cos(pi t / 150)) / 2, worked out by hand at thirds and halves; none before the first reset."""
    p, optimizer = with_moments()
    for step, factor in ((0, 1), (75, 1), (499, 1), (500, 0.01), (550, 0.2575), (575, 0.505), (600, 0.7525), (650, 1), (999, 1),
                         (1000, 0.01)):
        p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        set_rates(optimizer, 2e-4, step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(factor * 2e-4), step
        state = optimizer.state[p]
        assert all((state[name] == 0).all() == (step % 500 == 0) for name in ("step", "exp_avg", "exp_avg_sq")), step
    before = p.detach().clone()
    optimizer.step()  # as an AdamW's first step: whatever the gradient is, the rate, 2e-6 here, beside the decay
    torch.testing.assert_close(p.detach(), before * (1 - 2e-6 * optimizer.param_groups[0]["weight_decay"]) - 2e-6, rtol=0, atol=1e-10)
    p, optimizer = with_moments(spam_interval=10)  # 3 of 10, as 150 of 500
    for step, factor in ((9, 1), (10, 0.01), (11, 0.2575), (12, 0.7525), (13, 1)):
        set_rates(optimizer, 2e-4, step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(factor * 2e-4), step


def test_adamw_keeps_the_groups_it_had():
    """What adamw_spam needs is in its own groups alone, and so in its own checkpoints."""
    keys = {*torch.optim.AdamW([torch.zeros(1)]).param_groups[0], "lr_scale"}
    for optimizer, more in (("adamw", set()), ("adamw_spam", {"spam_interval"})):
        assert all(group.keys() == keys | more for group in new_optimizer(small_gpt("gpt2"), optimizer, 1e-3, 0.9, 0.95, 0.1).param_groups)
