"""The schedule against torch's own, the parameter groups, and Muon against its formula."""
import math

import pytest
import torch
import torch.nn.functional as F

from conftest import GPU, check_error, defaults, error_line, literals, needs_gpu, optimizer_config, same, small_gpt
from muon import muon_updates, newton_schulz
from optim import build_schedule, configure_optimizer, set_lr, step_if_finite


# ---------------------------------------------------------------------------------------------------
# the schedule

def schedule_config(schedule, **changes):
    return {**dict(lr_schedule=schedule, learning_rate=0.6, min_lr=0.06, warmup_iters=10, lr_decay_iters=None,
                   wsd_decay_frac=0.2), **changes}


def learning_rates(schedule, steps=101, max_iters=100, **changes):
    return list(map(build_schedule(schedule_config(schedule, **changes), max_iters), range(steps)))


def torch_learning_rates(scheduler, **settings):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.6)
    scheduler, lrs = scheduler(optimizer, **settings), []
    for _ in range(101):
        lrs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return lrs


def test_cosine_equals_torch():
    lrs = learning_rates("cosine", steps=200)
    expected = torch_learning_rates(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=90, eta_min=0.06)
    assert lrs[:10] == pytest.approx([0.06 * (i + 1) for i in range(10)])
    assert lrs[10:101] == pytest.approx(expected[:91]) and lrs[100:] == [0.06] * 100
    assert learning_rates("cosine", lr_decay_iters=50)[50:] == [0.06] * 51


def test_wsd_equals_torch_and_constant_stays():
    expected = torch_learning_rates(torch.optim.lr_scheduler.LinearLR, start_factor=1, end_factor=0.1, total_iters=20)
    lrs = learning_rates("wsd")
    assert lrs[10:80] == pytest.approx([0.6] * 70) and lrs[80:] == pytest.approx(expected[:21])
    assert learning_rates("constant", steps=200)[10:] == [0.6] * 190


def test_a_schedule_without_a_formula_is_found_before_the_first_step():
    with pytest.raises(ValueError, match="no_such_schedule"):
        build_schedule(schedule_config("no_such_schedule"), 100)
    for choice in literals("train_gpt2.py")["lr_schedule"]:
        build_schedule(schedule_config(choice), 100)


def test_without_a_number_the_warmup_is_a_tenth_of_the_run_and_at_most_2000_steps():
    for max_iters, warmup_iters in ((5, 0), (100, 10), (50000, 2000)):
        unset, explicit = (learning_rates("cosine", 200, max_iters, warmup_iters=n) for n in (None, warmup_iters))
        assert unset == explicit
    assert learning_rates("wsd", warmup_iters=None, wsd_decay_frac=1.0, min_lr=0.0)[0] == 0.6  # all of the run falls


@pytest.mark.parametrize("schedule, changes, words", [
    ("cosine", dict(warmup_iters=101), "--warmup_iters=101.*at most 100 steps"),
    ("constant", dict(warmup_iters=101), "--warmup_iters=101.*at most 100 steps"),
    ("wsd", dict(warmup_iters=81), "--warmup_iters=81.*at most 80 steps"),
    ("wsd", dict(wsd_decay_frac=0.0), "--wsd_decay_frac=0.0"),
    ("cosine", dict(min_lr=0.7), "--min_lr=0.7.*--learning_rate=0.6"),
])
def test_a_schedule_that_cannot_be_is_refused(schedule, changes, words):
    check_error(words, build_schedule, schedule_config(schedule, **changes), 100)


# ---------------------------------------------------------------------------------------------------
# parameter groups

@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_matrices_decay_and_norms_and_biases_do_not(arch):
    gpt = small_gpt(arch)
    optimizer = configure_optimizer(gpt, optimizer_config())
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(gpt.parameters()))
    for name, p in gpt.named_parameters():
        assert (id(p) in decayed) == (name.endswith("weight") and "ln_" not in name), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_group_has_its_own_rate_and_one_schedule_moves_them_all(optimizer):
    gpt, muon = small_gpt("llama"), optimizer == "muon"
    config = optimizer_config(optimizer, embedding_lr=0.1, head_lr=0.004, vector_lr=0.003)
    groups = configure_optimizer(gpt, config)
    # given for 12 layers of 768, and this model has two of 16
    depth, width = 2 / 12, 16 / 768
    muon_lr, head_lr = 0.02 * depth ** (-1 / 3) * width ** -0.1, 0.004 * width ** -0.75
    assert [group["lr"] for group in groups.param_groups] == [muon_lr if muon else 1e-3, 0.1, head_lr, 0.003]
    assert [group.get("betas") for group in groups.param_groups[1:]] == 3 * [(0.9, 0.95)]
    set_lr(groups, 5e-4)  # half the peak
    lr = {id(p): group["lr"] for group in groups.param_groups for p in group["params"]}
    for name, p in gpt.named_parameters():
        expected = (0.0015 if p.dim() < 2 else 0.05 if "wte" in name else head_lr / 2 if "lm_head" in name else
                    muon_lr / 2 if muon else 5e-4)
        assert lr[id(p)] == pytest.approx(expected), name


def test_rates_in_proportion_to_zero_are_refused():
    gpt = small_gpt("gpt2")
    config = optimizer_config(learning_rate=0.0, embedding_lr=0.1)
    assert "--learning_rate=0" in error_line(configure_optimizer, gpt, config)
    groups = configure_optimizer(gpt, optimizer_config(learning_rate=0.0, weight_decay=0.0)).param_groups
    assert {group["lr"] for group in groups} == {0.0}


def test_muon_without_a_matrix_to_train_is_refused():
    gpt = small_gpt("llama")
    gpt.transformer.h.requires_grad_(False)
    line = error_line(configure_optimizer, gpt, optimizer_config("muon"))
    assert "--optimizer=muon: it trains hidden matrices" in line


def take_steps(gpt, optimizer, steps):
    """With the same gradients in the same step of each run and rank."""
    for step in steps:
        torch.manual_seed(step)
        for p in gpt.parameters():
            p.grad = torch.randn_like(p)
        set_lr(optimizer, 1e-3)
        optimizer.step()


@pytest.mark.parametrize("device", ["cpu", pytest.param(GPU, marks=needs_gpu)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "plain"])
def test_a_step_that_is_not_finite_changes_nothing(optimizer, device):
    """Neither weights nor state, so that the next one is that of a twin. Plain: an optimizer without found_inf."""
    def create():
        gpt = small_gpt("llama").to(device)
        plain = torch.optim.Adam(gpt.parameters()) if optimizer == "plain" else None
        opt = plain or configure_optimizer(gpt, optimizer_config(optimizer, weight_decay=5.0))
        opt.param_groups[0].setdefault("lr_scale", 1.0)
        take_steps(gpt, opt, range(2))
        return gpt, opt

    (gpt, opt), (twin, twin_opt) = create(), create()
    finite, infinite, nan = (torch.tensor(value, device=device) for value in (1.0, math.inf, math.nan))
    for p in gpt.parameters():
        p.grad = torch.full_like(p, math.nan)
    assert step_if_finite(opt, finite, infinite) == (False, 1.0, math.inf)
    step_if_finite(opt, nan, finite)
    if optimizer != "plain":  # with CUDA the optimizer itself leaves the step out; here, too, it can
        opt.found_inf = torch.ones((), device=device)
        opt.step()
        opt.found_inf = torch.zeros((), device=device)
    assert same(gpt.state_dict(), twin.state_dict()) and same(opt.state_dict(), twin_opt.state_dict())
    for p, q in zip(gpt.parameters(), twin.parameters()):
        p.grad = q.grad = torch.ones_like(p)
    step_if_finite(opt, finite, finite)
    twin_opt.step()
    assert same(gpt.state_dict(), twin.state_dict()) and same(opt.state_dict(), twin_opt.state_dict())


@pytest.mark.parametrize("optimizer", literals("train_gpt2.py")["optimizer"])
def test_each_optimizer_resumes_exactly_and_with_the_settings_of_the_new_start(optimizer):
    """All it has to keep is in its `state`; the settings of its groups may have been changed."""
    def create(**changes):
        gpt = small_gpt("llama")
        return gpt, configure_optimizer(gpt, {**defaults("train_gpt2.py"), "optimizer": optimizer, **changes})

    whole, first, second, changed = create(), create(), create(), create(weight_decay=0.7, beta1=0.5, head_lr=0.3)
    take_steps(*whole, range(4))
    take_steps(*first, range(2))
    for part, saved in zip(second, first):
        part.load_state_dict(saved.state_dict())
    take_steps(*second, range(2, 4))
    assert same(whole[0].state_dict(), second[0].state_dict())

    groups = changed[1].state_dict()["param_groups"]
    changed[1].load_state_dict(first[1].state_dict())
    assert changed[1].state_dict()["param_groups"] == groups
    assert same(changed[1].state_dict()["state"], first[1].state_dict()["state"])


@pytest.mark.parametrize("optimizer, name, group", [
    ("adamw", "exp_avg", 0), ("adamw_spam", "exp_avg_sq", 2), ("muon", "momentum_buffer", 0), ("muon", "exp_avg", 1)])
def test_moments_of_another_shape_than_their_parameter_are_refused(optimizer, name, group):
    """Fused AdamW reads beyond moments that are too small, which can crash the process."""
    gpt = small_gpt("llama")
    optimizer = configure_optimizer(gpt, optimizer_config(optimizer))
    take_steps(gpt, optimizer, range(1))
    saved = optimizer.state_dict()
    saved["state"][saved["param_groups"][group]["params"][-1]][name] = torch.zeros(1)
    with pytest.raises(ValueError, match=rf"its optimizer's {name} has the shape \(1,\), the parameter \(\d+"):
        optimizer.load_state_dict(saved)


# ---------------------------------------------------------------------------------------------------
# Muon

def test_newton_schulz_is_torchs():
    """To 1e-6 for each of several matrices at once, by a step of torch.optim.Muon from zero, without momentum."""
    for rows, cols in (16, 16), (64, 16), (16, 48), (256, 1024):
        torch.manual_seed(rows)
        gradients = torch.randn(3, rows, cols) * torch.tensor([1e-4, 1.0, 1e4])[:, None, None]
        params = [torch.zeros(rows, cols, requires_grad=True) for _ in gradients]
        for p, g in zip(params, gradients):
            p.grad = g
        torch.optim.Muon(params, lr=1.0, momentum=0.0, weight_decay=0.0).step()
        expected = -torch.stack([p.detach() for p in params]) / max(1, rows / cols) ** 0.5
        torch.testing.assert_close(newton_schulz(gradients).float(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows, cols", [(64, 16), (16, 48)])
def test_all_rows_of_a_matrix_move_equally_far(rows, cols):
    """Also if half of the rows are alike, so that orthogonalized they are shorter than the others."""
    torch.manual_seed(rows)
    matrix, skip = torch.randn(1, rows, cols), torch.zeros((), dtype=bool)
    matrix[:, :rows // 2] += 10
    plain, update = newton_schulz(matrix).float(), muon_updates(matrix, skip)
    assert plain.norm(dim=2).std() > 0.05
    torch.testing.assert_close(update.norm(dim=2), plain.norm().expand(1, rows) / rows ** 0.5)
    torch.testing.assert_close(F.cosine_similarity(update, plain, dim=2), torch.ones(1, rows))
    assert not muon_updates(matrix, ~skip).any()


@pytest.mark.parametrize("arch, backend", [
    ("gpt2", None), ("llama", "aot_eager"), pytest.param("llama", "inductor", marks=pytest.mark.slow)])
def test_muon_is_its_formula_for_hidden_matrices_and_adamw_for_the_rest(arch, backend):
    """Three steps with random gradients; its matmuls are in bfloat16, hence the tolerance."""
    gpt, twin = small_gpt(arch), small_gpt(arch)
    muon_lr = 0.02 * (2 / 12) ** (1 / 3) * (16 / 768) ** 0.1  # at two layers of 16 a rate of 0.02
    optimizer = configure_optimizer(gpt, optimizer_config("muon", weight_decay=5.0, muon_lr=muon_lr))
    adamw = configure_optimizer(twin, optimizer_config("adamw", weight_decay=5.0))
    if backend:
        optimizer.compile(backend)
    hidden = {name: p.detach().clone() for name, p in gpt.transformer.h.named_parameters() if p.dim() == 2}
    momentum, mu = dict.fromkeys(hidden, 0.0), 0.85
    for step in range(3):
        take_steps(gpt, optimizer, [step])
        take_steps(twin, adamw, [step])
        for name, p in hidden.items():
            gradient = gpt.transformer.h.get_parameter(name).grad
            momentum[name] = mu * momentum[name] + (1 - mu) * gradient
            direction = mu * momentum[name] + (1 - mu) * gradient  # Nesterov's
            update = newton_schulz(direction[None])[0].float()
            norm = update.norm()
            update = update / update.norm(dim=1)[:, None]
            update *= norm / update.norm()
            p -= 0.02 * (5 * p + max(1, p.size(0) / p.size(1)) ** 0.5 * update)
    for (name, p), q in zip(gpt.named_parameters(), twin.parameters()):
        expected = hidden.get(name.removeprefix("transformer.h."))
        if expected is None:
            torch.testing.assert_close(p, q)
        else:  # of three updates, each with entries of about 0.02 / sqrt(16)
            assert (p - expected).abs().mean() < 0.02 * 0.02, name


def run_rank(rank, world_size, folder):
    """Four Muon steps, resumed after two; saves weights, state and this rank's share of the matrices."""
    if world_size > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                                             world_size=world_size)
    gpt = small_gpt("llama")
    optimizer, resumed = (configure_optimizer(gpt, optimizer_config("muon")) for _ in range(2))
    take_steps(gpt, optimizer, range(2))
    resumed.load_state_dict(optimizer.state_dict())
    take_steps(gpt, resumed, range(2, 4))
    owner = {name: resumed.owner[p] for name, p in gpt.named_parameters() if p in resumed.owner}
    torch.save([gpt.state_dict(), resumed.state_dict(), owner], f"{folder}/{world_size}_{rank}.pt")
    if world_size > 1:
        torch.distributed.destroy_process_group()


def test_ranks_that_share_out_the_matrices_make_the_update_of_one(tmp_path):
    """Bit for bit on each rank; the saved state is whole; each rank has its share of the work."""
    run_rank(0, 1, tmp_path)
    torch.multiprocessing.start_processes(run_rank, (2, tmp_path), nprocs=2, start_method="forkserver")
    one, first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("1_0", "2_0", "2_1"))
    assert same(one[:2], first[:2]) and same(first, second)
    assert len(one[1]["state"]) == sum(len(group["params"]) for group in one[1]["param_groups"]) == 21
    owners = list(first[2].values())
    assert one[2] == {} and len(owners) == 14 and owners.count(0) == owners.count(1) == 7
