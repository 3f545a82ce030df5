"""loss.png, drawn from the log."""
import json
import sys

import pytest

from extras import plot
from features import evaluation_hooks


@pytest.fixture
def out_dir(tmp_path):
    """A folder with the log of a run that was killed and resumed, and damaged."""
    lines = [dict(iter=i, tokens=100 * i, train_loss=5.0 - i, lr=1e-3) for i in (1, 2, 3, 4)]
    lines += [dict(iter=2, tokens=200, event="resume"), dict(iter=3, tokens=300, train_loss=2.5, lr=1e-3)]
    damage = b'null\n5\n{"iter": 9}\n{"tokens": "x"}\n{"event": ["x"], "tokens": 3}\n\xff\x00\n{"iter": 4, "tok'
    (tmp_path / "log.jsonl").write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + damage)
    return tmp_path


def hooks(out_dir):
    return evaluation_hooks(None, None, None, [], {"sample_tokens": 0, "eval_tasks": "", "out_dir": out_dir}, "base")


def test_the_log_is_read_without_what_was_done_again(out_dir):
    for key, curve in (("train_loss", [4.0, 3.0, 2.5]), ("lr", [1e-3, 1e-3, 1e-3])):
        found = [(entry["tokens"], entry[key]) for entry in plot.read_log(out_dir / "log.jsonl") if key in entry]
        assert found == list(zip((100, 200, 300), curve))


def test_a_damaged_log_is_drawn_and_one_that_cannot_be_does_not_end_the_run(out_dir, monkeypatch, capsys):
    hook, = hooks(out_dir)
    monkeypatch.setenv("RANK", "1")  # another rank leaves it to rank 0
    assert hook(4, False) == {} and not (out_dir / "loss.png").exists()
    monkeypatch.delenv("RANK")
    assert hook(4, False) == {}
    picture = (out_dir / "loss.png").read_bytes()
    assert picture[:4] == b"\x89PNG"
    machine = {"device": "a CPU", "torch": "2", "commit": "1234567", "threads": 1}
    (out_dir / "config.json").write_text(json.dumps({"machine": machine}))
    assert hook(4, False) == {} and (out_dir / "loss.png").read_bytes() != picture  # it names the machine
    with open(out_dir / "log.jsonl", "a") as f:
        f.write('\n{"tokens": 7, "val_loss": {"a": 1}}\n')
    assert hook(5, False) == {}
    assert capsys.readouterr().out.count(f"{out_dir}/loss.png is not drawn") == 1


def test_each_curve_is_over_tokens_and_beside_those_of_its_kind(out_dir, monkeypatch):
    figures = []
    monkeypatch.setattr(plot.Figure, "savefig", lambda figure, _: figures.append(figure))
    plot.draw(out_dir)
    loss, lr, *_ = [{line.get_label(): line.get_xydata().tolist() for line in ax.lines} for ax in figures[0].axes]
    assert loss == {"train loss (nats per token)": [[100, 4.0], [200, 3.0], [300, 2.5]], "val loss": []}
    assert lr == {"learning rate": [[100, 1e-3], [200, 1e-3], [300, 1e-3]]}


def test_a_run_does_without_matplotlib_and_says_so(out_dir, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "extras.plot")
    assert hooks(out_dir) == []
    assert "loss.png is not drawn: " in capsys.readouterr().out
