"""Pruning: the ramp and the scores against their formulas, the counts to the weight, and what a run of train_gpt2.py leaves behind."""
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import export_hf
from conftest import TINY, read_log, refused, run
from optim import mask_gradients, new_masks, new_optimizer, plan_pruning, prune, sparsity_at, sparsity_of
from test_optim import small_gpt
from test_train import load

ARGS = [*TINY, "--sample_tokens=0", "--eval_interval=20"]
SETTINGS = dict(sparsity=0.5, prune_by="magnitude", prune_scope="layer", prune_begin=None, prune_end=None, prune_interval=None,
                optimizer="adamw", fsdp=False)


def hidden(tensors):
    return {name: tensor for name, tensor in tensors.items() if name.startswith("transformer.h.") and tensor.dim() == 2}


def test_the_ramp_is_zhu_and_guptas():
    """s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3 with s_i = 0, from t_0 to t_0 + n dt."""
    for t in range(20, 61):
        assert sparsity_at(t, 0.8, 20, 60) == pytest.approx(0.8 + (0 - 0.8) * (1 - (t - 20) / (10 * 4)) ** 3)
    assert [sparsity_at(t, 0.8, 20, 60) for t in (0, 20, 40, 60, 99)] == pytest.approx([0, 0, 0.7, 0.8, 0.8])
    assert [sparsity_at(t, 0.8, 60, 60) for t in (59, 60)] == [0, 0.8]  # at one blow


def test_what_is_not_given_is_derived_and_what_cannot_be_is_refused():
    plan = plan_pruning(SETTINGS, 50000)
    assert (plan["begin"], plan["end"], plan["interval"]) == (5000, 37500, 325)
    assert plan_pruning(SETTINGS, 3)["interval"] == plan_pruning(SETTINGS, 0)["end"] == 1
    for change, words in (({"prune_begin": 9, "prune_end": 5}, "prune_begin=9"), ({"fsdp": True}, "sparsity=0.5"),
                          ({"prune_by": "state", "optimizer": "muon"}, "prune_by=state")):
        with pytest.raises(ValueError, match=words):
            plan_pruning({**SETTINGS, **change}, 20)
        plan_pruning({**SETTINGS, **change, "sparsity": 0.0}, 20)


def test_an_end_that_was_not_met_is_made_up_for():
    """A resumed run whose prune_end lies behind it; first steps that were skipped, so that there are no moments yet."""
    gpt = small_gpt("gpt2")
    optimizer, masks = new_optimizer(gpt, "adamw", 1e-3, 0.9, 0.95, 0.1), new_masks(gpt, None, 0.5)
    plan = dict(sparsity=0.5, scope="layer", begin=0, end=6, interval=100)
    prune(gpt, optimizer, masks, 6, by="state", **plan)
    assert sparsity_of(masks) == 0
    prune(gpt, optimizer, masks, 8, by="magnitude", **plan)
    assert sparsity_of(masks) == 0.5


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("by", ["magnitude", "state"])
def test_the_lowest_scores_go_and_exactly_as_many_as_asked(arch, scope, by):
    """Three prunings, against numpy: |w|, or |w| v^(1/4), sorted; what went before stays; nothing but hidden matrices is touched."""
    gpt = small_gpt(arch)
    optimizer = new_optimizer(gpt, "adamw", 1e-3, 0.9, 0.95, 0.1)
    masks = new_masks(gpt, None, 0.37)
    assert masks.keys() == hidden(dict(gpt.named_parameters())).keys() and len(masks) == 2 * (4 if arch == "gpt2" else 7)
    expected = {name: np.zeros(mask.numel(), bool) for name, mask in masks.items()}
    for step, part in ((7, 0.37 * (1 - (4 / 5) ** 3)), (9, None), (10, 0.37 * (1 - (1 / 5) ** 3)), (11, 0.37), (12, None)):
        for p in gpt.parameters():
            p.grad = torch.randn_like(p)
        mask_gradients(gpt, masks)
        optimizer.step()
        params = {name: p.detach().clone() for name, p in gpt.named_parameters()}
        score = {}
        for name in masks:
            w, v = (t.double().numpy().ravel() for t in (params[name], optimizer.state[gpt.get_parameter(name)]["exp_avg_sq"]))
            score[name] = np.abs(w) * v ** 0.25 if by == "state" else np.abs(w)
        for names in () if part is None else [list(masks)] if scope == "global" else [[name] for name in masks]:
            scores = np.concatenate([np.where(expected[name], -1, score[name]) for name in names])
            lowest = np.zeros(len(scores), bool)
            lowest[np.argsort(scores)[:round(part * len(scores))]] = True
            expected.update(zip(names, np.split(lowest, np.cumsum([len(score[name]) for name in names])[:-1])))
        prune(gpt, optimizer, masks, step, 0.37, by, scope, begin=6, end=11, interval=1 if step < 9 else 4)
        for name, p in gpt.named_parameters():
            kept = ~torch.from_numpy(expected[name]).view(p.shape) if name in masks else torch.ones_like(p, dtype=torch.bool)
            assert torch.equal(p, params[name] * kept), (step, name)
            assert name not in masks or torch.equal(masks[name], ~kept)
    counts = [(mask.sum().item(), mask.numel()) for mask in masks.values()]
    if scope == "layer":
        assert all(count == round(0.37 * n) for count, n in counts)
    else:
        assert sum(count for count, _ in counts) == round(0.37 * sum(n for _, n in counts)) and len({count / n for count, n in counts}) > 1
    assert sparsity_of(masks) == pytest.approx(0.37, abs=1e-3)


def test_what_is_pruned_moves_no_more_and_counts_in_no_norm():
    gpt = small_gpt("gpt2")
    optimizer = new_optimizer(gpt, "adamw", 1e-3, 0.9, 0.95, 0.1)
    masks = new_masks(gpt, None, 0.5)
    for step in range(1, 4):
        for p in gpt.parameters():
            p.grad = torch.ones_like(p)
        mask_gradients(gpt, masks)
        norm = torch.nn.utils.get_total_norm([p.grad for p in gpt.parameters()])
        n = sum(p.numel() for p in gpt.parameters()) - sum(mask.sum().item() for mask in masks.values())
        assert norm == pytest.approx(n ** 0.5, rel=1e-5)
        optimizer.step()
        prune(gpt, optimizer, masks, step, 0.5, "magnitude", "layer", begin=1, end=1, interval=1)
        zeros = torch.cat([gpt.get_parameter(name)[mask] for name, mask in masks.items()])
        assert (zeros == 0).all() and not zeros.signbit().any()


def test_equal_scores_go_in_order_behind_what_is_pruned():
    """Ranks whose weights are the same have the same masks, whatever sorts them, and zeros that were there are not taken for pruned."""
    gpt = small_gpt("gpt2")
    masks = new_masks(gpt, None, 0.25)
    for name, mask in masks.items():
        torch.nn.init.zeros_(gpt.get_parameter(name))
        mask[-1, -1] = True
    prune(gpt, None, masks, 5, 0.25, "magnitude", "layer", begin=5, end=5, interval=1)
    for mask in masks.values():
        n = mask.numel()
        assert torch.equal(mask.flatten(), (torch.arange(n) < n // 4 - 1) | (torch.arange(n) == n - 1))


@pytest.fixture(scope="module")
def pruned(shards, tmp_path_factory):
    """A run of 20 steps whose ramp goes from step 2 to 15, and what it printed."""
    out_dir = tmp_path_factory.mktemp("pruned") / "out"
    return out_dir, run("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={out_dir}", "--sparsity=0.6")


def test_a_run_ends_with_as_many_zeros_as_asked_and_exports_them(pruned, tmp_path):
    out_dir, output = pruned
    checkpoint, log = load(out_dir), read_log(out_dir, "sparsity", "val_loss")
    assert "sparsity 60.0" in output and log["val_loss", 20] < log["val_loss", 0]
    assert log["sparsity", 1] == log["sparsity", 2] == 0 and log["sparsity", 15] == log["sparsity", 20] == pytest.approx(0.6, abs=1e-3)
    for step in range(3, 15):
        assert log["sparsity", step] == pytest.approx(0.6 * (1 - (1 - (step - 2) / 13) ** 3), abs=1e-3)
    matrices = hidden(checkpoint["model"])
    assert checkpoint["masks"].keys() == matrices.keys()
    for name, tensor in checkpoint["model"].items():
        assert (tensor == 0).sum() == (round(0.6 * tensor.numel()) if name in matrices else 0), name
        assert name not in matrices or torch.equal(tensor == 0, checkpoint["masks"][name])
    export_hf.export(str(out_dir), str(tmp_path / "hf"), "bfloat16", 10 ** 9, overwrite=False)
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: (theirs[name] == 0).sum().item() for name in matrices} == {name: round(0.6 * w.numel()) for name, w in matrices.items()}


def test_weights_that_were_pruned_stay_so_in_the_next_run_if_told(pruned, shards, tmp_path, capsys):
    start = [*ARGS, f"--init_from={pruned[0]}", f"--data_dir={shards}", "--max_iters=2", "--warmup_iters=0"]
    before = load(pruned[0])
    assert "WARNING" not in run("train_gpt2.py", *start, f"--out_dir={tmp_path}/sparse", "--sparsity=0.6").split("settings given")[0]
    after = load(tmp_path / "sparse")
    for i, (name, mask) in enumerate(before["masks"].items()):
        assert torch.equal(after["masks"][name], mask) and torch.equal(after["model"][name] == 0, mask)
        assert not torch.equal(after["model"][name], before["model"][name])
        assert torch.equal(after["optimizer"]["state"][i]["exp_avg"] == 0, mask)  # no gradient ever came
    assert "the weights that were pruned grow back" in run("train_gpt2.py", *start, f"--out_dir={tmp_path}/dense")
    assert all((load(tmp_path / "dense")["model"][name] == 0).sum() < mask.sum() / 2 for name, mask in before["masks"].items())
    from model import GPT, GPTConfig
    gpt = GPT(GPTConfig(**before["model_args"]))
    with pytest.raises(SystemExit):
        new_masks(gpt, before, 0.5)
    assert "--sparsity=0.5: of this model's weights 0.6" in capsys.readouterr().err
    new_masks(gpt, before, 0.6)
    line = refused("train_gpt2.py", "--init_from=resume", f"--out_dir={pruned[0]}", "--max_iters=30", "--sparsity=0.7")
    assert "sparsity=0.7" in line and "0.6" in line


def test_a_dense_run_has_the_checkpoint_it_had(shards, tmp_path):
    run("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_iters=2")
    checkpoint = load(tmp_path / "o")
    assert checkpoint.keys() == {"model", "optimizer", "scaler", "health", "model_args", "config", "tokenizer", "data", "stage", "iter_num",
                                 "rows_seen", "best_val_loss", "val_loss", "val_iter"}
    assert ("sparsity", 2) not in read_log(tmp_path / "o", "sparsity")
