"""Pruning: the ramp and the scores against their formulas, the counts to the weight, and runs."""
import numpy as np
import pytest
import torch

from conftest import (TINY, check_error, check_resumed, error_line, extra_flags, load, optimizer_config, read_log,
                      small_gpt)
from extras.prune import Pruner
from model import GPT, GPTConfig
from optim import configure_optimizer
from start import load_init_from, take_settings


def new_pruner(gpt, sparsity, max_iters=20, checkpoint=None, before_prune=lambda: None, **changes):
    """A Pruner of a GPT, and the optimizer it attaches to."""
    config = {**optimizer_config(), "sparsity": sparsity, "prune_by": "magnitude", "prune_begin": None,
              "prune_end": None, "fsdp": False, **changes}
    optimizer = configure_optimizer(gpt, config)
    optimizer.register_step_post_hook(lambda *_: before_prune())
    return Pruner(gpt, optimizer, config, max_iters, checkpoint), optimizer


def hidden(tensors):
    return {name: tensor for name, tensor in tensors.items() if ".h." in name and tensor.dim() == 2}


def test_the_ramp_is_zhu_and_guptas():
    """s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3 with s_i = 0, from t_0 to t_0 + n dt."""
    pruner, _ = new_pruner(small_gpt("gpt2"), 0.8, prune_begin=20, prune_end=60)
    for t in range(20, 61):
        assert pruner.sparsity_at(t) == pytest.approx(0.8 + (0 - 0.8) * (1 - (t - 20) / (10 * 4)) ** 3)
    assert [pruner.sparsity_at(t) for t in (0, 20, 40, 60, 99)] == pytest.approx([0, 0, 0.7, 0.8, 0.8])
    pruner, _ = new_pruner(small_gpt("gpt2"), 0.8, prune_begin=60, prune_end=60)
    assert [pruner.sparsity_at(t) for t in (59, 60)] == [0, 0.8]  # in one go


def test_settings_left_out_follow_from_the_length_of_the_run(capsys):
    for max_iters, begin, end, interval in ((50000, 5000, 37500, 325), (3, 0, 2, 1), (0, 0, 0, 1)):
        pruner, _ = new_pruner(small_gpt("gpt2"), 0.5, max_iters)
        assert (pruner.begin, pruner.end, pruner.interval) == (begin, end, interval)
        assert capsys.readouterr().out == (f"pruning by magnitude: to 0.5 from step {begin} to {end}, every {interval} "
                                           f"steps; the run ends at step {max_iters}\n")
    new_pruner(small_gpt("gpt2"), 0.5, 10, prune_end=11)
    assert "WARNING: pruning by magnitude: to 0.5 from step 1 to 11" in capsys.readouterr().out


@pytest.mark.parametrize("settings, words", [
    (dict(prune_begin=9, prune_end=5), "--prune_begin=9.*--prune_end=5"), (dict(fsdp=True), "--sparsity=0.5"),
    (dict(lora_rank=2), "--sparsity=0.5"), (dict(prune_by="state", optimizer="muon"), "--prune_by=state"),
])
def test_settings_that_exclude_each_other_are_refused(settings, words):
    check_error(words, new_pruner, small_gpt("gpt2"), 0.5, **settings)


def test_an_end_that_was_missed_is_made_up_for():
    """A resumed run whose prune_end is in the past, or a step that was skipped at the end of the ramp."""
    pruner, optimizer = new_pruner(small_gpt("gpt2"), 0.5, prune_begin=0, prune_end=600)
    for step, sparsity in ((599, 0.0), (602, 0.0), (603, 0.5)):
        optimizer.found_inf = torch.tensor(float(step == 602))  # skipped on a GPU, which calls the hook all the same
        pruner.step = step
        pruner.prune()
        assert pruner.metrics() == {"sparsity": sparsity}


@pytest.mark.parametrize("arch, by", [("gpt2", "magnitude"), ("llama", "state")])
def test_the_lowest_scores_are_pruned_and_exactly_as_many_as_asked(arch, by):
    """Every fourth step, against numpy: |w|, or |w| v^(1/4), sorted; what was pruned stays; only hidden matrices."""
    gpt, params = small_gpt(arch), {}
    pruner, optimizer = new_pruner(
        gpt, 0.37, prune_begin=100, prune_end=500, prune_by=by,
        before_prune=lambda: params.update((name, p.detach().clone()) for name, p in gpt.named_parameters()))
    masks = pruner.masks
    assert masks.keys() == hidden(dict(gpt.named_parameters())).keys()
    assert len(masks) == 2 * (4 if arch == "gpt2" else 7)
    expected = {name: np.zeros(mask.numel(), bool) for name, mask in masks.items()}
    for step in (102, 104, 106, 180, 499, 500, 504):
        for p in gpt.parameters():
            p.grad = torch.randn_like(p)
        pruner.mask_gradients(step - 1)
        optimizer.step()
        for name in masks if step in (104, 180, 500) else ():
            w, v = params[name], optimizer.state[gpt.get_parameter(name)]["exp_avg_sq"]
            w, v = w.double().numpy().ravel(), v.double().numpy().ravel()
            score = np.where(expected[name], -1, np.abs(w) * v ** 0.25 if by == "state" else np.abs(w))
            n = round(0.37 * (1 - ((500 - step) / 400) ** 3) * len(score))
            expected[name] = np.isin(np.arange(len(score)), np.argsort(score)[:n])
        for name, p in gpt.named_parameters():
            kept = ~torch.from_numpy(expected[name]).view(p.shape) if name in masks else torch.tensor(True)
            assert torch.equal(p, params[name] * kept), (step, name)
            assert name not in masks or torch.equal(masks[name], ~kept)
    assert all(mask.sum() == round(0.37 * mask.numel()) for mask in masks.values())
    assert pruner.metrics()["sparsity"] == pytest.approx(0.37, abs=1e-3)


def test_frozen_matrices_are_left_alone():
    gpt = small_gpt("gpt2")
    masks = new_pruner(gpt, 0.5)[0].masks
    gpt.transformer.h[0].requires_grad_(False)
    pruner, optimizer = new_pruner(gpt, 0.5, prune_begin=1, prune_end=1, checkpoint={"masks": masks})
    assert [name.split(".")[2] for name in pruner.masks] == ["1"] * 4
    for p in gpt.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    pruner.mask_gradients(0)
    optimizer.step()
    assert pruner.metrics() == {"sparsity": 0.5}
    assert all(p.all() for p in hidden(dict(gpt.transformer.h[0].named_parameters(prefix="x.h.0"))).values())


def test_equal_scores_are_pruned_in_order_after_those_that_are_pruned_already():
    """Ranks with the same weights have the same masks, however they sort; a zero is not yet a pruned weight."""
    gpt = small_gpt("gpt2")
    pruner, _ = new_pruner(gpt, 0.25, prune_begin=5, prune_end=5)
    for name, mask in pruner.masks.items():
        torch.nn.init.zeros_(gpt.get_parameter(name))
        mask[-1, -1] = True
    pruner.step = 5
    pruner.prune()
    for mask in pruner.masks.values():
        n = mask.numel()
        assert torch.equal(mask.flatten(), (torch.arange(n) < n // 4 - 1) | (torch.arange(n) == n - 1))


# ---------------------------------------------------------------------------------------------------
# runs

@pytest.fixture(scope="module")
def pruned(train, tmp_path_factory):
    """The out_dir of a run of 20 steps whose ramp goes from step 2 to 15."""
    out_dir = tmp_path_factory.mktemp("pruned") / "out"
    assert "sparsity 60.0" in train(out_dir, "--sample_tokens=0", "--sparsity=0.6")
    return out_dir


def test_a_run_ends_with_as_many_zeros_as_asked(pruned):
    checkpoint, log = load(pruned), read_log(pruned, "sparsity", "val_loss")
    assert log["val_loss", 20] < log["val_loss", 0]
    for step in range(1, 21):
        progress = min(max(step - 2, 0), 13) / 13
        assert log["sparsity", step] == pytest.approx(0.6 * (1 - (1 - progress) ** 3), abs=1e-3)
    matrices = hidden(checkpoint["model"])
    assert checkpoint["masks"].keys() == matrices.keys()
    for name, tensor in checkpoint["model"].items():
        assert (tensor == 0).sum() == (round(0.6 * tensor.numel()) if name in matrices else 0), name
        assert name not in matrices or torch.equal(tensor == 0, checkpoint["masks"][name])


def test_pruned_weights_stay_pruned_in_the_next_run_if_asked(pruned, train, tmp_path, capsys):
    before = load(pruned)
    train(tmp_path, "--sample_tokens=0", f"--init_from={pruned}", "--max_iters=2", "--warmup_iters=0", "--sparsity=0.6")
    after = load(tmp_path)
    for i, (name, mask) in enumerate(before["masks"].items()):
        assert torch.equal(after["masks"][name], mask) and torch.equal(after["model"][name] == 0, mask)
        assert not torch.equal(after["model"][name], before["model"][name])
        assert torch.equal(after["optimizer"]["state"][i]["exp_avg"] == 0, mask)  # it never had a gradient
    for sparsity, warns in ((0.6, False), (0.0, True)):
        load_init_from({**before["config"], "init_from": str(pruned), "sparsity": sparsity}, {}, "base")
        assert ("WARNING: the pruned weights will grow back" in capsys.readouterr().out) == warns

    gpt = GPT(GPTConfig(**before["model_args"]))
    new_pruner(gpt, 0.6, checkpoint=before)
    tiny, rounded = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=2, vocab_size=384)), {}
    for name, p in hidden(dict(tiny.named_parameters())).items():  # of 4 to 16 weights: more than 0.55 in all
        rounded[name] = torch.arange(p.numel()).view(p.shape) < round(0.55 * p.numel())
    assert sum(mask.sum() for mask in rounded.values()) / sum(mask.numel() for mask in rounded.values()) > 0.56
    new_pruner(tiny, 0.55, checkpoint={"masks": rounded})
    for refused in (lambda: new_pruner(gpt, 0.5, checkpoint=before),
                    lambda: take_settings({**before["config"]}, {"sparsity": 0.5}, before)):
        line = error_line(refused)
        assert "--sparsity=0.5" in line and "0.6" in line


RAMP = ["--sparsity=0.7", "--prune_begin=2", "--prune_end=13"]


@pytest.mark.slow
def test_interrupted_in_the_ramp_equals_uninterrupted(shards, tmp_path):
    spam = extra_flags(spam=["--optimizer=adamw_spam", "--spam_interval=7"])  # it resets what prunes by state
    check_resumed("train_gpt2.py", [*TINY, *RAMP, *spam, "--arch=llama", "--prune_by=state", f"--data_dir={shards}"],
                  tmp_path, ranks=2, stops=(10, 20))
    assert load(tmp_path / "whole")["masks"]
