"""Weights & Biases and TensorBoard: they get the log, and cannot stop a run."""
import sys
from types import SimpleNamespace

from conftest import read_lines
from extras.trackers import Trackers

FAKES = """
import json, os, types

class Run:
    def __init__(self, **settings):
        self.file = open(settings["dir"] / "wandb.jsonl", "a")
        names = {name: str(settings[name]) for name in ("project", "name", "id", "resume")}
        self.log([len(settings["config"]), names])

    def define_metric(self, name, step_metric):
        self.log([name, step_metric])

    def log(self, values):
        print(json.dumps(values), file=self.file, flush=True)

class SummaryWriter:
    def __init__(self, folder, purge_step):
        self.file = open(str(folder) + ".txt", "a")
        print("purge", purge_step, file=self.file)

    def add_scalar(self, *values):
        print(*values, file=self.file)

    def flush(self):
        self.file.flush()

sys.modules["wandb"] = types.SimpleNamespace(init=Run, Settings=dict)
sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=SummaryWriter)
"""


def grouped(line):
    return {("val/" + key[4:] if key.startswith("val_") else key.replace("train_", "train/")): value
            for key, value in line.items()}


def test_both_get_every_line_of_the_log(train, tmp_path):
    """And a resumed run continues its own."""
    for name, more in (("given", ["--max_iters=2", "--wandb_log=True", "--tensorboard=True",
                                  "--wandb_project=project"]),
                       ("another", ["--max_iters=3", "--init_from=resume"])):
        train(tmp_path / "name", *more, patch=f"{FAKES}\nos.environ['WANDB_NAME'] = {name!r}")
    expected = [line for line in read_lines(tmp_path / "name" / "log.jsonl") if "event" not in line]
    tracked = read_lines(tmp_path / "name" / "wandb.jsonl")
    (n_settings, names), metric, resumed_with, again = [tracked.pop(i) for i in (0, 0, 6, 6)]
    assert metric == again == ["*", "iter"]  # not log's step=, which would drop what follows a rollback
    assert names == {"project": "project", "name": "given", "id": names["id"], "resume": "allow"} and n_settings > 50
    assert resumed_with[1] == names and len(names["id"]) == 8
    # 2 evaluations, each with its duration, and 2 steps, then a step and an evaluation
    assert tracked == list(map(grouped, expected)) and len(tracked) == 9
    assert "train/loss" in tracked[2] and "val/loss" in tracked[0] and "lr" in tracked[2]
    scalars = (tmp_path / "name" / "tensorboard.txt").read_text().splitlines()
    assert f"val/loss {expected[-2]['val_loss']} 3" in scalars and f"lr {expected[2]['lr']} 1" in scalars
    assert [line for line in scalars if line.startswith("purge")] == ["purge 0", "purge 3"]


def new_trackers(out_dir, **changes):
    return Trackers({"out_dir": str(out_dir), "wandb_log": True, "wandb_project": None, "tensorboard": False,
                     **changes})


def test_a_run_is_named_after_its_folder_and_its_project_is_the_environments(monkeypatch, tmp_path):
    settings = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=settings.update, Settings=dict))
    monkeypatch.delenv("WANDB_NAME", raising=False)
    for environment, flag, project in (None, None, "forkgpt"), ("e", None, "e"), ("e", "flag", "flag"):
        if environment:
            monkeypatch.setenv("WANDB_PROJECT", environment)
        new_trackers(tmp_path / "name", wandb_project=flag)({"iter": 0, "event": "start"})
        assert (settings["name"], settings["project"]) == ("name", project)


def test_tensorboard_gets_the_numbers_alone(monkeypatch, tmp_path):
    scalars = []
    writer = SimpleNamespace(add_scalar=lambda *values: scalars.append(values), flush=lambda: None)
    module = SimpleNamespace(SummaryWriter=lambda *_, **__: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    new_trackers(tmp_path, wandb_log=False, tensorboard=True)({"iter": 3, "val_loss": 2.5, "shape": [2, 64]})
    assert scalars == [("val/loss", 2.5, 3)]


def test_one_that_is_missing_or_fails_is_a_warning_and_off(monkeypatch, tmp_path, capsys):
    for module in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)  # not installed
    trackers, calls, others = new_trackers(tmp_path, tensorboard=True), [], []

    def failing(values):
        calls.append(values)
        1 / 0

    trackers.services += [failing, others.append]
    trackers({"iter": 1})
    trackers({"iter": 2})
    output = capsys.readouterr().out
    assert output.count("WARNING: no Weights & Biases (ModuleNotFoundError: ") == 1 == output.count("no TensorBoard (")
    assert calls == [{"iter": 1}] and others == [{"iter": 1}, {"iter": 2}]
    assert output.count("WARNING: a tracker failed") == 1
