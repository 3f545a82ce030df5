"""The chat path: format and mask, packing, the chat loop against a plain one, and talking to what it trained."""
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import runtime
from conftest import ROOT, TINY, read_log, refused, run
from model import GPT, GPTConfig, IGNORE, packed
from prepare_data import (best_fit, chat_fault, chat_rows, chat_tokens, decode_chat, fit_conversation, get_tokenizer,
                          parse_mixture, python_conversations, render_chat)
from test_model import VARIANTS, new_gpt
from test_train import PRUNED, SPAM, check_compiled, load, same

BYTES = get_tokenizer("bytes")
E, S, U, A, END = 256, 257, 258, 259, 260  # <|endoftext|>, <|system|>, <|user|>, <|assistant|>, <|end|>


def turns(*contents, system=None):
    """Messages of user and assistant in turn."""
    beginning = [{"role": "system", "content": system}] if system is not None else []
    return beginning + [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


# ---------------------------------------------------------------------------------------------------
# the format

def c(text):
    return list(text.encode())


@pytest.mark.parametrize("messages, ids, trained", [
    (turns("hi", "yo"), [E, U, *c("hi"), END, A, *c("yo"), END], "0 0 00 0 0 11 1"),
    (turns("a", "b", "c", "d"), [E, U, *c("a"), END, A, *c("b"), END, U, *c("c"), END, A, *c("d"), END], "0 0 0 0 0 1 1 0 0 0 0 1 1"),
    (turns("a", "b", system="be"), [E, S, *c("be"), END, U, *c("a"), END, A, *c("b"), END], "0 0 00 0 0 0 0 0 1 1"),
    (turns("a", ""), [E, U, *c("a"), END, A, END], "0 0 0 0 0 1"),
    (turns("<|end|>", "<|endoftext|>"), [E, U, *c("<|end|>"), END, A, *c("<|endoftext|>"), END], "0 0 0000000 0 0 1111111111111 1"),
], ids=["single_turn", "multi_turn", "system", "empty_assistant", "special_tokens_spelled_out"])
def test_ids_and_mask_token_by_token(messages, ids, trained):
    assert render_chat(BYTES, messages) == (ids, [mark == "1" for mark in trained.replace(" ", "")])
    if "" not in [message["content"] for message in messages]:
        assert decode_chat(BYTES, ids) == "<|endoftext|>" + "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)


def test_the_chat_tokens_are_the_four_after_the_tokenizers_own(gpt2_vocabulary):
    assert chat_tokens(gpt2_vocabulary) == {"system": 50257, "user": 50258, "assistant": 50259, "end": 50260}
    assert chat_tokens(BYTES) == {"system": S, "user": U, "assistant": A, "end": END}


@pytest.mark.parametrize("room, x, y, note", [
    (100, [E, U, 97, END, A, 98, END, U, 99, END, A, 100], [E, E, E, E, 98, END, E, E, E, E, 100, END], ""),
    (12, [E, U, 97, END, A, 98, END, U, 99, END, A, 100], [E, E, E, E, 98, END, E, E, E, E, 100, END], ""),
    (11, [E, U, 97, END, A, 98], [E, E, E, E, 98, END], "cut behind an answer"),
    (6, [E, U, 97, END, A, 98], [E, E, E, E, 98, END], "cut behind an answer"),
    (5, None, None, "dropped: longer than a row"),
])
def test_a_conversation_is_cut_behind_an_answer_or_dropped(room, x, y, note):
    """y is what is learned at each place of x; <|endoftext|>, which is never learned, stands for nothing."""
    pair, said = fit_conversation(BYTES, turns("a", "b", "c", "d"), room)
    assert said.startswith(note) and bool(said) == bool(note)
    assert pair is None if x is None else pair.tolist() == [x, y]


def test_a_last_question_without_an_answer_is_cut():
    pair, said = fit_conversation(BYTES, turns("a", "b", "c"), 100)
    assert pair.tolist() == [[E, U, 97, END, A, 98], [E, E, E, E, 98, END]] and "ends in a question" in said


@pytest.mark.parametrize("messages, fault", [
    (turns("a", "b"), None), (turns("a", "b", system="s"), None), (turns("a", "b", "c"), None),
    ("text", "no list"), ([1], "no list"), ([], "no assistant"), (turns("a"), "no assistant"), ({"role": "user"}, "no list"), (3, "no list"), (turns("a", "  "), "empty"),
    ([{"role": "human", "content": "a"}], "unknown role 'human'"), ([{"content": "a"}], "without a role"), ([{"role": "user", "content": ["a"]}], "no string"),
    ([{"role": "user"}], "without content"), ([{"role": "user", "content": None}], "without content"),
    (turns("a", "b") + turns("c", "d", system="s"), "system message that is not the first"),
    (turns("a")[:1] * 2 + turns("a", "b")[1:], "do not take turns"), (turns("a", "b")[1:], "do not take turns"),
])
def test_faults_of_conversations_are_named(messages, fault):
    assert chat_fault(messages) is None if fault is None else fault in chat_fault(messages)


def test_what_python_documents_makes_conversations():
    conversations = python_conversations()
    assert len(conversations) > 1000 and not [c for c in conversations if chat_fault(c["messages"])]
    answers = {c["messages"][0]["content"]: c["messages"][1]["content"] for c in conversations}
    assert answers["What does textwrap.dedent do?"].startswith("Remove any common leading whitespace")
    assert max(len(render_chat(BYTES, c["messages"])[0]) for c in conversations) <= 257


# ---------------------------------------------------------------------------------------------------
# packing

@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=300))
def test_best_fit_places_each_once_and_no_row_overflows(lengths):
    lengths = np.array(lengths)
    rows = best_fit(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(lengths[row].sum() <= 64 for row in rows)
    assert len(rows) <= 11 / 9 * -(-lengths.sum() // 64) + len(lengths[lengths > 21]) / 2 + 1  # Johnson: 11/9 of the best and a row
    fullest_pair = sorted(64 - lengths[row].sum() for row in rows)[-2:]
    assert len(rows) == 1 or sum(64 - left for left in fullest_pair) > 64  # or the two emptiest would have shared a row


def jsonl(path, conversations):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return path


def conversations_of(rows):
    """The (x, y) of each conversation in rows (n, 2, T), and how many places were padding."""
    found, padding = [], 0
    for x, y in rows.tolist():
        starts = [i for i in range(len(x)) if x[i] == E] + [len(x)]
        for begin, end in zip(starts, starts[1:]):
            if end == begin + 1:
                padding += 1
            else:
                found.append((tuple(x[begin:end]), tuple(y[begin:end])))
    return found, padding


def test_packed_rows_hold_each_conversation_once_or_say_why_not(tmp_path):
    rng = np.random.default_rng(0)
    data = [turns(f"question {i} " + "q" * int(rng.integers(1, 20)), "a" * int(rng.integers(1, 20))) for i in range(200)]
    data += [turns("q" * 100, "a")] * 7 + [turns("q", "a", "q" * 100, "a")] * 5  # too long, and cut
    train, val, plan = chat_rows(tmp_path / "rows", str(jsonl(tmp_path / "a.jsonl", data)), None, "bytes", 96, True, 1, True)
    (held, padding), (held_out, _) = conversations_of(train), conversations_of(val)
    expected = [tuple(map(tuple, fit_conversation(BYTES, messages, 96)[0].tolist())) for messages in data[:200] + data[-5:]]
    assert sorted(held + held_out) == sorted(expected) and 5 <= len(held_out) < 12 and not set(held) & set(held_out)
    assert [count for count, _ in plan["notes"].values()] == [7, 5] and "a.jsonl, line 201" in str(plan["notes"])
    assert plan["train"]["conversations"] == len(held) and padding == train.shape[0] * 96 - plan["train"]["tokens"] < 0.06 * 96 * len(train)
    assert plan["train"]["trained"] == sum(token != E for _, y in held for token in y)


def test_a_weight_is_passes_an_epoch(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse_mixture("a.jsonl,a.jsonl:2")
    with pytest.raises(SystemExit):
        parse_mixture("b.jsonl:-1", "val_data")
    assert "--val_data=b.jsonl:-1: " in capsys.readouterr().err
    for name in "ab":
        jsonl(tmp_path / f"{name}.jsonl", [turns(f"{name}{i}", "yes") for i in range(20)])
    jsonl(tmp_path / "val.jsonl", [turns("v", "yes")])
    train, val, _ = chat_rows(tmp_path, f"{tmp_path}/a.jsonl:0.5,{tmp_path}/b.jsonl:3", f"{tmp_path}/val.jsonl", "bytes", 64, True, 1, True)
    held, _ = conversations_of(train)
    counts = {name: sum(x[2] == ord(name) for x, _ in held) for name in "ab"}
    assert counts == {"a": 10, "b": 60} and len({x for x, _ in held}) == 30 and len(conversations_of(val)[0]) == 1
    assert parse_mixture("c:/x.jsonl:2, me/chats,me/chats/part:0.5") == [("c:/x.jsonl", 2.0), ("me/chats", 1.0), ("me/chats/part", 0.5)]


def test_without_packing_a_row_is_one_conversation(tmp_path):
    data = jsonl(tmp_path / "a.jsonl", [turns(f"q{i}", "a") for i in range(60)])
    train, val, _ = chat_rows(tmp_path, str(data), None, "bytes", 32, False, 1, True)
    assert len(train) + len(val) == 60 and all(len(conversations_of(train[i:i + 1])[0]) == 1 for i in range(len(train)))


def test_a_folder_of_the_hubs_kind_is_read_through_datasets(tmp_path):
    (tmp_path / "chats").mkdir()
    for n in (10, 20):  # and made anew when its files change
        jsonl(tmp_path / "chats" / "train.jsonl", [turns(f"q{i}", "a") for i in range(n)])
        train, val, _ = chat_rows(tmp_path / "rows", f"{tmp_path}/chats", None, "bytes", 32, True, 1, True)
        assert len(conversations_of(train)[0] + conversations_of(val)[0]) == n


# ---------------------------------------------------------------------------------------------------
# a packed row is its conversations

@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name in ("gpt2", "llama", "gpt2_mla", "llama_mla")])
def test_packed_loss_is_the_loss_of_each_conversation_alone(name, compiled):
    rng = np.random.default_rng(0)
    talks = [turns("q" * int(rng.integers(1, 9)), "a" * int(rng.integers(1, 9)), *("again", "yes") * int(rng.integers(2))) for _ in range(4)]
    pairs = [fit_conversation(BYTES, talk, 200)[0].astype(np.int64) for talk in talks]
    row = np.concatenate(pairs, axis=1)
    T = row.shape[1] + 5  # five places of padding
    row = torch.from_numpy(np.concatenate((row, np.full((2, 5), E)), axis=1))
    gpt = new_gpt(name, max_seq_len=T, vocab_size=384)
    x, y = row[None, 0], torch.where(row[None, 1] == E, IGNORE, row[None, 1])
    positions, mask = packed(x, E)
    call = torch.compile(gpt, dynamic=False, fullgraph=True) if compiled else gpt
    whole, at = 0.0, 0
    with torch.no_grad():
        logits = gpt(x, None, positions, mask)
        for pair in map(torch.from_numpy, pairs):
            alone_y = torch.where(pair[1] == E, IGNORE, pair[1])
            alone = F.cross_entropy(gpt(pair[None, 0])[0], alone_y, ignore_index=IGNORE, reduction="none")
            n = pair.size(1)
            together = F.cross_entropy(logits[0, at:at + n], alone_y, ignore_index=IGNORE, reduction="none")
            torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
            whole, at = whole + alone.sum(), at + n
    loss = call(x, y, positions, mask)
    loss.backward()
    assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gpt.parameters())


def test_a_micro_batch_without_a_target_has_no_loss_and_no_gradient():
    gpt = new_gpt("gpt2", max_seq_len=8, vocab_size=384)
    x = torch.full((2, 8), E)
    loss = gpt(x, torch.full((2, 8), IGNORE), *packed(x, E))
    loss.backward()
    assert loss.item() == 0 and all(p.grad is None or p.grad.abs().max() == 0 for p in gpt.parameters())


# ---------------------------------------------------------------------------------------------------
# the loop

@pytest.fixture(scope="module")
def base(shards, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("base") / "out"
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={out_dir}", "--max_seq_len=64", "--sample_tokens=0")
    return out_dir


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations whose answer repeats a word of the question; some rows have far more to train on than others."""
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat"]
    talks = []
    for i in range(150):
        word = words[int(rng.integers(6))]
        talks.append(turns(f"say {word}", word) if i % 3 else turns(word, " ".join([word] * 8)))
    return jsonl(tmp_path_factory.mktemp("chats") / "chats.jsonl", talks)


SFT = ["--batch_size=2", "--gradient_accumulation_steps=2", "--eval_iters=4", "--log_interval=1", "--learning_rate=3e-3", "--max_iters=20",
       "--warmup_iters=2", "--eval_interval=10", "--sample_tokens=8", "--device=cpu", "--dtype=float32", "--compile=False"]


@pytest.fixture(scope="module")
def sft(base, chats, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    output = run("chat_sft.py", *SFT, f"--init_from={base}", f"--data={chats}", f"--chat_dir={folder}/rows", f"--out_dir={folder}/out")
    return folder, output


def test_chat_tuning_learns_logs_and_leaves_a_chat_model(sft):
    folder, output = sft
    log = read_log(folder / "out", "train_loss", "val_loss", "useful", "shape", "recompiles", "targets")
    assert log["val_loss", 20] < log["val_loss", 10] < log["val_loss", 0]
    assert {value for key, value in log.items() if key[0] == "shape" for value in [tuple(value)]} == {(2, 64)}
    assert np.mean([value for key, value in log.items() if key[0] == "useful"]) > 0.9
    assert output.count("<|user|>") == output.count("----- sample") == 3 and "talk to it" in output and "of the places" in output
    checkpoint = load(folder / "out")
    assert checkpoint["stage"] == "chat" and checkpoint["model_args"]["max_seq_len"] == 64 and checkpoint["config"]["max_seq_len"] == 64
    assert "chat model" in run("sample.py", f"--checkpoint={folder}/out", "--max_new_tokens=3")


def plan_rows(folder):
    return np.load(next((folder / "rows").glob("*/train.npy")))


def test_the_loss_curve_is_that_of_a_plain_loop_over_single_conversations(base, sft):
    """The order of the rows, the mask, the mean over a step's targets, clipping, schedule and AdamW, written out once more."""
    folder, _ = sft
    rows = plan_rows(folder)
    gpt = GPT(GPTConfig(**load(base)["model_args"]))
    gpt.load_state_dict(load(base)["model"])
    optimizer = torch.optim.AdamW(gpt.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    order = np.concatenate([np.random.default_rng((1337, epoch)).permutation(len(rows)) for epoch in range(10)])
    log = read_log(folder / "out", "train_loss", "grad_norm", "targets")
    for step in range(20):
        losses = []
        for x, y in conversations_of(rows[order[4 * step:4 * step + 4]])[0]:
            logits = gpt(torch.tensor([x]))[0]
            losses += [F.cross_entropy(logits[i], torch.tensor(token)) for i, token in enumerate(y) if token != E]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (step + 1) / 2 if step < 2 else 3e-3 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 18))
        optimizer.step()
        optimizer.zero_grad()
        assert log["targets", step + 1] == len(losses)
        assert log["train_loss", step + 1] == pytest.approx(loss.item(), abs=2e-5)
        assert log["grad_norm", step + 1] == pytest.approx(norm.item(), rel=1e-3)


def test_two_ranks_with_unequal_targets_train_the_model_of_one(base, chats, sft, tmp_path):
    run("chat_sft.py", *SFT, f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/two", ranks=2)
    one, two = (read_log(out_dir, "train_loss", "val_loss", "grad_norm", "targets") for out_dir in (sft[0] / "out", tmp_path / "two"))
    assert one.keys() == two.keys()
    for key in one:
        assert one[key] == pytest.approx(two[key], abs=1e-5), key
    rows, order = plan_rows(sft[0]), np.random.default_rng((1337, 0)).permutation(len(plan_rows(sft[0])))
    per_rank = (rows[order[:len(order) // 4 * 4], 1] != E).reshape(-1, 2, 2, 64).sum((2, 3))  # step, rank
    assert (per_rank.max(1) > 1.3 * per_rank.min(1)).any()  # so a mean of the ranks' means would be another loss
    assert not [name for name in load(tmp_path / "two")["model"] if name.startswith(("module.", "_orig_mod."))]


@pytest.mark.parametrize("extra, ranks", [([], 1), (["--pack=False", "--dropout=0.1"], 1), (["--optimizer=muon", "--compile=True"], 2),
                                          ([*SPAM, *PRUNED], 1), (["--gradient_accumulation_steps=3"], 3)],
                         ids=["packed", "unpacked_dropout", "muon_compiled_two_ranks", "spam_pruned", "three_ranks"])
def test_interrupted_twice_equals_uninterrupted(base, chats, tmp_path, extra, ranks):
    args = [*SFT, *extra, f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows", "--eval_interval=5",
            "--lr_decay_iters=20", "--sample_tokens=0"]
    run("chat_sft.py", *args, f"--out_dir={tmp_path}/whole", ranks=ranks)
    run("chat_sft.py", *args, f"--out_dir={tmp_path}/parts", "--max_iters=5", ranks=ranks)
    for stop in (15, 20):  # the rows are made anew once
        run("chat_sft.py", "--init_from=resume", f"--out_dir={tmp_path}/parts", f"--max_iters={stop}", f"--chat_dir={tmp_path}/rows{stop}",
            ranks=ranks)
    whole, parts = load(tmp_path / "whole"), load(tmp_path / "parts")
    assert whole.keys() == parts.keys() and ("masks" in whole) == ("--sparsity=0.7" in extra)
    for key in ("model", "optimizer", "rows_seen", "iter_num", "best_val_loss", "val_loss", *(["masks"] if "masks" in whole else [])):
        assert same(whole[key], parts[key]), key
    assert read_log(tmp_path / "whole", "train_loss", "val_loss") == read_log(tmp_path / "parts", "train_loss", "val_loss")


@pytest.mark.parametrize("extra", [[], ["--optimizer=muon"]], ids=["adamw", "muon"])
def test_a_sharded_model_is_tuned_as_the_whole_one(base, chats, tmp_path, extra):
    """Losses, the answer that is shown, and a checkpoint that goes on whole. Muon rounds its matrices to bfloat16, hence its tolerance."""
    args = [*SFT, *extra, f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows"]
    outputs = [run("chat_sft.py", *args, f"--out_dir={tmp_path}/whole"),
               run("chat_sft.py", *args, f"--out_dir={tmp_path}/sharded", "--fsdp=True", ranks=2)]
    whole, sharded = (read_log(tmp_path / name, "train_loss", "val_loss", "recompiles") for name in ("whole", "sharded"))
    assert whole.keys() == sharded.keys()
    for key, value in whole.items():
        assert sharded[key] == pytest.approx(value, abs=5e-3 if extra else 1e-4), key
    samples = [output.split("----- sample")[1].split("-----")[0] for output in outputs]
    assert samples[0] == samples[1]
    assert load(tmp_path / "whole")["model"].keys() == load(tmp_path / "sharded")["model"].keys()
    run("chat_sft.py", "--init_from=resume", f"--out_dir={tmp_path}/sharded", "--fsdp=False", "--max_iters=22", f"--chat_dir={tmp_path}/rows")


@pytest.mark.parametrize("ranks, extra", [(1, []), (2, ["--pack=False"])], ids=["packed", "unpacked_two_ranks"])
def test_compiled_equals_eager_without_a_recompile(base, chats, tmp_path, ranks, extra):
    """Inductor itself, over training, validation, sampling and saving, and each one's checkpoint gone on with by the other."""
    for name, compile in (("eager", False), ("compiled", True)):
        output = run("chat_sft.py", *SFT, *extra, f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows",
                     f"--out_dir={tmp_path / name}", f"--compile={compile}", ranks=ranks)
        assert "recompiled" not in output and ("compiled in" in output) == compile
    check_compiled(tmp_path)
    for name, compile in (("eager", True), ("compiled", False)):
        run("chat_sft.py", "--init_from=resume", f"--out_dir={tmp_path / name}", f"--compile={compile}", "--max_iters=22",
            f"--chat_dir={tmp_path}/rows", ranks=ranks)


def test_both_loops_score_tasks_at_evaluations_and_all_of_them_at_the_end(shards, base, chats, tmp_path):
    (tmp_path / "tasks" / "hellaswag").mkdir(parents=True)
    problems = [{"ind": i, "ctx": "the cat", "endings": ["sat", "ran", "on", f"{i}"], "label": str(i % 4)} for i in range(9)]
    (tmp_path / "tasks" / "hellaswag" / "validation.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    tasks = ["--eval_tasks=hellaswag", f"--task_dir={tmp_path}/tasks", "--eval_problems=4", "--eval_interval=5", "--max_iters=10"]
    for ranks in (1, 2):
        run("train_gpt2.py", *TINY, *tasks, f"--data_dir={shards}", f"--out_dir={tmp_path}/base{ranks}", "--max_seq_len=64", ranks=ranks)
        run("chat_sft.py", *SFT, *tasks, f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/chat{ranks}",
            ranks=ranks)
    for loop in ("base", "chat"):
        one, two = (read_log(tmp_path / f"{loop}{ranks}", "hellaswag_acc", "hellaswag_acc_norm", "hellaswag_n") for ranks in (1, 2))
        assert one == two and [one["hellaswag_n", i] for i in (0, 5, 10)] == [4, 4, 9]
    assert "did you mean 'hellaswag'" in refused("train_gpt2.py", *TINY, *tasks, "--eval_tasks=helaswag", f"--data_dir={shards}", f"--out_dir={tmp_path}/o")


def test_epochs_and_defaults(base, chats, tmp_path):
    output = run("chat_sft.py", f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/out",
                 "--epochs=2", "--device=cpu", "--compile=False")
    rows = len(plan_rows(tmp_path))
    assert f"run: {math.ceil(2 * rows / 32)} steps of 32 rows" in output and "rows of 64" in output


def test_print_batch_shows_what_is_trained_on(base, tmp_path):
    data = jsonl(tmp_path / "a.jsonl", [turns("hi", "yo\n"), turns("x"), turns("another", "one")])
    output = run("chat_sft.py", f"--init_from={base}", f"--data={data}", f"--chat_dir={tmp_path}/rows", "--print_batch=True",
                 f"--out_dir={tmp_path}/none")
    assert "<|endoftext|>|<|user|>|h|i|<|end|>|<|assistant|>|[y]|[o]|[\\n]|[<|end|>]" in output
    assert "(padding: " in output and not (tmp_path / "none").exists()
    assert "1 conversation skipped: no assistant message" in output and "WARNING: 1 conversations are not trained on" in output


# ---------------------------------------------------------------------------------------------------
# bad input

@pytest.mark.parametrize("lines, words", [
    (['{"messages": ['], ["line 3", "no JSON"]), (["[1]"], ["line 3"]), (['{"message": []}'], ["line 3", "the keys message"]), (["7"], ["line 3"]),
    (["\udcff"], ["line 3"]), (["[" * 100_000], ["line 3"]),
], ids=["broken", "list", "missing_key", "number", "not_utf8", "deep"])
def test_a_line_that_is_no_conversation_is_named(base, tmp_path, lines, words):
    path = tmp_path / "a.jsonl"
    good = json.dumps({"messages": turns("q", "a")})
    path.write_bytes("\n".join([good, good, *lines, good]).encode(errors="surrogateescape"))
    line = refused("chat_sft.py", *SFT, f"--init_from={base}", f"--data={path}", f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/o")
    assert "a.jsonl" in line and all(word in line for word in words), line


def test_faulty_conversations_are_counted_and_the_rest_trained_on(base, tmp_path):
    good = [turns(f"q{i}", "a") for i in range(40)]
    bad = [[{"role": "tool", "content": "x"}], turns("a"), turns("a", " "), turns("a")[:1] * 2 + turns("a", "b")[1:], turns("a", "b", system="")]
    data = jsonl(tmp_path / "a.jsonl", good + bad)
    output = run("chat_sft.py", *SFT, f"--init_from={base}", f"--data={data}", f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/o",
                 "--max_iters=3")
    for note in ("1 conversation skipped: unknown role 'tool'", "skipped: no assistant message", "skipped: an empty message",
                 "skipped: user and assistant do not take turns", "system message left out: it is empty", "a.jsonl, line 41"):
        assert note in output, note
    only_bad = jsonl(tmp_path / "b.jsonl", bad[:4])
    line = refused("chat_sft.py", *SFT, f"--init_from={base}", f"--data={only_bad}", f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/p")
    assert "no conversation in it can be used" in line and "unknown role 'tool'" in line


def test_mistakes_are_refused_in_one_line(base, chats, sft, tmp_path):
    start = [*SFT, f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/o"]
    resume = ["--init_from=resume", f"--out_dir={sft[0]}/out", f"--chat_dir={tmp_path}/rows", "--max_iters=30"]
    other = jsonl(tmp_path / "other.jsonl", [turns(f"other {i}", "data") for i in range(9)])
    for args, words in [
        ([*start, "--max_seq_len=65"], ["max_seq_len=65", "64 positions"]), ([*start, "--data=nowhere.jsonl"], ["nowhere.jsonl"]),
        ([*start, "--data="], ["--data="]), ([*start, "--data=a.jsonl:-1"], ["a.jsonl:-1", "weight"]), ([*start, "--epochs=2"], ["--epochs and --max_iters"]),
        ([*start, "--init_from=nowhere.pt"], ["nowhere.pt", "no checkpoint"]), ([*start, "--warmup_iters=21"], ["warmup_iters=21"]),
        ([*start, f"--out_dir={sft[0]}/out"], ["resume", "overwrite"]), ([*start, f"--data={tmp_path}/empty.jsonl"], ["empty.jsonl"]),
        ([*resume, f"--data={other}"], ["not the rows"]), ([*resume, "--max_seq_len=32"], ["max_seq_len=32"]), ([*resume, "--pack=False"], ["pack"]),
        ([*start, "--data=/nowhere/deep/typo.json"], ["typo.json", "no such file"]), ([*start, f"--data={chats}:"], ["weight"]),
        ([*start, f"--data={chats},{other}:0.01"], ["0.01", "that is none"]), ([*resume, "--epochs=9"], ["epochs", "max_iters"]),
        ([*resume, "--max_iters=3"], ["max_iters=3", "20 steps"]), (["--init_from=resume", f"--out_dir={base}"], ["base model"]),
    ]:
        (tmp_path / "empty.jsonl").write_text("")
        line = refused("chat_sft.py", *args)
        assert all(word in line for word in words), line
    jsonl(tmp_path / "one.jsonl", [turns("q", "a")])
    assert "expected at least one of each" in refused("chat_sft.py", *start, f"--data={tmp_path}/one.jsonl")
    run("chat_sft.py", *(arg for arg in start if not arg.startswith(("--max_iters", "--warmup"))), "--epochs=0.2")
    resume = ["--init_from=resume", f"--out_dir={tmp_path}/o", f"--chat_dir={tmp_path}/rows", "--epochs=1"]
    assert "--epochs counts steps" in refused("chat_sft.py", *resume, "--batch_size=1")
    run("chat_sft.py", *resume, "--batch_size=1", "--gradient_accumulation_steps=4")  # as many rows a step


def test_rows_that_are_damaged_are_refused_with_what_to_do(base, chats, tmp_path):
    args = [*SFT, f"--init_from={base}", f"--data={chats}", f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/o", "--print_batch=True"]
    run("chat_sft.py", *args)
    path = next((tmp_path / "rows").glob("*/train.npy"))
    whole = path.read_bytes()
    for damaged in (whole[:1000], whole[:-2] + b"AA"):
        path.write_bytes(damaged)
        assert "remove the folder" in refused("chat_sft.py", *args)
    (path.parent / "plan.json").write_text('{"train": {}}')
    assert "remove the folder" in refused("chat_sft.py", *args)


# ---------------------------------------------------------------------------------------------------
# talking to it

def test_a_conversation_in_the_terminal(sft):
    def talk(text, *args):
        done = subprocess.run([sys.executable, ROOT / "sample.py", f"--checkpoint={sft[0]}/out", "--chat=True", "--max_new_tokens=8",
                               "--device=cpu", "--dtype=float32", *args], input=text, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    output = talk("say cat\nsay mat\nsay the cat sat\n/reset\n/help\nsay on\n/quit\nnever read\n")
    assert output.count("model: ") == 4 and "chat model" in output and "turn does not fit any more and is forgotten" in output
    assert "(a new conversation)" in output and output.count("/reset begins anew") == 2 and "never" not in output
    first, after_reset = talk("say on\n", "--temperature=0"), talk("say cat\n/reset\nsay on\n", "--temperature=0")
    assert first.split("model: ")[1].split("\n")[0] == after_reset.split("model: ")[2].split("\n")[0]
    assert "say it in fewer words" in talk("x" * 80 + "\n")
    assert "--prompt: makes 8" in refused("sample.py", f"--checkpoint={sft[0]}/out", "--chat=True", "--prompt=" + "x" * 80)
    assert talk("", "--prompt=say cat", "--system=be brief").count("model: ") == 1
    for args, words in [(["--system=" + "x" * 40, "--chat=True"], "say it in fewer words"), (["--system=be"], "--chat=True"),
                        (["--chat=True", "--num_samples=2"], "answers once")]:
        assert words in refused("sample.py", f"--checkpoint={sft[0]}/out", *args)


def test_a_base_model_is_told_from_a_chat_model(base):
    assert "this is a base model" in run("sample.py", f"--checkpoint={base}", "--chat=True", "--prompt=hi", "--max_new_tokens=3")


@pytest.mark.skipif(os.name == "nt", reason="SIGINT cannot be sent to one process there")
def test_ctrl_c_stops_an_answer_and_not_the_program(tmp_path):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(arch="llama", n_layer=2, n_head=2, n_embd=32, max_seq_len=20_000, vocab_size=384))
    gpt.lm_head.weight.data[256:] = 0  # the likeliest id is never one that ends the answer
    runtime.save_checkpoint(tmp_path, {"model": gpt.state_dict(), "model_args": gpt.config.__dict__, "config": {}, "tokenizer": "bytes",
                                       "stage": "chat", "iter_num": 0, "val_loss": 0.0, "val_iter": 0})
    program = subprocess.Popen([sys.executable, "-u", ROOT / "sample.py", f"--checkpoint={tmp_path}", "--chat=True", "--max_new_tokens=9000",
                                "--temperature=0", "--device=cpu"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background ignores it
    program.stdin.write(b"hello\n")
    program.stdin.flush()
    seen = b""
    while b"model: " not in seen or len(seen.split(b"model: ")[1]) < 20:  # it answers
        seen += program.stdout.read(1)
    program.send_signal(signal.SIGINT)
    time.sleep(0.2)
    rest, errors = program.communicate(b"/quit\n", timeout=60)
    assert b"(stopped)" in rest and program.returncode == 0, errors
