"""extras/compare.py: a table over settings and seeds, which is resumed and not repeated."""
import json

import pytest

from conftest import TINY, read_log, refused, run

# takes --steps and --seed, or --stop, which ends it between two evaluations, as a signal does: with exit code 0
FAKE_SCRIPT = """
import json, os, sys
flags = dict(arg[2:].split("=", 1) for arg in sys.argv[1:] if "=" in arg)
entries = [{"iter": 3, "val_loss": float(flags.get("steps", 1)) / int(flags["seed"])}, {"iter": 5, "train_loss": 1.0}]
os.makedirs(flags["out_dir"], exist_ok=True)
with open(flags["out_dir"] + "/log.jsonl", "a") as log:
    log.writelines(json.dumps(entry) + "\\n" for entry in entries[:1 + ("stop" in flags)])
print("ran", sys.argv)
"""


@pytest.fixture
def compare(tmp_path):
    """Starts compare.py with a script that takes no time, on two seeds."""
    (tmp_path / "fake.py").write_text(FAKE_SCRIPT)
    return lambda start, *args: start("extras/compare.py", f"--script={tmp_path}/fake.py", "--seeds=2",
                                      f"--out_dir={tmp_path}/o", *args)


def test_a_table_has_the_mean_of_each_setting_and_nothing_is_repeated(compare, tmp_path):
    args = ["--runs=--steps=6;;--steps=8 --x=1", "--args=--y=2"]
    output = compare(run, *args)
    assert output.count("ran ") == output.count("'--init_from=auto', '--y=2'") == 6
    assert "--steps=6 --seed=2: val_loss 3\n" in output
    table = output.partition("--seeds=2\n")[2].splitlines()[:3]
    assert table == ["--steps=6: val_loss 4.5 +/- 2.1", "(no flags): val_loss 0.75 +/- 0.35",
                     "--steps=8 --x=1: val_loss 6 +/- 2.8"]
    folder, = (tmp_path / "o").glob("*=6_seed=1_*")
    (folder / "result.json").unlink()  # as if it had been killed while it trained
    (folder / "log.jsonl").write_text('{"iter": 3, "val_loss": 9}\n{"iter": 4, "val_\n')
    again = compare(run, *args)
    assert again.count("ran ") == 1 and again.partition("--seeds=2\n")[2].splitlines()[:3] == table
    assert compare(run, *args, "--args=--y=3").count("ran ") == 6 and compare(run, *args).count("ran ") == 0
    script = tmp_path / "fake.py"
    script.write_text(FAKE_SCRIPT.replace("steps\", 1", "steps\", 3"))  # the code has changed, and with it the results
    assert compare(run, *args).count("ran ") == 6
    script.write_text(FAKE_SCRIPT)
    (folder / "result.json").write_text("{")
    line = compare(refused, *args)
    assert "result.json" in line and "remove it" in line


def test_a_config_file_says_what_the_runs_start_from(compare, tmp_path):
    for init_from, flag in (("auto:o/ckpt.pt", ""), ("o/ckpt.pt", "'--init_from=auto:o/ckpt.pt', "),
                            ("scratch", "'--init_from=auto', ")):
        (tmp_path / "tune.py").write_text(f"from math import sqrt\ninit_from = {init_from!r}\n")
        output = compare(run, f"--args={tmp_path}/tune.py --y=2")
        assert output.count(f"fake.py', {flag}'{tmp_path}/tune.py', '--y=2'") == 2


def test_a_run_that_stopped_or_failed_is_no_result(compare, tmp_path):
    for args, error in (("--stop=1", ": stopped at step 5; the same command resumes it"),
                        ("--steps=no", "fake.py --init_from=auto --steps=no --seed=1 failed, see above")):
        assert error in compare(lambda *words: run(*words, code=2), f"--args={args}", f"--out_dir={tmp_path}/{args}")
    assert not list(tmp_path.glob("*/*/result.json"))


def test_a_run_that_diverged_has_a_mean_and_long_flags_a_folder(compare):
    assert "val_loss nan\n" in compare(run, f"--runs=--steps=nan {'--x=1 ' * 60}").partition("--seeds=2\n")[2]


@pytest.mark.slow
def test_the_training_script_is_compared(shards, tmp_path):
    run("extras/compare.py", "--runs=--max_iters=2", "--seeds=1", f"--args={' '.join(TINY)} --data_dir={shards}",
        f"--out_dir={tmp_path}")
    folder, = tmp_path.glob("--max_iters=2_seed=1_*")
    result = json.loads((folder / "result.json").read_text())
    assert result["val_loss"] == read_log(folder, "val_loss")["val_loss", 2]
    assert result.keys() >= {"train_loss", "seconds", "tok_per_sec", "peak_mem_mb"} and result["iter"] == 2


@pytest.mark.parametrize("flags", ["", "--n_layer=1 --seed=3", "--seed 3", "--out_dir=elsewhere"])
def test_what_is_no_comparison_is_refused(flags):
    assert "--runs: expected the flags" in refused("extras/compare.py", f"--runs={flags}")


def test_a_quotation_that_does_not_end_is_refused(compare):
    assert "--args= --runs=--x='a b: No closing quotation" in compare(refused, "--runs=--x='a b")
