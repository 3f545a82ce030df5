"""
Draws out_dir/loss.png from log.jsonl at each evaluation: losses, learning rate, gradient norm, tokens/s vs tokens.
"""
import json
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from distributed import get_rank

LABELS = {"train_loss": "train loss (nats per token)", "val_loss": "val loss", "lr": "learning rate",
          "grad_norm": "gradient norm", "tok_per_sec": "tokens/s"}


def read_log(path):
    """
    The entries of a log.jsonl, without half lines of runs that were killed, and without what was logged after the
    checkpoint from which a run was resumed.
    """
    entries = []
    for line in open(path, encoding="utf-8", errors="replace"):
        try:
            entry = json.loads(line)
            tokens = int(entry["tokens"])
        except (ValueError, KeyError, TypeError):
            continue
        if entry.get("event") == "resume":
            entries = [earlier for earlier in entries if earlier["tokens"] <= tokens]
        entries.append(entry)
    return entries


def draw(out_dir):
    entries = read_log(out_dir / "log.jsonl")
    figure = Figure(figsize=(11, 5), dpi=110, layout="constrained")
    axes = figure.subplot_mosaic([["loss", "lr"], ["loss", "grad_norm"], ["loss", "tok_per_sec"]], width_ratios=[2, 1])
    for key, label in LABELS.items():
        ax = axes.get(key, axes["loss"])
        found = [entry for entry in entries if key in entry]
        ax.plot([entry["tokens"] for entry in found], [entry[key] for entry in found], ".-", linewidth=0.9,
                markersize=3, label=label)
        ax.xaxis.set_major_formatter(EngFormatter())
        ax.grid(alpha=0.3)
        ax.legend()
    figure.supxlabel("tokens")
    settings = out_dir / "config.json"
    if settings.exists():
        machine = json.loads(settings.read_text(encoding="utf-8"))["machine"]
        figure.text(0.99, 0.01, "{device}, torch {torch}, commit {commit}".format(**machine), ha="right", fontsize=7)
    figure.savefig(out_dir / "loss.png")


def plot_hook(out_dir):
    def hook(iter_num, done):
        if get_rank() == 0:
            try:
                draw(Path(out_dir))
            except Exception as error:  # a picture is no reason to stop
                print(f"{out_dir}/loss.png is not drawn: {error}")
        return {}
    return hook
