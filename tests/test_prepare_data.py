"""Text to shards, shards to windows: every token is accounted for, whatever interrupts the work or is wrong with the source."""
import ast
import fcntl
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare_data
from prepare_data import (Windows, epoch_order, get_tokenizer, load_conversations, padded_vocab_size, read_meta, read_shard, rows_to_windows,
                          token_bytes, tokenize)

SCRIPT = prepare_data.__file__
BYTES_EOT = 256


def start(folder, *args):
    """The script as a process group of its own, with `folder` as its current one; nothing may come from a network."""
    env = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1",
           "USE_TORCH": "0"}  # `datasets` imports torch where it is, which takes longer than all the rest
    env.pop("RANK", None)
    return subprocess.Popen([sys.executable, SCRIPT, *args], cwd=folder, env=env, start_new_session=True, text=True,
                            encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def prepare(folder, *args):
    """Runs the script to its end. -> what it printed"""
    process = start(folder, *args)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def refusal(folder, *args):
    """Runs the script with a mistake. -> the one line it ends with"""
    process = start(folder, *args)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2, (process.returncode, err)
    assert "Traceback" not in out + err, err
    *before, last = err.splitlines()
    assert last.startswith("error: ") and not any(line.startswith("error: ") for line in before), err
    return last


def some_documents(n, seed=0, longest=400):
    pieces = list("abcdefgh  \n\t\"\\,") + ["é", "漢", "🙂", "\0", "the ", "<|endoftext|>", "<|user|>"]
    rng = random.Random(seed)
    return ["".join(rng.choices(pieces, k=rng.randint(1, longest))) for _ in range(n)]


def write_parquet(path, documents, row_group_size=1000, column="text"):
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(documents)), column: documents}), path,
                                row_group_size=row_group_size)


def write_jsonl(path, documents):
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents))


def write_shard(path, tokens, magic=20240520, version=1, count=None):
    """A shard by the letter of its format."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())


def read_shards(data_dir, split):
    """The tokens of a split, one array a shard, by the letter of the format."""
    shards = []
    for path in sorted(data_dir.glob(f"{split}_*.bin")):
        header, tokens = np.fromfile(path, "<i4", 256), np.fromfile(path, "<u2", offset=1024)
        assert header[:3].tolist() == [20240520, 1, len(tokens)] and not header[3:].any()
        assert path.stat().st_size == 1024 + 2 * len(tokens)
        assert path.name == f"{split}_{len(shards):06d}.bin"
        shards.append(tokens)
    return shards


def all_tokens(data_dir):
    return np.concatenate(read_shards(data_dir, "val") + read_shards(data_dir, "train"))


def bytes_tokens(documents):
    return np.concatenate([[BYTES_EOT, *text.encode("utf-8")] for text in documents])


def contents(data_dir):
    """Every file of a folder; of progress.json the name alone."""
    return {path.name: path.name != "progress.json" and path.read_bytes() for path in data_dir.iterdir()}


# ---------------------------------------------------------------------------------------------------
# sources

PARQUET = ["--files=*.parquet", "--tokenizer=bytes", "--val_tokens=8000", "--shard_size=3000"]
PARQUET_DOCUMENTS = some_documents(400) + ["long " * 2000] + some_documents(200, seed=1)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """A folder with two parquet files, whose row groups are no multiples of a batch, and `undisturbed`, made of them."""
    folder = tmp_path_factory.mktemp("parquet")
    write_parquet(folder / "b.parquet", PARQUET_DOCUMENTS[350:], row_group_size=37)
    write_parquet(folder / "a.parquet", PARQUET_DOCUMENTS[:350], row_group_size=100)
    prepare(folder, *PARQUET, "--data_dir=undisturbed", "--num_threads=1")
    return folder


def test_shards_hold_the_documents(parquet):
    val, train = read_shards(parquet / "undisturbed", "val"), read_shards(parquet / "undisturbed", "train")
    assert [len(shard) for shard in val] == [3000, 3000, 2000]
    assert {len(shard) for shard in train[:-1]} == {3000} and 1 <= len(train[-1]) <= 3000 and len(train) > 80
    tokens = np.concatenate(val + train)
    assert tokens[0] == BYTES_EOT
    cuts = np.flatnonzero(tokens == BYTES_EOT)
    texts = [bytes(part[1:].astype(np.uint8)).decode("utf-8") for part in np.split(tokens, cuts[1:])]
    assert texts == PARQUET_DOCUMENTS


def test_meta_counts_what_the_shards_hold(parquet):
    meta = json.loads((parquet / "undisturbed" / "meta.json").read_text())
    assert meta["tokenizer"] == "bytes" and meta["vocab_size"] == 384
    assert meta["documents"] == len(PARQUET_DOCUMENTS)
    assert meta["bytes"] == sum(len(text.encode("utf-8")) for text in PARQUET_DOCUMENTS)
    assert meta["tokens"] == meta["documents"] + meta["bytes"] == len(all_tokens(parquet / "undisturbed"))
    assert [name for name, *_ in meta["source"]["files"]] == ["a.parquet", "b.parquet"]
    assert read_meta(parquet / "undisturbed") == meta


def test_jsonl_plain_and_compressed_with_empty_documents(tmp_path):
    first, second = some_documents(100, seed=2), some_documents(30, seed=3)
    write_jsonl(tmp_path / "z.jsonl.gz", ["", None, *first, None])
    write_jsonl(tmp_path / "y.jsonl", ["", *second])
    printed = prepare(tmp_path, "--files=z.jsonl.gz, y.jsonl", "--tokenizer=bytes", "--val_tokens=50", "--num_threads=1")
    assert "4 documents are left out: empty" in printed and "130 documents" in printed
    assert all_tokens(tmp_path / "data/files").tolist() == bytes_tokens(second + first).tolist()
    assert json.loads((tmp_path / "data/files/meta.json").read_text())["documents"] == 130


def test_empty_documents_behind_the_end_are_not_counted(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["abc"] * 64 + [""] * 64)
    printed = prepare(tmp_path, "--files=a.jsonl", "--tokenizer=bytes", "--max_tokens=100", "--val_tokens=50", "--num_threads=1")
    assert "25 documents" in printed and "left out" not in printed


def test_text_files_as_gpt2_tokens(tmp_path, gpt2_vocabulary):
    documents = some_documents(5, seed=5) + ["A sentence of <|endoftext|> English.\n\nAnd its    next, don't they say?\n"]
    (tmp_path / "in").mkdir()
    for i, text in enumerate(documents):
        (tmp_path / "in" / f"{i}.txt").write_text(text, encoding="utf-8", newline="")
    prepare(tmp_path, "--files=in/*.txt", "--data_dir=out", "--val_tokens=50", "--num_threads=1")
    gpt2 = tiktoken.get_encoding("gpt2")
    expected = [token for text in documents for token in (50256, *gpt2.encode_ordinary(text))]
    assert all_tokens(tmp_path / "out").tolist() == expected
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert (meta["tokenizer"], meta["vocab_size"], meta["documents"]) == ("gpt2", 50304, 6)
    assert meta["bytes"] == sum(len(text.encode("utf-8")) for text in documents)


def test_the_standard_library_is_a_source(tmp_path):
    printed = prepare(tmp_path, "--dataset=python", "--max_tokens=30000", "--val_tokens=1000", "--num_threads=1")
    assert "30,000 tokens" in printed
    [val], [train] = read_shards(tmp_path / "data/python", "val"), read_shards(tmp_path / "data/python", "train")
    assert (len(val), len(train)) == (1000, 29000)
    *whole, cut = get_tokenizer("bytes").decode([*val[1:], *train]).split("<|endoftext|>")
    assert whole and all(ast.parse(text) for text in whole)
    meta = json.loads((tmp_path / "data/python/meta.json").read_text())
    assert (meta["tokenizer"], meta["tokens"]) == ("bytes", 30000)
    assert meta["documents"] == (all_tokens(tmp_path / "data/python") == BYTES_EOT).sum()


# ---------------------------------------------------------------------------------------------------
# the same bytes, whatever happens

PYTHON = ["--dataset=python", "--val_tokens=62500", "--shard_size=50000", "--num_threads=1"]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A folder with `undisturbed`: 537,500 tokens in 2 shards of val and 10 of train, the last one half full."""
    folder = tmp_path_factory.mktemp("python")
    prepare(folder, *PYTHON, "--max_tokens=537500", "--data_dir=undisturbed")
    assert len(list((folder / "undisturbed").glob("*.bin"))) == 12
    return folder


def test_parquet_is_read_on_from_any_batch(parquet):
    paths = [parquet / "a.parquet", parquet / "b.parquet"]
    batches = list(prepare_data.parquet_batches(paths, "text", None))
    assert [text for _, documents in batches for text in documents] == PARQUET_DOCUMENTS
    for i, (state, _) in enumerate(batches):
        assert list(prepare_data.parquet_batches(paths, "text", json.loads(json.dumps(state)))) == batches[i:]


@pytest.mark.parametrize("num_threads", [2, 3])
def test_any_number_of_threads_makes_the_same_bytes(parquet, num_threads):
    prepare(parquet, *PARQUET, f"--data_dir=threads{num_threads}", f"--num_threads={num_threads}")
    assert contents(parquet / f"threads{num_threads}") == contents(parquet / "undisturbed")


def kill_at_shard(n, folder, *args, by=signal.SIGKILL):
    """Starts the script and kills it once n shards exist -> what it said on stderr."""
    process = start(folder, *args)
    data_dir = folder / args[-1].removeprefix("--data_dir=")
    deadline = time.time() + 120
    while len(list(data_dir.glob("*.bin"))) < n:
        assert process.poll() is None, "it ended before it could be killed: " + process.stderr.read()
        assert time.time() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, by)
    error = process.communicate()[1]
    assert process.returncode == -by and not (data_dir / "meta.json").exists()
    return error


def test_killed_and_started_again_makes_the_same_bytes(parquet):
    command = [*PARQUET, "--num_threads=2", "--data_dir=killed"]
    n = len(list((parquet / "undisturbed").glob("*.bin")))
    assert n > 80
    for moment, by in ((10, signal.SIGKILL), (40, signal.SIGINT)):
        error = kill_at_shard(moment, parquet, *command, by=by)
        assert "Traceback" not in error and ("interrupted: whole shards stay" in error) == (by == signal.SIGINT)
        assert len(list((parquet / "killed").glob("*.bin"))) < n
    assert "going on behind" in prepare(parquet, *command)
    assert contents(parquet / "killed") == contents(parquet / "undisturbed")


# A file is written beside its name and renamed: of every two renames the first is a shard's, the second progress.json's.
KILLED_AT_RENAME = """
import os, runpy, signal, sys
renames, last, replace = 0, int(sys.argv[1]), os.replace
def replace_or_die(*args):
    global renames
    if renames == last:
        os.killpg(0, signal.SIGKILL)
    renames += 1
    replace(*args)
os.replace = replace_or_die
script, sys.argv = sys.argv[2], sys.argv[2:]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize("renames, shards, known", [
    (1, 0, 0),  # the first shard is written, not renamed
    (2, 1, 0),  # the first shard is there, progress.json does not know
    (12, 6, 5),  # the same in the middle
    (24, 12, 11)])  # all is there but meta.json
def test_killed_between_two_renames_makes_the_same_bytes(python, renames, shards, known):
    data_dir = python / f"killed{renames}"
    command = [*PYTHON, "--max_tokens=537500", f"--data_dir={data_dir.name}"]
    killed = subprocess.run([sys.executable, "-c", KILLED_AT_RENAME, str(renames), SCRIPT, *command], cwd=python,
                            start_new_session=True, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(list(data_dir.glob("*.bin"))) == shards and not (data_dir / "meta.json").exists()
    assert json.loads((data_dir / "progress.json").read_text())["counts"]["shards"] == known
    assert ("going on behind" in prepare(python, *command)) == bool(known)
    assert contents(data_dir) == contents(python / "undisturbed")


def test_val_is_the_same_however_much_is_prepared(python):
    prepare(python, *PYTHON, "--max_tokens=225000", "--data_dir=less")
    val = read_shards(python / "less", "val")
    assert [len(shard) for shard in val] == [50000, 12500]
    assert np.array_equal(np.concatenate(val), np.concatenate(read_shards(python / "undisturbed", "val")))
    assert np.array_equal(all_tokens(python / "less"), all_tokens(python / "undisturbed")[:225000])


def test_raised_max_tokens_goes_on(python):
    for max_tokens in (62501, 225000):
        prepare(python, *PYTHON, f"--max_tokens={max_tokens}", "--data_dir=raised")
        assert len(all_tokens(python / "raised")) == read_meta(python / "raised")["tokens"] == max_tokens
    assert "going on behind" in prepare(python, *PYTHON, "--max_tokens=537500", "--data_dir=raised")
    assert contents(python / "raised") == contents(python / "undisturbed")
    assert "prepared already" in prepare(python, *PYTHON, "--max_tokens=537500", "--data_dir=raised")
    assert contents(python / "raised") == contents(python / "undisturbed")


@pytest.mark.parametrize("change", [
    "--max_tokens=537499", "--max_tokens=100000", "--val_tokens=62400", "--shard_size=50001", "--tokenizer=gpt2",
    "--files=a.txt"])
def test_other_settings_in_the_same_folder_are_refused(python, change, request):
    if "gpt2" in change:
        request.getfixturevalue("gpt2_vocabulary")
    (python / "a.txt").write_text("text " * 20000)
    before = contents(python / "undisturbed")
    source = ["--tokenizer=bytes", *PYTHON[1:]] if "files" in change else PYTHON
    line = refusal(python, *source, "--max_tokens=537500", "--data_dir=undisturbed", change)
    assert "undisturbed" in line and "give another --data_dir" in line
    key = change[2:].split("=")[0]
    assert key.replace("files", "source") in line
    assert contents(python / "undisturbed") == before


def test_lowered_max_tokens_is_refused_before_the_end_too(python):
    shutil.copytree(python / "undisturbed", python / "unfinished")
    (python / "unfinished" / "meta.json").unlink()
    before = contents(python / "unfinished")
    assert "--max_tokens=100000" in refusal(python, *PYTHON, "--max_tokens=100000", "--data_dir=unfinished")
    assert contents(python / "unfinished") == before


def test_shards_of_others_are_refused(tmp_path):
    write_shard(tmp_path / "[data]" / "fineweb_train_000001.bin", range(100))
    before = contents(tmp_path / "[data]")
    assert "did not write" in refusal(tmp_path, *PYTHON, "--data_dir=[data]")
    assert contents(tmp_path / "[data]") == before


# ---------------------------------------------------------------------------------------------------
# mistakes

@pytest.mark.parametrize("args, parts", [
    (["--files=no/*.txt"], ["--files=no/*.txt", "no such file"]),
    (["--files=a.txt,missing.txt"], ["missing.txt", "no such file"]),
    (["--files=a.csv"], ["a.csv", ".parquet, .jsonl, .json, .txt"]),
    (["--files=a.txt,b.jsonl"], ["json, text", "of one kind"]),
    (["--files=d.parquet"], ["--files=d.parquet", "Is a directory"]),
    (["--files=c.parquet.gz"], ["c.parquet.gz", "compressed inside"]),
    (["--files=a.txt", "--dataset=python"], ["a.txt", "python", "one of them"]),
    (["--files=a.txt", "--dataset_split=test"], ["a.txt", "--dataset_split=test", "one of them"]),
    (["--dataset=python", "--text_column=body"], ["--dataset=python", "--text_column=body", "one of them"]),
    (["--files=a.txt", "--max_tokens=100", "--val_tokens=100"], ["--max_tokens=100", "--val_tokens=100"]),
    (["--files=a.txt", "--max_tokens=0"], ["--max_tokens=0", "at least 1"]),
    (["--files=a.txt", "--val_tokens=0"], ["--val_tokens=0", "at least 1"]),
    (["--files=a.txt", "--shard_size=-1"], ["--shard_size=-1", "at least 1"]),
    (["--files=a.txt", "--shard_size=3000000000"], ["--shard_size=3000000000", "2147483647"]),
    (["--files=a.txt", "--num_threads=0"], ["--num_threads=0", "at least 1"]),
    (["--files=a.txt", "--data_dir=a.csv"], ["a.csv", "FileExistsError"]),
    (["--files=a.txt", "--data_dir=a.csv/out"], ["a.csv/out", "NotADirectoryError"])])
def test_a_mistake_is_named(tmp_path, args, parts):
    for name in ("a.txt", "b.jsonl", "a.csv", "c.parquet.gz"):
        (tmp_path / name).write_text("text " * 100)
    (tmp_path / "d.parquet").mkdir()
    before = sorted(tmp_path.iterdir())
    line = refusal(tmp_path, "--tokenizer=bytes", *args)
    assert all(part in line for part in parts), line
    assert sorted(tmp_path.iterdir()) == before


def test_an_earlier_start_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "progress.json").write_text("{")
    assert "--data_dir=out" in refusal(tmp_path, *PYTHON, "--data_dir=out")
    (tmp_path / "out" / "progress.json").unlink()
    (tmp_path / "out" / "meta.json").write_text('{"tokenizer": "bytes", "vocab_size": 384}')
    assert "meta.json is not one that this script wrote" in refusal(tmp_path, *PYTHON, "--data_dir=out")


def test_it_goes_on_from_nothing_that_has_changed(parquet, tmp_path):
    for path in (*parquet.glob("*.parquet"), parquet / "undisturbed"):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    command, out = [*PARQUET, "--data_dir=undisturbed"], tmp_path / "undisturbed"
    assert "is prepared already" in prepare(tmp_path, *command)
    original = (out / "progress.json").read_bytes()
    for change in ({"state": {"shard_idx": 0}}, {"state": 3}, {"skip": "0"}, {"counts": {}}, {"counts": None}):
        (out / "progress.json").write_text(json.dumps({**json.loads(original), **change}))
        assert "--data_dir=undisturbed" in refusal(tmp_path, *command)
    (out / "progress.json").write_bytes(original)
    last = max(out.glob("train_*.bin"))
    for shard in (out / "train_000001.bin", last):
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-2])
        assert "remove the folder" in refusal(tmp_path, *command)
        shard.unlink()
        assert "remove the folder" in refusal(tmp_path, *command)
        shard.write_bytes(whole)
    assert "is prepared already" in prepare(tmp_path, *command)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-20] + b"x" + whole[-19:])  # of the same size
    assert "prepared with another source" in refusal(tmp_path, *command)


def test_two_starts_do_not_write_to_one_folder(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1000)
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out/lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = refusal(tmp_path, "--files=a.txt", "--tokenizer=bytes", "--data_dir=out")
        assert "--data_dir=out: another start is writing to it now" in line
    prepare(tmp_path, "--files=a.txt", "--tokenizer=bytes", "--data_dir=out")


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["a document"] * 10, column="body")
    command = ["--files=a.parquet", "--tokenizer=bytes", "--val_tokens=10", "--num_threads=1"]
    line = refusal(tmp_path, *command)
    assert "--text_column=text: no such column" in line and "id, body" in line
    prepare(tmp_path, *command, "--text_column=body")  # into the same folder: nothing had been written there
    assert len(all_tokens(tmp_path / "data/files")) == 110


@pytest.mark.parametrize("column", [[b"bytes"] * 10, list(range(10)), [["a list"]] * 10, [{"a": "b"}] * 10])
def test_a_parquet_column_that_is_no_text_is_refused_before_anything_is_written(tmp_path, column):
    write_parquet(tmp_path / "a.parquet", ["a document"] * 10)
    pyarrow.parquet.write_table(pyarrow.table({"id": range(10), "text": column}), tmp_path / "b.parquet")
    line = refusal(tmp_path, "--files=*.parquet", "--tokenizer=bytes", "--val_tokens=10")
    assert "--text_column=text: is no text in b.parquet" in line and "id, text" in line
    assert not list((tmp_path / "data/files").glob("*.bin"))


def test_text_in_any_of_arrows_types(tmp_path):
    documents = some_documents(20) + [None, ""]
    text = pyarrow.array(documents)
    for i, column in enumerate((text, text.cast(pyarrow.large_string()), text.dictionary_encode())):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / f"{i}.parquet")
    printed = prepare(tmp_path, "--files=*.parquet,0.parquet,./1.parquet", "--tokenizer=bytes", "--val_tokens=10")  # each once
    assert np.array_equal(all_tokens(tmp_path / "data/files"), bytes_tokens(documents[:20] * 3)) and "6 documents are left out: empty" in printed


def test_what_is_left_out_is_counted_by_reason(gpt2_vocabulary, tmp_path):
    documents = ["text", "", None, 3, "a" + " " * 1_100_000 + "b", "more text"]
    tokens, starts, left_out = tokenize("gpt2", documents)
    assert starts.tolist() == [0, 2] and len(tokens) == 5
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}) + "\n" for text in (documents[0], documents[4])))
    notes = {}
    assert len(load_conversations([(str(tmp_path / "chat.jsonl"), 1.0)], get_tokenizer("gpt2"), 64, notes)[0]) == 1
    assert list(notes.values()) == [[1, f"{tmp_path}/chat.jsonl, line 2"]] and "refused by tiktoken" in list(notes)[0]
    assert left_out == {"empty": 2, "no text": 1, "refused by tiktoken, as about a million spaces on end are": 1}


def test_too_few_tokens_for_val_and_the_suggested_value_works(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 99)
    command = ["--files=a.txt", "--tokenizer=bytes", "--num_threads=1"]
    line = refusal(tmp_path, *command, "--val_tokens=100", "--shard_size=30")
    assert "100 tokens" in line
    prepare(tmp_path, *command, line.split("try ")[1])
    assert len(all_tokens(tmp_path / "data/files")) == 100


def test_a_broken_line_in_jsonl_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b\n{"text": "c"}\n')
    assert "JSON" in refusal(tmp_path, "--files=a.jsonl", "--tokenizer=bytes", "--val_tokens=1", "--num_threads=1")


def test_a_damaged_parquet_file_ends_the_work_and_once_repaired_it_goes_on(parquet, tmp_path):
    for name in ("a.parquet", "b.parquet"):
        shutil.copy(parquet / name, tmp_path)
    whole = (tmp_path / "b.parquet").read_bytes()
    half = len(whole) // 2
    (tmp_path / "b.parquet").write_bytes(whole[:half] + b"\x55" * 300 + whole[half + 300:])
    line = refusal(tmp_path, *PARQUET, "--data_dir=out", "--num_threads=1")
    assert "b.parquet could not be read on" in line
    assert len(list((tmp_path / "out").glob("*.bin"))) > 5 and not (tmp_path / "out/meta.json").exists()
    (tmp_path / "b.parquet").write_bytes(whole)
    assert "going on behind" in prepare(tmp_path, *PARQUET, "--data_dir=out", "--num_threads=1")
    assert contents(tmp_path / "out") == contents(parquet / "undisturbed")


def test_what_is_no_parquet_file_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"junk" * 100)
    line = refusal(tmp_path, "--files=a.parquet", "--tokenizer=bytes", "--val_tokens=10")
    assert "a.parquet cannot be opened" in line


# ---------------------------------------------------------------------------------------------------
# tokenizers

@given(st.text())
def test_bytes_are_utf8_and_round_trip(text):
    tokenizer = get_tokenizer("bytes")
    tokens = tokenizer.encode_ordinary(text)
    assert tokens == list(text.encode("utf-8"))
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_half_a_surrogate_pair_is_encoded_as_tiktoken_does(name, request):
    if name == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    for text in ("a\ud83d b", "\udc00", "\ud83d\ude00"):
        assert prepare_data.encode(get_tokenizer(name), text).tolist() == get_tokenizer(name).encode_ordinary(text)


@given(st.lists(st.text()))
def test_documents_become_tokens(documents):
    tokens, starts, left_out = tokenize("bytes", documents)
    kept = [text for text in documents if text]
    assert tokens.tolist() == [t for text in kept for t in (BYTES_EOT, *text.encode("utf-8"))]
    assert starts.tolist() == [i for i, token in enumerate(tokens) if token == BYTES_EOT]
    assert left_out.total() == left_out["empty"] == len(documents) - len(kept)


@settings(deadline=None)
@given(text=st.text(min_size=1) | st.sampled_from(some_documents(100)))
def test_gpt2_tokens_are_tiktokens(gpt2_vocabulary, text):
    expected = tiktoken.get_encoding("gpt2").encode_ordinary(text)
    assert tokenize("gpt2", [text])[0].tolist() == [50256, *expected]


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_a_special_token_in_text_is_text(name, request):
    if name == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    tokenizer = get_tokenizer(name)
    tokens, starts, _ = tokenize(name, ["a <|endoftext|> b"])
    assert (tokens == tokenizer.eot_token).tolist() == [True] + [False] * (len(tokens) - 1)
    assert starts.tolist() == [0] and tokenizer.decode(tokens[1:].tolist()) == "a <|endoftext|> b"


def test_vocabularies_are_padded(gpt2_vocabulary):
    assert padded_vocab_size(get_tokenizer("gpt2")) == 50304
    assert padded_vocab_size(get_tokenizer("bytes")) == 384
    assert (get_tokenizer("gpt2").eot_token, get_tokenizer("bytes").eot_token) == (50256, 256)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_token_bytes_add_up_to_those_of_the_text(name, request):
    if name == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    tokenizer = get_tokenizer(name)
    sizes = token_bytes(tokenizer)
    assert sizes.shape == (padded_vocab_size(tokenizer),)
    assert not sizes[tokenizer.eot_token:].any() and sizes[:tokenizer.eot_token].all()
    for text in some_documents(50):
        assert sizes[tokenize(name, [text])[0]].sum() == len(text.encode("utf-8"))


def test_an_unknown_tokenizer_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        get_tokenizer("gpt5")
    assert stop.value.code == 2 and "gpt5" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------
# windows

def shards_of(folder, *lengths, split="train"):
    """Shards whose tokens count on, so that each token says where it is from."""
    first = 0
    for i, length in enumerate(lengths):
        write_shard(folder / f"{split}_{i:06d}.bin", range(first, first + length))
        first += length
    return str(folder)


def refused_windows(capsys, *args):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        Windows(*args)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1
    return err


def test_windows_cover_every_token_but_the_tail_once(tmp_path):
    data_dir = shards_of(tmp_path / "d[1]", 10, 3, 4, 25, 9)  # windows of 4 and a target behind: 2, 0, 0, 6, 2
    windows = Windows(data_dir, "train", 4)
    expected = [*range(0, 8, 4), *range(17, 41, 4), *range(42, 50, 4)]  # where each begins
    assert len(windows) == len(expected) == 10
    assert (windows.tokens, windows.tail) == (51, 51 - 40)
    x, y = windows[np.arange(10)]
    assert x.dtype == y.dtype == np.int64 and x.shape == y.shape == (10, 4)
    assert x.tolist() == [list(range(first, first + 4)) for first in expected]
    assert np.array_equal(y, x + 1)
    order = np.random.default_rng(0).permutation(10)
    assert np.array_equal(windows[order][0], x[order]) and np.array_equal(windows[order][1], y[order])


@pytest.mark.parametrize("length, n", [(5, 1), (8, 1), (9, 2), (4097, 1024)])
def test_a_window_needs_the_token_behind_it(tmp_path, length, n):
    windows = Windows(shards_of(tmp_path / "data", length), "train", 4)
    assert len(windows) == n
    assert windows[[n - 1]][1][0, -1] == 4 * n


def test_windows_of_prepared_shards_are_their_text(parquet):
    for split in ("val", "train"):
        shards = read_shards(parquet / "undisturbed", split)
        windows = Windows(str(parquet / "undisturbed"), split, 64)
        x, y = windows[range(len(windows))]
        cut = [shard[:(len(shard) - 1) // 64 * 64 + 1] for shard in shards]
        assert np.array_equal(x.ravel(), np.concatenate([shard[:-1] for shard in cut]))
        assert np.array_equal(y.ravel(), np.concatenate([shard[1:] for shard in cut]))
        assert windows.tail == sum(map(len, shards)) - x.size


def test_published_shards_are_found_and_are_gpt2s(tmp_path):
    write_shard(tmp_path / "d" / "fineweb_train_000002.bin", range(100, 150))
    write_shard(tmp_path / "d" / "fineweb_train_000001.bin", range(0, 100))
    write_shard(tmp_path / "d" / "fineweb_val_000000.bin", range(1000, 1030))
    assert Windows(str(tmp_path / "d"), "train", 49)[[0, 1, 2]][0][:, 0].tolist() == [0, 49, 100]
    assert Windows(str(tmp_path / "d"), "val", 10)[[1]][1].tolist() == [list(range(1011, 1021))]
    meta = read_meta(tmp_path / "d")
    assert (meta["tokenizer"], meta["vocab_size"]) == ("gpt2", 50304)


@pytest.mark.parametrize("meta", ["{", "[]", "{}", '{"tokenizer": "gpt2"}', '{"tokenizer": "gpt2", "vocab_size": null}'])
def test_an_unreadable_meta_is_named(tmp_path, capsys, meta):
    (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(SystemExit) as stop:
        read_meta(tmp_path)
    assert stop.value.code == 2 and str(tmp_path / "meta.json") in capsys.readouterr().err


@pytest.mark.parametrize("damage, part", [
    (lambda path: path.write_bytes(b""), "not a token shard"),
    (lambda path: path.write_bytes(path.read_bytes()[:500]), "not a token shard"),
    (lambda path: path.write_bytes(path.read_bytes()[:-2]), "damaged"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged"),
    (lambda path: path.write_bytes(path.read_bytes() + b"\0\0"), "damaged"),
    (lambda path: write_shard(path, []), "damaged"),
    (lambda path: write_shard(path, range(100), count=-100), "damaged"),
    (lambda path: write_shard(path, range(100), magic=20240801), "not a token shard"),
    (lambda path: write_shard(path, range(100), version=2), "version 2, expected 1"),
    (lambda path: path.write_text("no shard at all " * 1000), "not a token shard")])
def test_a_damaged_shard_is_named(tmp_path, capsys, damage, part):
    data_dir = shards_of(tmp_path / "data", 100, 100, 100)
    path = tmp_path / "data" / "train_000001.bin"
    damage(path)
    err = refused_windows(capsys, data_dir, "train", 8)
    assert str(path) in err and part in err
    with pytest.raises(SystemExit):
        read_shard(path)


def test_max_seq_len_longer_than_every_shard_is_refused(tmp_path, capsys):
    data_dir = shards_of(tmp_path / "data", 10, 20)
    assert len(Windows(data_dir, "train", 19)) == 1
    err = refused_windows(capsys, data_dir, "train", 20)
    assert "max_seq_len=20" in err and "20 tokens" in err


def test_a_folder_without_shards_is_refused(tmp_path, capsys):
    data_dir = shards_of(tmp_path / "data", 100)
    assert "no val shards" in refused_windows(capsys, data_dir, "val", 8)
    assert "data_dir=nowhere" in refused_windows(capsys, "nowhere", "train", 8)


def test_the_fingerprint_tells_shards_apart(tmp_path):
    def fingerprint(name, *shards):
        for i, tokens in enumerate(shards):
            write_shard(tmp_path / name / f"train_{i:06d}.bin", tokens)
        return Windows(str(tmp_path / name), "train", 8).fingerprint()

    a, b = np.arange(3000), np.arange(3000, 6000)
    first, last = a.copy(), b.copy()
    first[0], last[-1] = 7, 7
    prints = [fingerprint("a", a, b), fingerprint("first", first, b), fingerprint("last", a, last), fingerprint("order", b, a),
              fingerprint("shorter", a, b[:-1]), fingerprint("fewer", a), fingerprint("more", a, b, b)]
    assert len(set(prints)) == len(prints)
    assert fingerprint("copy", a, b) == prints[0]


@pytest.mark.parametrize("n", [1, 7, 1000])
def test_each_epoch_is_a_permutation(n):
    epochs = rows_to_windows(range(3 * n), n, seed=5).reshape(3, n)
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs.tolist())
    if n == 1000:
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
        assert rows_to_windows(range(n), n, seed=6).tolist() != epochs[0].tolist()


def test_a_rows_window_depends_on_its_number_alone():
    together = rows_to_windows(range(300), 70, seed=5)
    epoch_order.cache_clear()
    one_by_one = [int(rows_to_windows([row], 70, seed=5)[0]) for row in reversed(range(300))]
    assert one_by_one[::-1] == together.tolist()
    assert rows_to_windows([299, 3, 150], 70, seed=5).tolist() == together[[299, 3, 150]].tolist()
