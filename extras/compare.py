"""
Trains a list of settings over several seeds and prints a table: the mean of each metric and its standard deviation.

    python extras/compare.py --runs='--optimizer=adamw;--optimizer=muon' --seeds=3 --args=config/quickstart.py
    python extras/compare.py --runs=';--lora_rank=16' --script=chat_sft.py --args='--init_from=auto:out/ckpt.pt'

Started again after an interruption, it resumes: a run that has ended is not repeated. Each run has a folder in out_dir;
compare.json holds the results.
"""
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from configurator import Positive, configure, fail, one_line_errors  # noqa: E402

runs: str = ""  # the flags of each, separated by semicolons
args: str = ""  # config files and flags of all of them
seeds: Positive = 3  # of each: 1, 2, ...
script: str = "train_gpt2.py"  # or chat_sft.py
metrics: str = "val_loss,seconds,tok_per_sec,peak_mem_mb"  # their last values in log.jsonl
out_dir: str = "out-compare"


def train(flags, seed, folder):
    """Returns the metrics of one run, which is resumed if it was interrupted."""
    command = [sys.executable, ROOT / script, "--init_from=auto", *args.split(), *flags.split(), f"--seed={seed}",
               f"--out_dir={folder}"]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        fail(f"--runs={flags}: seed {seed} failed, see above")
    values = {}
    for line in (folder / "log.jsonl").open():
        values |= json.loads(line)
    with one_line_errors(f"--metrics={metrics}", f"the log has {', '.join(values)}"):
        return {name: values[name] for name in metrics.split(",")}


if __name__ == "__main__":
    configure(globals())
    path, command = Path(out_dir, "compare.json"), f"{script} {args}"
    results = {"command": command, "metrics": metrics, "runs": {}}
    with one_line_errors(f"--out_dir={out_dir}", "give another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            before, results = results, json.loads(path.read_text())
            if {**results, "runs": {}} != before:
                raise ValueError(f"holds runs of {results['command']} with --metrics={results['metrics']}")
    table = f"{command}, mean and standard deviation over {seeds} seeds\n"
    for flags in map(str.strip, runs.split(";")):
        measured = []
        for seed in range(1, seeds + 1):
            name = f"{flags} --seed={seed}".strip()
            if name not in results["runs"]:
                results["runs"][name] = train(flags, seed, Path(out_dir, re.sub(r"\W+", "_", name)))
                path.write_text(json.dumps(results, indent=1))
            measured.append(results["runs"][name])
            print(f"{name}:", *(f"{metric} {value:.6g}" for metric, value in measured[-1].items()), flush=True)
        columns = {metric: [run[metric] for run in measured] for metric in measured[0]}
        table += f"{flags or 'as they are':40} " + "  ".join(
            f"{metric} {statistics.mean(values):.6g} +/- {statistics.stdev(values) if seeds > 1 else 0:.2g}"
            for metric, values in columns.items()) + "\n"
    print(f"\n{table}")
