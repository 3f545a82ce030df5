"""
Trains a list of settings over several seeds and prints a table: the mean of each metric and its standard deviation.

    python extras/compare.py --runs='--muon_lr=0.02;--muon_lr=0.04' --seeds=3 --args=config/quickstart.py
    python extras/compare.py --runs=';--lora_rank=16' --script=chat_sft.py --args='--init_from=auto:out-chat'

Each run has a folder in out_dir, named after its settings; a finished run has a result.json there. After an
interruption, the same command resumes the unfinished run and repeats none of the finished ones, unless the code has
changed; if the data or a model has, give another out_dir. Runs start with --init_from=auto, so that they can be
resumed; give a model as --init_from=auto:PATH.
"""
import json
import math
import re
import shlex
import signal
import statistics
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from configurator import Positive, configure, fail, one_line_errors, read_config_file  # noqa: E402

runs: str = ""  # the flags of each, separated by semicolons
args: str = ""  # config files and flags of all of them
seeds: Positive = 3  # of each: 1, 2, ...
script: str = "train_gpt2.py"  # or chat_sft.py, or your copy of one
out_dir: str = "out-compare"

METRICS = "train_loss", "val_loss", "seconds", "tok_per_sec", "peak_mem_mb"


def summary(results):
    """The mean of each metric over some results, and its standard deviation, as text."""
    parts = []
    for metric in METRICS:
        if metric in results[0]:
            values = [result[metric] for result in results]
            parts.append(f"{metric} {statistics.mean(values):.5g}")
            if len(values) > 1 and all(map(math.isfinite, values)):
                parts[-1] += f" +/- {statistics.stdev(values):.2g}"
    return ", ".join(parts)


def train(flags, seed):
    """Returns one run's result: its result.json, or after training it the last value of each metric in its log."""
    with one_line_errors(f"--args={args} --runs={flags}", errors=ValueError):  # a quotation that does not end
        words = shlex.split(f"{args} {flags} --seed={seed}")
    config = {}
    for word in words:
        if word.endswith(".py"):
            config |= read_config_file(word)
    init_from = config.get("init_from", "scratch")
    if not init_from.startswith("auto"):
        words.insert(0, "--init_from=auto" + (f":{init_from}" if init_from != "scratch" else ""))
    code = sorted({ROOT / script, *ROOT.glob("*.py"), *ROOT.glob("extras/*.py")})
    recipe = [words, config, [path.read_text(encoding="utf-8") for path in code]]
    # with other --args, or if the code has changed, a run gets another folder
    name = f"{flags[:150]}_seed={seed}_{zlib.crc32(json.dumps(recipe, default=str).encode()):08x}"
    folder = Path(out_dir, re.sub(r"[^\w.=-]", "_", name))
    path, result, evaluated = folder / "result.json", {}, None
    if path.exists():
        with one_line_errors(path, "remove it"):
            result = json.loads(path.read_text())
    else:
        command = [sys.executable, ROOT / script, *words, f"--out_dir={folder}"]
        if subprocess.run(command, stdout=sys.stderr).returncode not in (0, 130):  # 130: Ctrl-C
            fail(f"--runs: {script} {shlex.join(words)} failed, see above")
        for line in (folder / "log.jsonl").open():
            with suppress(ValueError):  # half a line, of a run that was killed
                result |= json.loads(line)
                if '"val_loss"' in line:
                    evaluated = result["iter"]
        if evaluated != result["iter"]:  # a run ends with an evaluation
            fail(f"{folder}: stopped at step {result['iter']}; the same command resumes it")
        path.write_text(json.dumps(result, indent=1))
    print(f"{flags} --seed={seed}: {summary([result])}", flush=True)
    return result


if __name__ == "__main__":
    configure(globals())
    if not runs and not args or re.search(r"--(seed|out_dir)\b", runs + args):
        fail("--runs: expected the flags of each run, separated by semicolons; seeds and folders are --seeds and "
             "--out_dir of this script")
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the current run, which saves and exits
    table = ""
    for flags in runs.split(";"):
        results = [train(flags.strip(), seed) for seed in range(1, seeds + 1)]
        table += f"{flags.strip() or '(no flags)'}: {summary(results)}\n"
    print(f"\n{script} {args}, mean and standard deviation, --seeds={seeds}\n{table}")
