"""bench.py: its tables, what it refuses, and the peaks that MFU is measured against."""
import re

import pytest
import torch

import runtime
from conftest import refused, run

TINY = ["--device=cpu", "--compile=False", "--rounds=1", "--train_iters=3", "--context=16", "--new_tokens=3",
        "--train_args=--n_layer=1 --n_head=2 --n_embd=32 --max_seq_len=32 --batch_size=2",
        "--chat_args=--max_seq_len=64 --batch_size=1"]


def read_tables(output):
    """{title up to its colon: {label: {metric: text}}}"""
    tables = {}
    for table in output.split("\n\n"):
        title, *lines = table.splitlines()
        head, *rows = [re.split(r" {2,}", line.strip()) for line in lines] or [[]]
        tables[title.partition(":")[0]] = {row[0]: dict(zip(head, row[1:])) for row in rows}
    return tables


def number(text):
    return float(text.split(" (")[0].replace(",", "").rstrip("%"))


def test_bench_prints_its_tables(gpt2_vocabulary, tmp_path):
    """With a nanoGPT whose steps take 0.1 s."""
    (tmp_path / "train.py").write_text(
        "import model\nfor ms in (5000, 100, 100):\n    print(f'iter 0: loss 9.0, time {ms:.2f}ms, mfu 0.1%')\n")
    (tmp_path / "model.py").write_text("import torch\nGPTConfig = dict\nclass GPT(torch.nn.Module):\n"
                                       "    def __init__(self, config): super().__init__()\n"
                                       "    def generate(self, idx, *_, **__): return idx\n")
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 1000)
    tables = read_tables(run("bench.py", *TINY, "--variants=gpt2,gpt2+mla", f"--nanogpt={tmp_path}",
                             f"--prep_files={tmp_path}/a.txt"))
    train, chat, prep, decode = (tables[name] for name in ("training", "chat tuning", "data preparation", "decoding"))

    assert [*train] == ["nanoGPT", "gpt2", "gpt2+mla"]
    assert train["nanoGPT"]["tok_per_sec"] == "640.0 (1.00)"  # 64 tokens in 0.1 s: its first step is not counted
    assert number(train["nanoGPT"]["peak_mem_mb"]) > 100
    for row in (train["gpt2"], train["gpt2+mla"]):
        speed, ratio = re.fullmatch(r"([\d,.]+) \((.+)\)", row["tok_per_sec"]).groups()
        assert number(speed) > 0 and float(ratio) == pytest.approx(number(speed) / 640, abs=0.006)
        assert number(row["peak_mem_mb"]) > 100 and 0 <= number(row["wait"]) <= 100 and row["recompiles"] == "0"
        assert "cold_compile_s" not in row

    assert [*chat] == ["uncompiled"] and number(chat["uncompiled"]["tok_per_sec"]) > 0
    assert 0 < number(chat["uncompiled"]["useful"]) <= 100
    assert [*prep] == ["tiktoken", "prepare_data.py"]  # both count the same tokens
    assert prep["tiktoken"]["n_tokens"] == prep["prepare_data.py"]["n_tokens"]
    assert number(prep["tiktoken"]["n_tokens"]) > 8000
    assert [*decode] == ["nanoGPT", "gpt2 uncompiled", "gpt2+mla uncompiled"]
    cache_bytes = [number(decode[label]["cache_bytes"]) for label in ("gpt2 uncompiled", "gpt2+mla uncompiled")]
    assert cache_bytes[1] / cache_bytes[0] == pytest.approx(128 / (2 * 768))


def test_bench_refuses_what_it_cannot_time(tmp_path):
    assert "variants=gpt3: expected some of gpt2, gpt2+mla" in refused("bench.py", "--variants=gpt3")
    assert "what=training: expected some of train" in refused("bench.py", "--what=training")
    assert "holds no train.py" in refused("bench.py", f"--nanogpt={tmp_path}")
    assert "expected at least 2" in refused("bench.py", "--train_iters=1")
    for wrong in ("--train_args=n_layer=2", "--train_args=--arch=llama", "--train_args=--dtype=float32",
                  "--chat_args=--max_iters=7", "--chat_args=--data=a.jsonl"):
        line = refused("bench.py", "--compile=False", "--what=prep", wrong)
        assert f"{wrong}: expected --name=value" in line and "bench.py gives these itself: arch" in line


@pytest.mark.parametrize("args, message", [
    (["--what=train", "--train_args=--n_layers=3"], "--n_layers: no such setting of train_gpt2.py"),
    (["--what=train", "--train_args=--batch_size=0"], "--batch_size=0: expected at least 1"),
    (["--what=prep", "--prep_files=nothing/*.txt"], "--files=nothing/*.txt: no such file")])
def test_bench_ends_with_the_error_of_a_script(args, message):
    assert message in refused("bench.py", "--compile=False", *args)


def test_peak_flops_are_those_of_the_card(monkeypatch):
    class Measured(Exception):
        """A card without a data sheet here is measured."""

    def measure(*args, **options):
        raise Measured

    monkeypatch.setattr(torch, "randn", measure)
    for name, flops in (("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
                        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L4", 121e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        assert runtime.peak_flops(torch.device("cuda:0"), "bfloat16") == flops, name
    with pytest.raises(Measured):
        runtime.peak_flops(torch.device("cuda:0"), "float32")
    for name in ("NVIDIA L40", "NVIDIA RTX A4000", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        with pytest.raises(Measured):
            runtime.peak_flops(torch.device("cuda:0"), "bfloat16")
