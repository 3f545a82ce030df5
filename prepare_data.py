"""
Text -> token shards. A Hugging Face data set (streamed), local files, or the text that comes with Python:

    python prepare_data.py --max_tokens=1000000000                       # FineWeb-Edu, its first billion tokens
    python prepare_data.py --files='dir/*.parquet' --data_dir=data/mine  # or .jsonl, .json, .txt, also .gz or .zst
    python prepare_data.py --dataset=python                              # the standard library, nothing to download
    python prepare_data.py --tokenizer=my-tokenizer                      # a folder with a tokenizer.json

A .txt file is one document in UTF-8. CR and CRLF line ends become LF, and a byte order mark stays, as the character
U+FEFF. Every other file has one document per row. A row whose document is missing, empty or not a string is skipped,
but a file whose first row lacks the key is refused.

All documents form one stream of tokens, with <|endoftext|> before each document. Exactly the first val_tokens of it
are for validation, in one shard. The rest is cut into training shards. A training shard ends with the batch of 64
documents that brings it to shard_size tokens. Preparation ends with the batch that reaches max_tokens. The last lines
of the output say how many tokens there are.

You can interrupt this script at any time. The same command resumes after the last complete shard and writes the bytes
that it would have written without the interruption, with any number of threads. A larger max_tokens adds shards to the
folder and does not change those in it. Memory holds two copies of a shard and a few batches, however large the source
is; only .txt files and JSON lists are read whole.
"""
import glob
import gzip
import io
import json
import os
import shlex
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated

# before numpy, which takes a moment: from here on Ctrl-C prints one line
from configurator import Positive, configure, fail, format_error, one_line_errors

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from python_text import conversation, hold_out, letter_questions, python_conversations, python_files, sum_questions
from shards import read_shard, shard_header
from tokenizer import encode, get_tokenizer, padded_vocab_size, token_bytes, token_dtype

KINDS = (".parquet", ".jsonl", ".json", ".txt")  # of local files; the last three may also be compressed


# ---------------------------------------------------------------------------------------------------
# sources of documents

def find_source(files, dataset, dataset_config, dataset_split):
    """
    Returns the source as meta.json records it: files, a data set of the hub, or python. Raises an error if a file is
    missing, or if the files are not of one kind.
    """
    if files:
        paths = {}  # by their normalized spelling, so that no file is read twice
        for pattern in map(str.strip, files.split(",")):
            for path in glob.glob(pattern, recursive=True) or [pattern]:
                paths.setdefault(os.path.normpath(path), path)
        kinds = {*map(kind_of, paths)}
        if len(kinds) > 1 or not kinds <= {*KINDS}:
            found = (kind or "a folder or a name without a suffix" for kind in sorted(kinds))
            raise ValueError(f"found {', '.join(found)}")
        return {"files": [[path, os.path.getsize(path)] for path in sorted(paths.values())]}
    if dataset == "python":
        return {"dataset": dataset, "version": sys.version.split()[0]}
    return {"dataset": dataset, "split": dataset_split,
            "config": dataset_config or ("sample-10BT" if dataset == "HuggingFaceFW/fineweb-edu" else None)}


def kind_of(path):
    """The suffix of a file's name, ignoring .gz and .zst."""
    return Path(path.removesuffix(".gz").removesuffix(".zst")).suffix


def open_file(path):
    """A file in binary, decompressed if it ends in .gz or .zst. Raises an error where a compressed file is cut off."""
    if path.endswith(".zst"):
        import pyarrow  # not at the top: --help need not wait for it
        return io.BufferedReader(pyarrow.CompressedInputStream(open(path, "rb"), "zstd"))
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")


def is_json_list(file):
    """Whether an open binary file of JSON holds one list, not a value on each line. Leaves it at its beginning."""
    return file.peek(1).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["  # after a byte order mark, perhaps


def read_file(path, column):
    """Yields the rows of a local file as dicts; of parquet and text files only this column."""
    if kind_of(path) == ".parquet":
        import pyarrow.parquet
        with pyarrow.parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise ValueError(f"its columns are {file.schema_arrow.names}, expected {column!r} among them")
            for batch in file.iter_batches(1000, columns=[column]):
                yield from ({column: document} for document in batch.column(0).to_pylist())
        return
    with open_file(path) as file:
        if kind_of(path) == ".txt":
            yield {column: io.TextIOWrapper(file, "utf-8").read()}
        elif is_json_list(file):
            yield from json.load(file)
        else:
            for i, line in enumerate(file, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except ValueError as error:
                        raise ValueError(f"line {i}: {format_error(error)}")
                    yield row


def read_documents(files, column):
    """
    Yields {column: document} for each row of files, pairs of path and size. The document is None if the row has no
    such column, but the first row of each file must have it. An error names the file.
    """
    for path, _ in files:
        try:
            for i, row in enumerate(read_file(path, column)):
                if not isinstance(row, dict):
                    raise ValueError(f"its row {i + 1} is {row!r:.60}, expected an object")
                if i == 0 and column not in row:
                    raise ValueError(f"the keys of its first row are {[*row]}, expected {column!r} among them")
                yield {column: row.get(column)}
        except Exception as error:
            advice = "; convert it to UTF-8" if isinstance(error, UnicodeDecodeError) else ""
            raise ValueError(f"{path}: {format_error(error)}{advice}")


def read_batches(source, column, state):
    """
    Yields 64 documents and the state of the source after them. source: from find_source; state: one to continue from;
    None: the start.
    """
    os.environ.setdefault("USE_TORCH", "0")  # otherwise datasets imports torch, which takes seconds
    import datasets  # here, because --help and a refused setting need not wait for it
    if "split" in source:
        data = datasets.load_dataset(source["dataset"], source["config"], split=source["split"], streaming=True)
    elif "files" in source:
        data = datasets.IterableDataset.from_generator(  # which resumes at the file that it was reading
            read_documents, gen_kwargs={"files": source["files"], "column": column})
    else:
        data = datasets.IterableDataset.from_generator(python_files)
    data = data.select_columns(column)
    if state:
        data.load_state_dict(state)
    for batch in data.iter(batch_size=64):
        yield batch[column], data.state_dict()


# ---------------------------------------------------------------------------------------------------
# documents -> tokens, in threads: tiktoken releases the GIL while it encodes

def count_cpus():
    """CPUs that this process may use: fewer than os.cpu_count() under taskset, Slurm and in some containers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def tokenize(tokenizer, documents):
    """
    Returns the tokens of documents, (n,) of token_dtype, with <|endoftext|> before each, and counts. Documents are
    skipped if they are empty, not text, or refused by tiktoken, which does not encode about a million consecutive
    spaces.
    """
    pieces = []
    for text in documents:
        with suppress(ValueError):  # tiktoken's
            if text and isinstance(text, str):
                pieces += [[tokenizer.eot_token], encode(tokenizer, text)]
    tokens, kept = np.concatenate(pieces or [[]], dtype=token_dtype(tokenizer), casting="unsafe"), len(pieces) // 2
    return tokens, {"documents": kept, "documents skipped": len(documents) - kept, "tokens": len(tokens),
                    "bytes": int(token_bytes(tokenizer)[tokens].sum())}


def tokenize_batches(batches, tokenizer, num_threads):
    """
    Yields (tokens, counts, state) for each batch of read_batches, in order: what tokenize returns, and the state. At
    most 4 * num_threads batches are in memory.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        jobs = ((pool.submit(tokenize, tokenizer, documents), state) for documents, state in batches)
        pending = [*islice(jobs, 4 * num_threads)]
        while pending:
            job, state = pending.pop(0)
            yield *job.result(), state
            pending += islice(jobs, 1)


# ---------------------------------------------------------------------------------------------------
# tokens -> shards

def write_atomically(path, *pieces):
    """Write bytes or arrays to a file. After a crash the file is there whole, or as it was before."""
    with open(f"{path}.tmp", "wb") as f:
        f.writelines(pieces)
        f.flush()
        os.fsync(f.fileno())
    os.replace(f.name, path)


def write_jsonl(path, rows):
    write_atomically(path, *(f"{json.dumps(row)}\n".encode() for row in rows))


def write_meta(folder, meta):
    write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode())


def read_progress(folder, recipe):
    """
    What earlier runs left in a folder, from its meta.json: the recipe, the counts of what its shards hold, and the
    state of the source after them. Raises an error if its shards are damaged or were prepared by another recipe.
    """
    path = folder / "meta.json"
    if path.exists() and b'"tokenizer"' not in path.read_bytes():
        raise ValueError("holds a meta.json that prepare_data.py did not write")
    counts = {"documents": 0, "documents skipped": 0, "tokens": 0, "bytes": 0, "train shards": 0, "exhausted": False}
    if not any(folder.glob("*.bin")):
        return {**recipe, **counts, "shards": {}, "state": None}
    meta = {"shards": {}, **json.loads(path.read_text())}  # an earlier version wrote fewer keys
    for key, value in recipe.items():
        if meta.get(key, value) != value:
            raise ValueError(f"holds shards prepared with another {key}, {meta[key]}")
    for name in ["val_000000.bin", *(f"train_{i:06d}.bin" for i in range(meta["train shards"]))]:
        read_shard(folder / name, meta["shards"].get(name))
    (folder / f"train_{meta['train shards']:06d}.bin").unlink(missing_ok=True)  # written just before a kill
    for key in counts:
        if not isinstance(meta[key], int):
            raise ValueError(f"its meta.json is damaged: {key} is {meta[key]!r}")
    if "files" in recipe["source"] and "previous_state" in str(meta.get("state")):
        del meta["state"]  # an earlier version read files with another reader
    return meta


def write_shard(folder, pieces, meta):
    """Write the next training shard, and meta.json. The first val_tokens overall become the validation shard."""
    tokens = np.concatenate(pieces)
    shards = {f"train_{meta['train shards']:06d}.bin": tokens}
    if meta["train shards"] == 0:
        val, train = np.split(tokens, [meta["val_tokens"]])
        shards = {"val_000000.bin": val, "train_000000.bin": train}
    for name, shard in shards.items():
        write_atomically(folder / name, shard_header(len(shard), shard.dtype.str), shard)
        meta["shards"][name] = zlib.crc32(shard), (folder / name).stat().st_mtime_ns
    meta["train shards"] += 1
    write_meta(folder, meta)


def write_shards(folder, batches, max_tokens, meta):
    """Write batches of tokens as shards until there are max_tokens, or no more batches. Keeps meta up to date."""
    pieces, begin = [], max(meta["tokens"], meta["val_tokens"])  # of the next shard; tokens before it
    with tqdm(total=max_tokens, initial=meta["tokens"], unit="tok", unit_scale=True) as bar:
        for tokens, counts, state in batches:
            pieces.append(tokens)
            for name in counts:
                meta[name] += counts[name]
            meta["state"] = state
            bar.update(len(tokens))
            if max_tokens and meta["tokens"] >= max_tokens:
                break
            if meta["tokens"] >= begin + meta["shard_size"]:
                write_shard(folder, pieces, meta)
                pieces, begin = [], meta["tokens"]
        else:
            meta["exhausted"] = True
    if meta["tokens"] > begin:
        write_shard(folder, pieces, meta)


def write_tokenizer(folder, tokenizer):
    """Write the files of a Hugging Face tokenizer, and remove those of an earlier one."""
    from hf_tokenizer import FILES  # not at the top: gpt2 and bytes do without it
    folder.mkdir(exist_ok=True)
    for name in FILES:
        if name in tokenizer.files:
            write_atomically(folder / name, tokenizer.files[name].encode())
        else:
            (folder / name).unlink(missing_ok=True)


def write_chats(folder):
    """Write chat.jsonl, with questions about the library, sums and letters, and tasks/, with those held out."""
    print(f"{folder}/chat.jsonl: writing questions and answers, and held-out ones in {folder}/tasks ...", flush=True)
    chats = [*python_conversations()]
    for task, questions in ("sums", sum_questions()), ("letters", letter_questions()):
        test, train = hold_out(questions)
        (folder / "tasks" / task).mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / "tasks" / task / "test.jsonl", test)
        chats += [conversation(**row) for row in train]
    write_jsonl(folder / "chat.jsonl", chats)


if __name__ == "__main__":
    dataset: str = "HuggingFaceFW/fineweb-edu"  # on the Hugging Face hub; or python: the standard library
    dataset_config: str | None = None  # its configuration; None: sample-10BT for FineWeb-Edu, else its default
    dataset_split: str = "train"  # the split of the data set to read
    files: str | None = None  # local files instead: paths or globs, comma-separated; a resume compares names, sizes
    text_column: str = "text"  # the column, or key, that holds a document
    data_dir: str | None = None  # where the shards go; None: data/NAME
    tokenizer: str | None = None  # gpt2, bytes, or a folder with a tokenizer.json; None: gpt2, python: bytes
    max_tokens: Positive | None = None  # stop with the batch that reaches this many, validation included; None: all
    val_tokens: Positive | None = None  # the first, held out; None: 2**20, or, if less, a tenth of local files by size
    shard_size: Annotated[int, 1, 2 ** 30] = 100_000_000  # minimum tokens per training shard, except a run's last
    num_threads: Positive = count_cpus()  # for tokenizing; default: one per CPU that this process may use
    _, overrides = configure(globals())

    # what to read, and what all runs in a folder must agree on
    source_flag = f"--files={files}" if files else f"--dataset={dataset}"
    if files and overrides.keys() & {"dataset", "dataset_config", "dataset_split"}:
        fail(f"{source_flag}: local files are read instead of a data set; leave out --dataset, --dataset_config and "
             "--dataset_split, or --files")
    with one_line_errors(source_flag, f"expected files of one kind, {', '.join(KINDS)}, the last three "
                         "optionally compressed (.gz or .zst)"):
        source = find_source(files, dataset, dataset_config, dataset_split)
    encoding = get_tokenizer(tokenizer or ("bytes" if dataset == "python" else "gpt2"))
    n_bytes = sum(size for _, size in source.get("files", ()))
    tenth = n_bytes // (10 if encoding.name == "bytes" else 40)  # other tokens are some 4 bytes
    recipe = {"tokenizer": encoding.name, "vocab_size": padded_vocab_size(encoding), "beginning": encoding.eot_token,
              "source": source, "text_column": text_column, "shard_size": shard_size,
              "val_tokens": val_tokens or min(2 ** 20, tenth) or 2 ** 20}

    # what earlier runs left in the folder
    folder = Path(data_dir or f"data/{'files' if files else Path(dataset).name}")
    with one_line_errors(f"--data_dir={folder}", "if another run is writing to it, wait for it to finish; else give "
                         "another --data_dir, or remove the folder if you do not need its shards"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock").acquire(timeout=0)  # until this process exits
        meta = read_progress(folder, recipe)

    # documents -> tokens -> shards
    if meta["exhausted"] or (max_tokens and meta["tokens"] >= max_tokens):
        print(f"{folder} is prepared already: nothing to add for --max_tokens={max_tokens}")
    elif "state" not in meta:
        fail(f"--data_dir={folder}: an earlier version of prepare_data.py wrote these shards, and this one cannot add "
             "to them; train on them as they are, or give another --data_dir")
    else:
        resume_hint = "the same command resumes after the complete shards"
        with one_line_errors(f"{source_flag} --text_column={text_column} to {folder}", resume_hint + (
                "; if you have to fix or leave out a file, give another --data_dir" if files else "")):
            print(f"opening {files or dataset}, after {meta['tokens']:,} tokens in complete shards ...", flush=True)
            meta["finished"] = False
            write_meta(folder, meta)
            if encoding.files:
                write_tokenizer(folder / "tokenizer", encoding)
            batches = read_batches(source, text_column, meta["state"])
            try:
                write_shards(folder, tokenize_batches(batches, encoding, num_threads), max_tokens, meta)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(resume_hint)
    summary = ("{documents:,} documents, {tokens:,} tokens, {bytes:,} bytes, {documents skipped:,} documents skipped"
               .format(**meta))
    if meta["train shards"] == 0:
        default = "" if val_tokens else ", the default"
        fail(f"--val_tokens={recipe['val_tokens']}{default}: leaves nothing to train on; {source_flag} gave only "
             f"{summary} (empty, not text, or refused by tiktoken); lower it, or give more text or a larger "
             "--max_tokens")
    if dataset == "python" and not (folder / "chat.jsonl").exists():  # a user may have edited it
        write_chats(folder)
    meta["finished"] = True
    write_meta(folder, meta)

    # what to do with them
    command = ["python", "train_gpt2.py", f"--data_dir={folder.as_posix()}"]
    if encoding.name == "bytes":
        command.insert(2, "config/quickstart.py")
    if dataset != "python":
        command.append(f"--out_dir=out-{folder.resolve().name}")
    share = recipe["val_tokens"] / meta["tokens"]
    print(f"{folder}: {summary}\n"
          f"the first {recipe['val_tokens']:,} tokens ({share:.0%}) are for validation; train on the rest:\n"
          + shlex.join(command))
    if meta["bytes"] < 50e6 and encoding.name == "gpt2":
        print("This is too little text for GPT-2 124M. For a small model prepare it in another folder, with "
              "--tokenizer=bytes")
