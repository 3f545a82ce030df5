"""Text to shards: every token is accounted for, whatever interrupts the work or is wrong with the source."""
import ast
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

os.environ.setdefault("USE_TORCH", "0")  # or `datasets` imports torch, which takes longer than all the rest
import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare_data
from prepare_data import document_batches, tokenize
from shards import read_meta
from tokenizer import get_tokenizer
from dataloader import TokenDataset
from test_dataloader import write_shard

SCRIPT = prepare_data.__file__
BYTES_EOT = 256


def start(folder, *args, python=()):
    """Start the script in a process group of its own, with `folder` as its current one and without a network."""
    env = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    env.pop("RANK", None)
    return subprocess.Popen([sys.executable, *python, SCRIPT, *args], cwd=folder, env=env, start_new_session=True,
                            text=True, encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def prepare(folder, *args, python=()):
    """Run the script to its end and return what it printed."""
    process = start(folder, *args, python=python)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in err, err
    return out


def refusal(folder, *args):
    """Run the script with a mistake and return the one line it ends with."""
    process = start(folder, *args)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2, (process.returncode, err)
    return error_line(out + err)


def error_line(text):
    assert "Traceback" not in text, text
    *before, last = text.splitlines()
    assert last.startswith("error: ") and not any(line.startswith("error: ") for line in before), text
    return last


def random_documents(n, seed=0, longest=400):
    pieces = list("abcdefgh  \n\t\"\\,") + ["é", "漢", "🙂", "\0", "the ", "<|endoftext|>", "<|user|>"]
    rng = random.Random(seed)
    return ["".join(rng.choices(pieces, k=rng.randint(1, longest))) for _ in range(n)]


def write_parquet(path, documents, row_group_size=1000, column="text"):
    table = pyarrow.table({"id": range(len(documents)), column: documents})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)


def write_jsonl(path, documents):
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents))


def write_texts(folder, documents):
    folder.mkdir()
    for i, text in enumerate(documents):
        (folder / f"{i:04d}.txt").write_text(text, encoding="utf-8", newline="")


def read_shards(data_dir, split):
    """The tokens of a split, one array per shard, by the letter of the format."""
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
    """Every file of a folder; of progress.json only that it is there."""
    return {path.name: path.name != "progress.json" and path.read_bytes() for path in data_dir.iterdir()}


# ---------------------------------------------------------------------------------------------------
# sources

OPTIONS = ["--tokenizer=bytes", "--val_tokens=8000", "--shard_size=3000"]
PARQUET = ["--files=*.parquet", *OPTIONS]
DOCUMENTS = random_documents(400) + ["long " * 2000] + random_documents(200, seed=1)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """
    DOCUMENTS as two parquet files whose row groups are not multiples of a batch, as .jsonl and .jsonl.gz, as .txt
    files, and as a data set of the hub's kind; and `undisturbed`, made from the parquet files.
    """
    folder = tmp_path_factory.mktemp("sources")
    write_parquet(folder / "b.parquet", DOCUMENTS[350:], row_group_size=37)
    write_parquet(folder / "a.parquet", DOCUMENTS[:350], row_group_size=100)
    write_jsonl(folder / "a.jsonl", DOCUMENTS[:350])
    write_jsonl(folder / "b.jsonl.gz", DOCUMENTS[350:])
    write_texts(folder / "texts[1]", DOCUMENTS)
    (folder / "hub").mkdir()
    write_parquet(folder / "hub" / "test-0.parquet", DOCUMENTS)
    prepare(folder, *PARQUET, "--data_dir=undisturbed", "--num_threads=1")
    return folder


def test_shards_hold_the_documents(sources):
    val, train = read_shards(sources / "undisturbed", "val"), read_shards(sources / "undisturbed", "train")
    assert [len(shard) for shard in val] == [3000, 3000, 2000]
    assert {len(shard) for shard in train[:-1]} == {3000} and 1 <= len(train[-1]) <= 3000 and len(train) > 80
    tokens = np.concatenate(val + train)
    assert tokens[0] == BYTES_EOT
    starts = np.flatnonzero(tokens == BYTES_EOT)
    texts = [bytes(part[1:].astype(np.uint8)).decode("utf-8") for part in np.split(tokens, starts[1:])]
    assert texts == DOCUMENTS


def test_meta_counts_what_the_shards_hold(sources):
    meta = json.loads((sources / "undisturbed" / "meta.json").read_text())
    assert meta["tokenizer"] == "bytes" and meta["vocab_size"] == 384 and meta["exhausted"] is True
    assert meta["documents"] == len(DOCUMENTS)
    assert meta["bytes"] == sum(len(text.encode("utf-8")) for text in DOCUMENTS)
    assert meta["tokens"] == meta["documents"] + meta["bytes"] == len(all_tokens(sources / "undisturbed"))
    assert [name for name, *_ in meta["source"]["files"]] == ["a.parquet", "b.parquet"]
    assert read_meta(sources / "undisturbed") == meta


def test_rows_of_prepared_shards_are_their_text(sources):
    for split in ("val", "train"):
        shards = read_shards(sources / "undisturbed", split)
        dataset = TokenDataset(str(sources / "undisturbed"), split, 64)
        idx, targets = dataset[range(len(dataset))]
        cut = [shard[:(len(shard) - 1) // 64 * 64 + 1] for shard in shards]
        assert np.array_equal(idx.ravel(), np.concatenate([shard[:-1] for shard in cut]))
        assert np.array_equal(targets.ravel(), np.concatenate([shard[1:] for shard in cut]))
        assert dataset.dropped_tokens == sum(map(len, shards)) - idx.size


def test_jsonl_plain_and_compressed_with_empty_documents(tmp_path):
    first, second = random_documents(100, seed=2), random_documents(30, seed=3)
    write_jsonl(tmp_path / "z.jsonl.gz", ["", None, *first, None])
    write_jsonl(tmp_path / "y.jsonl", ["", *second])
    printed = prepare(tmp_path, "--files=z.jsonl.gz, y.jsonl", "--tokenizer=bytes", "--val_tokens=50")
    assert "4 documents skipped" in printed and "130 documents" in printed
    assert all_tokens(tmp_path / "data/files").tolist() == bytes_tokens(second + first).tolist()
    assert read_meta(tmp_path / "data/files")["documents"] == 130


def test_empty_documents_after_the_end_are_not_counted(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["abc"] * 64 + [""] * 64)
    command = ["--files=a.jsonl", "--tokenizer=bytes", "--max_tokens=100", "--val_tokens=50", "--num_threads=1"]
    printed = prepare(tmp_path, *command)
    assert "25 documents" in printed and "0 documents skipped" in printed


def test_text_files_as_gpt2_tokens(tmp_path, gpt2_vocabulary):
    documents = random_documents(5, seed=5) + ["A sentence of <|endoftext|> English.\n\nAnd its    next, isn't it?\n"]
    write_texts(tmp_path / "in", documents)
    prepare(tmp_path, "--files=in/*.txt", "--data_dir=out", "--val_tokens=50", "--num_threads=1")
    gpt2 = tiktoken.get_encoding("gpt2")
    expected = [token for text in documents for token in (50256, *gpt2.encode_ordinary(text))]
    assert all_tokens(tmp_path / "out").tolist() == expected
    meta = read_meta(tmp_path / "out")
    assert (meta["tokenizer"], meta["vocab_size"], meta["documents"]) == ("gpt2", 50304, 6)
    assert meta["bytes"] == sum(len(text.encode("utf-8")) for text in documents)


def test_text_in_any_of_arrows_types(tmp_path):
    documents = random_documents(20) + [None, ""]
    text = pyarrow.array(documents)
    for i, column in enumerate((text, text.cast(pyarrow.large_string()), text.dictionary_encode())):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / f"{i}.parquet")
    printed = prepare(tmp_path, "--files=*.parquet,0.parquet", "--tokenizer=bytes", "--val_tokens=10")
    assert np.array_equal(all_tokens(tmp_path / "data/files"), bytes_tokens(documents[:20] * 3))  # each file once
    assert "6 documents skipped" in printed


WITHOUT_TORCH = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
assert "torch" not in sys.modules
"""


def test_the_standard_library_is_a_source_and_needs_no_torch(tmp_path):
    command = ["--dataset=python", "--max_tokens=30000", "--val_tokens=1000", "--num_threads=1"]
    printed = prepare(tmp_path, *command, python=["-c", WITHOUT_TORCH])
    assert "30,000 tokens" in printed
    [val], [train] = read_shards(tmp_path / "data/python", "val"), read_shards(tmp_path / "data/python", "train")
    assert (len(val), len(train)) == (1000, 29000)
    *whole, cut = get_tokenizer("bytes").decode([*val[1:], *train]).split("<|endoftext|>")
    assert whole and all(ast.parse(text) for text in whole)
    meta = read_meta(tmp_path / "data/python")
    assert (meta["tokenizer"], meta["tokens"], meta["exhausted"]) == ("bytes", 30000, False)
    assert meta["documents"] == (all_tokens(tmp_path / "data/python") == BYTES_EOT).sum()
    chats = tmp_path / "data/python/chat.jsonl"
    conversations = [json.loads(line) for line in chats.open()]
    assert len(conversations) > 1000
    assert {tuple(m["role"] for m in c["messages"]) for c in conversations} == {("user", "assistant")}
    chats.write_text("edited")
    prepare(tmp_path, "--dataset=python", "--max_tokens=31000", "--val_tokens=1000")
    assert chats.read_text() == "edited"
    for shard in chats.parent.glob("*.bin"):
        shard.unlink()
    assert "shards are missing" in refusal(tmp_path, "--dataset=python", "--val_tokens=1000")


@given(st.lists(st.text()))
def test_documents_become_tokens(documents):
    tokens, skipped = tokenize(get_tokenizer("bytes"), documents)
    kept = [text for text in documents if text]
    assert tokens.tolist() == [token for text in kept for token in (BYTES_EOT, *text.encode("utf-8"))]
    assert skipped == len(documents) - len(kept)


@settings(deadline=None)
@given(text=st.text(min_size=1) | st.sampled_from(random_documents(100)))
def test_gpt2_tokens_are_tiktokens(gpt2_vocabulary, text):
    expected = tiktoken.get_encoding("gpt2").encode_ordinary(text)
    assert tokenize(gpt2_vocabulary, [text])[0].tolist() == [50256, *expected]


def test_skipped_documents_are_counted(gpt2_vocabulary):
    documents = ["text", "", None, 3, "a" + " " * 1_100_000 + "b", b"bytes", ["a list"], "more text"]
    tokens, skipped = tokenize(gpt2_vocabulary, documents)
    assert np.flatnonzero(tokens == 50256).tolist() == [0, 2] and len(tokens) == 5 and skipped == 6


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


@pytest.mark.parametrize("kind, paths", [(".parquet", ["a.parquet", "b.parquet"]),
                                         (".jsonl", ["a.jsonl", "b.jsonl.gz"]), (".txt", ["texts[[]1]/*.txt"])])
def test_any_batch_is_a_place_to_resume(sources, kind, paths):
    options = prepare_data.READERS[kind]

    def read(state):
        data = datasets.load_dataset(data_files=[str(sources / path) for path in paths], split="train",
                                     streaming=True, **options)
        return list(document_batches(data.select_columns("text"), "text", state))

    def texts(batches):
        return [text for _, documents in batches for text in documents]

    batches = read(None)
    assert texts(batches) == DOCUMENTS
    for i, (state, _) in enumerate(batches):
        resumed = read(json.loads(json.dumps(state)))
        assert texts(resumed) == texts(batches[i:])
        state, documents = resumed[-1]  # and again, from a state of the resumed run
        assert texts(read(json.loads(json.dumps(state)))) == documents


@pytest.mark.parametrize("num_threads", [2, 3])
def test_any_number_of_threads_makes_the_same_bytes(sources, num_threads):
    prepare(sources, *PARQUET, f"--data_dir=threads{num_threads}", f"--num_threads={num_threads}")
    assert contents(sources / f"threads{num_threads}") == contents(sources / "undisturbed")


def kill_at_shard(n, signal_number, folder, *args):
    """Start the script and kill it once n shards exist. Returns its stderr."""
    process = start(folder, *args)
    data_dir = folder / args[-1].removeprefix("--data_dir=")
    deadline = time.time() + 120
    while len(list(data_dir.glob("*.bin"))) < n:
        assert process.poll() is None, "it ended before it could be killed: " + process.stderr.read()
        assert time.time() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal_number)
    error = process.communicate()[1]
    assert process.returncode == (2 if signal_number == signal.SIGINT else -signal_number)
    assert not (data_dir / "meta.json").exists()
    return error


@pytest.mark.parametrize("name, source", [
    ("parquet", ["--files=*.parquet"]), ("jsonl", ["--files=*.jsonl,b.jsonl.gz"]),
    ("txt", ["--files=texts[[]1]/*.txt"]), ("hub", ["--dataset=./hub", "--dataset_split=test"])])
def test_killed_and_resumed_makes_the_same_bytes(sources, name, source):
    data_dir = sources / f"killed_{name}"
    command = [*source, *OPTIONS, "--num_threads=1", f"--data_dir={data_dir.name}"]
    total = len(list((sources / "undisturbed").glob("*.bin")))
    assert total > 60
    for n, signal_number in ((10, signal.SIGKILL), (40, signal.SIGINT)):
        error = kill_at_shard(n, signal_number, sources, *command)
        if signal_number == signal.SIGINT:
            assert "complete shards stay, the same command resumes after them" in error_line(error)
        assert len(list(data_dir.glob("*.bin"))) < total
    assert "resuming after" in prepare(sources, *command)
    files, expected = contents(data_dir), contents(sources / "undisturbed")
    metas = [json.loads(each.pop("meta.json")) for each in (files, expected)]
    assert files == expected
    assert [meta.pop("source") for meta in metas] and metas[0] == metas[1]


# A file is written beside its name and renamed; of each two renames, one is progress.json's and the next a shard's.
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


def kill_at_rename(n, folder, *args):
    """Run the script until it has renamed n files and is about to rename another."""
    killed = subprocess.run([sys.executable, "-c", KILLED_AT_RENAME, str(n), SCRIPT, *args], cwd=folder,
                            start_new_session=True, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.parametrize("renames, shards, known", [
    (1, 0, 0),  # the first shard is written, not renamed
    (2, 1, 0),  # the first shard is there, progress.json does not know
    (12, 6, 5),  # the same in the middle
    (24, 12, 11)])  # all shards are there, chat.jsonl and meta.json are not
def test_killed_between_two_renames_makes_the_same_bytes(python, renames, shards, known):
    data_dir = python / f"killed{renames}"
    command = [*PYTHON, "--max_tokens=537500", f"--data_dir={data_dir.name}"]
    kill_at_rename(renames, python, *command)
    assert len(list(data_dir.glob("*.bin"))) == shards and not (data_dir / "meta.json").exists()
    *_, counts = json.loads((data_dir / "progress.json").read_text())
    assert counts.get("val shards", 0) + counts.get("train shards", 0) == known
    assert ("resuming after" in prepare(python, *command)) == bool(known)
    assert contents(data_dir) == contents(python / "undisturbed")


def test_val_is_the_same_however_much_is_prepared(python):
    prepare(python, *PYTHON, "--max_tokens=225000", "--data_dir=less")
    val = read_shards(python / "less", "val")
    assert [len(shard) for shard in val] == [50000, 12500]
    assert np.array_equal(np.concatenate(val), np.concatenate(read_shards(python / "undisturbed", "val")))
    assert np.array_equal(all_tokens(python / "less"), all_tokens(python / "undisturbed")[:225000])


def test_a_raised_max_tokens_continues(python):
    for max_tokens in (62501, 225000):
        prepare(python, *PYTHON, f"--max_tokens={max_tokens}", "--data_dir=raised")
        assert len(all_tokens(python / "raised")) == read_meta(python / "raised")["tokens"] == max_tokens
    kill_at_rename(2, python, *PYTHON, "--max_tokens=537500", "--data_dir=raised")
    assert not (python / "raised" / "meta.json").exists()  # its counts no longer hold
    assert "resuming after" in prepare(python, *PYTHON, "--max_tokens=537500", "--data_dir=raised")
    assert contents(python / "raised") == contents(python / "undisturbed")
    assert "prepared already" in prepare(python, *PYTHON, "--max_tokens=537500", "--data_dir=raised")
    assert contents(python / "raised") == contents(python / "undisturbed")


# ---------------------------------------------------------------------------------------------------
# mistakes

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
    name = change[2:].split("=")[0].replace("files", "source")
    assert ("--max_tokens=" if "max" in change else f"prepared with another {name}") in line
    assert contents(python / "undisturbed") == before


def test_a_lowered_max_tokens_is_refused_before_the_end_too(python):
    shutil.copytree(python / "undisturbed", python / "unfinished")
    (python / "unfinished" / "meta.json").unlink()
    before = contents(python / "unfinished")
    assert "--max_tokens=100000" in refusal(python, *PYTHON, "--max_tokens=100000", "--data_dir=unfinished")
    assert contents(python / "unfinished") == before


@pytest.mark.parametrize("removed", ["train_000001.bin", "val_000000.bin"])
def test_a_removed_shard_is_missed_before_the_end_too(tmp_path, removed):
    (tmp_path / "a.txt").write_text("text " * 4000)
    args = ["--files=a.txt", "--tokenizer=bytes", "--shard_size=3000", "--val_tokens=1000", "--data_dir=out"]
    prepare(tmp_path, *args, "--max_tokens=13000")
    (tmp_path / "out" / "meta.json").unlink()  # as when a longer run is killed early
    (tmp_path / "out" / removed).unlink()
    assert f"{removed.split('_')[0]} shards are missing" in refusal(tmp_path, *args, "--max_tokens=18000")


def test_shards_from_elsewhere_are_refused(tmp_path):
    write_shard(tmp_path / "[data]" / "fineweb_train_000001.bin", range(100))
    assert "progress.json" in refusal(tmp_path, *PYTHON, "--data_dir=[data]")
    assert {path.name for path in (tmp_path / "[data]").iterdir()} == {"fineweb_train_000001.bin", "lock"}


@pytest.mark.parametrize("args, words", [
    (["--files=no/*.txt"], ["--files=no/*.txt", "No such file"]),
    (["--files=a.txt,missing.txt"], ["missing.txt", "No such file"]),
    (["--files=a.csv"], ["a.csv", ".parquet, .jsonl, .json, .txt"]),
    (["--files=a.txt,b.jsonl"], [".jsonl", ".txt", "of one kind"]),
    (["--files=a.txt", "--dataset=python"], ["a.txt", "python", "one of them"]),
    (["--files=a.txt", "--dataset_split=test"], ["a.txt", "--dataset_split=test", "one of them"]),
    (["--files=a.txt", "--max_tokens=100", "--val_tokens=100"], ["--max_tokens=100", "--val_tokens=100"]),
    (["--files=a.txt", "--max_tokens=0"], ["--max_tokens=0", "at least 1"]),
    (["--files=a.txt", "--val_tokens=0"], ["--val_tokens=0", "at least 1"]),
    (["--files=a.txt", "--shard_size=-1"], ["--shard_size=-1", "from 1"]),
    (["--files=a.txt", "--shard_size=3000000000"], ["--shard_size=3000000000", "2147483647"]),
    (["--files=a.txt", "--num_threads=0"], ["--num_threads=0", "at least 1"]),
    (["--files=a.txt", "--data_dir=a.csv"], ["--data_dir=a.csv", "FileExistsError"]),
    (["--files=a.txt", "--data_dir=a.csv/out"], ["--data_dir=a.csv/out", "NotADirectoryError"])])
def test_a_mistake_is_named(tmp_path, args, words):
    for name in ("a.txt", "b.jsonl", "a.csv"):
        (tmp_path / name).write_text("text " * 100)
    before = sorted(tmp_path.iterdir())
    line = refusal(tmp_path, "--tokenizer=bytes", *args)
    assert all(word in line for word in words), line
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["junk.parquet", "folder.parquet", "packed.parquet.gz", "broken.jsonl",
                                  "cut.jsonl.gz", "empty.jsonl"])
def test_an_unreadable_file_is_named(tmp_path, name):
    write_parquet(tmp_path / "good.parquet", ["text"] * 10)
    (tmp_path / "junk.parquet").write_bytes(b"junk" * 100)
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "packed.parquet.gz").write_bytes(gzip.compress((tmp_path / "good.parquet").read_bytes()))
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": "b\n{"text": "c"}\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "text " * 1000}).encode())[:-20])
    (tmp_path / "empty.jsonl").touch()
    line = refusal(tmp_path, f"--files={name}", "--tokenizer=bytes", "--val_tokens=1", "--num_threads=1")
    assert f"--files={name}" in line
    assert ("JSON" in line) == (name == "broken.jsonl")
    assert not (tmp_path / "data/files/meta.json").exists()


def test_a_damaged_parquet_file_stops_the_run_and_once_repaired_it_resumes(sources, tmp_path):
    for name in ("a.parquet", "b.parquet"):
        shutil.copy(sources / name, tmp_path)
    whole = (tmp_path / "b.parquet").read_bytes()
    half = len(whole) // 2
    (tmp_path / "b.parquet").write_bytes(whole[:half] + b"\x55" * 300 + whole[half + 300:])
    command = [*PARQUET, "--data_dir=out", "--num_threads=1"]
    line = refusal(tmp_path, *command)
    assert "--files=*.parquet" in line and "complete shards stay" in line
    assert len(list((tmp_path / "out").glob("*.bin"))) > 5 and not (tmp_path / "out/meta.json").exists()
    (tmp_path / "b.parquet").write_bytes(whole)
    assert "resuming after" in prepare(tmp_path, *command)
    assert contents(tmp_path / "out") == contents(sources / "undisturbed")


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["a document"] * 10, column="body")
    (tmp_path / "a.jsonl").write_text('{"id": 1, "body": "a document"}\n' * 10)
    for name in ("a.parquet", "a.jsonl"):
        command = [f"--files={name}", f"--data_dir={name}.out", "--tokenizer=bytes", "--val_tokens=10"]
        line = refusal(tmp_path, *command)
        assert "--text_column=text" in line and "'id', 'body'" in line
        prepare(tmp_path, *command, "--text_column=body")  # into the same folder: nothing had been written there
        assert len(all_tokens(tmp_path / f"{name}.out")) == 110


@pytest.mark.parametrize("column", [[b"bytes"] * 10, list(range(10)), [["a list"]] * 10, [{"a": "b"}] * 10])
def test_a_column_that_is_not_text_is_refused(tmp_path, column):
    pyarrow.parquet.write_table(pyarrow.table({"id": range(10), "text": column}), tmp_path / "a.parquet")
    line = refusal(tmp_path, "--files=*.parquet", "--tokenizer=bytes", "--val_tokens=10")
    assert "0 tokens, 0 bytes, 10 documents skipped" in line and "no text" in line
    assert not list((tmp_path / "data/files").glob("*.bin"))


def test_too_few_tokens_for_val_and_the_suggested_value_works(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 99)
    command = ["--files=a.txt", "--tokenizer=bytes", "--num_threads=1"]
    line = refusal(tmp_path, *command, "--val_tokens=100", "--shard_size=30")
    assert "100 tokens" in line and "remove data/files" in line
    shutil.rmtree(tmp_path / "data/files")
    prepare(tmp_path, *command, line.split("try ")[1])
    assert len(all_tokens(tmp_path / "data/files")) == 100


def test_an_earlier_run_that_cannot_be_read_is_named(python, tmp_path):
    shutil.copytree(python / "undisturbed", tmp_path / "out")
    (tmp_path / "out" / "meta.json").write_text("{")
    assert "--data_dir=out" in refusal(tmp_path, *PYTHON, "--data_dir=out")
    (tmp_path / "out" / "progress.json").write_text("{")
    assert "--data_dir=out" in refusal(tmp_path, *PYTHON, "--data_dir=out")


def test_nothing_that_has_changed_is_resumed(sources, tmp_path):
    for path in (*sources.glob("*.parquet"), sources / "undisturbed"):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    command, out = [*PARQUET, "--data_dir=undisturbed"], tmp_path / "undisturbed"
    assert "is prepared already" in prepare(tmp_path, *command)
    last = max(out.glob("train_*.bin"))
    for shard in (out / "train_000001.bin", last):
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-2])
        assert "remove the folder" in refusal(tmp_path, *command)
        shard.unlink()
        assert "remove the folder" in refusal(tmp_path, *command)
        shard.write_bytes(whole)
    assert "is prepared already" in prepare(tmp_path, *command)
    with open(tmp_path / "a.parquet", "ab") as f:
        f.write(b"x")
    assert "prepared with another source" in refusal(tmp_path, *command)
    shutil.copy(sources / "a.parquet", tmp_path)
    (out / "meta.json").unlink()
    recipe, state, left, counts = json.loads((out / "progress.json").read_text())
    for damaged in ([recipe, {"shard_idx": 0}, left, counts], [recipe, 3, left, counts], [recipe, state, left, 3], [],
                    {"recipe": recipe, "state": state, "offset": left, "counts": counts}):
        (out / "progress.json").write_text(json.dumps(damaged))
        assert "undisturbed" in refusal(tmp_path, *command)


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1000)
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out/lock"):
        line = refusal(tmp_path, "--files=a.txt", "--tokenizer=bytes", "--data_dir=out")
        assert "--data_dir=out" in line and "if another run is writing to it, wait for its end" in line
    prepare(tmp_path, "--files=a.txt", "--tokenizer=bytes", "--data_dir=out")
