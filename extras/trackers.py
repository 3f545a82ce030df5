"""Weights & Biases (--wandb_log=True) and TensorBoard (--tensorboard=True). Neither can stop a run."""
import os
import re
import uuid
from pathlib import Path

wandb_project: str | None = None  # None: $WANDB_PROJECT, or train-gpt2; the run is named $WANDB_NAME, or after out_dir


class Trackers:
    """
    Starts both. A checkpoint has the id, project and name of the run at Weights & Biases, which a resumed run
    continues.
    """

    def __init__(self, config):
        self.config = config
        self.wandb_run = {"id": uuid.uuid4().hex[:8],
                          "project": wandb_project or os.environ.get("WANDB_PROJECT", "train-gpt2"),
                          "name": os.environ.get("WANDB_NAME", Path(config["out_dir"]).resolve().name)}

    def state_dict(self):
        return self.wandb_run

    def load_state_dict(self, state):
        self.wandb_run = state

    def start(self, iter_num):
        """Returns functions that take a line of the log, a dict with iter. iter_num: the steps taken so far."""
        trackers, out_dir = [], Path(self.config["out_dir"])
        if self.config["wandb_log"]:
            try:
                import wandb
                run = wandb.init(**self.wandb_run, resume="allow", dir=out_dir, config=self.config,
                                 settings=wandb.Settings(init_timeout=60))
                trackers.append(guarded(lambda values: run.log(values, step=values["iter"])))
            except Exception as error:  # not installed, no account, no network, ...
                print(f"WARNING: no Weights & Biases ({type(error).__name__}: {' '.join(str(error).split())[:200]}); "
                      f"pip install wandb; WANDB_MODE=offline keeps its files here")
        if self.config["tensorboard"]:
            try:
                from torch.utils.tensorboard import SummaryWriter
                # hides what a run that was killed had logged after the checkpoint that it resumes from
                writer = SummaryWriter(out_dir / "tensorboard", purge_step=iter_num + 1 if iter_num else 0)
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
    """
    A tracker that gets train_loss as train/loss, val_loss as val/loss, and is left out after its first failure, with a
    warning.
    """
    def track(values):
        nonlocal tracker
        try:
            tracker({re.sub("^(train|val)_", r"\1/", key): value for key, value in values.items()})
        except Exception as error:
            print(f"WARNING: a tracker failed and is off from here on: {type(error).__name__}: {error}")
            tracker = lambda values: None
    return track
