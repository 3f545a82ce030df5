"""Spikes: found, rolled back, and a run without a way out stopped."""
import json
import math

import pytest
import torch

from configurator import extra_settings
from conftest import TINY, load, patched, poisoned, read_log, run, same
from extras.rollback import SpikeGuard

ARGS = [*TINY, "--sample_tokens=0"]
CONFIG = {"spike_loss": 3.0, "spike_norm": 100.0, "out_dir": ""}


@pytest.mark.parametrize("losses, norms, spikes, not_finite", [
    ([3.0] * 60 + [8.9, 9.5, 3.0, math.nan], [1.0] * 64, [61], [63]),
    ([3.0] * 60, [1.0] * 55 + [9.0, 120.0] + [1.0] * 3, [56], []),
    ([3.0, 30.0, 3.0], [1.0, 1.0, math.inf], [], [2]),  # there is no average yet
])
def test_anomalies_of_a_step(losses, norms, spikes, not_finite):
    guard = SpikeGuard(CONFIG, None, torch.amp.GradScaler(enabled=False))
    for i, step in enumerate(zip(losses, norms)):
        assert guard.is_spike(i, *step) == (i in spikes)
        assert bool(guard.anomaly) == (i in spikes + not_finite)


def test_an_overflow_under_float16_is_no_anomaly():
    guard = SpikeGuard(CONFIG, None, torch.amp.GradScaler("cpu"))
    assert not guard.is_spike(0, 3.0, math.inf) and not guard.anomaly
    assert not guard.is_spike(1, math.nan, math.inf) and guard.anomaly
    guard.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)  # it has looked for its range and found none
    assert not guard.is_spike(2, 3.0, math.inf) and guard.anomaly


def test_a_spike_is_rolled_back_and_training_continues_on_fresh_data(tmp_path):
    data = poisoned(tmp_path / "data", [75])
    args = [*ARGS, f"--data_dir={data}", "--max_iters=90", "--spike_loss=1.5", "--rollback_lr=0.5", "--init_from=auto"]
    if extra_settings("prune"):  # at 70 and 73, of which the rollback undoes one
        args += ["--sparsity=0.3", "--prune_begin=10", "--prune_end=80", "--prune_interval=3"]
    output = run("train_gpt2.py", *args, f"--out_dir={tmp_path}/o")
    assert "is a spike: over 1.5 times its average" in output
    assert "rolled back to step 70; the data moves on" in output
    entries = [json.loads(line) for line in (tmp_path / "o" / "log.jsonl").read_text().splitlines()]
    assert [entry["iter"] for entry in entries if entry.get("event") == "rollback"] == [70]
    log = read_log(tmp_path / "o", "tokens", "lr", "lr_factor", "rollbacks")
    assert log["tokens", 90] == (90 + 6) * 256 and log["rollbacks", 90] == 1  # five good steps and the bad one
    cosine = 6e-5 + (3e-3 - 6e-5) * 0.5 * (1 + math.cos(math.pi * 87 / 88))
    assert log["lr", 90] == pytest.approx(cosine) and log["lr_factor", 90] == 0.5
    assert load(tmp_path / "o")["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.5 * cosine)
    if extra_settings("prune"):
        pruned = [(entry["iter"], entry["sparsity"]) for entry in entries
                  if "sparsity" in entry and entry["iter"] in (70, 71, 73)]
        assert [i for i, _ in pruned[:3]] == [70, 71, 73] and pruned[:3] == pruned[3:]
        assert pruned[0][1] == pruned[1][1] < pruned[2][1]
    # interrupted after the rollback, it ends the same
    for stop in (80, 90):
        run("train_gpt2.py", *args, f"--out_dir={tmp_path}/p", f"--max_iters={stop}", "--lr_decay_iters=90")
    one, other = load(tmp_path / "o"), load(tmp_path / "p")
    assert one.keys() == other.keys() and all(same(one[key], other[key]) for key in one if key != "config")


def test_two_ranks_roll_back_together_and_before_the_first_checkpoint_skip(tmp_path):
    data = poisoned(tmp_path / "data", [55, 65])
    args = [*ARGS, f"--data_dir={data}", "--max_iters=67", "--spike_loss=1.5", "--eval_interval=60"]
    output = run("train_gpt2.py", *args, f"--out_dir={tmp_path}/o", ranks=2)
    assert output.count("step 55 is skipped, its loss") == 1 and "1 skipped so far" in output
    assert output.count("rolled back to step 60") == 1
    log = read_log(tmp_path / "o", "skipped", "rollbacks", "tokens")
    assert (log["skipped", 67], log["rollbacks", 67], log["tokens", 67]) == (1, 1, (67 + 6) * 256)


def test_a_spike_rolls_back_to_a_checkpoint_of_another_precision(tmp_path):
    args = [*ARGS, f"--data_dir={poisoned(tmp_path / 'data', [65])}", f"--out_dir={tmp_path}/o", "--max_iters=67",
            "--spike_loss=1.5", "--eval_interval=60"]
    run("train_gpt2.py", *args, "--max_iters=60", "--lr_decay_iters=67")
    output = run("train_gpt2.py", *args, "--init_from=resume", "--dtype=float16")
    assert "rolled back to step 60" in output and load(tmp_path / "o")["iter_num"] == 67


def test_without_a_way_out_the_run_stops_with_its_last_checkpoint(tmp_path):
    data = poisoned(tmp_path / "data", range(75, 150))
    output = run("train_gpt2.py", *ARGS, f"--data_dir={data}", f"--out_dir={tmp_path}/o", "--max_iters=90",
                 "--spike_loss=1.5", "--max_faults=3", code=2)
    assert "error: step 7" in output and "anomaly number 3 in a row: stopped" in output
    assert f"stopped: step 70 is saved; resume with python " in output and f"--out_dir={tmp_path}/o" in output
    assert load(tmp_path / "o")["iter_num"] == 70


def test_a_spike_with_the_checkpoint_damaged_goes_back_to_the_one_before(tmp_path):
    damage = (f"import extras.rollback\nfind = extras.rollback.SpikeGuard.is_spike\n"
              f"def damaged_before(self, step, *rest):\n"
              f"    if step == 72 and not self.stats['calm_until']:\n"
              f"        open({str(tmp_path / 'o' / 'ckpt.pt')!r}, 'wb').write(b'PK damaged')\n"
              f"    return find(self, step, *rest)\n"
              f"extras.rollback.SpikeGuard.is_spike = damaged_before")
    output = run(patched(tmp_path, "train_gpt2.py", damage), *ARGS, f"--data_dir={poisoned(tmp_path / 'data', [75])}",
                 "--max_iters=79", "--spike_loss=1.5", "--keep_interval=10", f"--out_dir={tmp_path}/o")
    assert "rolled back to step 60" in output and (tmp_path / "o" / "ckpt_damaged.pt").exists()
    # ckpt_70.pt was ckpt.pt by another name, and so damaged too; it is saved again
    assert [load(tmp_path / "o", name)["iter_num"] for name in ("ckpt.pt", "ckpt_70.pt")] == [79, 70]
