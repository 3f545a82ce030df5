"""bench.py: what it prints, beside a stand-in for nanoGPT, and what it refuses."""
import re

import pytest

from conftest import refused, run

TINY = ["--device=cpu", "--compile=False", "--rounds=1", "--steps=1",
        "--flags=--n_layer=1 --n_head=2 --n_embd=32 --max_seq_len=32 --batch_size=2"]

# a stand-in for nanoGPT's train.py, whose step takes 0.1 s, and the first one 5 s
NANOGPT = """
import sys
import model
sizes = dict(flag.removeprefix("--").split("=") for flag in sys.argv[1:])
tokens_per_iter = int(sizes["batch_size"]) * int(sizes["block_size"]) * (sizes["n_layer"] == "1")
for ms in (5000, 100):
    print(f"iter 0: loss 9.0, time {ms:.2f}ms, mfu 0.1%")
"""


@pytest.mark.slow
def test_bench_compares_with_nanogpt(tmp_path):
    (tmp_path / "train.py").write_text(NANOGPT)
    (tmp_path / "model.py").write_text("")
    lines = run("bench.py", *TINY, f"--nanogpt={tmp_path}", env={}).splitlines()
    rows = {line.split()[0]: {key: float(value.replace(",", ""))
                              for key, value in re.findall(r"(\w+) ([\d,.]+)", line)}
            for line in lines if "tok_per_sec" in line}
    assert list(rows) == ["nanoGPT", "train_gpt2.py"] and lines[0].startswith("device ")
    nanogpt, ours = rows.values()
    assert nanogpt["tok_per_sec"] == 640 and nanogpt["ratio"] == 1  # 64 tokens in 0.1 s: the first step does not count
    assert ours["tok_per_sec"] == pytest.approx(64_000 / ours["ms"], rel=0.02)
    assert ours["ratio"] == pytest.approx(ours["tok_per_sec"] / 640, abs=6e-3)
    assert ours["peak_mem_mb"] > 100 and nanogpt["peak_mem_mb"] > 100


@pytest.mark.slow
def test_a_config_file_sets_the_size(tmp_path):
    (tmp_path / "small.py").write_text("n_layer, n_head, n_embd, max_seq_len, batch_size = 1, 2, 32, 32, 2\n")
    output = run("bench.py", *TINY[:-1], f"--flags={tmp_path}/small.py", env={})
    assert " rows of 32, and" in output


@pytest.mark.slow
def test_bench_refuses_what_it_cannot_time(tmp_path):
    for wrong, words in ((f"--nanogpt={tmp_path}", "holds no train.py"),
                         ("--steps=0", "expected an int of at least 1"),
                         ("--flags=--n_layer=1 --out_dir=out", "leave out --out_dir and --overwrite"),
                         ("--flags=--max_iters=9", "and --max_iters (give --steps)")):
        line = refused("bench.py", "--compile=False", wrong)
        assert wrong in line and words in line
    (tmp_path / "train.py").touch()
    line = refused("bench.py", f"--nanogpt={tmp_path}", "--flags=config/quickstart.py --n_layer=2")
    assert "--flags=config/quickstart.py --n_layer=2: with --nanogpt write --name=value" in line
    output = run("bench.py", "--compile=False", "--flags=--n_layers=3", env={}, code=2)
    assert "error: --n_layers: no such setting of train_gpt2.py" in output and "Traceback" not in output
