"""Spikes: found, rolled back, and a run without a way out stopped."""
import math
from dataclasses import asdict
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from checkpoint import Checkpointer
from conftest import TINY, Entry, error_line, extra_flags, load, poisoned, read_lines, read_log, run, same
from extras.rollback import SpikeGuard
from model import GPTConfig

CONFIG = {"spike_loss": 3.0, "spike_norm": 100.0, "rollback_lr": 0.5}


def new_guard(**changes):
    return SpikeGuard({**CONFIG, **changes}, SimpleNamespace(param_groups=[{"lr": 2.0}]))


@pytest.mark.parametrize("changes, spikes", [({}, [55, 61]), ({"spike_loss": 0.0}, [55]), ({"spike_norm": 0.0}, [61])])
def test_a_spike_is_a_multiple_of_the_average_from_the_50th_step_on(changes, spikes):
    losses, norms, guard = [3.0] * 64, [1.0] * 64, new_guard(**changes)
    losses[2], losses[60], losses[61] = 30.0, 10.3, 10.8  # averages of about 3.45 and, with 10.3 in it, 3.57
    norms[49], norms[54], norms[55] = 900.0, 9.0, 2000.0  # an average of about 17.6
    assert [i for i, step in enumerate(zip(losses, norms)) if guard.is_spike(i, *step)] == spikes
    guard.stats |= {"loss": 3.0, "steps": 1000}
    guard.is_spike(1000, 4.0, 1.0)
    assert guard.stats["loss"] == pytest.approx(3.01)  # over about 100 steps


@pytest.fixture
def saved(tmp_path):
    """A guard, the entries that it rolls back, and their Checkpointer, with checkpoints of steps 10 and 20."""
    guard, entries = new_guard(), {key: Entry(None) for key in ("model", "optimizer", "rows_seen")}
    facts = dict(model_args=asdict(GPTConfig()), config={}, tokenizer="bytes", data="", stage="base")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    checkpointer = Checkpointer(tmp_path, {**entries, "scaler": scaler, "health": guard}, facts)
    for step in (10, 20, 25):
        for entry in entries.values():
            entry.value = {"step": step}
        if step < 25:
            checkpointer.save(step)
    checkpointer.state["scaler"] = torch.amp.GradScaler("cpu")  # a run that was resumed with another precision
    guard.spike = "its loss is a spike"
    return guard, entries, checkpointer


def test_a_rollback_restores_the_last_checkpoint_but_not_the_position_in_the_data(saved, tmp_path, monkeypatch):
    (guard, entries, checkpointer), log, agree = saved, Mock(), Mock()
    monkeypatch.setattr("extras.rollback.check_ranks_agree", agree)
    guard.stats |= {"loss": 1.0, "norm": 1.0, "steps": 80}  # of weights that are gone
    assert guard.roll_back(25, checkpointer, log) == 20
    assert guard.stats["steps"] == 0 and guard.metrics()["rollbacks"] == 1
    assert [entry.value["step"] for entry in entries.values()] == [20, 20, 25]
    agree.assert_called_once_with({"step": 20})
    log.assert_called_once_with(20, event="rollback")
    log.forget_losses.assert_called_once_with()
    checkpoint = load(tmp_path)  # a run that is resumed from it continues after the spike
    assert (checkpoint["iter_num"], checkpoint["rows_seen"]["step"]) == (20, 25)
    assert checkpoint["health"]["faults"] == checkpoint["health"]["rollbacks"] == 1
    assert load(tmp_path, "ckpt_prev.pt")["iter_num"] == 10
    for iter_num, factor in ((119, 0.5), (120, 1.0)):
        guard.optimizer.param_groups[0]["lr"] = 2.0
        guard.scale_lr(iter_num)
        assert (guard.optimizer.param_groups[0]["lr"], guard.metrics()["lr_factor"]) == (2 * factor, factor)


def test_a_run_that_could_save_nothing_does_not_go_on_with_the_one_that_it_overwrites(saved):
    guard, _, checkpointer = saved
    checkpointer.saved_iter = None
    assert "nothing of this run could be saved" in error_line(guard.roll_back, 25, checkpointer, Mock())


def test_the_fifth_spike_in_a_row_stops_the_run(saved):
    guard, _, checkpointer = saved
    for step in (24, 23, 24, 22):
        guard.roll_back(step, checkpointer, Mock())
        assert not guard.is_spike(24, 3.0, 1.0)  # not past the last spike
    line = error_line(guard.roll_back, 24, checkpointer, None)
    assert "error: step 24: its loss is a spike, number 5 in a row; resume from" in line
    guard.is_spike(25, 3.0, 1.0)
    guard.roll_back(27, checkpointer, Mock())


@pytest.mark.slow
def test_two_ranks_roll_back_and_continue_on_fresh_data(tmp_path):
    data = poisoned(tmp_path / "data", 55)
    args = [*TINY, "--sample_tokens=0", f"--data_dir={data}", "--lr_decay_iters=62", "--eval_interval=50",
            "--spike_loss=1.5", "--rollback_lr=0.5", "--init_from=auto",
            *extra_flags(prune=["--sparsity=0.3", "--prune_begin=10", "--prune_end=60"])]
    output = run("train_gpt2.py", *args, f"--out_dir={tmp_path}/o", "--max_iters=62", ranks=2)
    assert output.count("is a spike: over 1.5 times its average") == 1
    assert output.count("rolled back to step 50; the data moves on") == 1
    entries = read_lines(tmp_path / "o" / "log.jsonl")
    assert [entry["iter"] for entry in entries if entry.get("event") == "rollback"] == [50]
    losses = [entry["train_loss"] for entry in entries if "train_loss" in entry]
    assert len(losses) == 68 and sum(map(math.isnan, losses)) == 1  # the spike's, which was taken back
    log = read_log(tmp_path / "o", "tokens", "lr", "lr_factor", "rollbacks")
    assert log["tokens", 62] == (62 + 6) * 256 and log["rollbacks", 62] == 1  # five good steps and the bad one
    cosine = 6e-5 + (3e-3 - 6e-5) * 0.5 * (1 + math.cos(math.pi * 59 / 60))
    assert log["lr", 62] == pytest.approx(cosine) and log["lr_factor", 62] == 0.5
    assert load(tmp_path / "o")["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.5 * cosine)
    pruned = [entry["sparsity"] for entry in entries if "sparsity" in entry and entry["iter"] == 51]
    assert len(set(pruned)) == 1 and len(pruned) == 2 or not extra_flags(prune=["here"])
    # interrupted after the rollback, it ends the same
    for stop in (58, 62):
        run("train_gpt2.py", *args, f"--out_dir={tmp_path}/p", f"--max_iters={stop}", ranks=2)
    one, other = load(tmp_path / "o"), load(tmp_path / "p")
    assert one.keys() == other.keys() and all(same(one[key], other[key]) for key in one if key != "config")
