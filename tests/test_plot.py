"""loss.png, drawn from the log."""
import json

from conftest import TINY, patched, run
from extras import plot


def curve(path, key):
    return [(entry["tokens"], entry[key]) for entry in plot.read_log(path) if key in entry]


def test_the_log_is_read_without_what_was_done_again(tmp_path):
    lines = [dict(iter=i, tokens=100 * i, train_loss=5.0 - i, lr=1e-3) for i in (1, 2, 3, 4)]
    lines += [dict(iter=2, tokens=200, event="resume"), dict(iter=3, tokens=300, train_loss=2.5, lr=1e-3)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iter": 4, "tok')
    assert curve(tmp_path / "log.jsonl", "train_loss") == [(100, 4.0), (200, 3.0), (300, 2.5)]
    assert curve(tmp_path / "log.jsonl", "lr") == [(100, 1e-3), (200, 1e-3), (300, 1e-3)]


def test_a_damaged_log_is_drawn_and_a_resumed_run_appends_to_it(shards, tmp_path):
    args = [*TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--sample_tokens=0"]
    run("train_gpt2.py", *args, "--max_iters=4", env={})
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    with open(tmp_path / "log.jsonl", "ab") as f:
        f.write(b'null\n5\n{"tokens": "x"}\n{"event": ["x"], "tokens": 3}\n\xff\x00\n{"iter": 20, "tok')
    (tmp_path / "loss.png").unlink()
    run("train_gpt2.py", *args, "--init_from=resume", "--max_iters=6", env={})
    assert [tokens for tokens, _ in curve(tmp_path / "log.jsonl", "train_loss")] == [256 * i for i in range(1, 7)]
    assert [tokens for tokens, _ in curve(tmp_path / "log.jsonl", "val_loss")] == [0, 1024, 1536]
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_be_drawn_does_not_end_the_run(shards, tmp_path):
    args = [*TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--sample_tokens=0"]
    run("train_gpt2.py", *args, "--max_iters=2")
    with open(tmp_path / "log.jsonl", "a") as f:
        f.write('{"tokens": 7, "val_loss": {"a": 1}}\n')
    output = run("train_gpt2.py", *args, "--init_from=resume", "--max_iters=3")
    assert "loss.png is not drawn" in output and "done after 3 steps" in output


def test_a_run_does_without_matplotlib_and_says_so_once(shards, tmp_path):
    program = patched(tmp_path, "train_gpt2.py", "sys.modules['matplotlib.figure'] = None")
    output = run(program, *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_iters=2")
    assert output.count("loss.png is not drawn") == 1 and "done after 2 steps" in output
    assert not (tmp_path / "o" / "loss.png").exists()
