"""Chat data: the format token by token, truncation, packing, and a packed row equals its conversations."""
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from chat_data import (ChatDataset, best_fit, build_datasets, packed_mask_and_positions, parse_mixture,
                       read_conversations, tokenize_conversation)
from model import IGNORE
from prepare_data import python_conversations
from test_model import VARIANTS, new_gpt
from tokenizer import chat_tokens, decode_chat, get_tokenizer, render_chat

BYTES = get_tokenizer("bytes")
CPU = torch.device("cpu")
E, S, U, A, END = 256, 257, 258, 259, 260  # <|endoftext|>, <|system|>, <|user|>, <|assistant|>, <|end|>


def turns(*contents, system=None):
    """Messages of user and assistant in turn."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return first + [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def jsonl(path, conversations):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return path


def build(folder, data, val_data=None, max_seq_len=64, pack=True, seed=1, build=True):
    return build_datasets(folder, str(data), val_data and str(val_data), BYTES, max_seq_len, pack, seed, build)


def conversations_of(rows):
    """The (inputs, targets) of each conversation in rows (n, 2, T), and the number of padding positions."""
    found, padding = [], 0
    for idx, targets in rows.tolist():
        starts = [i for i in range(len(idx)) if idx[i] == E] + [len(idx)]
        for start, end in zip(starts, starts[1:]):
            if end == start + 1:
                padding += 1
            else:
                found.append((tuple(idx[start:end]), tuple(targets[start:end])))
    return found, padding


@pytest.fixture
def refused(capsys):
    """Calls a function with a user's mistake: exit code 2 and one line on stderr, which is returned."""
    def call(function, *args, **kwargs):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            function(*args, **kwargs)
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert end.value.code == 2 and len(lines) == 1
        return lines[0]
    return call


# ---------------------------------------------------------------------------------------------------
# the format

def c(text):
    return list(text.encode())


@pytest.mark.parametrize("messages, ids, trained", [
    (turns("hi", "yo"), [E, U, *c("hi"), END, A, *c("yo"), END], "0 0 00 0 0 11 1"),
    (turns("a", "b", "c", "d"), [E, U, *c("a"), END, A, *c("b"), END, U, *c("c"), END, A, *c("d"), END],
     "0 0 0 0 0 1 1 0 0 0 0 1 1"),
    (turns("a", "b", system="be"), [E, S, *c("be"), END, U, *c("a"), END, A, *c("b"), END], "0 0 00 0 0 0 0 0 1 1"),
    (turns("a", ""), [E, U, *c("a"), END, A, END], "0 0 0 0 0 1"),
    (turns("<|end|>", "<|endoftext|>"), [E, U, *c("<|end|>"), END, A, *c("<|endoftext|>"), END],
     "0 0 0000000 0 0 1111111111111 1"),
], ids=["single_turn", "multi_turn", "system", "empty_assistant", "special_tokens_spelled_out"])
def test_ids_and_mask_token_by_token(messages, ids, trained):
    assert render_chat(BYTES, messages) == (ids, [mark == "1" for mark in trained.replace(" ", "")])
    text = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in messages)
    assert decode_chat(BYTES, ids) == "<|endoftext|>" + text


def test_chat_tokens_are_the_four_after_the_tokenizers_own(gpt2_vocabulary):
    assert chat_tokens(gpt2_vocabulary) == {"system": 50257, "user": 50258, "assistant": 50259, "end": 50260}
    assert chat_tokens(BYTES) == {"system": S, "user": U, "assistant": A, "end": END}


TRUNCATED = "truncated after the last answer, or the last that fits into a row"


@pytest.mark.parametrize("max_seq_len, idx, targets, note", [
    (100, [E, U, 97, END, A, 98, END, U, 99, END, A, 100], [E, E, E, E, 98, END, E, E, E, E, 100, END], ""),
    (12, [E, U, 97, END, A, 98, END, U, 99, END, A, 100], [E, E, E, E, 98, END, E, E, E, E, 100, END], ""),
    (11, [E, U, 97, END, A, 98], [E, E, E, E, 98, END], TRUNCATED),
    (6, [E, U, 97, END, A, 98], [E, E, E, E, 98, END], TRUNCATED),
])
def test_a_long_conversation_is_truncated_after_an_answer(max_seq_len, idx, targets, note):
    """The target at each position of idx; <|endoftext|> where nothing is trained on."""
    pair, said = tokenize_conversation(BYTES, turns("a", "b", "c", "d"), max_seq_len)
    assert pair.tolist() == [idx, targets] and pair.dtype == np.uint16 and said == note


def test_a_conversation_whose_first_answer_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="longer than a row"):
        tokenize_conversation(BYTES, turns("a", "b", "c", "d"), 5)


@pytest.mark.parametrize("max_seq_len", [6, 8, 100])
def test_a_last_question_without_an_answer_is_truncated(max_seq_len):
    pair, note = tokenize_conversation(BYTES, turns("a", "b", "c"), max_seq_len)
    assert pair.tolist() == [[E, U, 97, END, A, 98], [E, E, E, E, 98, END]] and note == TRUNCATED


@pytest.mark.parametrize("messages", [turns("a", "b"), turns("a", "b", system="s"), turns("a", "b", "c")])
def test_conversations_that_can_be_trained_on(messages):
    assert tokenize_conversation(BYTES, messages, 100)[0].shape[0] == 2


def test_an_empty_system_message_is_left_out():
    without, _ = tokenize_conversation(BYTES, turns("a", "b"), 100)
    assert (tokenize_conversation(BYTES, turns("a", "b", system=" "), 100)[0] == without).all()


@pytest.mark.parametrize("messages, fault", [
    ("text", "not a list"), ([1], "not a list"), ({"role": "user"}, "not a list"), (3, "not a list"),
    (None, "not a list"), ([], "roles"), (turns("a"), "roles"), (turns("a", "  "), "a message is empty"),
    ([{"role": "human", "content": "a"}], "roles"), ([{"role": ["user"], "content": "a"}], "both strings"),
    ([{"content": "a"}], "both strings"), ([{"role": "user", "content": ["a"]}], "both strings"),
    ([{"role": "user"}], "both strings"), ([{"role": "user", "content": None}], "both strings"),
    (turns("a", "b") + turns("c", "d", system="s"), "at most one system message"),
    (turns("a", "b") + turns("c", "d", system=""), "at most one system message"),
    (turns("a")[:1] * 2 + turns("a", "b")[1:], "in turn"), (turns("a", "b")[1:], "in turn"),
])
def test_faults_of_conversations_are_named(messages, fault):
    with pytest.raises(ValueError, match=fault):
        tokenize_conversation(BYTES, messages, 100)


def test_conversations_from_pythons_documentation_can_be_trained_on():
    conversations = [conversation["messages"] for conversation in python_conversations()]
    assert len(conversations) > 1000
    assert not any(tokenize_conversation(BYTES, messages, 256)[1] for messages in conversations)
    answers = {messages[0]["content"]: messages[1]["content"] for messages in conversations}
    assert answers["What does dedent(text) do?"].startswith("Remove any common leading whitespace")
    assert len(answers) == len(conversations)
    assert not any("(self" in question or "(/" in question for question in answers)


# ---------------------------------------------------------------------------------------------------
# packing

@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=300))
def test_best_fit_places_each_item_once_and_no_row_overflows(lengths):
    rows = best_fit([np.full((2, n), i) for i, n in enumerate(lengths)], 64)
    used = [sum(pair.shape[1] for pair in row) for row in rows]
    assert sorted(pair[0, 0] for row in rows for pair in row) == list(range(len(lengths))) and max(used) <= 64
    # Johnson: at most 11/9 of the least number of rows, and one more
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 64) + sum(length > 21 for length in lengths) / 2 + 1
    assert len(rows) == 1 or sum(sorted(used)[:2]) > 64  # or the two emptiest would share a row


def test_packed_rows_hold_each_conversation_once_or_say_why_not(tmp_path):
    rng = np.random.default_rng(0)
    data = [turns(f"question {i} " + "q" * int(rng.integers(1, 20)), "a" * int(rng.integers(1, 20)))
            for i in range(200)]
    data += [turns("q" * 100, "a")] * 7 + [turns("q", "a", "q" * 100, "a")] * 5  # too long, and truncated
    train, val, text = build(tmp_path / "rows", jsonl(tmp_path / "a.jsonl", data), max_seq_len=96)
    (kept, padding), (held_out, _) = conversations_of(train.rows), conversations_of(val.rows)
    expected = [tokenize_conversation(BYTES, messages, 96)[0].tolist() for messages in data[:200] + data[-5:]]
    assert sorted(kept + held_out) == sorted((tuple(idx), tuple(targets)) for idx, targets in expected)
    assert 5 <= len(held_out) < 12 and not set(kept) & set(held_out)
    assert padding < 0.06 * 96 * len(train)

    trained, tokens = train.count_targets(range(len(train)))
    assert trained == sum(token != E for _, targets in kept for token in targets)
    assert tokens == len(train) * 96 - padding
    row_counts = np.array([train.count_targets(np.array([i])) for i in range(len(train))])
    assert row_counts.sum(0).tolist() == [trained, tokens]
    assert text.splitlines() == [
        f"data: {tmp_path}/a.jsonl, {len(kept)} conversations in {len(train)} rows of 96; "
        f"{tokens / len(train) / 96:.1%} of the positions are not padding, {trained / len(train) / 96:.1%} are "
        f"trained on; {len(held_out)} conversations for validation",
        f"  7 skipped: longer than a row before its first answer ends (the first: {tmp_path}/a.jsonl, line 201)",
        f"  5 {TRUNCATED} (the first: {tmp_path}/a.jsonl, line 208)"]


def test_rows_are_those_of_the_first_edition(tmp_path):
    """Their digests, as its checkpoints hold them: with other rows, or in another order, its runs could not resume."""
    a = jsonl(tmp_path / "a.jsonl", [turns("q" * (i % 17), f"answer {i}" * (i % 5 + 1), *("more", "yes") * (i % 2))
                                     for i in range(1, 300)])
    b = jsonl(tmp_path / "b.jsonl", [turns(f"b{i}", "yes", system="") for i in range(30)])
    for data, val_data, pack, train, val in [
        (f"{a}:2.5,{b}", None, True, "c960d2d7d472f336", "3dc70a5fbc7ba3a2"),
        (f"{a}:2.5,{b}", None, False, "0bc85dc36f481429", "7c3d98ef9d6f7f15"),
        (a, f"{b}:0.5", True, "2b9d86762f75b552", "0f76f6bd7ac69daa"),
    ]:
        datasets = build(tmp_path / "rows", data, val_data, pack=pack, seed=3)[:2]
        assert [hashlib.sha256(dataset.rows).hexdigest()[:16] for dataset in datasets] == [train, val]
        assert datasets[0].fingerprint[:16] == train


def test_a_weight_is_passes_an_epoch(tmp_path):
    for name in "ab":
        jsonl(tmp_path / f"{name}.jsonl", [turns(f"{name}{i}", "yes") for i in range(20)])
    val_data = jsonl(tmp_path / "val.jsonl", [turns("v", "yes")])
    train, val, _ = build(tmp_path, f"{tmp_path}/a.jsonl:0.5,{tmp_path}/b.jsonl:3", val_data)
    kept, _ = conversations_of(train.rows)
    assert {name: sum(idx[2] == ord(name) for idx, _ in kept) for name in "ab"} == {"a": 10, "b": 60}
    assert len({idx for idx, _ in kept}) == 30 and len(conversations_of(val.rows)[0]) == 1
    assert parse_mixture("c:/x.jsonl:2, me/chats,me/chats/part:.5, 10:30.jsonl,me/chats:2") == {
        "c:/x.jsonl": 2.0, "me/chats": 3.0, "me/chats/part": 0.5, "10:30.jsonl": 1.0}


def test_without_packing_a_row_is_one_conversation(tmp_path):
    data = jsonl(tmp_path / "a.jsonl", [turns(f"q{i}", "a") for i in range(60)])
    train, val, _ = build(tmp_path, data, max_seq_len=32, pack=False)
    assert len(train) + len(val) == 60
    assert all(len(conversations_of(train.rows[i:i + 1])[0]) == 1 for i in range(len(train)))


def test_rows_are_made_once_and_found_by_the_other_processes(tmp_path, capsys):
    data = jsonl(tmp_path / "a.jsonl", [turns(f"q{i}", "a") for i in range(60)])
    first = build(tmp_path / "rows", data)
    assert "packing" in capsys.readouterr().out
    for again in (build(tmp_path / "rows", data), build(tmp_path / "rows", data, build=False)):
        assert again[2] == first[2] and again[0].fingerprint == first[0].fingerprint
        assert all((a.rows == b.rows).all() for a, b in zip(first[:2], again[:2]))
    assert "packing" not in capsys.readouterr().out
    build(tmp_path / "rows", data, seed=2)
    assert len(list((tmp_path / "rows").iterdir())) == 2  # and no temporary file
    jsonl(tmp_path / "a.jsonl", [turns(f"q{i}", "a") for i in range(61)])  # made again when it changes
    train, val, _ = build(tmp_path / "rows", data)
    assert len(conversations_of(train.rows)[0] + conversations_of(val.rows)[0]) == 61


# ---------------------------------------------------------------------------------------------------
# batches

def test_mask_and_positions_token_by_token():
    idx = torch.tensor([[E, U, A, E, U, E, E]])  # texts of three and two tokens, two positions of padding
    mask, positions = packed_mask_and_positions(idx, E)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0],
                                         [0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0],
                                         [0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1]]


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("B", [1, 3])
def test_batches(tmp_path, pack, B):
    data = jsonl(tmp_path / "a.jsonl", [turns(f"q{i}", "a" * (i % 7 + 1)) for i in range(60)])
    dataset, _, _ = build(tmp_path / "rows", data, pack=pack)
    rows = dataset.rows
    indices = np.array([4, 0, 2])[:B]
    batch = dataset.get_batch(indices, CPU)
    assert batch.keys() == ({"idx", "targets", "mask", "positions"} if pack else {"idx", "targets"})
    for name, dtype, shape, stride in [("idx", torch.int64, (B, 64), (64, 1)),
                                       ("targets", torch.int64, (B, 64), (64, 1)),
                                       ("positions", torch.int64, (B, 64), (64, 1)),
                                       ("mask", torch.bool, (B, 1, 64, 64), (4096, 4096, 64, 1))]:
        if name in batch:  # one stride for all batch sizes, or the compiled model would be compiled again
            assert (batch[name].dtype, batch[name].shape, batch[name].stride()) == (dtype, shape, stride), name
    assert batch["idx"].tolist() == rows[indices, 0].tolist()
    assert batch["targets"].tolist() == [[IGNORE if t == E else t for t in row] for row in rows[indices, 1].tolist()]
    assert len(dataset) == len(rows) and dataset.max_seq_len == 64


def test_a_row_is_shown_token_by_token(tmp_path):
    data = jsonl(tmp_path / "a.jsonl", [turns("hi", "yo\n"), turns("ho", "\x1b")])
    shown = build(tmp_path / "rows", data, data)[0].format_row(0)
    hi = "<|endoftext|>|<|user|>|h|i|<|end|>|<|assistant|>|[y]|[o]|[\\n]|[<|end|>]"
    ho = "<|endoftext|>|<|user|>|h|o|<|end|>|<|assistant|>|[\ufffd]|[<|end|>]"
    assert shown == f"{hi}\n\n{ho}\n\n(padding: {64 - 9 - 7} of 64 positions)"
    dataset, _, _ = build(tmp_path / "rows", data, data, max_seq_len=9, pack=False)
    assert {dataset.format_row(i) for i in (0, 1)} == {
        f"{hi}\n\n(padding: 0 of 9 positions)", f"{ho}\n\n(padding: 2 of 9 positions)"}


def test_padded_and_packed_rows_have_the_loss_of_each_conversation_alone(tmp_path):
    """The total over a data set, and how many targets it is over."""
    rng = np.random.default_rng(0)
    talks = [turns("q" * int(rng.integers(1, 20)), "a" * int(rng.integers(1, 20))) for _ in range(60)]
    data = jsonl(tmp_path / "a.jsonl", talks)
    gpt, totals = new_gpt("llama", max_seq_len=64, vocab_size=384).eval(), []
    with torch.no_grad():
        for pack in (True, False):
            dataset, _, _ = build(tmp_path / "rows", data, data, pack=pack)
            losses = [gpt(**dataset.get_batch(np.array([i]), CPU)).item() for i in range(len(dataset))]
            totals.append((sum(losses), dataset.count_targets(np.arange(len(dataset)))[0]))
        nats, n = 0.0, 0
        for talk in talks:
            ids, trained = render_chat(BYTES, talk)
            log_probs = gpt(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
            answers = [i for i, on in enumerate(trained[1:]) if on]
            nats, n = nats - sum(log_probs[i, ids[i + 1]].item() for i in answers), n + len(answers)
    for total, targets in totals:
        assert total == pytest.approx(nats, rel=1e-5) and targets == n


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name in ("gpt2", "llama", "gpt2_mla", "llama_mla")])
def test_packed_loss_is_the_loss_of_each_conversation_alone(name, compiled):
    rng = np.random.default_rng(0)
    talks = [turns("q" * int(rng.integers(1, 9)), "a" * int(rng.integers(1, 9)),
                   *("again", "yes") * int(rng.integers(2))) for _ in range(4)]
    pairs = [tokenize_conversation(BYTES, talk, 200)[0] for talk in talks]
    rows = np.concatenate([*pairs, np.full((2, 5), E)], axis=1)[None]  # five positions of padding
    batch = ChatDataset(rows, BYTES, True, "").get_batch([0], CPU)
    gpt = new_gpt(name, max_seq_len=rows.shape[2], vocab_size=384, n_layer=1 if compiled else 3)
    total, start = 0.0, 0
    with torch.no_grad():
        logits = gpt(**{**batch, "targets": None})
        for pair in pairs:
            alone = ChatDataset(pair[None], BYTES, False, "").get_batch([0], CPU)
            end = start + pair.shape[1]
            losses = [F.cross_entropy(part, alone["targets"][0], ignore_index=IGNORE, reduction="none")
                      for part in (logits[0, start:end], gpt(alone["idx"])[0])]
            torch.testing.assert_close(*losses, atol=1e-5, rtol=0)
            total, start = total + losses[1].sum().item(), end
    loss = (torch.compile(gpt, dynamic=False, fullgraph=True) if compiled else gpt)(**batch)
    loss.backward()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gpt.parameters())


def test_a_micro_batch_without_a_target_has_no_loss_and_no_gradient():
    gpt = new_gpt("gpt2", max_seq_len=8, vocab_size=384)
    loss = gpt(**ChatDataset(np.full((2, 2, 8), E), BYTES, True, "").get_batch([0, 1], CPU))
    loss.backward()
    assert loss.item() == 0 and all(p.grad is None or p.grad.abs().max() == 0 for p in gpt.parameters())


# ---------------------------------------------------------------------------------------------------
# bad input

@pytest.mark.parametrize("line, words", [
    ('{"messages": [', "JSONDecodeError"), ("[1]", "messages"), ('{"message": []}', "KeyError: 'messages'"),
    ("7", "messages"), ("\udcff", "UnicodeDecodeError"), ("[" * 100_000, "RecursionError"),
], ids=["broken", "list", "missing_key", "number", "not_utf8", "deep"])
def test_a_line_that_is_no_conversation_is_named(tmp_path, refused, line, words):
    path = tmp_path / "a.jsonl"
    good = json.dumps({"messages": turns("q", "a")})
    path.write_bytes("\n".join(["\ufeff" + good, "", line, good]).encode(errors="surrogateescape"))
    message = refused(build, tmp_path / "rows", path)
    assert "a.jsonl, line 3: " in message and words in message and 'expected {"messages": [...]}' in message


SHAREGPT = [{"id": "a", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]},
            {"id": "b", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
                                          {"from": "gpt", "value": "r"}]},
            {"id": "c", "conversations": [{"from": "tool", "value": "q"}]}]
ALPACA = [{"instruction": "q", "input": "", "output": "r"}, {"instruction": "q", "input": "x", "output": "r"}]


@pytest.mark.parametrize("name, rows, messages", [
    ("ShareGPT", SHAREGPT, [turns("q", "r"), turns("q", "r", system="s"), [{"role": "tool", "content": "q"}]]),
    ("Alpaca", ALPACA, [turns("q", "r"), turns("q\nx", "r")])])
@pytest.mark.parametrize("array", [False, True])
def test_another_format_is_named_and_converted_by_the_code_in_the_error(tmp_path, monkeypatch, capsys, name, rows,
                                                                         messages, array):
    monkeypatch.chdir(tmp_path)
    source = Path("chats.json" if array else "other.jsonl")
    source.write_text(json.dumps(rows) if array else "\n".join(map(json.dumps, rows)))
    with pytest.raises(SystemExit):
        list(read_conversations(str(source)))
    error, _, code = capsys.readouterr().err.partition("\n")
    assert error == f"error: --data or --val_data: {source} is in {name}'s format; in Python this converts it:"
    exec(code, {})
    assert [found for _, found in read_conversations(f"{source.stem}-messages.jsonl")] == messages


def test_keys_of_another_format_beside_messages_are_not_misread(tmp_path):
    path = tmp_path / "a.jsonl"
    row = {"conversations": "x" * 20_000, "instruction": "y", "output": "z", "messages": turns("q", "a")}
    path.write_text(json.dumps(row))
    assert [found for _, found in read_conversations(str(path))] == [turns("q", "a")]


def test_faulty_conversations_are_counted_and_the_rest_kept(tmp_path, refused):
    good = [turns(f"q{i}", "a") for i in range(40)]
    bad = [[{"role": "tool", "content": "x"}], turns("a"), turns("a", " "), turns("a")[:1] * 2 + turns("a", "b")[1:],
           turns("a", "b", system="")]
    data = jsonl(tmp_path / "a.jsonl", good + bad)
    train, val, text = build(tmp_path / "rows", data)
    assert len(conversations_of(train.rows)[0] + conversations_of(val.rows)[0]) == 41
    for note in ("3 skipped: its roles are not", "1 skipped: a message is empty", f"{tmp_path}/a.jsonl, line 41"):
        assert note in text, note

    message = refused(build, tmp_path / "rows", jsonl(tmp_path / "b.jsonl", bad[:4]))
    assert "b.jsonl:1: none of its 0 usable conversations" in message and "its roles are not" in message


def test_what_tiktoken_refuses_is_skipped(tmp_path, gpt2_vocabulary):
    data = jsonl(tmp_path / "a.jsonl", [turns("q", "a"), turns("q" + " " * 1_000_000 + "q", "a")])
    _, _, text = build_datasets(tmp_path, str(data), str(data), gpt2_vocabulary, 64, True, 1, True)
    assert "1 conversations" in text and "2 skipped: " in text and "line 2" in text


def test_mistakes_are_refused_in_one_line(tmp_path, refused):
    chats = jsonl(tmp_path / "chats.jsonl", [turns(f"q{i}", "a") for i in range(40)])
    one, empty = jsonl(tmp_path / "one.jsonl", [turns("q", "a")]), jsonl(tmp_path / "empty.jsonl", [])
    for data, val_data, words in [
        ("", None, ["--data", "''", "not a file"]), (f"{chats},", None, ["''", "not a file"]),
        (f"{chats}:", None, ["chats.jsonl:'", "SOURCE:WEIGHT"]),
        (f"{chats}:-1", None, ["chats.jsonl:-1'", "SOURCE:WEIGHT"]), (f"{chats}:0", None, ["chats.jsonl:0", "weight"]),
        (chats, f"{chats}:0", ["--val_data=", "chats.jsonl:0", "weight"]),
        ("nowhere.jsonl", None, ["--data", "nowhere.jsonl: FileNotFoundError"]),
        (chats, "nowhere.jsonl", ["--val_data", "nowhere.jsonl: FileNotFoundError"]),
        ("/nowhere/deep/typo.json", None, ["typo.json", "not a file"]),
        ("no such/data*", None, ["no such/data*", "not a file"]),
        (empty, None, ["empty.jsonl", "none of its 0 usable conversations"]),
        (f"{chats},{one}:0.01", chats, ["--data=", "one.jsonl:0.01", "none of its 1 usable", "raise its weight"]),
        (chats, f"{one}:0.01", ["--val_data=", "one.jsonl:0.01"]),
        (one, None, ["--data=", "one.jsonl", "none of its 1 usable", "--val_data"]),  # it is held out
    ]:
        message = refused(build, tmp_path / "rows", data, val_data)
        assert all(word in message for word in words), message
    assert "--chat_dir" in refused(build, chats, chats)  # a file, where the folder should be


def test_damaged_rows_are_refused_with_what_to_do(tmp_path, refused):
    data = jsonl(tmp_path / "a.jsonl", [turns(f"q{i}", "a") for i in range(60)])
    build(tmp_path / "rows", data)
    [path] = (tmp_path / "rows").iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    for damaged in (b"", whole[:100], whole[:-100], whole[:-2000] + b"A" * 2000,
                    whole[:middle] + bytes(255 - byte for byte in whole[middle:middle + 99]) + whole[middle + 99:]):
        path.write_bytes(damaged)
        message = refused(build, tmp_path / "rows", data)
        assert str(path) in message and "remove it" in message
    path.unlink()
    build(tmp_path / "rows", data)
    assert path.read_bytes() == whole
