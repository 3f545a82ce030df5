"""Weights & Biases (--wandb_log=True) and TensorBoard (--tensorboard=True). Neither can stop a run."""
from pathlib import Path

wandb_project: str = "train-gpt2"  # the run is named after out_dir


def start(config):
    """Returns functions that take a line of the log, a dict with iter."""
    trackers, out_dir = [], Path(config["out_dir"])
    if config["wandb_log"]:
        try:
            import wandb
            run = wandb.init(project=wandb_project, name=out_dir.resolve().name, dir=out_dir, config=config,
                             settings=wandb.Settings(init_timeout=60))
            trackers.append(guarded(lambda values: run.log(values, step=values["iter"])))
        except Exception as error:  # not installed, no account, no network, ...
            print(f"WARNING: no Weights & Biases ({type(error).__name__}: {' '.join(str(error).split())[:200]}); "
                  f"WANDB_MODE=offline keeps its files here")
    if config["tensorboard"]:
        try:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(out_dir / "tensorboard")
        except Exception as error:
            print(f"WARNING: no TensorBoard ({type(error).__name__}: {error}): pip install tensorboard")
        else:
            def write(values):
                for key, value in values.items():
                    if isinstance(value, (int, float)) and key != "iter":
                        writer.add_scalar(key, value, values["iter"])
                writer.flush()
            trackers.append(guarded(write))
    return trackers


def guarded(tracker):
    """A tracker that is left out after its first failure, with a warning."""
    def track(values):
        nonlocal tracker
        try:
            tracker(values)
        except Exception as error:
            print(f"WARNING: a tracker failed and is off from here on: {type(error).__name__}: {error}")
            tracker = lambda values: None
    return track
