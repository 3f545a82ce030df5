"""
Compiled beside uncompiled chat tuning, as verdicts: the same loss, more tokens per second, no more memory, compiled
within a minute, one shape, no recompile. Run by hand, on a GPU in some minutes:

    python tests/bench_chat.py --flags='--init_from=out/ckpt.pt --data=my-chats.jsonl --max_seq_len=2048'
"""
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from configurator import Positive, configure  # noqa: E402


def run_loop(script, flags, folder):
    """Runs chat_sft.py or train_gpt2.py. Returns its log's lines of training, and the seconds that compiling took."""
    command = [sys.executable, ROOT / script, "--log_interval=1", "--sample_tokens=0", *flags, f"--out_dir={folder}"]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise SystemExit(1)
    lines = [json.loads(line) for line in (Path(folder) / "log.jsonl").open()]
    return [line for line in lines if "train_loss" in line], lines[0]["compile_seconds"]


if __name__ == "__main__":
    flags: str = ""  # of chat_sft.py
    steps: Positive = 100
    configure(globals())
    with tempfile.TemporaryDirectory() as folder:
        common = [*flags.split(), f"--max_iters={steps}", f"--chat_dir={folder}/rows"]
        plain, _ = run_loop("chat_sft.py", [*common, "--compile=False"], f"{folder}/plain")
        compiled, compile_seconds = run_loop("chat_sft.py", [*common, "--compile=True"], f"{folder}/compiled")
    speed, memory = ([statistics.median(line[key] for line in lines[1:]) for lines in (compiled, plain)]
                     for key in ("tok_per_sec", "peak_mem_mb"))
    loss = compiled[-1]["train_loss"] / plain[-1]["train_loss"]
    shapes = {tuple(line["shape"]) for line in compiled}
    for ok, text in ((0.95 <= loss <= 1.05, f"loss at step {steps}: {loss:.4f} times the uncompiled, 0.95 to 1.05"),
                     (speed[0] >= 1.3 * speed[1], f"tokens/s: {speed[0]:,.0f} against {speed[1]:,.0f}, expected 1.3"),
                     (memory[0] <= 1.1 * memory[1], f"MiB: {memory[0]:,.0f} against {memory[1]:,.0f}, expected 1.1"),
                     (compile_seconds <= 60, f"compiling: {compile_seconds:.0f} s, expected at most 60"),
                     (len(shapes) == 1, f"shapes: {shapes}, expected one"),
                     (compiled[-1]["recompiles"] == 0, f"recompiles: {compiled[-1]['recompiles']}, expected 0")):
        print(f"{'pass' if ok else 'FAIL'}  {text}")
