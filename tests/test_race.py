"""docs/race.py: models of nanochat and nanoGPT learn from our rows, and their loss is measured as ours is."""
import json
import shutil

import pytest

from conftest import ROOT, read_lines, refused, run

NANOCHAT = """
import torch
class GPTConfig:
    def __init__(self, **settings): self.settings = settings
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = torch.nn.Embedding(config.settings["vocab_size"], config.settings["vocab_size"])
    def init_weights(self): torch.nn.init.zeros_(self.wte.weight)
    def setup_optimizer(self, matrix_lr, **rates):
        kind = dict(kind="muon", initial_lr=matrix_lr)
        return torch.optim.SGD([dict(params=self.parameters(), **kind)], lr=matrix_lr)
    def forward(self, idx, targets):
        return torch.nn.functional.cross_entropy(self.wte(idx).flatten(0, 1), targets.flatten())
"""
NANOGPT = NANOCHAT.replace("def init_weights(self): ", "    ").replace(
    "    def setup_optimizer(self, matrix_lr, **rates):",
    "    def configure_optimizers(self, decay, matrix_lr, betas, device):"
).replace("return torch.nn.functional", "return None, torch.nn.functional")


def race(folder, project, file, code, args):
    """The log of a race of a checkout of `project` that has this code."""
    (folder / project / file).parent.mkdir(parents=True)
    (folder / project / file).write_text(code)
    run(f"{ROOT}/docs/race.py", *args, f"--{project}={folder}/{project}", f"--out_dir={folder}/runs/{project}",
        env={})
    return read_lines(folder / "runs" / project / "log.jsonl")


@pytest.mark.slow
def test_both_read_the_rows_of_train_gpt2_and_all_are_drawn(shards, trained, tmp_path):
    args = [f"--data_dir={shards}", "--n_layer=1", "--n_head=1", "--n_embd=16", "--max_seq_len=32", "--batch_size=2",
            "--eval_interval=10", "--eval_iters=2", "--device=cpu", "--compile=False", "--max_iters=20"]
    nanochat = race(tmp_path, "nanochat", "nanochat/gpt.py", NANOCHAT, args)
    nanogpt = race(tmp_path, "nanogpt", "model.py", NANOGPT, args)
    for log in nanochat, nanogpt:  # they begin at ln(vocabulary), and learn
        assert [(entry["iter"], entry["tokens"]) for entry in log] == [(0, 0), (10, 640), (20, 1280)]
        assert log[0]["val_loss"] == pytest.approx(5.95, abs=0.01) and log[2]["val_loss"] < log[0]["val_loss"]
        assert 0 == log[0]["seconds"] < log[1]["seconds"] < log[2]["seconds"]
    assert "holds a log.jsonl" in refused(f"{ROOT}/docs/race.py", f"--nanochat={tmp_path}/nanochat", *args,
                                          f"--out_dir={tmp_path}/runs/nanogpt")
    shutil.copytree(trained, tmp_path / "runs" / "ours")
    (tmp_path / "runs" / "size" / "sparse").mkdir(parents=True)  # rolled back; evaluated between log lines
    (tmp_path / "runs" / "size" / "sparse" / "log.jsonl").write_text("\n".join(map(json.dumps, (
        {"iter": 20, "tokens": 20, "seconds": 2.0}, {"iter": 10, "tokens": 25, "val_loss": 1.0},
        {"iter": 15, "tokens": 30, "seconds": 4.0}))) + '\n{"iter": 4')  # half a line, of a run that was killed
    run(f"{ROOT}/docs/race.py", f"--out_dir={tmp_path}/runs", env={})
    points = (tmp_path / "runs" / "race.csv").read_text().splitlines()
    assert [point.split(",")[:3] for point in points[1:-1]] == [
        [name, str(step), str(step * tokens)] for name, tokens in (("nanochat", 64), ("nanogpt", 64), ("ours", 256))
        for step in (0, 10, 20)]
    assert float(points[9].split(",")[3]) > float(points[8].split(",")[3]) > 0
    assert points[-1] == "size/sparse,10,25,3.0,1.0"
    assert (tmp_path / "runs" / "race.png").exists()


@pytest.mark.slow
def test_a_folder_that_is_no_checkout_is_refused(shards, tmp_path):
    nanochat, nanogpt = f"--nanochat={tmp_path}", f"--nanogpt={tmp_path}"
    for flags, words in (([nanochat, nanogpt], "give one of them"), ([nanochat], "expected the folder of a checkout"),
                         ([nanogpt], "expected the folder of a checkout"), ([], "holds no log.jsonl of a run")):
        assert words in refused(f"{ROOT}/docs/race.py", *flags, f"--data_dir={shards}", f"--out_dir={tmp_path}/runs",
                                "--device=cpu")
