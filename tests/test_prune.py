"""Pruning: the ramp and the scores against their formulas, the counts to the weight, and runs."""
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conftest import TINY, chats, load, read_log, refused, run
from extras import prune
from model import GPT, GPTConfig
from optim import configure_optimizer
from test_chat import SFT, check_resumed
from test_cuda import COMPILED, check_losses_of_a_cpu, needs_gpu
from test_optim import optimizer_config, small_gpt

ARGS = [*TINY, "--sample_tokens=0", "--eval_interval=20"]


@pytest.fixture
def new_pruner(monkeypatch):
    """Makes a Pruner of a GPT, with given settings, and the optimizer it attaches to."""
    def new(gpt, sparsity, max_iters=20, checkpoint=None, optimizer="adamw", before_prune=lambda: None, **settings):
        for name in ("prune_by", "prune_scope", "prune_begin", "prune_end", "prune_interval"):
            default = {"prune_by": "magnitude", "prune_scope": "layer"}.get(name)
            monkeypatch.setattr(prune, name, settings.pop(name, default))
        config = {**optimizer_config(optimizer), "sparsity": sparsity, "fsdp": False, **settings}
        adamw = configure_optimizer(gpt, config)
        adamw.register_step_post_hook(lambda *_: before_prune())
        return prune.Pruner(gpt, adamw, config, max_iters, checkpoint), adamw
    return new


def hidden(tensors):
    return {name: tensor for name, tensor in tensors.items() if ".h." in name and tensor.dim() == 2}


def test_the_ramp_is_zhu_and_guptas(new_pruner):
    """s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3 with s_i = 0, from t_0 to t_0 + n dt."""
    pruner, _ = new_pruner(small_gpt("gpt2"), 0.8, prune_begin=20, prune_end=60)
    for t in range(20, 61):
        assert pruner.sparsity_at(t) == pytest.approx(0.8 + (0 - 0.8) * (1 - (t - 20) / (10 * 4)) ** 3)
    assert [pruner.sparsity_at(t) for t in (0, 20, 40, 60, 99)] == pytest.approx([0, 0, 0.7, 0.8, 0.8])
    pruner, _ = new_pruner(small_gpt("gpt2"), 0.8, prune_begin=60, prune_end=60)
    assert [pruner.sparsity_at(t) for t in (59, 60)] == [0, 0.8]  # in one go


def test_settings_left_out_follow_from_the_length_of_the_run(new_pruner):
    gpt = small_gpt("gpt2")
    for max_iters, begin, end, interval in ((50000, 5000, 37500, 325), (3, 0, 2, 1), (0, 0, 0, 1)):
        pruner, _ = new_pruner(gpt, 0.5, max_iters)
        assert (pruner.begin, pruner.end, pruner.interval) == (begin, end, interval)


@pytest.mark.parametrize("settings, words", [
    (dict(prune_begin=9, prune_end=5), ["--prune_begin=9", "--prune_end=5"]), (dict(fsdp=True), ["--sparsity=0.5"]),
    (dict(lora_rank=2), ["--sparsity=0.5"]), (dict(prune_by="state", optimizer="muon"), ["--prune_by=state"]),
])
def test_settings_that_exclude_each_other_are_refused(new_pruner, capsys, settings, words):
    with pytest.raises(SystemExit) as end:
        new_pruner(small_gpt("gpt2"), 0.5, **settings)
    message = capsys.readouterr().err
    assert end.value.code == 2 and all(word in message for word in words), message


def test_an_end_that_was_missed_is_made_up_for(new_pruner):
    """A resumed run whose prune_end is in the past, or a step that was skipped at the end of the ramp."""
    gpt = small_gpt("gpt2")
    pruner, _ = new_pruner(gpt, 0.5, prune_begin=0, prune_end=6, prune_interval=100)
    for step, sparsity in ((5, 0.0), (8, 0.5)):
        pruner.step = step
        pruner.prune()
        assert pruner.metrics() == {"sparsity": sparsity}


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("by", ["magnitude", "state"])
def test_the_lowest_scores_are_pruned_and_exactly_as_many_as_asked(new_pruner, arch, scope, by):
    """Three times, against numpy: |w|, or |w| v^(1/4), sorted; what was pruned stays; only hidden matrices change."""
    gpt, params = small_gpt(arch), {}
    pruner, optimizer = new_pruner(
        gpt, 0.37, prune_begin=6, prune_end=11, prune_interval=1, prune_scope=scope, prune_by=by,
        before_prune=lambda: params.update((name, p.detach().clone()) for name, p in gpt.named_parameters()))
    masks = pruner.masks
    assert masks.keys() == hidden(dict(gpt.named_parameters())).keys()
    assert len(masks) == 2 * (4 if arch == "gpt2" else 7)
    expected = {name: np.zeros(mask.numel(), bool) for name, mask in masks.items()}
    ramp = {7: 0.37 * (1 - (4 / 5) ** 3), 9: None, 10: 0.37 * (1 - (1 / 5) ** 3), 11: 0.37, 12: None}
    for step, sparsity in ramp.items():
        pruner.interval = 1 if step < 9 else 4
        for p in gpt.parameters():
            p.grad = torch.randn_like(p)
        pruner.mask_gradients(step - 1)
        optimizer.step()
        score = {}
        for name in masks:
            w, v = params[name], optimizer.state[gpt.get_parameter(name)]["exp_avg_sq"]
            w, v = w.double().numpy().ravel(), v.double().numpy().ravel()
            score[name] = np.abs(w) * v ** 0.25 if by == "state" else np.abs(w)
        groups = [list(masks)] if scope == "global" else [[name] for name in masks]
        for names in groups if sparsity else ():
            scores = np.concatenate([np.where(expected[name], -1, score[name]) for name in names])
            lowest = np.zeros(len(scores), bool)
            lowest[np.argsort(scores)[:round(sparsity * len(scores))]] = True
            expected.update(zip(names, np.split(lowest, np.cumsum([len(score[name]) for name in names])[:-1])))
        for name, p in gpt.named_parameters():
            kept = ~torch.from_numpy(expected[name]).view(p.shape) if name in masks else torch.tensor(True)
            assert torch.equal(p, params[name] * kept), (step, name)
            assert name not in masks or torch.equal(masks[name], ~kept)
    counts = [(mask.sum().item(), mask.numel()) for mask in masks.values()]
    if scope == "layer":
        assert all(count == round(0.37 * n) for count, n in counts)
    else:
        assert sum(count for count, _ in counts) == round(0.37 * sum(n for _, n in counts))
        assert len({count / n for count, n in counts}) > 1
    assert pruner.metrics()["sparsity"] == pytest.approx(0.37, abs=1e-3)


def test_pruned_weights_stay_zero_and_their_gradients_count_in_no_norm(new_pruner):
    gpt = small_gpt("gpt2")
    pruner, optimizer = new_pruner(gpt, 0.5, prune_begin=1, prune_end=1)
    for step in range(3):
        for p in gpt.parameters():
            p.grad = torch.ones_like(p)
        pruner.mask_gradients(step)
        norm = torch.nn.utils.get_total_norm([p.grad for p in gpt.parameters()])
        n = sum(p.numel() for p in gpt.parameters()) - sum(mask.sum().item() for mask in pruner.masks.values())
        assert norm == pytest.approx(n ** 0.5, rel=1e-5)
        optimizer.step()
        zeros = torch.cat([gpt.get_parameter(name)[mask] for name, mask in pruner.masks.items()])
        assert len(zeros) > 0 and (zeros == 0).all() and not zeros.signbit().any()


def test_equal_scores_are_pruned_in_order_after_those_that_are_pruned_already(new_pruner):
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
def pruned(shards, tmp_path_factory):
    """The out_dir of a run of 20 steps whose ramp goes from step 2 to 15, and its output."""
    out_dir = tmp_path_factory.mktemp("pruned") / "out"
    return out_dir, run("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={out_dir}", "--sparsity=0.6")


def test_a_run_ends_with_as_many_zeros_as_asked_and_exports_them(pruned, tmp_path):
    out_dir, output = pruned
    checkpoint, log = load(out_dir), read_log(out_dir, "sparsity", "val_loss")
    assert "sparsity 60.0" in output and log["val_loss", 20] < log["val_loss", 0]
    assert log["sparsity", 1] == log["sparsity", 2] == 0
    assert log["sparsity", 15] == log["sparsity", 20] == pytest.approx(0.6, abs=1e-3)
    for step in range(3, 15):
        assert log["sparsity", step] == pytest.approx(0.6 * (1 - (1 - (step - 2) / 13) ** 3), abs=1e-3)
    matrices = hidden(checkpoint["model"])
    assert checkpoint["masks"].keys() == matrices.keys()
    for name, tensor in checkpoint["model"].items():
        assert (tensor == 0).sum() == (round(0.6 * tensor.numel()) if name in matrices else 0), name
        assert name not in matrices or torch.equal(tensor == 0, checkpoint["masks"][name])
    run("export_hf.py", f"--checkpoint={out_dir}", f"--out_dir={tmp_path}/hf", "--dtype=bfloat16")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in matrices.items():
        assert (exported[name] == 0).sum() == round(0.6 * tensor.numel()), name


def test_pruned_weights_stay_pruned_in_the_next_run_if_asked(pruned, shards, tmp_path, new_pruner, capsys):
    start = [*ARGS, f"--init_from={pruned[0]}", f"--data_dir={shards}", "--max_iters=2", "--warmup_iters=0"]
    before = load(pruned[0])
    assert "grow back" not in run("train_gpt2.py", *start, f"--out_dir={tmp_path}/sparse", "--sparsity=0.6")
    after = load(tmp_path / "sparse")
    for i, (name, mask) in enumerate(before["masks"].items()):
        assert torch.equal(after["masks"][name], mask) and torch.equal(after["model"][name] == 0, mask)
        assert not torch.equal(after["model"][name], before["model"][name])
        assert torch.equal(after["optimizer"]["state"][i]["exp_avg"] == 0, mask)  # it never had a gradient
    assert "the pruned weights grow back" in run("train_gpt2.py", *start, f"--out_dir={tmp_path}/dense")
    dense = load(tmp_path / "dense")
    assert "masks" not in dense
    assert all((dense["model"][name] == 0).sum() < mask.sum() / 2 for name, mask in before["masks"].items())

    gpt = GPT(GPTConfig(**before["model_args"]))
    with pytest.raises(SystemExit):
        new_pruner(gpt, 0.5, checkpoint=before)
    message = capsys.readouterr().err
    assert "--sparsity=0.5" in message and "0.6" in message
    new_pruner(gpt, 0.6, checkpoint=before)
    line = refused("train_gpt2.py", "--init_from=resume", f"--out_dir={pruned[0]}", "--max_iters=30", "--sparsity=0.7")
    assert "sparsity=0.7" in line and "0.6" in line


def test_a_dense_run_has_no_masks_in_its_checkpoint_and_no_sparsity_in_its_log(trained):
    assert load(trained).keys() - {"health"} == {  # of the guard against spikes
        "model", "optimizer", "scaler", "model_args", "config", "tokenizer", "data", "stage", "iter_num", "rows_seen",
        "best_val_loss", "val_loss", "val_iter"}
    assert not read_log(trained, "sparsity")


RAMP = ["--sparsity=0.7", "--prune_begin=2", "--prune_end=13", "--prune_interval=4"]  # at 6, 10 and 13


def test_pretraining_interrupted_twice_equals_uninterrupted(shards, tmp_path):
    args = [*TINY, *RAMP, "--arch=llama", "--prune_by=state", "--prune_scope=global", f"--data_dir={shards}"]
    check_resumed("train_gpt2.py", args, tmp_path, ranks=2)
    assert load(tmp_path / "whole")["masks"]


def test_chat_tuning_interrupted_twice_equals_uninterrupted(trained, tmp_path):
    data = chats(tmp_path / "chats.jsonl")
    check_resumed("chat_sft.py", [*SFT, *RAMP, f"--init_from={trained}", f"--data={data}"], tmp_path)
    assert load(tmp_path / "whole")["masks"]


@needs_gpu
def test_a_run_on_a_gpu_has_the_losses_of_a_cpu(shards, tmp_path):
    check_losses_of_a_cpu("train_gpt2.py", [*TINY, *RAMP, f"--data_dir={shards}"], COMPILED, 2e-3, tmp_path)


def test_a_ramp_that_the_run_does_not_reach_the_end_of_is_named(shards, tmp_path):
    args = [*ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_iters=3"]
    assert "the run ends at step 3" in run("train_gpt2.py", *args, "--sparsity=0.5", "--prune_end=600")
    assert "sparsity=1" in refused("train_gpt2.py", *args, "--sparsity=1", "--overwrite=True")
    assert "prune_interval=0" in refused("train_gpt2.py", *args, "--prune_interval=0", "--overwrite=True")
