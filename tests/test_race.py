"""docs/race.py: the same rows and validation for all, a table that is continued, a picture."""
import csv

import pytest

from conftest import ROOT, run

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


def read_table(folder):
    return list(csv.DictReader(open(folder / "race.csv")))


@pytest.mark.slow
def test_a_race_of_three_is_continued_and_drawn(shards, tmp_path):
    for folder, file, code in (("nanochat", "nanochat/gpt.py", NANOCHAT), ("nanogpt", "model.py", NANOGPT)):
        path = tmp_path / folder / file
        path.parent.mkdir(parents=True)
        path.write_text(code)
    args = [f"--data_dir={shards}", f"--nanochat={tmp_path}/nanochat", f"--nanogpt={tmp_path}/nanogpt", "--steps=20",
            "--n_layer=1", "--n_head=1", "--n_embd=16", "--max_seq_len=32", "--batch_size=2", "--eval_interval=10",
            "--eval_iters=2", "--device=cpu", "--compile=False", f"--out_dir={tmp_path}"]
    run(f"{ROOT}/docs/race.py", *args, env={})
    rows = read_table(tmp_path)
    assert [(row["run"], row["step"]) for row in rows] == [
        (f"{name}-1", step) for name in ("ours", "nanochat x 1", "nanoGPT x 1") for step in ("0", "10", "20")]
    assert len({row["tokens"] for row in rows}) == 3 and all(float(row["seconds"]) > 0 for row in rows[1:3])
    # all begin at ln(vocabulary), and learn
    losses = [float(row["val_loss"]) for row in rows]
    assert losses[3] == pytest.approx(losses[6]) == pytest.approx(5.95, abs=0.01) and losses[8] < losses[6]
    assert (tmp_path / "race.png").stat().st_size > 10_000
    # half a run is done again, a whole one is not
    lines = (tmp_path / "race.csv").read_text().splitlines(keepends=True)
    (tmp_path / "race.csv").write_text("".join(lines[:-1]))
    output = run(f"{ROOT}/docs/race.py", *args, env={})
    assert output.count("is in ") == 2 and [row["val_loss"] for row in read_table(tmp_path)] == [
        row["val_loss"] for row in rows]
