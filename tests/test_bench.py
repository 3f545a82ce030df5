"""bench.py: its tables, and what it refuses."""
import re

import pytest
from torch._inductor.runtime.runtime_utils import cache_dir

from conftest import refused, run

TINY = ["--device=cpu", "--compile=False", "--rounds=1", "--train_iters=2", "--chat_iters=2", "--context=16",
        "--new_tokens=3", "--decode_rows=2", "--chat_args=--max_seq_len=64 --batch_size=1",
        "--train_args=--n_layer=1 --n_head=2 --n_embd=32 --max_seq_len=32 --batch_size=2"]

# nanoGPT's step takes 0.1 s, the first one 5 s; of decoding it has only the signature
NANOGPT = """
import sys
import model
sizes = dict(flag.removeprefix("--").split("=") for flag in sys.argv[1:])
tokens_per_iter = int(sizes["batch_size"]) * int(sizes["block_size"]) * (sizes["n_layer"] == "1")
for ms in (5000, 100):
    print(f"iter 0: loss 9.0, time {ms:.2f}ms, mfu 0.1%")
"""
NANOGPT_MODEL = """
import torch
GPTConfig = dict
class GPT(torch.nn.Module):
    def __init__(self, config): super().__init__()
    def generate(self, idx, n_tokens, top_k): return torch.nn.functional.pad(idx, (0, n_tokens))
"""


def read_tables(output):
    """{title up to its colon: {row: {metric: number}}}; stderr comes after stdout."""
    tables = {}
    for table in output.partition("-----")[0].strip().split("\n\n")[1:]:
        title, *rows = table.splitlines()
        tables[title.partition(":")[0]] = {row[:24].strip(): dict(re.findall(r"(\S+) +(\S+)", row[24:]))
                                           for row in rows}
    return tables


def number(text):
    return float(text.replace(",", ""))


def test_bench_prints_its_tables(tmp_path):
    (tmp_path / "train.py").write_text(NANOGPT)
    (tmp_path / "model.py").write_text(NANOGPT_MODEL)
    tables = read_tables(run("bench.py", *TINY, "--variants=gpt2,gpt2+mla", f"--nanogpt={tmp_path}"))
    train, chat, decode = (tables[name] for name in ("training", "chat tuning", "decoding"))

    assert [*train] == ["nanoGPT", "gpt2", "gpt2+mla"]
    assert train["nanoGPT"]["tok_per_sec"] == "640.000"  # 64 tokens in 0.1 s: its first step is not counted
    assert train["nanoGPT"]["ratio"] == "1.000" and "wait" not in train["nanoGPT"]
    assert number(train["nanoGPT"]["peak_mem_mb"]) > 100
    for row in (train["gpt2"], train["gpt2+mla"]):
        assert number(row["tok_per_sec"]) > 0
        assert number(row["ratio"]) == pytest.approx(number(row["tok_per_sec"]) / 640, abs=6e-4)
        assert number(row["peak_mem_mb"]) > 100 and 0 <= number(row["wait"]) <= 1 and row["recompiles"] == "0.000"

    assert [*chat] == ["--compile=False"] and number(chat["--compile=False"]["tok_per_sec"]) > 0
    assert number(chat["--compile=False"]["train_loss"]) > 0
    assert 0 < number(chat["--compile=False"]["useful"]) <= 1
    assert {row: metrics["n_tokens"] for row, metrics in decode.items()} == {
        "nanoGPT": "16.000", "gpt2 --compile=False": "6.000", "gpt2+mla --compile=False": "6.000"}


def test_compiled_chat_tuning_is_compared_with_uncompiled(tmp_path):
    """Two ranks; a step of this size gains nothing from compiling, so the tokens/s may fail. The loss is the same."""
    args = [arg for arg in TINY if arg != "--compile=False"]
    output = run("bench.py", *args, "--what=chat", "--ranks=2", "--chat_args=--max_seq_len=64 --batch_size=1",
                 env={"TORCHINDUCTOR_CACHE_DIR": cache_dir()})
    verdicts = re.findall(r"(pass|FAIL)  compiled over uncompiled, (.*): (\S+), expected", output)
    ok = {"loss at step 2": lambda x: 0.95 <= x <= 1.05, "tokens/s": lambda x: x >= 1.3, "memory": lambda x: x <= 1.1,
          "compile_s": lambda x: x <= 60}
    assert [what for _, what, _ in verdicts] == list(ok)
    assert all(ok[what](float(value)) == (verdict == "pass") for verdict, what, value in verdicts)
    assert verdicts[0][0] == "pass" and ", --ranks=2" in output


def test_bench_refuses_what_it_cannot_time(tmp_path):
    for wrong, words in (("--variants=gpt3", "expected some of gpt2, gpt2+mla"),
                         ("--what=training", "expected some of train"),
                         (f"--nanogpt={tmp_path}", "holds no train.py"), ("--train_iters=0", "expected at least 1")):
        line = refused("bench.py", "--compile=False", wrong)
        assert wrong in line and words in line


@pytest.mark.parametrize("args, message", [
    (["--what=train", "--train_args=--n_layers=3"], "--n_layers: no such setting of train_gpt2.py"),
    (["--what=train", "--train_args=--batch_size=0"], "--batch_size=0: expected at least 1")])
def test_bench_ends_with_the_error_of_a_script(args, message):
    assert message in refused("bench.py", "--compile=False", *args)
