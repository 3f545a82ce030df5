"""The chat loop against a plain one; resumed, on several ranks, compiled; what it refuses."""
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from chat_data import build_datasets
from conftest import (NEW_TEXT, SFT, check_close, check_compiled, check_resumed, conversations_of, extra_flags,
                      hellaswag, jsonl, load, new_gpt, read_log, refused, run, save_model, turns)
from model import GPT, GPTConfig
from tokenizer import get_tokenizer


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Flags for a task of 70 examples, more than the 64 that an evaluation during a run scores."""
    return hellaswag(tmp_path_factory.mktemp("tasks"), 70)


@pytest.fixture(scope="module")
def base(train, tasks, tmp_path_factory):
    """The out_dir of a base model."""
    out_dir = tmp_path_factory.mktemp("base") / "out"
    train(out_dir, *tasks, "--max_seq_len=64", "--sample_tokens=0")
    return out_dir


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations whose answer repeats a word of the question; some have far more to train on than others."""
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat"]
    talks = []
    for i in range(150):
        word = words[int(rng.integers(6))]
        talks.append(turns(f"say {word}", word) if i % 3 else turns(word, " ".join([word] * 8)))
    return jsonl(tmp_path_factory.mktemp("chats") / "chats.jsonl", talks)


@pytest.fixture(scope="module")
def start(base, chats, tmp_path_factory):
    """Flags of a run, the last of them the folder of its rows."""
    return [*SFT, f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path_factory.mktemp('rows')}"]


@pytest.fixture(scope="module")
def sft(start, tasks, tmp_path_factory):
    """The out_dir of a run, and its output."""
    out_dir = tmp_path_factory.mktemp("sft") / "out"
    return out_dir, run("chat_sft.py", *start, *tasks, "--epochs=9", "--save_interval=15", f"--out_dir={out_dir}")


@pytest.fixture(scope="module")
def rows(chats, tmp_path_factory):
    """The rows (n, 2, 64) that it trains on."""
    folder = tmp_path_factory.mktemp("rows")
    return build_datasets(str(folder), str(chats), None, get_tokenizer("bytes"), 64, True, 1337)[0].rows


# ---------------------------------------------------------------------------------------------------
# the loop

def test_a_run_learns_logs_and_leaves_a_chat_model(sft, base):
    out_dir, output = sft
    log = read_log(out_dir, "train_loss", "val_loss", "useful", "shape", "hellaswag_n")
    assert log["val_loss", 20] < log["val_loss", 10] < log["val_loss", 0]
    assert all(log["shape", i] == [2, 64] for i in range(1, 21))
    assert np.mean([log["useful", i] for i in range(1, 21)]) > 0.9
    assert output.count("<|user|>") == output.count("----- sample") == 3
    assert f"python sample.py --checkpoint={out_dir}/ckpt.pt --chat=True" in output
    assert "of the positions are not padding" in output
    assert "--max_iters=20 sets the length of the run, not --epochs=9.0" in output
    assert load(out_dir, "ckpt_prev.pt")["iter_num"] == 15  # saved without an evaluation
    checkpoint = load(out_dir)
    assert checkpoint["stage"] == "chat"
    assert checkpoint["model_args"]["max_seq_len"] == checkpoint["config"]["max_seq_len"] == 64
    assert "chat model" in run("sample.py", f"--checkpoint={out_dir}", "--max_new_tokens=3")
    for log in log, read_log(base, "hellaswag_n"):
        assert [log["hellaswag_n", i] for i in (0, 10, 20)] == [64, 64, 70]


def test_the_loss_curve_is_that_of_a_plain_loop_over_single_conversations(base, sft, rows):
    """The rows' order, the mask, the mean over a step's targets, clipping, schedule and AdamW, written out again."""
    gpt = GPT(GPTConfig(**load(base)["model_args"]))
    gpt.load_state_dict(load(base)["model"])
    optimizer = torch.optim.AdamW(gpt.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    order = np.concatenate([np.random.default_rng((1337, epoch)).permutation(len(rows)) for epoch in range(10)])
    log = read_log(sft[0], "train_loss", "grad_norm", "targets")
    for step in range(20):
        losses = []
        for idx, targets in conversations_of(rows[order[4 * step:4 * step + 4]])[0]:
            logits = gpt(torch.tensor([idx]))[0]
            losses += [F.cross_entropy(logits[i], torch.tensor(target))
                       for i, target in enumerate(targets) if target < NEW_TEXT]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * ((step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 18)))
        optimizer.step()
        optimizer.zero_grad()
        assert log["targets", step + 1] == len(losses)
        assert log["train_loss", step + 1] == pytest.approx(loss.item(), abs=2e-5)
        assert log["grad_norm", step + 1] == pytest.approx(norm.item(), rel=1e-3)


@pytest.mark.parametrize("ranks, flags", [(2, []), pytest.param(
    4, ["--batch_size=1", "--gradient_accumulation_steps=4", "--eval_iters=8"], marks=pytest.mark.slow)])
def test_ranks_with_unequal_targets_train_the_model_of_one(start, tasks, sft, rows, tmp_path, ranks, flags):
    run("chat_sft.py", *start, *tasks, *flags, f"--out_dir={tmp_path}", ranks=ranks)
    check_close(sft[0], tmp_path, "train_loss", "val_loss", "grad_norm", "targets", "hellaswag_acc",
                "hellaswag_acc_norm", "hellaswag_n", abs=1e-5)
    order = np.random.default_rng((1337, 0)).permutation(len(rows))
    per_rank = (rows[order[:len(order) // 4 * 4], 1] < NEW_TEXT).reshape(-1, 2, 2, 64).sum((2, 3))  # (steps, 2)
    assert (per_rank.max(1) > 1.3 * per_rank.min(1)).any()  # so a mean of the ranks' means would be another loss


@pytest.mark.slow
@pytest.mark.parametrize("extra, ranks, stops", [
    (["--pack=False", "--dropout=0.1", "--optimizer=muon", "--gradient_accumulation_steps=3"], 3, (5, 10, 15)),
    (extra_flags(prune=["--sparsity=0.7", "--prune_begin=2", "--prune_end=13"], rollback=["--spike_norm=1e9"],
                 spam=["--optimizer=adamw_spam", "--spam_interval=7"]), 1, (10, 20)),
], ids=["unpacked_dropout_muon_three_ranks", "extras"])
def test_interrupted_equals_uninterrupted(start, tmp_path, extra, ranks, stops):
    check_resumed("chat_sft.py", [*start, *extra], tmp_path, ranks, stops)
    if "--sparsity=0.7" in extra:
        assert read_log(tmp_path / "whole", "sparsity")["sparsity", 20] == pytest.approx(0.7, abs=1e-3)
    if "--spike_norm=1e9" in extra:  # its averages are of the numbers in the log
        for name, key in ("loss", "train_loss"), ("norm", "grad_norm"):
            values = [*read_log(tmp_path / "whole", key).values()]
            assert load(tmp_path / "whole")["health"][name] == pytest.approx(np.mean(values)) and len(values) == 20


@pytest.mark.slow
def test_compiled_equals_eager_without_a_recompile(start, sft, tmp_path):
    """In training, validation, sampling and saving; and its checkpoint is resumed uncompiled."""
    shutil.copytree(sft[0], tmp_path / "eager")
    output = run("chat_sft.py", *start, f"--out_dir={tmp_path}/compiled", "--compile=True")
    assert "recompiled" not in output and "compiled in" in output
    check_compiled(tmp_path)
    run("chat_sft.py", "--init_from=resume", f"--out_dir={tmp_path}/compiled", "--compile=False", "--max_iters=22",
        start[-1])


@pytest.mark.slow
def test_padded_to_2048_positions_every_step_has_one_shape(chats, tmp_path):
    """--pack=False at the defaults' shape, (4, 2048): printed, logged, and on two ranks compiled the same."""
    gpt = new_gpt("gpt2", max_seq_len=4096, n_layer=1, n_head=1, n_embd=16)
    base = save_model(tmp_path / "base", gpt, stage="base")
    for name, flags, ranks in (("eager", ["--compile=False"], 1), ("compiled", ["--compile_backend=aot_eager"], 2)):
        output = run("chat_sft.py", f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows",
                     f"--out_dir={tmp_path / name}", "--pack=False", "--gradient_accumulation_steps=2",
                     "--max_iters=2", "--log_interval=1", "--eval_iters=1", "--device=cpu", "--dtype=float32",
                     "--sample_tokens=0", *flags, ranks=ranks)
        assert "2 steps of 8 rows of 2048" in output and output.count("shape [4, 2048]") == 2
        assert set(map(tuple, read_log(tmp_path / name, "shape").values())) == {(4, 2048)}
    check_compiled(tmp_path)


def test_a_step_that_is_not_finite_is_skipped_and_training_lines_come_at_intervals(start, tmp_path):
    output = run("chat_sft.py", *start, "--learning_rate=1e30", "--warmup_iters=0", "--grad_clip=0", "--max_iters=7",
                 "--log_interval=3", "--eval_interval=3", f"--out_dir={tmp_path}")
    log = read_log(tmp_path, "lr", "skipped")
    assert [key for key in log if key[0] == "lr"] == [("lr", i) for i in (1, 3, 6, 7)] and log["lr", 1] == 1e30
    assert "is not finite; 1 skipped so far" in output and log["skipped", 7] >= 1
    assert all(tensor.isfinite().all() for tensor in load(tmp_path)["model"].values())
    assert load(tmp_path, "ckpt_prev.pt")["iter_num"] == 0  # an evaluation after a skipped step saves nothing


# ---------------------------------------------------------------------------------------------------
# epochs, --print_batch, mistakes

def test_epochs_at_the_start_and_on_resume(start, rows, tmp_path):
    """A run is made longer; with another number of rows per step, --epochs would mean another number of steps."""
    flags = [arg for arg in start if not arg.startswith(("--max_iters", "--warmup", "--batch_size", "--grad"))]
    output = run("chat_sft.py", *flags, f"--out_dir={tmp_path}", "--epochs=0.2", "--sample_tokens=0")
    assert f"run: {math.ceil(0.2 * len(rows) / 32)} steps of 32 rows of 64" in output
    assert "steps teach a model little; for few conversations" in output
    resume = ["--init_from=resume", f"--out_dir={tmp_path}", "--epochs=1", start[-1]]
    assert "--epochs has no meaning" in refused("chat_sft.py", *resume, "--batch_size=1")
    run("chat_sft.py", *resume, "--batch_size=1", "--gradient_accumulation_steps=32")  # as many rows per step
    assert (checkpoint := load(tmp_path))["iter_num"] == math.ceil(len(rows) / 32)
    del checkpoint["config"]["batch_size"]  # of a changed script, perhaps
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert "done after" in run("chat_sft.py", *resume, "--batch_size=1", "--gradient_accumulation_steps=32")


def test_print_batch_shows_what_is_trained_on(base, tmp_path):
    data = jsonl(tmp_path / "a.jsonl", [turns("hi", "yo\n"), turns("x"), turns("another", "one")])
    output = run("chat_sft.py", f"--init_from={base}", f"--data={data}", f"--chat_dir={tmp_path}/rows",
                 "--print_batch=True", f"--out_dir={tmp_path}/none")
    assert "<|endoftext|>|<|user|>|h|i|<|end|>|<|assistant|>|[y]|[o]|[\\n]|[<|end|>]" in output
    assert "(padding: " in output and not (tmp_path / "none").exists()
    assert "1 skipped: its roles are not" in output


def test_mistakes_are_refused_in_one_line(start, sft, tmp_path):
    assert "replace it with --overwrite=True" in refused("chat_sft.py", *start, f"--out_dir={sft[0]}")
    assert "--pack=False: the checkpoint was trained with True" in refused(
        "chat_sft.py", "--init_from=resume", f"--out_dir={sft[0]}", f"--chat_dir={tmp_path}", "--pack=False")
