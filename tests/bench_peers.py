"""
Training steps beside what you might use instead, on the same data, from the same weights, in turns: transformers'
Trainer and litgpt for pretraining, TRL's SFTTrainer for chat tuning. Prints the median tokens per second and the peak
memory of each. Run by hand, with the peers in their own environments (litgpt needs another version of a package):

    python3 -m venv peers && peers/bin/pip install -r tests/requirements-peers.txt
    python tests/bench_peers.py --peer=trl --python=peers/bin/python --checkpoint=out-chat --data=my-chats.jsonl
    python tests/bench_peers.py --peer=transformers --python=peers/bin/python --data_dir=data/fineweb-edu
    python3 -m venv litgpt && litgpt/bin/pip install torch==2.13.0 litgpt==0.5.13 filelock
    python tests/bench_peers.py --peer=litgpt --python=litgpt/bin/python --data_dir=data/fineweb-edu

In docs/benchmarks.md the checkpoints are those of train_gpt2.py --arch=llama --qk_norm=True --n_layer=6 --n_head=6
--n_embd=384 --max_seq_len=512 --warmup_iters=0 --max_iters=3, and of chat_sft.py from there with --max_iters=3.

With trl, --val_data=held-out.jsonl prints the loss on these conversations after each run, too, measured by chat_sft.py
for both: SFTTrainer's model goes back through its folder. And --losses=True compares losses instead of times: 20 steps
in float32, each on the 16 shortest conversations, not packed. --checkpoint may be a Hugging Face folder. Its chat
template must have generation marks, as ours has, or be one that TRL knows, as Llama 3's is. (In its version of Qwen3's,
TRL trains on the newline after each answer, too.) No conversation may be longer than a row: TRL cuts it off anywhere.

The checkpoint is exported, and each contestant starts from the export, except litgpt, which takes its sizes. With trl
both pack conversations and train on the answers; a token counts if it is not padding. Peers run in bfloat16, as ours do
where --dtype=auto picks it. Compiled, SFTTrainer pads its batches to one length: it would compile each length anew.
"""
import json
import math
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from configurator import NonNegative, NonNegativeFloat, Positive, configure, fail  # noqa: E402


def run_ours(model, out_dir, compiled):
    """Runs a training loop. Returns [(tokens, seconds) of each step] and its peak memory in MiB."""
    from bench_chat import run_loop  # not at the top: a peer's environment lacks torch's newer parts
    script, flags = ("chat_sft.py", [f"--data={data}", f"--chat_dir={out_dir}/rows", f"--lora_rank={lora_rank}"]) \
        if data else ("train_gpt2.py", [f"--data_dir={data_dir}"])
    log, _ = run_loop(script, [
        *flags, f"--init_from={model}", f"--max_iters={steps}", f"--batch_size={batch_size}",
        f"--max_seq_len={max_seq_len}", f"--compile={compiled}", "--overwrite=True", "--gradient_accumulation_steps=1",
        "--warmup_iters=0", f"--learning_rate={learning_rate}", "--min_lr=0", "--lr_schedule=cosine",
        "--eval_iters=1", "--weight_decay=0.1", "--beta2=0.999"], out_dir)
    return [(line["tok_per_sec"] * line["ms"] / 1000, line["ms"] / 1000) for line in log], log[-1]["peak_mem_mb"]


def run_peer(model, out_dir, compiled):
    """As run_ours, in the peer's environment."""
    command = [python, __file__, f"--model={model}", f"--compiled={compiled}",
               *(f"--{name}={globals()[name]}" for name in config if name not in ("model", "compiled"))]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return json.loads(lines[-1])


def rows_of_shard():
    """(steps * batch_size, max_seq_len + 1) int64: the first rows of data_dir."""
    import numpy as np
    from shards import read_shard
    shard = read_shard(sorted(Path(data_dir).glob("train_*.bin"))[0])
    n, T = steps * batch_size, max_seq_len
    return np.stack([shard[i * T:i * T + T + 1] for i in range(n)]).astype(np.int64)


def train_with_trainer():
    """Trains the model in the folder `model` with SFTTrainer or Trainer. Returns what run_ours returns, but memory."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
    tokens, ends = [], []
    common = dict(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=batch_size, max_steps=steps, bf16=True,
                  use_cpu=not torch.cuda.is_available(), torch_compile=compiled, gradient_checkpointing=False,
                  learning_rate=learning_rate, lr_scheduler_type="cosine", weight_decay=0.1,
                  save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=steps)

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ends.append(time.perf_counter())

    def count(collate):
        def collate_and_count(rows):
            batch = collate(rows)  # packed, a text's first token has position 0, as padding has
            tokens.append(int((batch["position_ids"] > 0).sum() if data else batch["labels"][:, 1:].numel()))
            return batch
        return collate_and_count

    if losses:
        common |= dict(bf16=False, logging_steps=1, adam_beta2=0.95, weight_decay=0.0, lr_scheduler_type="constant")
    if data:
        from peft import LoraConfig
        from trl import SFTConfig, SFTTrainer
        conversations = Dataset.from_list([json.loads(line) for line in open(data)]).select_columns("messages")
        trainer = SFTTrainer(
            model, SFTConfig(**common, packing=not losses, assistant_only_loss=True, max_length=max_seq_len,
                             pad_to_multiple_of=batch_size * max_seq_len if compiled else None),
            train_dataset=conversations, processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Clock()],
            peft_config=LoraConfig(r=lora_rank, lora_alpha=32, target_modules="all-linear") if lora_rank else None)
    else:
        rows = [{"input_ids": row, "labels": row} for row in rows_of_shard()[:, :-1]]
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        trainer = Trainer(loaded, TrainingArguments(**common), train_dataset=rows, callbacks=[Clock()])
    if losses:
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]
    trainer.data_collator = count(trainer.data_collator)
    start = time.perf_counter()
    trainer.train()
    if val_data:
        tuned = trainer.accelerator.unwrap_model(trainer.model)
        shutil.copytree(model, f"{model}-tuned", dirs_exist_ok=True)  # for the tokenizer
        (tuned.merge_and_unload() if lora_rank else tuned).save_pretrained(f"{model}-tuned")
    return list(zip(tokens, (b - a for a, b in zip([start, *ends], ends))))


def train_with_litgpt():
    """litgpt's model, loss and optimizer in the steps of its pretrain.py. Returns what train_with_trainer returns."""
    import lightning
    import torch
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy
    c = json.loads(Path(model, "config.json").read_text())
    fabric = lightning.Fabric(devices=1, precision="bf16-mixed")
    gpt = GPT(Config(name="forkgpt", block_size=max_seq_len, padded_vocab_size=c["vocab_size"],
                     n_layer=c["num_hidden_layers"], n_head=c["num_attention_heads"], n_embd=c["hidden_size"],
                     n_query_groups=c["num_key_value_heads"], rotary_percentage=1.0, parallel_residual=False,
                     bias=False, norm_class_name="RMSNorm", norm_qk=c["model_type"] == "qwen3",
                     mlp_class_name="LLaMAMLP", intermediate_size=c["intermediate_size"]))
    gpt = fabric.setup(torch.compile(gpt, disable=not compiled))
    optimizer = torch.optim.AdamW(gpt.parameters(), 1e-4, weight_decay=0.1, fused=fabric.device.type == "cuda")
    optimizer, measured = fabric.setup_optimizers(optimizer), []
    for batch in torch.from_numpy(rows_of_shard()).to(fabric.device).split(batch_size):
        start = time.perf_counter()
        loss = chunked_cross_entropy(gpt(batch[:, :-1].contiguous()), batch[:, 1:].contiguous())
        fabric.backward(loss)
        fabric.clip_gradients(gpt, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        measured.append((batch[:, 1:].numel(), time.perf_counter() - start))
    return measured


def compare_losses(model, folder):
    """Prints the losses of 20 steps here and of SFTTrainer, on conversations that make up one batch."""
    global data, batch_size, steps
    lines = sorted(open(data), key=len)[:16]
    data, batch_size, steps = f"{folder}/chats.jsonl", len(lines), 20
    Path(data).write_text("".join(lines))
    from bench_chat import run_loop
    log, _ = run_loop("chat_sft.py", [
        f"--init_from={model}", f"--data={data}", f"--val_data={data}", f"--chat_dir={folder}/rows", "--pack=False",
        f"--batch_size={batch_size}", "--gradient_accumulation_steps=1", f"--max_seq_len={max_seq_len}",
        f"--lora_rank={lora_rank}", "--max_iters=20", "--eval_iters=1", f"--learning_rate={learning_rate}",
        "--warmup_iters=0",
        "--lr_schedule=constant", "--dtype=float32", "--compile=False"], f"{folder}/run")
    theirs, _ = run_peer(model, folder, False)
    for line, loss in zip(log, theirs, strict=True):
        print(f"step {line['iter']:2}: {line['train_loss']:.6f} {loss:.6f} {line['train_loss'] - loss:+.1e}")


def held_out_loss(model, folder):
    """The mean loss of a model on the answers in val_data, in nats per token."""
    from bench_chat import run_loop
    run_loop("chat_sft.py", [f"--init_from={model}", f"--data={data}", f"--val_data={val_data}", "--max_iters=0",
                             f"--chat_dir={folder}/rows", f"--max_seq_len={max_seq_len}", "--eval_iters=1000",
                             "--compile=False", "--overwrite=True"], f"{folder}/held-out")
    return [json.loads(line) for line in open(f"{folder}/held-out/log.jsonl")][1]["val_loss"]


def peak_memory():
    """In MiB."""
    import torch
    return (torch.cuda.max_memory_allocated() / 2 ** 20 if torch.cuda.is_available() else
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 10)


if __name__ == "__main__":
    peer: Literal["transformers", "trl", "litgpt"] = "transformers"
    python: str = sys.executable  # with the peer's packages
    checkpoint: str = "out"
    data: str | None = None  # trl: conversations
    val_data: str | None = None  # trl: measure the loss on these conversations after each run
    data_dir: str | None = None  # transformers, litgpt: shards
    lora_rank: NonNegative = 0  # trl: tune adapters
    steps: Positive = 12  # the first third is not timed
    rounds: Positive = 3
    batch_size: Positive = 4
    max_seq_len: Positive = 512
    learning_rate: NonNegativeFloat = 1e-4  # falls to zero as a cosine
    compiled: bool = True  # besides uncompiled
    losses: bool = False  # trl: compare losses instead
    model: str | None = None  # used by this script itself
    config, _ = configure(globals())
    if model:
        train = train_with_litgpt if peer == "litgpt" else train_with_trainer
        print(json.dumps([train(), peak_memory()]))
        raise SystemExit
    if (data is None) == (peer == "trl") or (data_dir is None) == (peer != "trl"):
        fail(f"--data={data} --data_dir={data_dir}: give --data with --peer=trl, and --data_dir with the others")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        export = f"{folder}/model"
        subprocess.run([sys.executable, ROOT / "export_hf.py", f"--checkpoint={checkpoint}", f"--out_dir={export}"],
                       check=True, stdout=sys.stderr)
        if losses:
            compare_losses(export, folder)
            raise SystemExit
        for _ in range(rounds):
            for name, run in (("here", run_ours), (peer, run_peer)):
                for compile_it in (False, True) if compiled else (False,):
                    steps_run, memory = run(export, f"{folder}/run", compile_it)
                    timed = steps_run[steps // 3:]
                    speed = sum(n for n, _ in timed) / sum(seconds for _, seconds in timed)
                    tuned = f"{folder}/run/ckpt.pt" if name == "here" else f"{export}-tuned"
                    loss = held_out_loss(tuned, folder) if val_data else math.nan
                    results.setdefault((name, compile_it), []).append((speed, memory, loss))
    for (name, compile_it), values in results.items():
        speed, memory, loss = map(statistics.median, zip(*values))
        print(f"{name:12}, {'compiled' if compile_it else 'uncompiled':<10} {speed:8,.0f} tokens/s {memory:8,.0f} MiB"
              + (f", held-out loss {loss:.4f}" if val_data else ""))
