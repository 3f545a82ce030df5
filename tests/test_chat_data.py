"""Chat data: the format token by token, truncation, packing, and a packed row equals its conversations."""
import gzip
import hashlib
import json
import multiprocessing
import os
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import pyarrow
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import chat_data
from chat_data import (ChatDataset, best_fit, build_datasets, fill_rows, packed_mask_and_positions, parse_mixture,
                       to_messages, tokenize_conversation)
from chat_format import decode_chat, render_chat
from compiling import graphs_compiled
from conftest import (GPU, NEW_TEXT, NO_LOSS, check_error, conversations_of, error_line, jsonl, needs_gpu, new_gpt,
                      tokens, turns)
from model import IGNORE
from python_text import python_conversations
from tokenizer import get_tokenizer

BYTES = get_tokenizer("bytes")
CPU = torch.device("cpu")
E = BYTES.eot_token
SPECIAL = dict(zip("ESUA.N-", (*range(E, E + 5), NEW_TEXT, NO_LOSS)))
fork = multiprocessing.get_context("fork")
TRUNCATED = "truncated after the last answer, or the last that fits into a row"


def ids(text):
    """
    E, S, U, A and . are <|endoftext|>, <|system|>, <|user|>, <|assistant|> and <|end|>; N and - mark targets where a
    text begins, and those without loss; the rest is text.
    """
    return [SPECIAL.get(c, ord(c)) for c in text]


def build(folder, data, val_data=None, max_seq_len=64, pack=True, seed=1):
    return build_datasets(folder, str(data), val_data and str(val_data), BYTES, max_seq_len, pack, seed)


def some_chats(folder, n=60):
    return jsonl(folder / "chats.jsonl", [turns(f"q{i}", "a" * (i % 7 + 1)) for i in range(n)])


# ---------------------------------------------------------------------------------------------------
# the format

@pytest.mark.parametrize("messages, rendered, trained", [
    (turns("hi", "yo"), "EUhi.Ayo.", "000000111"),
    (turns("a", "b", "c", "d"), "EUa.Ab.Uc.Ad.", "0000011000011"),
    (turns("a", "b", system="be"), "ESbe.Ua.Ab.", "00000000011"),
    (turns("a", ""), "EUa.A.", "000001"),
    (turns("<|end|>", "<|endoftext|>"), "EU<|end|>.A<|endoftext|>.", "0" * 11 + "1" * 14),
], ids=["single_turn", "multi_turn", "system", "empty_assistant", "special_tokens_spelled_out"])
def test_ids_and_mask_token_by_token(messages, rendered, trained):
    assert render_chat(BYTES, messages) == (ids(rendered), [mark == "1" for mark in trained])
    text = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in messages)
    assert decode_chat(BYTES, ids(rendered)) == "<|endoftext|>" + text


@pytest.mark.parametrize("contents, max_seq_len, length, note", [
    ("abcd", 100, 12, ""), ("abcd", 12, 12, ""), ("abcd", 11, 6, TRUNCATED), ("abcd", 6, 6, TRUNCATED),
    ("abc", 100, 6, TRUNCATED), ("abc", 6, 6, TRUNCATED), ("ab", 6, 6, ""),
])
def test_a_conversation_is_truncated_after_an_answer(contents, max_seq_len, length, note):
    """The target at each position. An empty system message is left out."""
    for system in None, " ":
        pair, said = tokenize_conversation(BYTES, turns(*contents, system=system), max_seq_len)
        assert pair.tolist() == [ids("EUa.Ab.Uc.Ad")[:length], ids("N---b.----d.")[:length]]
        assert pair.dtype == np.uint16 and said == note


@pytest.mark.parametrize("fault, conversations", [
    ("not a list", ["text", [1], {"role": "user"}, 3, None, [{"content": "a"}], [{"role": "user"}],
                    [{"role": ["user"], "content": "a"}], turns(["a"]), turns(None)]),
    ("roles", [[], turns("a"), turns("a", "b")[1:], turns("a") + turns("a", "b"),
               [{"role": "human", "content": "a"}, *turns("a", "b")[1:]],
               *(turns("a", "b") + turns("c", "d", system=system) for system in ("s", ""))]),
    ("a message is empty", [turns("a", "  "), turns("", "b")]),
    ("it has tool_calls, or a weight other than 1", [
        [*turns("a"), {"role": "assistant", "content": "b", "weight": 0}],
        [*turns("a"), {"role": "assistant", "content": "b", "weight": None, "tool_calls": [{"type": "function"}]}],
        [*turns("a"), {"role": "assistant", "content": "b", "function_call": {"name": "f"}}]]),
    ("thoughts are in reasoning_content", [[*turns("a"), {"role": "assistant", "content": "b", name: "c"}]
                                           for name in ("reasoning_content", "reasoning", "thinking")]),
    ("longer than a row", [turns("a", "bb"), turns("a", "bb", "c", "d")]),
])
def test_faults_of_conversations_are_named(fault, conversations):
    for messages in conversations:
        with pytest.raises(ValueError, match=fault):
            tokenize_conversation(BYTES, messages, 6)


def test_a_list_of_text_parts_is_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined, apart = (tokenize_conversation(BYTES, turns("q", content), 16)[0] for content in ("ab", parts))
    assert joined.tolist() == apart.tolist()
    for part in {"type": "image", "url": "c"}, {"type": "thinking", "text": "c"}, {"text": "c"}, {"type": "text"}:
        with pytest.raises(ValueError, match="messages is not a list of"):
            tokenize_conversation(BYTES, turns("q", [*parts, part]), 16)


@pytest.mark.slow
def test_conversations_from_pythons_documentation_can_be_trained_on():
    conversations = [conversation["messages"] for conversation in python_conversations()]
    assert not any(tokenize_conversation(BYTES, messages, 256)[1] for messages in conversations)
    answers = {question["content"]: answer["content"] for question, answer in conversations}
    assert answers["What does dedent(text) do?"].startswith("Remove any common leading whitespace")
    assert len(answers) == len(conversations) > 1000
    assert not any("(self" in question or "(/" in question for question in answers)


# ---------------------------------------------------------------------------------------------------
# packing

@settings(max_examples=50)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=300))
def test_best_fit_places_each_item_once_and_no_row_overflows(lengths):
    rows = best_fit([np.full((2, n), i) for i, n in enumerate(lengths)], 64)
    used = [sum(pair.shape[1] for pair in row) for row in rows]
    assert sorted(pair[0, 0] for row in rows for pair in row) == list(range(len(lengths))) and max(used) <= 64
    assert len(rows) == 1 or sum(sorted(used)[:2]) > 64  # or the two emptiest would share a row


def test_packed_rows_hold_each_conversation_once_or_say_why_not(tmp_path):
    data = [turns(f"question {i}", "a" * (i * 7 % 30 + 1)) for i in range(200)]
    data += [turns("q" * 100, "a")] * 7 + [turns("q", "a", "q" * 100, "a")] * 5  # too long, and truncated
    train, val, text = build(tmp_path / "rows", jsonl(tmp_path / "a.jsonl", data), max_seq_len=96)
    (kept, padding), (held_out, _) = conversations_of(train.rows), conversations_of(val.rows)
    pairs = [tokenize_conversation(BYTES, messages, 96)[0] for messages in data[:200] + data[-5:]]
    assert sorted(kept + held_out) == sorted(conversations_of(fill_rows(pairs, 96, False, E))[0])
    assert 5 <= len(held_out) < 12 and not set(kept) & set(held_out)

    tokens, trained = train.rows[:, 0].size - padding, sum(t < NEW_TEXT for _, targets in kept for t in targets)
    assert padding < 0.06 * train.rows[:, 0].size and train.count_targets(range(len(train))) == (trained, tokens)
    assert text.splitlines() == [
        f"data: {tmp_path}/a.jsonl, {len(kept)} conversations in {len(train)} rows of 96; "
        f"{tokens / len(train) / 96:.1%} of the positions are not padding, {trained / len(train) / 96:.1%} are "
        f"trained on; {len(held_out)} conversations for validation",
        f"  7 skipped: longer than a row before its first answer ends (the first: {tmp_path}/a.jsonl, line 201)",
        f"  5 {TRUNCATED} (the first: {tmp_path}/a.jsonl, line 208)"]


def test_rows_are_those_of_earlier_versions(tmp_path):
    """
    Their digests, with <|endoftext|> for targets without loss, are in older checkpoints: with other rows, or in
    another order, those runs could not resume.
    """
    a = jsonl(tmp_path / "a.jsonl", [turns("q" * (i % 17), f"answer {i}" * (i % 5 + 1), *("more", "yes") * (i % 2))
                                     for i in range(1, 300)])
    b = jsonl(tmp_path / "b.jsonl", [turns(f"b{i}", "yes", system="") for i in range(30)])
    for data, val_data, pack, train, val in [
        (f"{a}:2.5,{b}", None, True, "c960d2d7d472f336", "3dc70a5fbc7ba3a2"),
        (f"{a}:2.5,{b}", None, False, "0bc85dc36f481429", "7c3d98ef9d6f7f15"),
        (a, f"{b}:0.5", True, "2b9d86762f75b552", "0f76f6bd7ac69daa"),
    ]:
        splits = build(tmp_path / "rows", data, val_data, pack=pack, seed=3)[:2]
        earlier = [np.where(split.rows < NEW_TEXT, split.rows, np.uint16(E)) for split in splits]
        assert [hashlib.sha256(rows).hexdigest()[:16] for rows in earlier] == [train, val]
        assert {split.fingerprint[:16] for split in splits} == {train}
        assert pack or all(len(conversations_of(row[None])[0]) == 1 for row in splits[0].rows)


def test_a_weight_is_passes_an_epoch(tmp_path):
    for name in "ab":
        jsonl(tmp_path / f"{name}.jsonl", [turns(f"{name}{i}", "yes") for i in range(20)])
    val_data = jsonl(tmp_path / "val.jsonl", [turns("v", "yes")])
    train, val, _ = build(tmp_path, f"{tmp_path}/a.jsonl:0.5,{tmp_path}/b.jsonl:3", val_data)
    kept, _ = conversations_of(train.rows)
    assert {name: sum(idx[2] == ord(name) for idx, _ in kept) for name in "ab"} == {"a": 10, "b": 60}
    assert len({idx for idx, _ in kept}) == 30 and len(conversations_of(val.rows)[0]) == 1
    assert parse_mixture("a\nb") == {"a\nb": 1.0}  # a comma was forgotten
    assert parse_mixture("c:/x.jsonl:2, me/chats,me/chats/part:.5, 10:30.jsonl,me/chats:2") == {
        "c:/x.jsonl": 2.0, "me/chats": 3.0, "me/chats/part": 0.5, "10:30.jsonl": 1.0}


# ---------------------------------------------------------------------------------------------------
# what is kept on disk

@pytest.fixture
def log(tmp_path, monkeypatch):
    """A log of the sources that are tokenized, each slowly enough for other processes to ask for it as well."""
    def read_rows(source, original=chat_data.read_rows):
        with open("log", "a") as log:
            log.write(f"{source}\n")
        time.sleep(0.3)
        return original(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat_data, "read_rows", read_rows)
    return tmp_path / "log"


def test_of_three_processes_one_tokenizes_and_the_others_wait(tmp_path, log):
    data = some_chats(tmp_path)
    with fork.Pool(3) as pool:
        splits = pool.starmap(build, [("rows", data)] * 3, chunksize=1)
    assert log.read_text() == f"{data}\n" and len({train.fingerprint for train, _, _ in splits}) == 1


def test_a_source_is_tokenized_again_when_it_or_max_seq_len_changes(tmp_path, log, monkeypatch):
    data = some_chats(tmp_path)
    first = build("rows", data)
    for kwargs, times in ({}, 1), ({"seed": 2, "pack": False, "val_data": data}, 1), ({"max_seq_len": 65}, 2):
        train, _, text = build("rows", data, **kwargs)
        assert log.read_text().count("\n") == times
        assert kwargs or (text, train.fingerprint) == (first[2], first[0].fingerprint)
    some_chats(tmp_path, 61)
    assert "61 conversations in" in build("rows", data, data)[2]
    times = os.stat(data).st_atime_ns, os.stat(data).st_mtime_ns
    jsonl(data, [turns("q", "another")])
    os.utime(data, ns=times)  # a copy may keep them
    assert ", 1 conversations in" in build("rows", data, data)[2]
    times = log.read_text().count("\n")
    monkeypatch.setattr(chat_data, "CHAT_TOKENS", (*chat_data.CHAT_TOKENS, "tool"))  # a fork's
    build("rows", data, data)
    assert log.read_text().count("\n") == times + 1


def test_damaged_files_are_refused_and_made_again(tmp_path):
    data = some_chats(tmp_path)
    fingerprint = build(tmp_path / "rows", data)[0].fingerprint
    [path] = (tmp_path / "rows").glob("generator/*/*/*.arrow")
    whole = path.read_bytes()
    another_letter = whole.replace(b"a\0a\0", b"a\0b\0", 1)
    for damaged in b"", whole[:100], whole[:-100], whole[:-2000] + b"A" * 2000, another_letter:
        path.write_bytes(damaged)
        line = error_line(build, tmp_path / "rows", data)
        assert f"--chat_dir={tmp_path}/rows" in line and f"{tmp_path}/rows/generator is damaged, remove it" in line
    path.write_bytes(whole.replace(struct.pack("<3i", 0, 32, 64), struct.pack("<3i", 0, 32, 2 ** 30)))  # offsets
    reader = fork.Process(target=build, args=(tmp_path / "rows", data))  # which pyarrow would crash
    reader.start()
    reader.join()
    assert reader.exitcode == 2
    (path.parent / "dataset_info.json").unlink()  # a run that was killed
    assert build(tmp_path / "rows", data)[0].fingerprint == fingerprint


# ---------------------------------------------------------------------------------------------------
# batches

def test_mask_and_positions_token_by_token():
    idx = torch.tensor([ids("EUAEUEE")])  # texts of three and two tokens, two positions of padding
    mask, positions = packed_mask_and_positions(idx == E)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    rows = ["".join(map(str, row)) for row in mask[0, 0].int().tolist()]
    assert rows == ["1000000", "1100000", "1110000", "0001000", "0001100", "0000010", "0000001"]


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_batches(tmp_path, pack):
    dataset = build(tmp_path / "rows", some_chats(tmp_path), pack=pack)[0]
    assert len(dataset) == len(dataset.rows) and dataset.max_seq_len == 64
    for indices in [4], [4, 0, 2]:
        B, (idx, targets) = len(indices), dataset.rows[indices].swapaxes(0, 1).tolist()
        batch = dataset.get_batch(indices, CPU)
        assert batch["idx"].tolist() == idx
        assert batch["targets"].tolist() == [[IGNORE if t >= NEW_TEXT else t for t in row] for row in targets]
        expected = {"idx": (torch.int64, (B, 64), (64, 1))}
        expected["targets"] = expected["idx"]
        if pack:
            expected |= {"positions": expected["idx"], "mask": (torch.bool, (B, 1, 64, 64), (4096, 4096, 64, 1))}
        # one stride for all batch sizes, or the compiled model would be compiled again
        assert {name: (x.dtype, x.shape, x.stride()) for name, x in batch.items()} == expected


@pytest.mark.parametrize("device", ["cpu", pytest.param(GPU, marks=needs_gpu)])
@pytest.mark.parametrize("variant, recompute", [("gpt2", False), ("qwen3", True), ("llama_mla", False)])
def test_with_blocks_for_a_mask_the_gradients_are_the_same_and_nothing_is_recompiled(device, variant, recompute,
                                                                                     monkeypatch):
    """On a CPU without generated code, and against its will: FlexAttention has no backward there."""
    if device == "cpu":
        monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch.compiler.reset()
    rng, gpt = torch.Generator().manual_seed(0), new_gpt(variant, max_seq_len=300)
    gpt.recompute = recompute
    backend = "aot_eager" if device == "cpu" else "inductor"
    model, before = torch.compile(gpt, backend=backend, dynamic=False, fullgraph=True), graphs_compiled()
    for _ in range(2):
        begins = torch.rand(2, 300, generator=rng) < 0.02
        gradients = []
        for where, blocks, function in ("cpu", False, gpt), (device, True, model):
            gpt.to(where).zero_grad()
            mask, positions = packed_mask_and_positions(begins.to(where), blocks)
            batch = [x.to(where) for x in (tokens(2, 300), tokens(2, 300, seed=2), positions)]
            function(*batch, mask).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in gpt.parameters()]).cpu())
        assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()
    assert graphs_compiled() == before + 1


def test_an_uncompiled_model_takes_blocks_for_a_mask_too():
    """It compiles FlexAttention alone. Bad steps and --sanity_check run the uncompiled model on a GPU's batches."""
    gpt, begins = new_gpt("qwen3", max_seq_len=300).eval(), torch.arange(600).view(2, 300) % 70 == 0
    with torch.no_grad():
        plain, blocks = (gpt(tokens(2, 300), mask=mask, positions=positions) for mask, positions in (
            packed_mask_and_positions(begins), packed_mask_and_positions(begins, blocks=True)))
    assert (plain - blocks).abs().max() < 1e-4


def test_a_row_is_shown_token_by_token(tmp_path):
    data = jsonl(tmp_path / "a.jsonl", [turns("hi", "yo\n"), turns("ho", "\x1b")])
    packed = build(tmp_path / "rows", data, data)[0]
    hi = "<|endoftext|>|<|user|>|h|i|<|end|>|<|assistant|>|[y]|[o]|[\\n]|[<|end|>]"
    ho = "<|endoftext|>|<|user|>|h|o|<|end|>|<|assistant|>|[\ufffd]|[<|end|>]"
    assert packed.format_row(0) == f"{hi}\n\n{ho}\n\n(padding: {64 - 9 - 7} of 64 positions)"
    assert decode_chat(BYTES, packed.first_question()) == "<|endoftext|><|user|>hi<|end|><|assistant|>"
    dataset, _, _ = build(tmp_path / "rows", data, data, max_seq_len=9, pack=False)
    assert {dataset.format_row(i) for i in (0, 1)} == {
        f"{hi}\n\n(padding: 0 of 9 positions)", f"{ho}\n\n(padding: 2 of 9 positions)"}


@pytest.mark.parametrize("name, compiled", [
    ("gpt2", False), pytest.param("llama", True, marks=pytest.mark.slow), ("gpt2_mla", False), ("llama_mla", False)])
def test_packed_and_padded_rows_have_the_loss_of_each_conversation_alone(name, compiled):
    talks = [turns("q", "aaaa"), turns("qqq", "a", "q", "aa"), turns("qq", "aaa")]
    pairs = [tokenize_conversation(BYTES, talk, 64)[0] for talk in talks]
    row = np.hstack([*pairs, np.array([[E] * 5, [NEW_TEXT] * 5], "<u2")])  # five positions of padding
    packed = ChatDataset(row[None], BYTES, True, "")
    padded = ChatDataset(fill_rows(pairs, 64, False, E), BYTES, False, "")
    gpt = new_gpt(name, max_seq_len=64, n_layer=1 if compiled else 3)
    alone = []
    with torch.no_grad():
        for talk in talks:
            ids, trained = map(torch.tensor, render_chat(BYTES, talk))
            alone += F.cross_entropy(gpt(ids[None, :-1])[0], ids[1:], reduction="none")[trained[1:]].tolist()
        batch = packed.get_batch([0], CPU)
        targets = batch.pop("targets")[0]
        losses = F.cross_entropy(gpt(**batch)[0], targets, ignore_index=IGNORE, reduction="none")
    assert losses[targets != IGNORE].tolist() == pytest.approx(alone, abs=1e-5)
    for dataset in padded, packed:
        model = torch.compile(gpt, dynamic=False, fullgraph=True) if compiled and dataset.pack else gpt
        loss = model(**dataset.get_batch(range(len(dataset)), CPU))
        assert loss.item() == pytest.approx(sum(alone), rel=1e-5)
        assert dataset.count_targets(range(len(dataset)))[0] == len(alone)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gpt.parameters())


# ---------------------------------------------------------------------------------------------------
# other formats, and bad input

def sharegpt(*turns):
    return {"id": 7, "conversations": [{"from": role, "value": text} for role, text in turns]}


FORMATS = [  # a row, and its messages
    ({"messages": turns("q", "r"), "conversations": "x", "instruction": "y", "output": "z"}, turns("q", "r")),
    (sharegpt(("system", "s"), ("human", "q"), ("gpt", "r")), turns("q", "r", system="s")),
    (sharegpt(("user", "q"), ("bing", None)), [{"role": "user", "content": "q"}, {"role": "bing", "content": None}]),
    ({"instruction": "q", "input": "x", "output": "r"}, turns("q\nx", "r")),
    ({"instruction": "q", "input": "", "output": "r"}, turns("q", "r")),
    ({"instruction": "q", "output": None}, turns("q", None)),
    ({**sharegpt(("human", "q"), ("gpt", "r")), "system": "s"}, turns("q", "r", system="s")),
    ({"instruction": "q", "output": "r", "system_prompt": "s", "history": []}, turns("q", "r", system="s")),
    ({"messages": None, "conversations": turns("q", "r"), "tools": "[]"}, turns("q", "r")),
    ({"conversations": [{"role": None, "content": None, "from": role, "value": text}
                        for role, text in (("human", "q"), ("gpt", "r"))]}, turns("q", "r"))]


def test_other_formats_are_read_from_lines_a_list_parquet_and_the_hub(tmp_path, monkeypatch):
    rows = [row for row, _ in FORMATS]
    assert [to_messages(row) for row in rows] == [messages for _, messages in FORMATS]
    monkeypatch.chdir(tmp_path)
    Path("lines.json").write_text("\n".join(map(json.dumps, rows)))
    Path("list.json").write_text("\ufeff\n" + json.dumps(rows), encoding="utf-8")
    Path("lines.json.gz").write_bytes(gzip.compress(Path("lines.json").read_bytes()))
    with pyarrow.CompressedOutputStream("list.json.zst", "zstd") as file:
        file.write(Path("list.json").read_bytes())
    hub = {("owner/name", "config", "train"): rows, ("owner/name", None, "train_sft"): rows}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: hub[name, config, split])
    for source, where in [("lines.json", "line 3"), ("list.json", "row 2"), ("lines.json.gz", "line 3"),
                          ("list.json.zst", "row 2"), ("owner/name/config", "row 2"),
                          ("owner/name@train_sft", "row 2")]:
        train, _, text = build("rows", source, source)
        assert len(conversations_of(train.rows)[0]) == 8
        assert text.splitlines()[1:] == [
            f"  4 skipped: messages is not a list of {{role, content}}, both strings (the first: {source}, {where})",
            "WARNING: 3 of the conversations for validation are trained on, too"]
    datasets.Dataset.from_list([{"messages": turns("q", "r")}] * 3).to_parquet("a.parquet")
    assert "data: a.parquet, 3 conversations in" in build("rows", "a.parquet", "a.parquet")[2]


def test_what_another_format_has_beside_its_turns_is_not_dropped():
    """A turn keeps its weight, which counts it as skipped; history and tools are refused, in any format."""
    row = sharegpt(("human", "q"), ("gpt", "r"))
    row["conversations"][1]["weight"] = 0
    with pytest.raises(ValueError, match="a weight other than 1"):
        tokenize_conversation(BYTES, to_messages(row), 16)
    for name in "train", "loss":
        with pytest.raises(ValueError, match="a weight other than 1"):
            tokenize_conversation(BYTES, [*turns("q"), {"role": "assistant", "content": "r", name: False}], 16)
        tokenize_conversation(BYTES, [{**turns("q")[0], name: False}, *turns("q", "r")[1:]], 16)
    for row in ({"messages": turns("q", "r"), "tools": [{"name": "f"}]},
                {"instruction": "q", "output": "r", "history": [["a", "b"]]}):
        with pytest.raises(ValueError, match="it has tools or a history besides its messages"):
            to_messages(row)


def test_a_hub_data_set_is_read_again_once_it_has_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for commit, answer in ("1", "old"), ("1", "ignored"), ("2", "new"):
        monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name, timeout: SimpleNamespace(sha=name + commit))
        monkeypatch.setattr(datasets, "load_dataset", lambda *name, split: [{"messages": turns("q", answer)}])
        row = build("rows", "owner/name", "owner/name")[0].rows[0, 0].tolist()
        assert ("old" if answer == "ignored" else answer) in decode_chat(BYTES, row)


@pytest.mark.parametrize("line, words", [
    ('{"messages": [', "JSONDecodeError"), ("[1]", "TypeError"), ("7", "TypeError"),
    ('{"message": []}', "TypeError: found {'message': []}"),
    ('{"conversations": [{"user": "q"}]}', "KeyError: 'from'"), ("\udcff", "UnicodeDecodeError"),
    ("[" * 100_000, "RecursionError"),
], ids=["broken", "list", "number", "missing_key", "faulty_turn", "not_utf8", "deep"])
def test_a_line_that_is_no_conversation_is_named(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    good = json.dumps({"messages": turns("q", "a")})
    path.write_bytes("\n".join(["\ufeff" + good, "", line, good]).encode(errors="surrogateescape"))
    for _ in range(2):  # kept, and read
        message = error_line(build, tmp_path / "rows", path)
        assert "a.jsonl, line 3: " in message and words in message and 'expected {"messages": [...]}' in message
        assert "as JSON in UTF-8" in message


def test_what_is_skipped_is_counted(tmp_path, gpt2_vocabulary):
    bad = [turns("a", " ")] * 2 + [turns("a")] * 3
    data = jsonl(tmp_path / "a.jsonl", [turns("q", "a")] * 40 + bad)
    text = build(tmp_path / "rows", data, data)[2]
    assert "40 conversations in" in text and "  4 skipped: a message is empty (the first:" in text
    assert f"  6 skipped: its roles are not user and assistant in turn, after at most one system message (the first: "\
           f"{data}, line 43)" in text
    words = r"b.jsonl: it has no conversation that can be used\. \d skipped: a message is empty.*its roles are not"
    check_error(words, build, tmp_path / "rows", jsonl(tmp_path / "b.jsonl", bad))
    refused = str(jsonl(tmp_path / "c.jsonl", [turns("q", "a"), turns("q" + " " * 1_000_000 + "q", "a")]))
    text = build_datasets(tmp_path / "rows", refused, refused, gpt2_vocabulary, 64, True, 1)[2]  # by tiktoken
    assert "1 conversations" in text and "2 skipped: " in text and "line 2" in text


def test_mistakes_are_refused_in_one_line(tmp_path, capsys, monkeypatch):
    chats = some_chats(tmp_path)
    one, empty = jsonl(tmp_path / "one.jsonl", [turns("q", "a")]), jsonl(tmp_path / "empty.jsonl", [])
    for data, val_data, words in [
        ("", None, "--data.*''.*expected .json"), (f"{chats},", None, "''.*expected .json"),
        (f"{chats}:-1", None, "chats.jsonl:-1'.*SOURCE:WEIGHT"), (f"{chats}:0", None, "chats.jsonl:0.*weight"),
        ("nowhere.jsonl", None, "--data.*nowhere.jsonl.*no such file"),
        (chats, "nowhere.jsonl", "--val_data.*nowhere.jsonl.*no such file"),
        (tmp_path, None, f"{tmp_path}.*IsADirectoryError"),
        ("/nowhere/deep/typo.json", None, "typo.json.*no such file"), ("/nowhere/chats", None, "chats.*no such file"),
        (empty, None, "empty.jsonl: it has no conversation that can be used"),
        (f"{chats},{one}:0.01", chats, "--data.*one.jsonl:0.01.*none of its 1 usable.*raise its weight"),
        (chats, f"{one}:0.01", "--val_data.*one.jsonl:0.01"),
        (one, None, "--data.*one.jsonl.*none of its 1 usable.*validation; give more.*--val_data"),  # it is held out
    ]:
        check_error(words, build, tmp_path / "rows", data, val_data)
    assert "--chat_dir" in error_line(build, chats, chats)  # a file, where the folder should be
    monkeypatch.setenv("LOCAL_RANK", "1")  # prints if it was the one to tokenize
    (tmp_path / "half.json").write_text("[1")
    assert "half.json" in error_line(build, tmp_path / "rows", tmp_path / "half.json")
    with pytest.raises(SystemExit):
        build(tmp_path / "rows", "nowhere.jsonl")
    assert not capsys.readouterr().err


def test_a_missing_library_is_one_line(tmp_path, monkeypatch):
    data = some_chats(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    line = error_line(build, tmp_path / "rows", data)
    assert str(data) in line and "ModuleNotFoundError: " in line and "datasets" in line
