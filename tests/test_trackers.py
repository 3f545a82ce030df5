"""Weights & Biases and TensorBoard: they get the log, and cannot stop a run."""
import json

from conftest import TINY, patched, run
from extras.trackers import guarded

FAKES = """
import json, types

class Run:
    def __init__(self, **settings):
        self.file = open(settings["dir"] / "wandb.jsonl", "w")
        self.log({name: str(settings[name]) for name in ("project", "name")}, len(settings["config"]))

    def log(self, values, step):
        print(json.dumps([step, values]), file=self.file, flush=True)

class SummaryWriter:
    def __init__(self, folder):
        self.file = open(str(folder) + ".txt", "w")

    def add_scalar(self, *values):
        print(*values, file=self.file)

    def flush(self):
        self.file.flush()

sys.modules["wandb"] = types.SimpleNamespace(init=Run, Settings=dict)
sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=SummaryWriter)
"""


def test_both_get_every_line_of_the_log(shards, tmp_path):
    run(patched(tmp_path, "train_gpt2.py", FAKES), *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/name",
        "--max_iters=2", "--wandb_log=True", "--tensorboard=True", "--wandb_project=project")
    lines = map(json.loads, (tmp_path / "name" / "log.jsonl").read_text().splitlines())
    expected = [line for line in lines if "event" not in line]
    (n_settings, names), *logged = map(json.loads, (tmp_path / "name" / "wandb.jsonl").read_text().splitlines())
    assert names == {"project": "project", "name": "name"} and n_settings > 50
    assert logged == [[line["iter"], line] for line in expected] and len(logged) == 4  # 2 evaluations, 2 steps
    scalars = (tmp_path / "name" / "tensorboard.txt").read_text().splitlines()
    assert f"val_loss {expected[-1]['val_loss']} 2" in scalars and f"lr {expected[1]['lr']} 1" in scalars


def test_one_that_is_not_installed_is_a_warning(shards, tmp_path):
    missing = "sys.modules['wandb'] = sys.modules['torch.utils.tensorboard'] = None"
    output = run(patched(tmp_path, "train_gpt2.py", missing), *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o",
                 "--max_iters=2", "--wandb_log=True", "--tensorboard=True")
    assert "WARNING: no Weights & Biases (ModuleNotFoundError: " in output and "WARNING: no TensorBoard (" in output
    assert "done after 2 steps" in output


def test_one_that_fails_is_off_from_there_on(capsys):
    calls = []

    def failing(values):
        calls.append(values)
        1 / 0

    track = guarded(failing)
    track({"iter": 1})
    track({"iter": 2})
    assert calls == [{"iter": 1}] and capsys.readouterr().out.count("WARNING: a tracker failed") == 1
