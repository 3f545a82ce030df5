"""
Draws out_dir/loss.png from log.jsonl at each evaluation: losses, learning rate, gradient norm, tokens/s over tokens.
"""
import json
import os
from pathlib import Path

import runtime


def read_log(path):
    """
    A log.jsonl as {key: {tokens: value}}. What was logged after the checkpoint that a resumed run started from is
    dropped, and half lines of runs that were killed.
    """
    curves = {}
    for line in open(path, encoding="utf-8", errors="replace"):
        try:
            entry = json.loads(line)
            tokens = int(entry["tokens"])
        except (ValueError, KeyError, TypeError):
            continue
        if entry.get("event") == "resume":
            curves = {key: {at: value for at, value in curve.items() if at <= tokens} for key, curve in curves.items()}
        for key, value in entry.items():
            if isinstance(value, (int, float)):
                curves.setdefault(key, {})[tokens] = value
    return curves


def draw(path, picture):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, MaxNLocator
    curves = read_log(path)
    figure, axes = plt.subplot_mosaic([["loss", "lr"], ["loss", "grad_norm"], ["loss", "tok_per_sec"]], figsize=(11, 5),
                                      dpi=110, width_ratios=[2.2, 1], layout="constrained")
    for key, curve in curves.items():
        points = list(zip(*sorted(curve.items())))
        if key == "train_loss":
            axes["loss"].plot(*points, linewidth=0.8, alpha=0.5, label="train loss")
        elif key == "val_loss":
            axes["loss"].plot(*points, color="C0", linewidth=1.6, marker="o", markersize=3,
                              label=f"val loss, last {points[1][-1]:.3f}")
        elif key in axes:
            axes[key].plot(*points, linewidth=0.9)
    labels = {"loss": "loss (nats per token)", "lr": "learning rate", "grad_norm": "gradient norm",
              "tok_per_sec": "tokens/s"}
    for key, label in labels.items():
        axes[key].set_ylabel(label)
        axes[key].grid(alpha=0.3)
        axes[key].xaxis.set(major_formatter=EngFormatter(), major_locator=MaxNLocator(7 if key == "loss" else 4))
    axes["tok_per_sec"].yaxis.set_major_formatter(EngFormatter())
    axes["tok_per_sec"].set_ylim(bottom=0)
    for key in ("loss", "tok_per_sec"):
        axes[key].set_xlabel("tokens")
    axes["loss"].legend()
    figure.savefig(f"{picture}.tmp", format="png")  # renamed, so a viewer that refreshes never sees half of it
    plt.close(figure)
    os.replace(f"{picture}.tmp", picture)


def plot_hook(out_dir):
    warned = False

    def hook(iter_num, done):
        nonlocal warned
        if runtime.rank() == 0 and not warned:
            try:
                draw(Path(out_dir) / "log.jsonl", f"{out_dir}/loss.png")
            except ImportError as error:
                warned = True
                print(f"{out_dir}/loss.png is not drawn: {error} (pip install matplotlib)")
            except OSError as error:  # a full disk is no reason to stop
                print(f"{out_dir}/loss.png is not drawn: {error}")
        return {}
    return hook
