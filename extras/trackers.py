"""Weights & Biases (--wandb_log=True) and TensorBoard (--tensorboard=True). Neither can stop a run."""
import os
import re
import uuid
from pathlib import Path

from configurator import format_error


class Trackers:
    """
    Called with each line of the log, a dict with iter, on rank 0, and passes it on unless it is an event; the first
    call starts both. A checkpoint has the id, project and name of the run at Weights & Biases, which a resumed run
    continues. The project is wandb_project, else $WANDB_PROJECT, else forkgpt; the run is named $WANDB_NAME, else
    after out_dir.
    """

    def __init__(self, config):
        self.config, self.started, self.services = config, False, []
        project = config.get("wandb_project") or os.environ.get("WANDB_PROJECT", "forkgpt")
        self.wandb_run = {"id": uuid.uuid4().hex[:8], "project": project,
                          "name": os.environ.get("WANDB_NAME", Path(config["out_dir"]).resolve().name)}

    def state_dict(self):
        return self.wandb_run

    def load_state_dict(self, state):
        self.wandb_run = state

    def __call__(self, values):
        if not self.started:
            self.start(values["iter"])
        if "event" in values:
            return
        values = {re.sub("^(train|val)_", r"\1/", key): value for key, value in values.items()}
        for service in list(self.services):
            try:
                service(values)
            except Exception as error:
                print(f"WARNING: a tracker failed and is off from here on: {format_error(error)}")
                self.services.remove(service)

    def start(self, iter_num):
        self.started, out_dir = True, Path(self.config["out_dir"])
        if self.config.get("wandb_log"):
            try:
                import wandb
                run = wandb.init(**self.wandb_run, resume="allow", dir=out_dir, config=self.config,
                                 settings=wandb.Settings(init_timeout=60))
                run.define_metric("*", step_metric="iter")  # log's step= would drop what follows a rollback
                self.services.append(run.log)
            except Exception as error:  # not installed, no account, no network, ...
                print(f"WARNING: no Weights & Biases ({format_error(error)}); pip install wandb; WANDB_MODE=offline "
                      f"keeps its files here")
        if self.config.get("tensorboard"):
            try:
                from torch.utils.tensorboard import SummaryWriter
                # hide what a run that was killed had logged after the checkpoint from which it is resumed
                writer = SummaryWriter(out_dir / "tensorboard", purge_step=iter_num + 1 if iter_num else 0)
            except Exception as error:
                print(f"WARNING: no TensorBoard ({format_error(error)}): pip install tensorboard")
                return

            def write(values):
                for key, value in values.items():
                    if isinstance(value, (int, float)) and key != "iter":
                        writer.add_scalar(key, value, values["iter"])
                writer.flush()

            self.services.append(write)
