"""The chat loop against a plain one; resumed, on several ranks, compiled; what it refuses."""
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import TINY, check_compiled, check_same_run, load, read_log, refused, run
from model import GPT, GPTConfig
from test_chat_data import E, conversations_of, jsonl, turns

SFT = ["--batch_size=2", "--gradient_accumulation_steps=2", "--eval_iters=4", "--log_interval=1",
       "--learning_rate=3e-3", "--max_iters=20", "--warmup_iters=2", "--eval_interval=10", "--sample_tokens=8",
       "--device=cpu", "--dtype=float32", "--compile=False"]


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory):
    """The out_dir of a base model."""
    out_dir = tmp_path_factory.mktemp("base") / "out"
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={out_dir}", "--max_seq_len=64",
        "--sample_tokens=0")
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
def sft(base, chats, tmp_path_factory):
    """The folder of a run, with its rows and its out_dir, out; and its output."""
    folder = tmp_path_factory.mktemp("sft")
    return folder, run("chat_sft.py", *SFT, f"--init_from={base}", f"--data={chats}", f"--chat_dir={folder}/rows",
                       f"--out_dir={folder}/out")


def train_rows(folder):
    return torch.load(next((folder / "rows").glob("*.pt")))[2].numpy()


# ---------------------------------------------------------------------------------------------------
# the loop

def test_a_run_learns_logs_and_leaves_a_chat_model(sft):
    folder, output = sft
    log = read_log(folder / "out", "train_loss", "val_loss", "useful", "shape")
    assert log["val_loss", 20] < log["val_loss", 10] < log["val_loss", 0]
    assert all(log["shape", i] == [2, 64] for i in range(1, 21))
    assert np.mean([log["useful", i] for i in range(1, 21)]) > 0.9
    assert output.count("<|user|>") == output.count("----- sample") == 3
    assert f"python sample.py --checkpoint={folder}/out/ckpt.pt --chat=True" in output
    assert "of the positions are not padding" in output
    checkpoint = load(folder / "out")
    assert checkpoint["stage"] == "chat"
    assert checkpoint["model_args"]["max_seq_len"] == checkpoint["config"]["max_seq_len"] == 64
    assert "chat model" in run("sample.py", f"--checkpoint={folder}/out", "--max_new_tokens=3")


def test_the_loss_curve_is_that_of_a_plain_loop_over_single_conversations(base, sft):
    """The rows' order, the mask, the mean over a step's targets, clipping, schedule and AdamW, written out again."""
    folder, _ = sft
    rows = train_rows(folder)
    gpt = GPT(GPTConfig(**load(base)["model_args"]))
    gpt.load_state_dict(load(base)["model"])
    optimizer = torch.optim.AdamW(gpt.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    order = np.concatenate([np.random.default_rng((1337, epoch)).permutation(len(rows)) for epoch in range(10)])
    log = read_log(folder / "out", "train_loss", "grad_norm", "targets")
    for step in range(20):
        losses = []
        for idx, targets in conversations_of(rows[order[4 * step:4 * step + 4]])[0]:
            logits = gpt(torch.tensor([idx]))[0]
            losses += [F.cross_entropy(logits[i], torch.tensor(target))
                       for i, target in enumerate(targets) if target != E]
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


def test_two_ranks_with_unequal_targets_train_the_model_of_one(base, chats, sft, tmp_path):
    run("chat_sft.py", *SFT, f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows",
        f"--out_dir={tmp_path}/two", ranks=2)
    one, two = (read_log(out_dir, "train_loss", "val_loss", "grad_norm", "targets")
                for out_dir in (sft[0] / "out", tmp_path / "two"))
    assert one.keys() == two.keys()
    for key in one:
        assert one[key] == pytest.approx(two[key], abs=1e-5), key
    rows = train_rows(sft[0])
    order = np.random.default_rng((1337, 0)).permutation(len(rows))
    per_rank = (rows[order[:len(order) // 4 * 4], 1] != E).reshape(-1, 2, 2, 64).sum((2, 3))  # (steps, 2)
    assert (per_rank.max(1) > 1.3 * per_rank.min(1)).any()  # so a mean of the ranks' means would be another loss
    assert not [name for name in load(tmp_path / "two")["model"] if name.startswith(("module.", "_orig_mod."))]


def check_resumed(script, args, folder, ranks=1, stops=(5, 15, 20)):
    """A run that is interrupted twice equals one that is not, bit for bit."""
    rows = [f"--chat_dir={folder}/rows"] if script == "chat_sft.py" else []
    args = [*args, *rows, "--eval_interval=5", f"--lr_decay_iters={stops[-1]}", "--sample_tokens=0"]
    run(script, *args, f"--out_dir={folder}/whole", f"--max_iters={stops[-1]}", ranks=ranks)
    run(script, *args, f"--out_dir={folder}/parts", f"--max_iters={stops[0]}", ranks=ranks)
    for stop in stops[1:]:  # the other settings come from the checkpoint; the rows are made again
        run(script, "--init_from=resume", f"--out_dir={folder}/parts", f"--max_iters={stop}",
            *[f"{row}{stop}" for row in rows], ranks=ranks)
    check_same_run(folder / "whole", folder / "parts")
    begun = [load(folder / name)["config"]["init_from"] for name in ("whole", "parts")]
    assert begun[0] == begun[1] != "resume"  # an export's card names the model that it was tuned from


@pytest.mark.parametrize("extra, ranks", [
    (["--pack=False", "--dropout=0.1"], 1), (["--optimizer=muon"], 2), (["--gradient_accumulation_steps=3"], 3),
], ids=["unpacked_dropout", "muon_two_ranks", "three_ranks"])
def test_interrupted_twice_equals_uninterrupted(base, chats, tmp_path, extra, ranks):
    check_resumed("chat_sft.py", [*SFT, *extra, f"--init_from={base}", f"--data={chats}"], tmp_path, ranks)


@pytest.mark.parametrize("ranks, extra", [(1, []), (2, ["--pack=False", "--compile_backend=aot_eager"])],
                         ids=["packed", "unpacked_two_ranks"])
def test_compiled_equals_eager_without_a_recompile(base, chats, tmp_path, ranks, extra):
    """In training, validation, sampling and saving; and each one's checkpoint resumed by the other."""
    for name, compile in (("eager", False), ("compiled", True)):
        output = run("chat_sft.py", *SFT, *extra, f"--init_from={base}", f"--data={chats}",
                     f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path / name}", f"--compile={compile}",
                     ranks=ranks)
        assert "recompiled" not in output and ("compiled in" in output) == compile
    check_compiled(tmp_path)
    for name, compile in (("eager", True), ("compiled", False)):
        run("chat_sft.py", "--init_from=resume", f"--out_dir={tmp_path / name}", f"--compile={compile}",
            "--max_iters=22", f"--chat_dir={tmp_path}/rows", ranks=ranks)


def test_padded_to_2048_positions_every_step_has_one_shape(shards, chats, tmp_path):
    """--pack=False at the defaults' shape, (4, 2048): printed, logged, and compiled the same."""
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/base", "--max_seq_len=2048",
        "--batch_size=1", "--max_iters=1", "--n_layer=1", "--sample_tokens=0", "--warmup_iters=0")
    for name, compile in (("eager", False), ("compiled", True)):
        output = run("chat_sft.py", f"--init_from={tmp_path}/base", f"--data={chats}", f"--chat_dir={tmp_path}/rows",
                     f"--out_dir={tmp_path / name}", "--pack=False", "--gradient_accumulation_steps=1",
                     "--max_iters=3", "--log_interval=1", "--eval_iters=1", "--device=cpu", "--dtype=float32",
                     "--sample_tokens=0", f"--compile={compile}")
        assert "3 steps of 4 rows of 2048" in output and output.count("shape [4, 2048]") == 3
        assert set(map(tuple, read_log(tmp_path / name, "shape").values())) == {(4, 2048)}
    check_compiled(tmp_path)


def test_both_loops_score_tasks_at_evaluations_and_all_problems_at_the_end(shards, base, chats, tmp_path):
    (tmp_path / "tasks" / "hellaswag").mkdir(parents=True)
    problems = [json.dumps({"ind": i, "ctx": "the cat", "endings": ["sat", "ran", "on", f"{i}"], "label": str(i % 4)})
                for i in range(9)]
    (tmp_path / "tasks" / "hellaswag" / "validation.jsonl").write_text("\n".join(problems))
    tasks = ["--eval_tasks=hellaswag", f"--task_dir={tmp_path}/tasks", "--eval_problems=4", "--eval_interval=5",
             "--max_iters=10", "--sample_tokens=0"]
    pretrain = ["train_gpt2.py", *TINY, *tasks, f"--data_dir={shards}", "--max_seq_len=64"]
    for ranks in (1, 2):
        run(*pretrain, f"--out_dir={tmp_path}/base{ranks}", ranks=ranks)
        run("chat_sft.py", *SFT, *tasks, f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows",
            f"--out_dir={tmp_path}/chat{ranks}", ranks=ranks)
    for loop in ("base", "chat"):
        one, two = (read_log(tmp_path / f"{loop}{ranks}", "hellaswag_acc", "hellaswag_acc_norm", "hellaswag_n")
                    for ranks in (1, 2))
        assert one == two and [one["hellaswag_n", i] for i in (0, 5, 10)] == [4, 4, 9]
    assert "the tasks are hellaswag" in refused(*pretrain, f"--out_dir={tmp_path}/o", "--eval_tasks=helaswag")


def test_epochs_and_defaults(base, chats, tmp_path):
    output = run("chat_sft.py", f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows",
                 f"--out_dir={tmp_path}/out", "--epochs=2", "--device=cpu", "--compile=False")
    assert f"run: {math.ceil(2 * len(train_rows(tmp_path)) / 32)} steps of 32 rows of 64" in output


def test_print_batch_shows_what_is_trained_on(base, tmp_path):
    data = jsonl(tmp_path / "a.jsonl", [turns("hi", "yo\n"), turns("x"), turns("another", "one")])
    output = run("chat_sft.py", f"--init_from={base}", f"--data={data}", f"--chat_dir={tmp_path}/rows",
                 "--print_batch=True", f"--out_dir={tmp_path}/none")
    assert "<|endoftext|>|<|user|>|h|i|<|end|>|<|assistant|>|[y]|[o]|[\\n]|[<|end|>]" in output
    assert "(padding: " in output and not (tmp_path / "none").exists()
    assert "1 skipped: its roles are not" in output


def test_mistakes_are_refused_in_one_line(base, chats, sft, tmp_path):
    start = [*SFT, f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/o"]
    resume = ["--init_from=resume", f"--out_dir={sft[0]}/out", f"--chat_dir={tmp_path}/rows", "--max_iters=30"]
    other = jsonl(tmp_path / "other.jsonl", [turns(f"other {i}", "data") for i in range(9)])
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"messages": [\n')
    for args, words in [
        ([*start, "--max_seq_len=65"], ["max_seq_len=65", "64 positions"]),
        ([*start, "--max_seq_len=3"], ["max_seq_len=3", "at least 4"]),
        ([*start, "--data=nowhere.jsonl"], ["nowhere.jsonl"]),
        ([*start, f"--data={broken}"], ["broken.jsonl, line 1"]),
        ([*start, "--init_from=nowhere.pt"], ["nowhere.pt", "not a readable checkpoint"]),
        ([*start, "--init_from=scratch"], ["init_from=scratch"]),
        ([*start, "--epochs=2"], ["--epochs and --max_iters"]),
        ([*start, "--warmup_iters=21"], ["warmup_iters=21"]),
        ([*start, f"--out_dir={sft[0]}/out"], ["resume", "overwrite"]),
        ([*resume, f"--data={other}"], ["other data"]),
        ([*resume, "--max_seq_len=32"], ["max_seq_len=32"]), ([*resume, "--pack=False"], ["pack=False"]),
        ([*resume, "--epochs=9"], ["epochs", "max_iters"]),
        ([*resume, "--max_iters=3"], ["max_iters=3", "20 steps"]),
        (["--init_from=resume", f"--out_dir={base}"], ["base model"]),
    ]:
        line = refused("chat_sft.py", *args)
        assert all(word in line for word in words), line


def test_epochs_on_resume(base, chats, tmp_path):
    """A run is made longer; with another number of rows per step, --epochs would mean another number of steps."""
    unset = ("--max_iters", "--warmup", "--sample_tokens")
    run("chat_sft.py", *(arg for arg in SFT if not arg.startswith(unset)), f"--init_from={base}", f"--data={chats}",
        f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/o", "--epochs=0.2", "--sample_tokens=0")
    resume = ["--init_from=resume", f"--out_dir={tmp_path}/o", f"--chat_dir={tmp_path}/rows", "--epochs=1"]
    assert "--epochs has no meaning" in refused("chat_sft.py", *resume, "--batch_size=1")
    run("chat_sft.py", *resume, "--batch_size=1", "--gradient_accumulation_steps=4")  # as many rows per step
    assert load(tmp_path / "o")["iter_num"] == math.ceil(len(train_rows(tmp_path)) / 4)
