"""
Text -> token shards. A Hugging Face data set (streamed), local files, or the text that comes with Python:

    python prepare_data.py --max_tokens=1000000000                       # FineWeb-Edu, its first billion tokens
    python prepare_data.py --files='dir/*.parquet' --data_dir=data/mine  # or .jsonl, .json, .txt, also .gz or .zst
    python prepare_data.py --dataset=python                              # the standard library, nothing to download

Documents become one stream of tokens, <|endoftext|> before each, that is cut into shards of a fixed size; the first
tokens are for validation. Memory is bounded whatever the size of the source. Stop it whenever you like: the same
command resumes after the last complete shard, and in the end the bytes are the same, for any number of threads.
"""
import ast
import glob
import hashlib
import json
import os
import re
import sys
import sysconfig
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated, Literal, Optional

import numpy as np
from filelock import FileLock, Timeout

from configurator import Positive, configure, fail, one_line_errors
from shards import read_meta, read_shard, shard_header
from tokenizer import REFUSED, encode, get_tokenizer, padded_vocab_size, token_bytes

# ---------------------------------------------------------------------------------------------------
# sources: each yields (state, documents) in a fixed order; given a state back, it continues from there

# suffix -> reader in `datasets`, and its options; parquet's batch is a row group by default, which may be a whole file
FILE_KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
READER_OPTIONS = {"parquet": {"batch_size": 1000}, "json": {}, "text": {"sample_by": "document"}}


def find_files(setting, files):
    """Comma-separated paths and globs, the value of `setting` -> sorted paths, each once."""
    paths = set()
    for pattern in files.split(","):
        pattern = os.path.expanduser(pattern.strip())
        found = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if not found:
            fail(f"--{setting}={files}: no such file: {pattern}")
        paths |= set(map(os.path.normpath, found))
    return sorted(paths)


def dataset_batches(data, column, state):
    """The documents of a streamed data set, 64 at a time."""
    if state:
        data.load_state_dict(state)
    for batch in data.iter(batch_size=64):
        yield state, batch[column]
        state = data.state_dict()


def python_files():
    """
    Yields (name, text) of each file of Python's standard library, in an order that mixes its packages (by the hash of
    the name), without its tests and without tables that are data in disguise.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if not skip & set(name.split("/")):
            yield name, (root / name).read_text(encoding="utf-8", errors="replace")


def python_batches(state):
    """The files of the standard library, 16 at a time."""
    texts = [text for _, text in python_files()]
    for i in range(state or 0, len(texts), 16):
        yield i, texts[i:i + 16]


def python_conversations():
    """
    Questions about the public functions and classes of the standard library, each answered by the first paragraph of
    its docstring, if that has 10 to 160 characters: a list of {"messages": [{"role", "content"}, ...]}.
    """
    conversations = []
    for name, text in python_files():
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in ast.parse(text).body:
            for item in [node, *(node.body if isinstance(node, ast.ClassDef) else [])]:
                if not isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    continue
                full_name = f"{module}.{item.name}" if item is node else f"{module}.{node.name}.{item.name}"
                answer = " ".join((ast.get_docstring(item) or "").split("\n\n")[0].split())
                if "._" not in f".{full_name}" and 10 <= len(answer) <= 160 and answer.isascii():
                    is_class = isinstance(item, ast.ClassDef)
                    question = f"What is {full_name}?" if is_class else f"What does {full_name} do?"
                    conversations.append({"messages": [{"role": "user", "content": question},
                                                       {"role": "assistant", "content": answer}]})
    return conversations


# ---------------------------------------------------------------------------------------------------
# documents -> tokens in threads (tiktoken releases the GIL while it encodes), tokens -> shards in the main one

def count_cpus():
    """CPUs that this process may use: fewer than there are under taskset, Slurm and in some containers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def tokenize(tokenizer, documents):
    """Tokens of documents, (n,) uint16, <|endoftext|> before each, and a Counter of skipped documents by reason."""
    eot, pieces, skipped = np.array([tokenizer.eot_token], dtype=np.uint32), [], Counter()
    for text in documents:
        if not isinstance(text, str) or not text:
            skipped["documents skipped: empty" if text in (None, "") else "documents skipped: not text"] += 1
            continue
        try:
            pieces += [eot, encode(tokenizer, text)]
        except ValueError:
            skipped[f"documents skipped: {REFUSED}"] += 1
    return np.concatenate([eot[:0], *pieces]).astype("<u2"), skipped


def tokenize_batches(batches, tokenizer, num_threads):
    """(state, documents) -> (state, tokens, skipped), in order. At most 4 * num_threads batches are in flight."""
    pending = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for state, documents in batches:
            pending.append((state, pool.submit(tokenize, tokenizer, documents)))
            if len(pending) == 4 * num_threads:
                state, job = pending.popleft()
                yield state, *job.result()
        for state, job in pending:
            yield state, *job.result()


def write_atomically(path, *pieces):
    """Write bytes or arrays to a file that is there whole or not at all."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as f:
        f.writelines(pieces)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def write_json(path, value):
    write_atomically(path, json.dumps(value, indent=1).encode())


def write_shard(data_dir, split, counts, pieces):
    """Write the next shard of a split, `pieces` of tokens, and count it."""
    path = f"{data_dir}/{split}_{counts[f'{split} shards']:06d}.bin"
    write_atomically(path, shard_header(sum(map(len, pieces))), *pieces)
    counts[f"{split} shards"] += 1


if __name__ == "__main__":
    dataset: str = "HuggingFaceFW/fineweb-edu"  # on the Hugging Face hub; or python: the standard library
    dataset_config: Optional[str] = None  # its configuration; None: sample-10BT for FineWeb-Edu, else its default
    dataset_split: str = "train"  # the split of the data set to read
    files: Optional[str] = None  # local files instead: paths or globs, separated by commas
    text_column: str = "text"  # the column, or key, that holds a document
    data_dir: Optional[str] = None  # where the shards go; None: data/NAME
    tokenizer: Optional[Literal["gpt2", "bytes"]] = None  # None: gpt2, but bytes for --dataset=python
    max_tokens: Optional[Positive] = None  # stop after this many, validation included; None: all
    val_tokens: Optional[Positive] = None  # the first tokens; None: 2**20, at most about a tenth of local files
    shard_size: Annotated[int, 1, 2 ** 31 - 1] = 100_000_000  # tokens per shard, 2 bytes each
    num_threads: Optional[Positive] = None  # that tokenize; None: one per CPU
    config, overrides = configure(globals())

    # the source
    from_files, from_python = files is not None, files is None and dataset == "python"
    source_name = f"--files={files}" if from_files else f"--dataset={dataset}"
    unused = (["dataset", "dataset_config", "dataset_split"] if from_files else
              ["dataset_config", "dataset_split", "text_column"] if from_python else [])
    for name in overrides.keys() & unused:
        fail(f"--{name}={overrides[name]} and {source_name}: give one of them")
    tokenizer = tokenizer or ("bytes" if from_python else "gpt2")
    encoding = get_tokenizer(tokenizer)
    if from_files:
        paths = find_files("files", files)
        kind, *others = sorted({FILE_KINDS.get(Path(re.sub(r"\.(gz|zst)$", "", path)).suffix, path) for path in paths})
        if others or kind not in READER_OPTIONS:
            fail(f"{source_name}: expected files of one kind, {', '.join(FILE_KINDS)}, the last three also with .gz "
                 f"or .zst after it; got {', '.join([kind, *others])}")
        reader = {"path": kind, "data_files": [*map(glob.escape, paths)], **READER_OPTIONS[kind]}
        source = {"files": [[path, os.path.getsize(path)] for path in paths]}
        tenth = sum(map(os.path.getsize, paths)) // (40 if tokenizer == "gpt2" else 10)  # gpt2: some 4 bytes a token
        val_tokens = val_tokens or min(2 ** 20, max(1, tenth))
    elif from_python:
        source = {"dataset": "python", "version": sys.version.split()[0]}
    else:
        dataset_config = dataset_config or ("sample-10BT" if dataset == "HuggingFaceFW/fineweb-edu" else None)
        reader = {"path": dataset, "name": dataset_config}
        source = {"dataset": dataset, "config": dataset_config, "split": dataset_split}
    data_dir = data_dir or f"data/{'files' if from_files else dataset.split('/')[-1]}"
    val_tokens, target_tokens = val_tokens or 2 ** 20, max_tokens or sys.maxsize
    if target_tokens <= val_tokens:
        fail(f"--max_tokens={max_tokens}: the first --val_tokens={val_tokens} are for validation, so none would be "
             f"left to train on; raise the one or lower the other")

    # what earlier runs have done; all runs in a folder share a recipe
    recipe = {"source": source, "text_column": text_column, "tokenizer": tokenizer, "val_tokens": val_tokens,
              "shard_size": shard_size}
    progress = {"recipe": recipe, "state": None, "offset": 0, "counts": {"tokens": 0}}
    progress_path, meta_path = f"{data_dir}/progress.json", f"{data_dir}/meta.json"
    with one_line_errors(f"--data_dir={data_dir}", "remove the folder, or give another"):
        os.makedirs(data_dir, exist_ok=True)
        with one_line_errors(f"--data_dir={data_dir}: another run is writing to it", "wait for its end", Timeout):
            lock = FileLock(f"{data_dir}/lock").acquire(timeout=0)
        existing_tokens = sum(len(read_shard(path)) for path in glob.glob(f"{glob.escape(data_dir)}/*.bin"))
        if os.path.exists(progress_path):
            saved_progress = json.loads(Path(progress_path).read_text())
            differing = [key for key in recipe if saved_progress["recipe"].get(key) != recipe[key]]
            if differing and existing_tokens:
                fail(f"--data_dir={data_dir}: holds shards prepared with another {' and '.join(differing)}; "
                     f"give another --data_dir, or remove the folder")
            progress = progress if differing else saved_progress
        elif existing_tokens:
            fail(f"--data_dir={data_dir}: holds shards that this script did not write; give another --data_dir")
        finished = os.path.exists(meta_path)
        done = read_meta(data_dir) if finished else progress["counts"]
        if not done["tokens"] <= existing_tokens <= target_tokens:
            fail(f"--max_tokens={max_tokens}: {data_dir} holds {existing_tokens} tokens; expected at least the "
                 f"{done['tokens']} of earlier runs, and at most --max_tokens; give another --data_dir, or remove the "
                 f"folder")
        if finished and (done["exhausted"] or existing_tokens == target_tokens):
            print(f"{data_dir} is prepared already: {done['documents']:,} documents, {done['tokens']:,} tokens")
            raise SystemExit(0)

    # documents -> tokens
    print(f"opening {files or dataset} ...", flush=True)
    counts, offset = Counter(progress["counts"]), progress["offset"]
    start_time, start_tokens = time.time(), counts["tokens"]
    if from_python:
        batches, bar = python_batches(progress["state"]), nullcontext()  # done in a second or two
    else:
        os.environ.setdefault("USE_TORCH", "0")  # or datasets imports torch, seconds for nothing
        import datasets
        from tqdm import tqdm  # comes with datasets
        with one_line_errors(f"{source_name} --text_column={text_column}"):
            data = datasets.load_dataset(**reader, split=dataset_split, streaming=True).select_columns(text_column)
        batches = dataset_batches(data, text_column, progress["state"])
        bar = tqdm(total=max_tokens, initial=start_tokens, unit="tok", unit_scale=True, mininterval=2)
    if start_tokens:
        print(f"resuming after {start_tokens:,} tokens in complete shards")
    write_json(progress_path, progress)
    if finished:  # and more tokens were asked for
        os.remove(meta_path)

    # tokens -> shards. After each full one, progress.json says where the next begins: the state of the source before a
    # batch of documents, and an offset into the tokens of that batch.
    sizes, pieces, filled = token_bytes(encoding), [], 0  # the shard being filled, and its length
    with one_line_errors(f"{source_name} to {data_dir}", "complete shards stay, the same command resumes after them",
                         (Exception, KeyboardInterrupt)), bar, closing(batches):
        for state, tokens, skipped in tokenize_batches(batches, encoding, num_threads or count_cpus()):
            if offset == 0:  # otherwise an earlier run began this batch, and counted these
                counts += skipped
            tokens = tokens[:offset + target_tokens - counts["tokens"]]
            while offset < len(tokens):
                split, space = "train", shard_size - filled
                if counts["tokens"] < val_tokens:
                    split, space = "val", min(space, val_tokens - counts["tokens"])
                piece = tokens[offset:offset + space]
                n = len(piece)
                pieces.append(piece)
                filled += n
                offset += n
                counts += Counter(documents=int((piece == encoding.eot_token).sum()), tokens=n,
                                  bytes=int(sizes[piece].sum()))
                if not from_python:
                    bar.update(n)
                if n == space:
                    write_shard(data_dir, split, counts, pieces)
                    pieces, filled = [], 0
                    progress = {"recipe": recipe, "state": state, "offset": offset, "counts": counts}
                    write_json(progress_path, progress)
            offset = 0
            if counts["tokens"] == target_tokens:
                break
        if pieces:  # a shorter last shard, not in progress.json: with a higher max_tokens it is written anew
            write_shard(data_dir, split, counts, pieces)
    seconds = time.time() - start_time
    summary = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    if counts["tokens"] <= val_tokens:
        for path in [progress_path, *glob.glob(f"{glob.escape(data_dir)}/val_*.bin")]:
            os.remove(path)
        fail(f"--val_tokens={val_tokens}: {source_name} has only {summary or 'no documents'}, so none are left to "
             f"train on; give more text, or try --val_tokens={max(1, counts['tokens'] // 10)}")

    # what was done
    if from_python:
        conversations = python_conversations()
        write_atomically(f"{data_dir}/chat.jsonl", *(json.dumps(c).encode() + b"\n" for c in conversations))
        print(f"{data_dir}/chat.jsonl: {len(conversations):,} questions and answers, from its docstrings")
    write_json(meta_path, {"tokenizer": tokenizer, "vocab_size": padded_vocab_size(encoding), "source": source,
                           "exhausted": counts["tokens"] < target_tokens, **counts})
    print(f"{data_dir}: {summary}; {seconds:.1f} s, {(counts['tokens'] - start_tokens) / seconds:,.0f} tokens/s")
    print(f"the first {val_tokens:,} tokens are for validation; train on the rest:\n"
          f"python train_gpt2.py --data_dir={data_dir} (GPT-2 124M; in minutes on a laptop: "
          f"python train_gpt2.py config/quickstart.py --data_dir={data_dir} --out_dir=out)")
