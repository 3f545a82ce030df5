"""extras/compare.py: a table over settings and seeds, which is resumed and not repeated."""
import json
import re

import pytest

from conftest import TINY, read_log, refused, run

ARGS = ["--runs=--learning_rate=1e-3;--optimizer=muon", "--seeds=2"]


def test_runs_are_compared_once_and_resumed(shards, tmp_path):
    small = f"--args={' '.join(TINY)} --max_iters=4 --eval_interval=2 --sample_tokens=0 --data_dir={shards}"
    output = run("extras/compare.py", *ARGS, small, f"--out_dir={tmp_path}")
    folders = sorted(tmp_path.iterdir())
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    assert len(results) == 4 and len({result["val_loss"] for result in results}) == 4
    for folder, result in zip(folders, results):
        assert result["val_loss"] == read_log(folder, "val_loss")["val_loss", 4]
    table = output.partition("--seeds=2\n")[2].splitlines()[:2]
    for flags, line in zip(("--learning_rate=1e-3", "--optimizer=muon"), table):
        losses = [result["val_loss"] for result in results if flags in result["recipe"]]
        mean, spread = map(float, re.search(r"val_loss (\S+) \+/- (\S+),", line).groups())
        assert line.startswith(flags) and mean == pytest.approx(sum(losses) / 2, rel=1e-4)
        assert spread == pytest.approx(abs(losses[0] - losses[1]) / 2 ** 0.5, rel=0.06)
    (folders[0] / "result.json").unlink()  # as if it had been killed before
    with (folders[0] / "log.jsonl").open("a") as log:
        log.write('{"iter": 9, "val_')
    again = run("extras/compare.py", *ARGS, small, f"--out_dir={tmp_path}")
    assert again.count("resumed at step 4") == 1 == again.count("done after 4 steps")
    assert again.partition("--seeds=2\n")[2].splitlines()[:2] == table
    (folders[1] / "result.json").write_text(json.dumps({"recipe": results[1]["recipe"]}))  # while it was training
    line = refused("extras/compare.py", *ARGS, small + " --min_lr=0", f"--out_dir={tmp_path}")
    assert "give another --out_dir" in line and "--min_lr=0" not in line


def test_a_run_that_fails_is_named(tmp_path):
    output = run("extras/compare.py", "--runs=--batch_size=0", f"--out_dir={tmp_path}", code=2)
    assert "--batch_size=0: expected at least 1" in output and "--runs: train_gpt2.py" in output


def test_a_run_that_was_stopped_is_no_result(tmp_path):
    """A signal ends it with exit code 0, but without the last evaluation."""
    (tmp_path / "script.py").write_text("""
import json, pathlib, sys
folder = pathlib.Path(sys.argv[-1].partition("=")[2])
entries = {"iter": 3, "val_loss": 2.0}, {"iter": 5, "train_loss": 1.0}
(folder / "log.jsonl").write_text("\\n".join(map(json.dumps, entries)))
""")
    output = run("extras/compare.py", "--args=--n_layer=1", f"--script={tmp_path}/script.py",
                 f"--out_dir={tmp_path}/o", code=2)
    assert "_seed=1: stopped at step 5; the same command resumes it" in output
    assert all("val_loss" not in path.read_text() for path in tmp_path.glob("o/*/result.json"))


def test_what_is_no_comparison_is_refused(tmp_path):
    for flags in ("", "--n_layer=1 --seed=3", "--out_dir=elsewhere"):
        assert "--runs: expected the flags" in refused("extras/compare.py", f"--runs={flags}")
    (tmp_path / "o" / "--n_layer=1_seed=1").mkdir(parents=True)
    (tmp_path / "o" / "--n_layer=1_seed=1" / "result.json").write_text("{")
    line = refused("extras/compare.py", "--runs=--n_layer=1", f"--out_dir={tmp_path}/o")
    assert "result.json" in line and "remove it" in line
