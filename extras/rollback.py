"""
Rolls a run back to its last checkpoint when the loss or the gradient norm spikes, and continues with fresh data
(--spike_loss=3, --spike_norm=100).
"""
from checkpoint import load_checkpoint
from configurator import fail
from distributed import check_ranks_agree, get_rank, print0

MAX_ROLLBACKS = 5  # exit at this many spikes in a row without getting past the step that spiked


class SpikeGuard:
    """
    Finds spikes and rolls the run back. Its state, the entry "health" of a checkpoint, holds moving averages, the
    number of rollbacks and the step of the last spike.
    """

    def __init__(self, config, optimizer):
        self.config, self.optimizer, self.lr_factor = config, optimizer, 1.0
        self.stats = {"loss": 0.0, "norm": 0.0, "steps": 0, "faults": 0, "fault_at": -1, "calm_until": 0,
                      "rollbacks": 0}

    def is_spike(self, iter_num, loss, grad_norm):
        """
        Whether the step should be taken back: the loss (nats per target) or the gradient norm is over spike_loss or
        spike_norm times its average over about 100 steps, once that has 50 steps. If it is not, updates the averages.
        Both must be finite; the loop skips steps that are not.
        """
        stats, values = self.stats, {"loss": loss, "norm": grad_norm}
        for name, value in values.items():
            limit = self.config.get(f"spike_{name}")
            if limit and stats["steps"] >= 50 and value > limit * stats[name]:
                self.spike = (f"its {name}, {value:.4g}, is a spike: over {limit:g} times its average, "
                              f"{stats[name]:.4g}")
                return True
        stats["steps"] += 1
        for name, value in values.items():
            stats[name] += (value - stats[name]) / min(stats["steps"], 100)
        if iter_num > stats["fault_at"]:  # past the last spike
            stats["faults"] = 0
        return False

    def roll_back(self, iter_num, checkpointer, log):
        """
        Restores the last checkpoint and its averages, but not the position in the data. Returns its iter_num. Fails at
        MAX_ROLLBACKS spikes in a row.
        """
        self.stats["faults"] += 1
        self.stats["fault_at"] = max(iter_num, self.stats["fault_at"])
        if self.stats["faults"] >= MAX_ROLLBACKS:
            fail(f"step {iter_num}: {self.spike}, number {MAX_ROLLBACKS} in a row; resume from the last checkpoint "
                 f"with a lower --learning_rate")
        if get_rank() == 0 and checkpointer.saved_iter is None:  # what is there is another run's
            fail(f"step {iter_num}: {self.spike}, and nothing of this run could be saved to go back to", alone=True)
        checkpoint = load_checkpoint(checkpointer.out_dir, merge=False)
        restored = checkpointer.restore(checkpoint, skip=("rows_seen", "health"))
        averages = checkpoint.get("health", {})  # restored, too: the loss of the old weights may be far higher
        self.stats |= {name: averages.get(name, 0) for name in ("loss", "norm", "steps")}
        log.forget_losses()
        check_ranks_agree({"step": restored})  # waits until all ranks have read it: below rank 0 replaces it
        print0(f"WARNING: step {iter_num}: {self.spike}: rolled back to step {restored}; the data moves on")
        self.stats["calm_until"] = restored + 100
        self.stats["rollbacks"] += 1
        checkpointer.save(restored)  # with the data moved on and the spike counted
        log(restored, event="rollback")
        return restored

    def scale_lr(self, iter_num):
        """A gradient hook: rollback_lr times the learning rate for 100 steps after a rollback."""
        self.lr_factor = self.config["rollback_lr"] if iter_num < self.stats["calm_until"] else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] *= self.lr_factor

    def metrics(self):
        return {"rollbacks": self.stats["rollbacks"], "lr_factor": self.lr_factor}

    def state_dict(self):
        return self.stats

    def load_state_dict(self, stats):
        self.stats |= stats
