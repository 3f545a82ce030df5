"""How a run stops: signals ask the loop to stop after its step, and its last lines say what is saved."""
import os
import shlex
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from configurator import fail
from distributed import get_rank
from machine import peak_memory_mb


def resume_hint(out_dir):
    start = "torchrun ..." if "RANK" in os.environ else "python"
    out_dir = shlex.quote(Path(out_dir).as_posix())  # / works on Windows too, quotes may not
    return f"resume with {start} {shlex.quote(sys.argv[0])} --init_from=resume --out_dir={out_dir}"


def drop_failed_writes():
    """From here on, stdout and stderr drop what they cannot write: no full disk or closed pipe may stop a run."""
    def write_or_drop(write, data):
        try:
            return write(data)
        except OSError:
            return len(data)

    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed at the start
        buffer = getattr(stream, "buffer", stream)  # a notebook's stream has none
        raw = getattr(buffer, "raw", buffer)  # with python -u nothing is buffered
        raw.write = partial(write_or_drop, raw.write)


class StopSignal:
    """
    From its construction on, SIGTERM, SIGINT, SIGUSR1 (Slurm's, with --signal=USR1@60) and SIGHUP (a closed terminal)
    set `requested`, and the loop stops after its step. Schedulers and torchrun both forward them to every worker, so
    repeats within 5 seconds count as one; a later one exits at once.
    """

    def __init__(self, out_dir):
        self.out_dir, self.exit_code = out_dir, 0
        self.requested, self.requested_at = False, 0.0
        for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows lacks two
            if number and (name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN):  # nohup ignores it
                signal.signal(number, self.request)

    def request(self, number, frame):
        if not self.requested:
            self.requested, self.requested_at = True, time.monotonic()
            if number == signal.SIGINT and "RANK" not in os.environ:
                self.exit_code = 130  # the shell's for Ctrl-C: a command after && does not run
            if get_rank() == 0:
                text = (f"\n{signal.Signals(number).name}: stopping after this step; a second signal after 5 seconds "
                        f"exits at once\n")
                with suppress(OSError):  # the terminal may be gone
                    os.write(2, text.encode())  # not print, which may be what was interrupted
        elif time.monotonic() - self.requested_at > 5:
            raise KeyboardInterrupt(resume_hint(self.out_dir))


def finish(iter_num, done, checkpointer, log, stop, flags=""):
    """
    Prints the last lines of a run. flags: added to the sample.py command that they suggest. Exits with an error if the
    last step could not be saved. If a signal stopped the run, exits with its code, 130 for Ctrl-C, else 0.
    """
    out_dir, facts = checkpointer.out_dir, checkpointer.facts
    if dist.is_initialized():
        time.sleep(0.1)  # else gloo can hang: its thread needs the GIL to free the last tensor (torch 2.13)
        dist.destroy_process_group()
    if get_rank() > 0:
        return
    if checkpointer.saved_iter != iter_num:
        hint = resume_hint(out_dir) if checkpointer.saved_iter is not None else "nothing of this run is saved"
        fail(f"--out_dir={out_dir}: step {iter_num} could not be saved; {hint}")
    if not done:
        print(f"stopped after step {iter_num}, which is saved; {resume_hint(out_dir)}")
        raise SystemExit(stop.exit_code)
    print(f"done after {iter_num} steps: val loss {facts['val_loss']:.4f} (best {facts['best_val_loss']:.4f}); "
          f"{log.seconds:,.0f} s of training, {log.eval_seconds:,.0f} s of evaluating and saving; peak memory "
          f"{peak_memory_mb(log.loader.device):,.0f} MiB\n"
          f"checkpoint: {out_dir}/ckpt.pt, log: {out_dir}/log.jsonl; try it: python sample.py "
          f"--checkpoint={shlex.quote((out_dir / 'ckpt.pt').as_posix())}{flags}")
