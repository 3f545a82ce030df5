"""
Trains a list of settings over several seeds and prints a table: the mean of each metric and its standard deviation.

    python extras/compare.py --runs='--optimizer=adamw;--optimizer=muon' --seeds=3 --args=config/quickstart.py
    python extras/compare.py --runs=';--lora_rank=16' --script=chat_sft.py --args='--init_from=auto:out/ckpt.pt'

Each run has a folder in out_dir, and when it has ended a result.json in it. Started again after an interruption, this
resumes the run that was under way and does not repeat the others. (So a model to start from is auto:PATH.)
"""
import json
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from configurator import Positive, configure, fail  # noqa: E402

runs: str = ""  # the flags of each, separated by semicolons
args: str = ""  # config files and flags of all of them
seeds: Positive = 3  # of each: 1, 2, ...
script: str = "train_gpt2.py"  # or chat_sft.py
out_dir: str = "out-compare"

METRICS = "train_loss", "val_loss", "seconds", "tok_per_sec", "peak_mem_mb"


def summary(results):
    """The mean of each metric over some results, and its standard deviation, as text."""
    columns = {metric: [result[metric] for result in results] for metric in METRICS}
    return ", ".join(f"{metric} {statistics.mean(values):.5g}"
                     + (f" +/- {statistics.stdev(values):.2g}" if len(values) > 1 else "")
                     for metric, values in columns.items())


def train(flags):
    """The result of one run, from its result.json, else by training: the last value of each metric in its log."""
    folder = Path(out_dir, re.sub(r"\W+", "_", flags))
    command, path = f"{script} --init_from=auto {args} {flags} --out_dir={folder}", folder / "result.json"
    if not path.exists():
        if subprocess.run([sys.executable, ROOT / script, *command.split()[1:]], stdout=sys.stderr).returncode:
            fail(f"--runs: {command} failed, see above")
        result, evaluated = {"command": command}, None
        for entry in map(json.loads, (folder / "log.jsonl").open()):
            result |= entry
            evaluated = entry["iter"] if "val_loss" in entry else evaluated
        if evaluated != result["iter"]:  # a run ends with an evaluation
            fail(f"{folder}: stopped at step {result['iter']}; the same command resumes it")
        path.write_text(json.dumps(result, indent=1))
    result = json.loads(path.read_text())
    if result["command"] != command:
        fail(f"--out_dir={out_dir}: holds the result of {result['command']}; give another folder")
    print(f"{flags}: {summary([result])}", flush=True)
    return result


if __name__ == "__main__":
    configure(globals())
    if not runs and not args:
        fail("--runs: expected the flags of each run, separated by semicolons")
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the run under way, which saves and ends
    table = ""
    for flags in runs.split(";"):
        results = [train(f"{flags} --seed={seed}".strip()) for seed in range(1, seeds + 1)]
        table += f"{flags.strip() or '(no flags)'}: {summary(results)}\n"
    print(f"\n{script} {args}, mean and standard deviation, --seeds={seeds}\n{table}")
