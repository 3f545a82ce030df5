"""A sharded model is the model: its losses, samples, scores and checkpoints."""
import json

import pytest
import torch

from configurator import extra_settings
from conftest import TINY, chats, check_same_run, fail_writes, load, patched, read_log, refused, run
from test_chat import SFT
from test_cuda import COMPILED, check_losses_of_a_cpu, needs_gpu
from test_train import LLAMA

ARGS = [*TINY, "--sample_tokens=0"]
SPAM = [["--optimizer=adamw_spam", "--spam_interval=10"]] if extra_settings("spam") else []


@pytest.mark.parametrize("extra", [[], ["--arch=llama", "--attention=mla", "--kv_lora_rank=8", "--recompute=True"],
                                   ["--compile=True", "--n_layer=1"], *SPAM],
                         ids=lambda extra: "_".join(flag.strip("-") for flag in extra) or "gpt2")
def test_a_sharded_model_is_the_model(shards, tmp_path, extra):
    """Two ranks against one that has all of it."""
    (tmp_path / "tasks" / "hellaswag").mkdir(parents=True)
    (tmp_path / "tasks" / "hellaswag" / "test.jsonl").write_text("".join(json.dumps(
        {"ind": i, "ctx": "the cat", "endings": ["sat", "ran", "on", f"{i}"], "label": str(i % 4)}) + "\n"
        for i in range(7)))
    args = [*TINY, *extra, f"--data_dir={shards}", "--eval_tasks=hellaswag", f"--task_dir={tmp_path}/tasks",
            "--eval_iters=3"]
    one = run("train_gpt2.py", *args, f"--out_dir={tmp_path}/whole")
    two = run("train_gpt2.py", *args, f"--out_dir={tmp_path}/sharded", "--fsdp=True", ranks=2)
    keys = "train_loss", "val_loss", "grad_norm", "hellaswag_acc", "recompiles"
    whole, sharded = (read_log(tmp_path / name, *keys) for name in ("whole", "sharded"))
    assert whole.keys() == sharded.keys()
    for key, value in whole.items():
        assert sharded[key] == pytest.approx(value, abs=1e-4), key
    a, b = load(tmp_path / "whole"), load(tmp_path / "sharded")
    assert a["model"].keys() == b["model"].keys() and a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys()
    assert all(torch.allclose(a["model"][name], b["model"][name], atol=1e-3) for name in a["model"])
    assert one.split("----- sample")[1].split("-----")[0] == two.split("----- sample")[1].split("-----")[0]
    if not extra:  # what was sharded is continued whole, and the reverse
        resume = ["--init_from=resume", "--max_iters=24"]
        run("train_gpt2.py", *resume, f"--out_dir={tmp_path}/sharded", "--fsdp=False")
        run("train_gpt2.py", *resume, f"--out_dir={tmp_path}/whole", "--fsdp=True", ranks=2)
        whole, sharded = (read_log(tmp_path / name, "train_loss", "val_loss") for name in ("whole", "sharded"))
        assert whole["train_loss", 24] == pytest.approx(sharded["train_loss", 24], abs=1e-3)


def test_three_ranks_interrupted_equal_three_uninterrupted(shards, tmp_path):
    args = [*ARGS, "--optimizer=muon", "--fsdp=True", f"--data_dir={shards}", "--gradient_accumulation_steps=3",
            "--max_iters=8", "--lr_decay_iters=8", "--eval_interval=4"]
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/whole", ranks=3)
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/parts", "--max_iters=4", ranks=3)
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/parts", "--max_iters=8", ranks=3)
    check_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("script", ["train_gpt2.py", "chat_sft.py"])
def test_a_last_save_that_fails_is_tried_again_by_all_ranks(shards, trained, tmp_path, script):
    args = [*ARGS, f"--data_dir={shards}"]
    if script == "chat_sft.py":
        args = [f"--init_from={trained}", f"--data={chats(tmp_path / 'chats.jsonl', 60)}", "--batch_size=1",
                f"--chat_dir={tmp_path}/rows", "--gradient_accumulation_steps=2", "--dtype=float32", "--device=cpu",
                "--compile=False", "--sample_tokens=0"]
    program = patched(tmp_path, script, fail_writes([3, 3]))
    output = run(program, *args, "--fsdp=True", f"--out_dir={tmp_path}/o", "--max_iters=3", ranks=2)
    assert output.count("trying again in 30 seconds") == 1 and load(tmp_path / "o")["iter_num"] == 3


def test_one_rank_and_float16_are_refused(shards, tmp_path):
    args = [*ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--fsdp=True"]
    assert "--fsdp=True: expected several ranks" in refused("train_gpt2.py", *args)
    assert "--fsdp=True: expected " in run("train_gpt2.py", *args, "--dtype=float16", ranks=2, code=2)


@pytest.mark.parametrize("extra", [[], ["--optimizer=muon"]], ids=["adamw", "muon"])
def test_a_sharded_model_is_tuned_like_a_whole_one(trained, tmp_path, extra):
    """Losses, the answer that is printed, a checkpoint that resumes unsharded. Muon rounds to bfloat16: 5e-3."""
    data = chats(tmp_path / "chats.jsonl")
    args = [*SFT, *extra, f"--init_from={trained}", f"--data={data}", f"--chat_dir={tmp_path}/rows"]
    outputs = [run("chat_sft.py", *args, f"--out_dir={tmp_path}/whole"),
               run("chat_sft.py", *args, f"--out_dir={tmp_path}/sharded", "--fsdp=True", ranks=2)]
    whole, sharded = (read_log(tmp_path / name, "train_loss", "val_loss", "recompiles")
                      for name in ("whole", "sharded"))
    assert whole.keys() == sharded.keys()
    for key, value in whole.items():
        assert sharded[key] == pytest.approx(value, abs=5e-3 if extra else 1e-4), key
    samples = [output.split("----- sample")[1].split("-----")[0] for output in outputs]
    assert samples[0] == samples[1]
    assert load(tmp_path / "whole")["model"].keys() == load(tmp_path / "sharded")["model"].keys()
    run("chat_sft.py", "--init_from=resume", f"--out_dir={tmp_path}/sharded", "--fsdp=False", "--max_iters=22",
        f"--chat_dir={tmp_path}/rows")


@pytest.mark.skipif(not extra_settings("distill"), reason="extras/distill.py is not here")
def test_a_sharded_teacher_is_the_teacher(shards, trained, tmp_path):
    """Of another width than its student, which is sharded too, or whole on each rank."""
    args = [*TINY, f"--data_dir={shards}", "--n_embd=16", f"--teacher={trained}", "--teacher_temperature=2",
            "--max_iters=6", "--lr_decay_iters=6", "--eval_interval=2", "--sample_tokens=0"]
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/whole")
    keys = "train_loss", "ce_loss", "kl_loss", "agreement", "temperature", "val_loss", "grad_norm"
    whole = read_log(tmp_path / "whole", *keys)
    for flag in ("--fsdp=True", "--shard_teacher=True"):
        run("train_gpt2.py", *args, f"--out_dir={tmp_path}/{flag}", flag, ranks=2)
        sharded = read_log(tmp_path / flag, *keys)
        assert whole.keys() == sharded.keys() and len(whole) == 6 * 6 + 4
        assert all(sharded[key] == pytest.approx(value, abs=1e-4) for key, value in whole.items())
    assert "--shard_teacher=True" in run("train_gpt2.py", *args, "--shard_teacher=True", f"--out_dir={tmp_path}/one",
                                         code=2)


@needs_gpu
@pytest.mark.parametrize("model, flags, tolerance", [
    ([], [], 2e-3), ([*LLAMA, "--optimizer=muon"], ["--dtype=bfloat16"], 3e-2)], ids=["gpt2", "muon_bfloat16"])
def test_a_rank_on_a_gpu_has_the_losses_of_a_cpu(shards, tmp_path, model, flags, tolerance):
    check_losses_of_a_cpu("train_gpt2.py", [*TINY, *model, f"--data_dir={shards}"],
                          [*COMPILED, "--fsdp=True", *flags], tolerance, tmp_path, nccl=True)
