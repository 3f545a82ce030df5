"""Text to shards: every token is accounted for, whatever interrupts the work or is wrong with the source."""
import ast
import gzip
import io
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import zlib
from contextlib import chdir, redirect_stderr, redirect_stdout
from unittest import mock

os.environ.setdefault("USE_TORCH", "0")  # or `datasets` imports torch, which takes longer than all the rest
import datasets  # noqa: F401: imported once for all runs of the script in this process
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
import tokenizers
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

import prepare_data
import python_text
from conftest import error_line, random_texts, read_lines
from prepare_data import find_source, read_batches, tokenize, tokenize_batches
from shards import read_meta, read_shard
from tokenizer import get_tokenizer

SCRIPT = prepare_data.__file__


class Killed(BaseException):
    """Like SIGKILL, the script does not handle it."""


def run_script(folder, *args, encoding="utf-8"):
    """Run the script in this process, in `folder`. Returns its exit code and what it printed, in this encoding."""
    output, code, locks = io.TextIOWrapper(io.BytesIO(), encoding, newline=""), 0, []

    def new_lock(path):
        locks.append(FileLock(path))
        return locks[-1]

    with (chdir(folder), redirect_stdout(output), redirect_stderr(output), mock.patch("filelock.FileLock", new_lock),
          mock.patch("sys.argv", [SCRIPT, *args])):
        try:
            runpy.run_path(SCRIPT, run_name="__main__")
        except (SystemExit, Killed) as stop:
            code = stop.args[0]
    for lock in locks:
        lock.release()  # as the end of a process does
    output.seek(0)
    return code, output.read()


def prepare(folder, *args):
    """Run the script to its end and return what it printed."""
    code, output = run_script(folder, *args)
    assert code == 0, output
    return output


def refusal(folder, *args):
    """Run the script with a mistake and return its one line of error, the last of its output."""
    code, output = run_script(folder, *args)
    *before, last = output.splitlines()
    assert code == 2 and last.startswith("error: ") and "\nerror: " not in "\n".join(before), output
    return last


def kill_at_rename(n, folder, *args):
    """Run the script until it has renamed n files, and stop it just before it renames another."""
    def rename_or_die(*paths, rename=os.replace, left=iter(range(n))):
        if next(left, None) is None:
            raise Killed("killed")
        rename(*paths)

    with mock.patch("os.replace", rename_or_die):
        assert run_script(folder, *args)[0] == "killed"


def write_parquet(path, documents, row_group_size=1000, column="text"):
    table = pyarrow.table({"id": range(len(documents)), column: documents})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)


def jsonl(documents):
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents)).encode()


def shard_tokens(data_dir, split):
    """The tokens of each shard of a split."""
    return [read_shard(path).tolist() for path in sorted(data_dir.glob(f"{split}_*.bin"))]


def all_tokens(data_dir):
    return sum(shard_tokens(data_dir, "val") + shard_tokens(data_dir, "train"), [])


def bytes_tokens(documents):
    return [token for text in documents for token in (256, *text.encode("utf-8"))]


def contents(data_dir):
    """The bytes of each file of a folder; of meta.json what does not depend on the source and on the time."""
    meta = json.loads((data_dir / "meta.json").read_text())
    del meta["source"], meta["state"]
    meta["shards"] = {name: checksum for name, (checksum, _) in meta.get("shards", {}).items()}
    return meta, {path.name: path.read_bytes() for path in data_dir.iterdir() if path.name != "meta.json"}


# ---------------------------------------------------------------------------------------------------
# sources

PARQUET = ["--files=*.parquet", "--tokenizer=bytes", "--val_tokens=8000", "--shard_size=25000", "--num_threads=1"]
RNG = random.Random(0)
DOCUMENTS = random_texts(RNG, 400)
DOCUMENTS.insert(250, "long " * 2000)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """
    DOCUMENTS as two parquet files whose row groups are not multiples of a batch, as .jsonl and .jsonl.gz, and as a
    data set of the hub's kind; 150 of them as .txt files; and `undisturbed`, made from the parquet files.
    """
    folder = tmp_path_factory.mktemp("sources")
    write_parquet(folder / "b.parquet", DOCUMENTS[370:], row_group_size=7)
    write_parquet(folder / "a.parquet", DOCUMENTS[:370], row_group_size=100)
    (folder / "a.jsonl").write_bytes(jsonl(DOCUMENTS[:370]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(DOCUMENTS[370:])))
    (folder / "hub").mkdir()
    write_parquet(folder / "hub/test-0.parquet", DOCUMENTS)
    (folder / "texts[1]").mkdir()
    for i, text in enumerate(DOCUMENTS[:150]):
        (folder / f"texts[1]/{i:04d}.txt").write_text(text, encoding="utf-8", newline="")
    prepare(folder, *PARQUET, "--data_dir=undisturbed")
    return folder


def test_the_shards_hold_the_documents_and_meta_counts_them(sources):
    folder, tokens = sources / "undisturbed", bytes_tokens(DOCUMENTS)
    [val], train = shard_tokens(folder, "val"), shard_tokens(folder, "train")
    assert len(val) == 8000 and sum(train, val) == tokens
    shard_ends = 8000 + np.cumsum([len(shard) for shard in train])
    assert set(shard_ends) < {len(bytes_tokens(DOCUMENTS[:i])) for i in (*range(64, 401, 64), 401)}
    assert len(train) == 6 and min(map(len, train[:-1])) >= 25000  # a shard is of two batches
    meta = read_meta(folder)
    assert meta.items() > {"tokenizer": "bytes", "vocab_size": 384, "documents": 401, "documents skipped": 0,
                           "tokens": len(tokens), "bytes": len(tokens) - 401, "exhausted": True}.items()
    assert meta["shards"] == {path.name: [zlib.crc32(read_shard(path)), path.stat().st_mtime_ns]
                              for path in folder.glob("*.bin")}
    assert [name for name, _ in meta["source"]["files"]] == ["a.parquet", "b.parquet"]


def test_each_file_is_read_once_and_empty_documents_are_skipped(tmp_path):
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(jsonl(["", None, *DOCUMENTS[:100], None])))
    (tmp_path / "in/d[1]").mkdir(parents=True)  # no pattern: the file is there
    (tmp_path / "in/d[1]/y.jsonl").write_bytes(jsonl(["", *DOCUMENTS[100:130]]))
    printed = prepare(tmp_path, "--files=z.jsonl.gz, in/d[1]/y.jsonl,**/*.jsonl,./z.jsonl.gz", "--tokenizer=bytes")
    assert "4 documents skipped" in printed and "130 documents" in printed
    assert all_tokens(tmp_path / "data/files") == bytes_tokens(DOCUMENTS[100:130] + DOCUMENTS[:100])
    n_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl*"))
    assert len(shard_tokens(tmp_path / "data/files", "val")[0]) == n_bytes // 10  # the default


def test_a_data_set_of_the_hub_is_read_in_the_configuration_and_split_that_meta_names():
    fineweb = "HuggingFaceFW/fineweb-edu"
    for name, config, found in (fineweb, None, "sample-10BT"), (fineweb, "CC-2024", "CC-2024"), ("a/b", None, None):
        assert find_source(None, name, config, "test") == {"dataset": name, "config": found, "split": "test"}


def test_zst_needs_no_other_package_and_a_truncated_file_is_refused(tmp_path):
    whole = b"".join(pyarrow.compress(jsonl(documents), "zstd", asbytes=True)  # two frames, as pzstd and cat make them
                     for documents in (DOCUMENTS[:70], DOCUMENTS[70:100]))
    (tmp_path / "a.jsonl.zst").write_bytes(whole)
    prepare(tmp_path, "--files=a.jsonl.zst", "--tokenizer=bytes", "--val_tokens=10")
    assert all_tokens(tmp_path / "data/files") == bytes_tokens(DOCUMENTS[:100])
    (tmp_path / "a.jsonl.zst").write_bytes(whole[:-9])
    assert "Truncated" in refusal(tmp_path, "--files=a.jsonl.zst", "--tokenizer=bytes", "--data_dir=cut")


def test_a_txt_file_keeps_its_byte_order_mark_but_not_its_carriage_returns(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffa\r\nb\rc\n".encode())
    prepare(tmp_path, "--files=a.txt", "--tokenizer=bytes", "--val_tokens=3")
    assert all_tokens(tmp_path / "data/files") == bytes_tokens(["\ufeffa\nb\nc\n"])


def test_half_a_surrogate_pair_in_json_becomes_the_replacement_character(tmp_path):
    texts = ["a\ud83d b", "\udc00", "\ud83d\ude00", "\ude00\ud83d", "\ud83d\ud83d\ude00", r"\ud83d, \\ud83d", "\n\"é"]
    lines = jsonl(texts)
    assert rb"a\ud83d b" in lines
    (tmp_path / "a.jsonl").write_bytes(lines + lines.replace(rb"\ud", rb"\uD"))
    prepare(tmp_path, "--files=a.jsonl", "--tokenizer=bytes", "--val_tokens=10")
    whole = ["a\ufffd b", "\ufffd", "\U0001f600", "\ufffd\ufffd", "\ufffd\U0001f600"]
    assert all_tokens(tmp_path / "data/files") == bytes_tokens(
        [*whole, *texts[5:], *whole, *[text.replace("ud83d", "uD83d") for text in texts[5:]]])


def test_one_document_is_enough_and_its_tokens_are_gpt2s(tmp_path, gpt2_vocabulary):
    text = "A sentence of <|endoftext|> English.\n\nAnd its    next, isn't it?\n" * 20
    (tmp_path / "a.txt").write_text(text)
    advice = "This is too little text for GPT-2 124M"
    assert advice in prepare(tmp_path, "--files=a.txt", "--data_dir=out", "--val_tokens=50")
    assert all_tokens(tmp_path / "out") == [50256, *tiktoken.get_encoding("gpt2").encode_ordinary(text)]
    assert read_meta(tmp_path / "out").items() > {"tokenizer": "gpt2", "vocab_size": 50304, "bytes": len(text)}.items()
    prepare(tmp_path, "--files=a.txt", "--data_dir=default")
    assert len(shard_tokens(tmp_path / "default", "val")[0]) == len(text) // 40
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 1_100_000, "id": "y" * 10_000_000}]))
    assert advice not in prepare(tmp_path, "--files=a.json", "--data_dir=large", "--tokenizer=bytes")
    assert len(shard_tokens(tmp_path / "large", "val")[0]) == 2 ** 20


def test_what_else_rows_hold_does_not_matter(tmp_path):
    """A row without text, or whose text is not a string, leaves its neighbours as they are; so do other columns."""
    document = 'He said "h\u00e9".\n'
    rows = [[{"text": document}], [{"text": document, "n": "x"}, {"text": 5}, {"text": document, "n": 1}, {"n": 2},
            {"text": ["a"]}, {"text": document, "more": {}}], [{"id": 3, "text": "2024-01-01T00:00:00Z"}]]
    for i, some in enumerate(rows):
        (tmp_path / f"{i}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some))
        (tmp_path / f"{i}.json").write_text("\ufeff" + json.dumps(some, indent=1), encoding="utf-8")
        columns = {"text": [row["text"] for row in some if isinstance(row.get("text"), str)]}
        pyarrow.parquet.write_table(pyarrow.table({**columns, str(i): columns["text"]}), tmp_path / f"{i}.parquet")
    for kind, skipped in ("jsonl", 3), ("json", 3), ("parquet", 0):
        printed = prepare(tmp_path, f"--files=*.{kind}", f"--data_dir={kind}", "--tokenizer=bytes", "--val_tokens=9")
        assert "5 documents, " in printed and f"{skipped} documents skipped" in printed
        assert all_tokens(tmp_path / kind) == bytes_tokens([document] * 4 + ["2024-01-01T00:00:00Z"])


def test_text_in_any_of_arrows_types(tmp_path):
    text = pyarrow.array(DOCUMENTS[:20] + [None, ""])
    for i, column in enumerate((text, text.cast(pyarrow.large_string()), text.dictionary_encode())):
        write_parquet(tmp_path / f"{i}.parquet", column)
    assert "6 documents skipped" in prepare(tmp_path, "--files=*.parquet", "--tokenizer=bytes", "--val_tokens=10")
    assert all_tokens(tmp_path / "data/files") == bytes_tokens(DOCUMENTS[:20] * 3)


def test_the_standard_library_is_a_source(tmp_path, monkeypatch):
    for name in "python_conversations", "sum_questions", "letter_questions":  # which take seconds
        monkeypatch.setattr(python_text, name, lambda: [])
    monkeypatch.setattr(python_text, "python_conversations", lambda: [{"messages": []}] * 3)
    command, folder = ["--dataset=python", "--max_tokens=30000", "--val_tokens=1000"], tmp_path / "data/python"
    prepare(tmp_path, *command)
    texts = get_tokenizer("bytes").decode(all_tokens(folder)).split("<|endoftext|>")[1:]
    assert len(texts) == read_meta(folder)["documents"] > 50 and all(map(ast.parse, texts))
    chats = folder / "chat.jsonl"
    assert chats.read_text() == '{"messages": []}\n' * 3
    chats.write_text("edited")
    assert "prepared already" in prepare(tmp_path, *command) and chats.read_text() == "edited"


def test_questions_to_train_on_and_others_to_test_with(tmp_path, monkeypatch):
    from evaluate import final_number, load_examples  # not at the top: imports torch
    files = [{"text": "strawberry raspberry " + " ".join("".join(RNG.choices("abcde", k=6)) for _ in range(500))}]
    monkeypatch.setattr(python_text, "python_files", lambda: files)
    monkeypatch.setattr(python_text, "python_conversations", lambda: [python_text.conversation("Why?", "So.")])
    prepare(tmp_path, "--dataset=python", "--val_tokens=1000")
    folder = tmp_path / "data/python"
    chats = [[message["content"] for message in chat["messages"]] for chat in read_lines(folder / "chat.jsonl")]
    trained = dict(chats)
    assert len(trained) == len(chats) and trained["Why?"] == "So."
    tested = {}
    for task in "sums", "letters":
        rows = load_examples(task, get_tokenizer("bytes"), "chat", folder / "tasks")
        assert len(rows) == 200
        tested |= {row["question"]: row["answer"] for row in read_lines(folder / "tasks" / task / "test.jsonl")}
    assert len(tested) == 400 and not tested.keys() & trained.keys()
    words = [{question.split()[-1] for question in asked if "many" in question} for asked in (tested, trained)]
    assert len(words[0]) == 200 and not words[0] & words[1]  # the words too are new
    for question, answer in [*tested.items(), *chats[1:]]:
        if found := re.fullmatch(r"What is (\d\d) \+ (\d\d)\?", question):
            right = int(found[1]) + int(found[2])
        else:
            letter, word = re.fullmatch("How many ([a-z])'s are in ([a-z]+)\\?", question).groups()
            right = word.count(letter)
        assert final_number(answer) == right
    answers = {**tested, **trained}
    assert answers["What is 47 + 85?"] == "7+5=12, 4+8+1=13, so 132"
    assert answers["What is 40 + 59?"] == "0+9=9, 4+5=9, so 99"
    assert answers["How many r's are in raspberry?"] == "r1aspber2r3y, so 3"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_names_that_the_terminal_cannot_show(tmp_path, encoding):
    """Any bytes may be the name of a folder or file."""
    name = os.fsdecode("\u00e9\u3042".encode() + b"\xff")
    (tmp_path / f"{name}.txt").write_text("text " * 9)
    code, output = run_script(tmp_path, f"--files={name}.txt", f"--data_dir={name}", "--tokenizer=bytes",
                              "--val_tokens=9", encoding=encoding)
    shown = {"ascii": "???", "utf-8": "\u00e9\u3042?"}[encoding]
    assert code == 0 and f"opening {shown}.txt" in output
    assert f"'--data_dir={shown}' '--out_dir=out-{shown}'\n" in output
    assert all_tokens(tmp_path / name) == bytes_tokens(["text " * 9])


@given(st.lists(st.text() | st.sampled_from([None, 3, b"bytes", ["a list"]])))
def test_documents_become_tokens(documents):
    tokens, counts = tokenize(get_tokenizer("bytes"), documents)
    kept = [text for text in documents if text and isinstance(text, str)]
    assert tokens.tolist() == bytes_tokens(kept)
    assert counts == {"documents": len(kept), "documents skipped": len(documents) - len(kept), "tokens": len(tokens),
                      "bytes": len(tokens) - len(kept)}


def test_what_tiktoken_refuses_is_skipped(gpt2_vocabulary):
    tokens, counts = tokenize(gpt2_vocabulary, ["text", "a" + " " * 1_100_000 + "b", "more text"])
    assert np.flatnonzero(tokens == 50256).tolist() == [0, 2] and counts["documents skipped"] == 1


# ---------------------------------------------------------------------------------------------------
# the same bytes, whatever happens

@pytest.mark.parametrize("files, n", [("*.parquet", 401), ("a.jsonl,b.jsonl.gz", 401), ("texts[[]1]/*.txt", 150)])
def test_any_batch_is_a_place_to_resume(sources, files, n):
    def read(state):
        batches = read_batches(find_source(files, None, None, None), "text", json.loads(json.dumps(state)))
        batches = [*tokenize_batches(batches, get_tokenizer("bytes"), 3)]
        return [tokens.tolist() for tokens, _, _ in batches], [state for _, _, state in batches]

    with chdir(sources):
        batches, states = read(None)
        assert batches == [bytes_tokens(DOCUMENTS[i:min(i + 64, n)]) for i in range(0, n, 64)]
        resumed = [read(state) for state in states]
        assert [later for later, _ in resumed] == [batches[i:] for i in range(1, len(batches) + 1)]
        assert read(resumed[0][1][0])[0] == batches[2:]  # from a state of a resumed run


def test_any_number_of_threads_makes_the_same_bytes(sources):
    prepare(sources, *PARQUET, "--data_dir=threads", "--num_threads=3")
    assert contents(sources / "threads") == contents(sources / "undisturbed")


# Renames of a run: meta.json, val, the first training shard, meta.json, five times a shard and meta.json, meta.json
@pytest.mark.parametrize("source, renames", [([], range(1, 15)), (["--dataset=./hub", "--dataset_split=test"], [8])])
def test_killed_between_two_renames_makes_the_same_bytes(sources, tmp_path, source, renames):
    for n in renames:
        data_dir = tmp_path / str(n)
        command = [*(source or PARQUET[:1]), *PARQUET[1:], f"--data_dir={data_dir}"]
        kill_at_rename(n, sources, *command)
        known = json.loads((data_dir / "meta.json").read_text())["tokens"]
        assert bool(known) == (n > 3)
        assert "its preparation was interrupted" in error_line(read_meta, data_dir)
        if known:  # a shard that meta.json does not record does not stay
            prepare(sources, *command, f"--max_tokens={known}")
            assert {path.name for path in data_dir.glob("*.bin")} == json.loads(
                (data_dir / "meta.json").read_text())["shards"].keys()
        printed = prepare(sources, *command)
        assert (f"after {known:,} tokens in complete shards" if n < 14 else "prepared already") in printed
        assert contents(data_dir) == contents(sources / "undisturbed")


def test_a_larger_max_tokens_adds_shards_and_changes_none(sources):
    args, folder = [*PARQUET, "--data_dir=raised"], sources / "raised"
    prepare(sources, *args, f"--max_tokens={len(bytes_tokens(DOCUMENTS[:64]))}")  # exactly
    meta, before = contents(folder)
    assert all_tokens(folder) == bytes_tokens(DOCUMENTS[:64]) and meta["tokens"] == len(all_tokens(folder))
    for max_tokens in (9000, meta["tokens"]):
        assert "prepared already" in prepare(sources, *args, f"--max_tokens={max_tokens}")
    assert contents(folder) == (meta, before)
    old = json.loads((folder / "meta.json").read_text())
    del old["shards"]  # as an earlier version left it
    (folder / "meta.json").write_text(json.dumps(old))
    kill_at_rename(2, sources, *args, "--max_tokens=100000")
    for more in ["--max_tokens=100000"], []:
        prepare(sources, *args, *more)
    meta, after = contents(folder)
    assert before.items() < after.items() and all_tokens(folder) == bytes_tokens(DOCUMENTS) and meta["exhausted"]
    assert meta["shards"].keys() == {name for name in after.keys() - before.keys() if name.endswith(".bin")}


def test_interrupted_by_ctrl_c_it_ends_in_one_line_and_never_imports_torch(tmp_path):
    command = [sys.executable, "-X", "importtime", SCRIPT, "--dataset=python", "--shard_size=1", "--data_dir=out"]
    env = {name: value for name, value in os.environ.items() if name != "USE_TORCH"}
    with open(tmp_path / "stderr", "w") as stderr:
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=stderr)
    while not (tmp_path / "out/train_000001.bin").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait() == -signal.SIGINT
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert "Traceback (most recent call last):" not in lines
    assert {"datasets", "torch"} & {line.split("|")[-1].strip() for line in lines} == {"datasets"}
    assert "interrupted: the same command resumes after the complete shards" in lines
    assert not [line for line in lines if line.startswith("error: ")]


# ---------------------------------------------------------------------------------------------------
# folders

@pytest.fixture
def prepared(sources, tmp_path):
    """A copy of the parquet files and of `undisturbed`. Returns the folder, and the command that prepared it."""
    for path in sources.glob("*.parquet"):
        shutil.copy(path, tmp_path)
    shutil.copytree(sources / "undisturbed", tmp_path / "undisturbed")
    return tmp_path, [*PARQUET, "--data_dir=undisturbed"]


@pytest.mark.parametrize("change", ["val_tokens=7999", "shard_size=25001", "tokenizer=gpt2", "text_column=id",
                                    "files=a.parquet"])
def test_what_was_prepared_otherwise_is_refused(prepared, gpt2_vocabulary, change):
    folder, command = prepared
    before = contents(folder / "undisturbed")
    name = change.split("=")[0].replace("files", "source")
    line = refusal(folder, *command, f"--{change}")
    assert f"--data_dir=undisturbed: holds shards prepared with another {name}" in line
    assert "give another --data_dir" in line and contents(folder / "undisturbed") == before


def test_a_changed_source_is_refused_and_a_damaged_folder(prepared):
    folder, command = prepared
    for name in ("a.parquet", "undisturbed/val_000000.bin", "undisturbed/train_000005.bin"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-2])
        assert "another source" if name == "a.parquet" else name in refusal(folder, *command)
        (folder / name).unlink()
        assert "prepared with another" if name == "a.parquet" else name in refusal(folder, *command)
        (folder / name).write_bytes(whole)
    assert "prepared already" in prepare(folder, *command)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-2] + b"\7\0")
    assert "train_000005.bin: its tokens have changed" in refusal(folder, *command)
    (folder / name).write_bytes(whole)
    path = folder / "undisturbed/meta.json"
    meta = json.loads(path.read_text()) | {"exhausted": False}
    for damaged in ({**meta, "state": {"shard_idx": 0}}, {**meta, "state": 3}, {**meta, "tokens": "3"}, {}, [],
                    {**meta, "tokens": "3", "exhausted": True}, {**meta, "documents": None, "exhausted": True}):
        path.write_text(json.dumps(damaged))
        assert "undisturbed" in refusal(folder, *command)
    path.write_text("{")
    assert "--data_dir=undisturbed" in refusal(folder, *command)


def test_a_folder_of_the_version_before(prepared):
    """It had fewer keys in meta.json."""
    folder, command = prepared
    path = folder / "undisturbed/meta.json"
    meta = json.loads(path.read_text())
    for key in ("text_column", "val_tokens", "shard_size", "finished", "state", "shards"):
        del meta[key]
    path.write_text(json.dumps(meta))
    assert read_meta(path.parent) == {**meta, "shards": {}} and "prepared already" in prepare(folder, *command)
    path.write_text(json.dumps(meta | {"exhausted": False}))
    assert "an earlier version" in refusal(folder, *command)
    state = {"examples_iterable": {"previous_state": {}}}  # of another reader of files
    path.write_text(json.dumps(meta | {"exhausted": False, "state": state}))
    assert "an earlier version" in refusal(folder, *command)
    path.unlink()  # as in an unfinished one, or with shards from elsewhere
    line = refusal(folder, *command)
    assert "meta.json" in line and "remove the folder" in line


def test_a_tokenizer_leaves_no_file_behind_for_the_next_one(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "p/tokenizer").mkdir(parents=True)
    (tmp_path / "p/tokenizer/mine.txt").touch()  # of a user
    for i, names in enumerate([("tokenizer.json", "chat_template.jinja"), ("tokenizer.json",)]):
        for name in names:
            (tmp_path / f"t{i}").mkdir(exist_ok=True)
            bpe = tokenizers.ByteLevelBPETokenizer()
            bpe.train_from_iterator(["a"], special_tokens=["<|endoftext|>"])
            (tmp_path / f"t{i}" / name).write_text(bpe.to_str() if name.endswith("json") else "{{ messages }}")
        prepare(tmp_path, "--files=a.txt", f"--tokenizer=t{i}", "--val_tokens=50", "--data_dir=p")
        assert {path.name for path in (tmp_path / "p/tokenizer").iterdir()} == {*names, "mine.txt"}
        for path in [*(tmp_path / "p").glob("*.bin"), tmp_path / "p/meta.json"]:
            path.unlink()
    assert "tokenizer=''" in refusal(tmp_path, "--files=a.txt", "--tokenizer=", "--data_dir=q")


def test_a_tokenizer_with_another_separator_does_not_add_to_a_folder(tmp_path):
    """It splits text alike, so it has the same name."""
    (tmp_path / "a.txt").write_text("text " * 100)
    command = ["--files=a.txt", "--tokenizer=t", "--val_tokens=50", "--data_dir=p"]
    for special in (["<|endoftext|>"], ["<|pad|>", "<|endoftext|>"]):
        bpe = tokenizers.ByteLevelBPETokenizer()
        bpe.train_from_iterator(["a"])
        bpe.add_special_tokens(special)
        (tmp_path / "t").mkdir(exist_ok=True)
        (tmp_path / "t/tokenizer.json").write_text(bpe.to_str())
        code, output = run_script(tmp_path, *command)
    assert code == 2 and "prepared with another beginning" in output


def test_two_runs_do_not_write_to_one_folder(sources):
    with FileLock(sources / "undisturbed/lock"):
        line = refusal(sources, *PARQUET, "--data_dir=undisturbed")
    assert "--data_dir=undisturbed" in line and "if another run is writing to it, wait for it to finish" in line


# ---------------------------------------------------------------------------------------------------
# mistakes

@pytest.mark.parametrize("args, words", [
    ("--files=no/*.txt", "--files=no/*.txt: FileNotFoundError"),
    ("--files=a.txt,missing.txt", "'missing.txt'"),
    ("--files=a.csv", "--files=a.csv: found .csv; expected files of one kind, .parquet, .jsonl, .json, .txt"),
    ("--files=a.txt,b.jsonl", "expected files of one kind"),
    ("--files=a.txt --dataset=python", "leave out --dataset"),
    ("--files=a.txt --dataset_split=test", "leave out --dataset, --dataset_config and --dataset_split"),
    ("--files=a.txt --max_tokens=0", "--max_tokens=0: expected an int of at least 1"),
    ("--files=a.txt --val_tokens=0", "--val_tokens=0: expected an int of at least 1"),
    ("--files=a.txt --shard_size=3000000000", "--shard_size=3000000000: expected an int from 1 to 1073741824"),
    ("--files=a.txt --num_threads=0", "--num_threads=0: expected an int of at least 1"),
    ("--files=a.txt --data_dir=a.csv", "--data_dir=a.csv: FileExistsError"),
    ("--files=a.txt --data_dir=a.csv/out", "--data_dir=a.csv/out: NotADirectoryError")])
def test_a_mistake_is_named(tmp_path, args, words):
    for name in ("a.txt", "b.jsonl", "a.csv"):
        (tmp_path / name).write_text("text " * 100)
    assert words in refusal(tmp_path, "--tokenizer=bytes", *args.split())
    assert len([*tmp_path.iterdir()]) == 3


def test_a_meta_json_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "meta.json").write_text('{"stoi": {"a": 1}}')
    assert "a meta.json that prepare_data.py did not write" in refusal(
        tmp_path, "--files=a.txt", "--data_dir=p", "--tokenizer=bytes")
    assert (tmp_path / "p" / "meta.json").read_text() == '{"stoi": {"a": 1}}'


def test_an_unreadable_file_is_named(tmp_path):
    write_parquet(tmp_path / "good.parquet", ["text"] * 10)
    (tmp_path / "folder.parquet").mkdir()
    for name, content in (("junk.parquet", b"junk" * 100), ("empty.jsonl", b""),
                          ("packed.parquet.gz", gzip.compress((tmp_path / "good.parquet").read_bytes())),
                          ("folder.parquet", None), ("text.jsonl", b'"text"\n')):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        line = refusal(tmp_path, f"--files={name}", "--tokenizer=bytes", "--val_tokens=1")
        assert f"--files={name}" in line
        assert ("its row 1 is 'text', expected an object" in line) == (name == "text.jsonl")
    assert not list((tmp_path / "data/files").glob("*.bin"))


@pytest.mark.parametrize("name, spoil", [
    ("txt", lambda whole: whole + b"\xff"), ("jsonl", lambda whole: whole + b'{"text": "b\n{"text": "c"}\n'),
    ("jsonl.gz", lambda whole: whole[:-20])])
def test_of_several_files_the_damaged_one_is_named(tmp_path, name, spoil):
    whole = b"text" * 9 if name == "txt" else jsonl(DOCUMENTS[:70])
    for letter in "abc":
        content = gzip.compress(whole) if name.endswith("gz") else whole
        (tmp_path / f"{letter}.{name}").write_bytes(spoil(content) if letter == "b" else content)
    line = refusal(tmp_path, f"--files=*.{name}", "--tokenizer=bytes", "--val_tokens=1")
    assert f"--files=*.{name}" in line and f" b.{name}: " in line and (name != "jsonl" or ": line 71: " in line)
    assert ("; convert it to UTF-8" in line) == (name == "txt")


def test_a_damaged_parquet_file_stops_the_run_and_once_repaired_it_resumes(prepared):
    folder, command = prepared
    whole = (folder / "b.parquet").read_bytes()
    half = len(whole) // 2
    (folder / "b.parquet").write_bytes(whole[:half] + b"\x55" * 300 + whole[half + 300:])
    line = refusal(folder, *command, "--data_dir=out")
    assert "--files=*.parquet" in line and ": b.parquet: " in line
    assert "if you have to fix or leave out a file, give another --data_dir" in line
    (folder / "b.parquet").write_bytes(whole)
    assert "after 0 tokens" not in prepare(folder, *command, "--data_dir=out")
    assert contents(folder / "out") == contents(folder / "undisturbed")


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["a document"] * 10, column="body")
    (tmp_path / "a.jsonl").write_text('{"id": 1, "body": "a document"}\n' * 10)
    for name in ("a.parquet", "a.jsonl"):
        command = [f"--files={name}", f"--data_dir={name}.out", "--tokenizer=bytes", "--val_tokens=10"]
        line = refusal(tmp_path, *command)
        assert "--text_column=text" in line and f" {name}: " in line and "'id', 'body'" in line
        prepare(tmp_path, *command, "--text_column=body")  # into the same folder: nothing had been written there
        assert len(all_tokens(tmp_path / f"{name}.out")) == 110


def test_without_tokens_to_train_on_no_shard_is_written(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x" * 99]))
    command = ["--files=a.jsonl", "--tokenizer=bytes"]
    line = refusal(tmp_path, *command, "--val_tokens=100")
    assert "--val_tokens=100" in line and "100 tokens" in line
    line = refusal(tmp_path, *command, "--val_tokens=10", "--text_column=id")  # numbers
    assert "0 tokens, 0 bytes, 1 documents skipped" in line and "not text" in line
    assert not list((tmp_path / "data/files").glob("*.bin"))
    prepare(tmp_path, *command, "--val_tokens=99")  # into the same folder
    assert len(all_tokens(tmp_path / "data/files")) == 100
