"""
Rolls a run back to its last checkpoint when the loss or the gradient norm spikes, and continues with fresh data.

Also ends a run after max_faults consecutive anomalies, skipped steps among them.
"""
import math

import runtime
from configurator import Fraction, Positive, fail

rollback_lr: Fraction = 1.0  # factor on the learning rate for the 100 steps after a rollback
max_faults: Positive = 5  # abort after this many consecutive anomalies


class SpikeGuard:
    """Its state is the entry "health" of a checkpoint: moving averages, and how long ago the last anomaly was."""

    def __init__(self, config, optimizer, scaler):
        self.config, self.optimizer, self.scaler, self.rollbacks = config, optimizer, scaler, 0
        self.stats = {"loss": 0.0, "norm": 0.0, "steps": 0, "faults": 0, "fault_at": -1, "calm_until": 0}

    def is_spike(self, iter_num, loss, grad_norm):
        """
        Whether the step is to be taken back. A loss (nats per target) or gradient norm is an anomaly if it is a spike,
        from the 50th step on over spike_loss or spike_norm times its average over about 100 steps, or if it is not
        finite, which is the loop's to skip. An overflow under float16 is none: the loss scale finds its range that
        way. Anomalies are counted until a step later than the last one succeeds: a run that rolls back and fails there
        again makes no progress.
        """
        stats, self.anomaly, spike = self.stats, None, False
        values = {"loss": loss, "norm": grad_norm}
        # float16 whose scale fell to 1 is no longer looking for its range; other types have a scale of 1
        if not math.isfinite(grad_norm) and self.scaler.get_scale() > 1:
            del values["norm"]
        for name, value in values.items():
            limit = self.config[f"spike_{name}"]
            if not math.isfinite(value):
                self.anomaly = f"its {name} is not finite"
            elif limit and stats["steps"] >= 50 and value > limit * stats[name]:
                spike = True
                self.anomaly = (f"its {name}, {value:.4g}, is a spike: over {limit:g} times its average, "
                                f"{stats[name]:.4g}")
        if self.anomaly:
            stats["faults"] += 1
            stats["fault_at"] = max(iter_num, stats["fault_at"])
            if stats["faults"] >= max_faults:
                fail(f"step {iter_num}: {self.anomaly}, anomaly number {stats['faults']} in a row: stopped"
                     f"{runtime.interrupt_message or ', nothing is saved'}; try a lower --learning_rate")
            return spike
        stats["steps"] += 1
        for name, value in values.items():
            stats[name] += (value - stats[name]) / min(stats["steps"], 100)
        if iter_num > stats["fault_at"]:
            stats["faults"] = 0
        return False

    def recover(self, iter_num, checkpointer, log):
        """
        Restores the last checkpoint, or skips the step if there is none. Returns the next iter_num. Data moves on.
        """
        if checkpointer.on_disk[0] == 0:  # nothing is saved yet, as every rank knows
            log.skipped += 1
            runtime.print0(f"WARNING: step {iter_num} is skipped, {self.anomaly}; {log.skipped} skipped so far")
            return iter_num + 1
        restored = checkpointer.restore(skip=("rows_seen", "health"))
        runtime.print0(f"WARNING: step {iter_num}: {self.anomaly}: rolled back to step {restored}; the data moves on")
        self.stats["calm_until"] = restored + 100
        self.rollbacks += 1
        checkpointer.save(restored, again=True)  # with the data moved on and the anomaly counted
        checkpointer.wait()
        log(restored, event="rollback")
        return restored

    def scale_lr(self, iter_num):
        """A gradient hook."""
        self.lr_factor = rollback_lr if iter_num < self.stats["calm_until"] else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] *= self.lr_factor

    def metrics(self):
        return {"rollbacks": self.rollbacks, "lr_factor": self.lr_factor}

    def state_dict(self):
        return dict(self.stats)

    def load_state_dict(self, stats):
        self.stats.update(stats)
