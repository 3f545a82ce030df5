"""
Training steps beside what you might use instead: transformers' Trainer and TRL's SFTTrainer, on the same data, from the
same weights, in turns. Prints the median tokens per second and the peak memory of each. Run by hand, with the peers in
their own environment:

    python3 -m venv peers && peers/bin/pip install -r tests/requirements-peers.txt
    python tests/bench_peers.py --python=peers/bin/python --checkpoint=out --data_dir=data/fineweb-edu
    python tests/bench_peers.py --python=peers/bin/python --checkpoint=out-chat --data=my-chats.jsonl

The checkpoint is exported, and each contestant starts from the export. With --data both pack conversations and train
on the answers; a token counts if it is not padding. Peers run in bfloat16, as ours do where --dtype=auto picks it.
"""
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench_chat import run_loop  # noqa: E402
from configurator import Positive, configure, fail  # noqa: E402


def run_ours(model, out_dir, compiled):
    """Runs a training loop. Returns [(tokens, seconds) of each step] and its peak memory in MiB."""
    script, flags = ("chat_sft.py", [f"--data={data}", f"--chat_dir={out_dir}/rows"]) if data else (
        "train_gpt2.py", [f"--data_dir={data_dir}"])
    log, _ = run_loop(script, [
        *flags, f"--init_from={model}", f"--max_iters={steps}", f"--batch_size={batch_size}",
        f"--max_seq_len={max_seq_len}", f"--compile={compiled}", "--overwrite=True", "--gradient_accumulation_steps=1",
        "--warmup_iters=0", "--learning_rate=1e-4", "--min_lr=0", "--lr_schedule=cosine", "--eval_iters=1"], out_dir)
    return [(line["tok_per_sec"] * line["ms"] / 1000, line["ms"] / 1000) for line in log], log[-1]["peak_mem_mb"]


def run_peer(model, out_dir, compiled):
    """As run_ours, in the peers' environment."""
    command = [python, __file__, f"--peer={model}", f"--compiled={compiled}",
               *(f"--{name}={globals()[name]}" for name in config if name not in ("peer", "compiled"))]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return json.loads(lines[-1])


def train_peer():
    """Trains the model in the folder `peer` with SFTTrainer or Trainer and prints what run_ours returns."""
    import numpy as np
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
    tokens, ends = [], []
    common = dict(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=batch_size, max_steps=steps, bf16=True,
                  use_cpu=not torch.cuda.is_available(), torch_compile=compiled, gradient_checkpointing=False,
                  learning_rate=1e-4, lr_scheduler_type="cosine", weight_decay=0.1,
                  save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=steps)

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ends.append(time.perf_counter())

    def count(collate):
        def collate_and_count(rows):
            batch = collate(rows)
            texts = (batch["position_ids"] == 0).sum() if "position_ids" in batch else 0  # their last has no target
            tokens.append(int((batch["input_ids"].numel() if "attention_mask" not in batch else
                               batch["attention_mask"].sum()) - texts))
            return batch
        return collate_and_count

    if data:
        from trl import SFTConfig, SFTTrainer
        conversations = Dataset.from_list([json.loads(line) for line in open(data)]).select_columns("messages")
        trainer = SFTTrainer(peer, SFTConfig(**common, packing=True, assistant_only_loss=True, max_length=max_seq_len),
                             train_dataset=conversations, processing_class=AutoTokenizer.from_pretrained(peer),
                             callbacks=[Clock()])
    else:
        from shards import read_shard
        shard = read_shard(sorted(Path(data_dir).glob("train_*.bin"))[0])
        rows = [{"input_ids": row, "labels": row} for row in
                shard[:steps * batch_size * max_seq_len].reshape(-1, max_seq_len).astype(np.int64)]
        trainer = Trainer(AutoModelForCausalLM.from_pretrained(peer, dtype=torch.float32), TrainingArguments(**common),
                          train_dataset=rows, callbacks=[Clock()])
    trainer.data_collator = count(trainer.data_collator)
    start = time.perf_counter()
    trainer.train()
    memory = (torch.cuda.max_memory_allocated() / 2 ** 20 if torch.cuda.is_available() else
              resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 10)
    print(json.dumps([list(zip(tokens, (b - a for a, b in zip([start, *ends], ends)))), memory]))


if __name__ == "__main__":
    python: str = sys.executable  # with the packages of tests/requirements-peers.txt
    checkpoint: str = "out"
    data: str | None = None  # conversations: tune with chat_sft.py and SFTTrainer
    data_dir: str | None = None  # shards: pretrain with train_gpt2.py and Trainer
    steps: Positive = 12  # the first third is not timed
    rounds: Positive = 3
    batch_size: Positive = 4
    max_seq_len: Positive = 512
    compiled: bool = True
    peer: str | None = None  # used by this script itself
    config, _ = configure(globals())
    if peer:
        train_peer()
        raise SystemExit
    if (data is None) == (data_dir is None):
        fail(f"--data={data} --data_dir={data_dir}: give one of them")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        subprocess.run([sys.executable, ROOT / "export_hf.py", f"--checkpoint={checkpoint}", f"--out_dir={model}"],
                       check=True, stdout=sys.stderr)
        for _ in range(rounds):
            for name, run in (("here", run_ours), ("peer", run_peer)):
                for compile_it in (False, True) if compiled else (False,):
                    steps_run, memory = run(model, f"{folder}/run", compile_it)
                    timed = steps_run[steps // 3:]
                    speed = sum(n for n, _ in timed) / sum(seconds for _, seconds in timed)
                    results.setdefault((name, compile_it), []).append((speed, memory))
    for (name, compile_it), values in results.items():
        speed, memory = map(statistics.median, zip(*values))
        print(f"{name}, {'compiled' if compile_it else 'uncompiled':<10} {speed:8,.0f} tokens/s {memory:8,.0f} MiB")
