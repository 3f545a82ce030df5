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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from configurator import Positive, configure, fail, one_line_errors
from shards import read_shard, shard_header
from tokenizer import encode, get_tokenizer, padded_vocab_size, token_bytes

# ---------------------------------------------------------------------------------------------------
# sources

# suffix -> arguments of load_dataset; parquet's batch is a row group by default, which may be a whole file
READERS = {".parquet": {"path": "parquet", "batch_size": 1000}, ".jsonl": {"path": "json"},
           ".json": {"path": "json"}, ".txt": {"path": "text", "sample_by": "document"}}


def python_files():
    """
    Yields the name and text of each file of Python's standard library, in an order that mixes its packages (by the
    hash of the name), without its tests and without tables that are data in disguise.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    names = glob.glob("**/*.py", root_dir=root, recursive=True)
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if not skip & set(name.split("/")):
            yield {"name": name, "text": (root / name).read_text(encoding="utf-8", errors="replace")}


def python_conversations():
    """
    Yields questions about the functions of the standard library, of up to 90 characters and each once, answered by the
    first paragraph of the docstring, if that has 10 to 160: {"messages": [{"role", "content"}, ...]}.
    """
    asked = set()
    for file in python_files():
        for node in ast.walk(ast.parse(file["text"])):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = re.sub(r"^(self|cls)(, /)?(, |$)", "", ast.unparse(node.args))
                question = f"What does {node.name}({arguments}) do?"
                answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if question not in asked and len(question) <= 90 and 10 <= len(answer) <= 160 and answer.isascii():
                    asked.add(question)
                    yield {"messages": [{"role": "user", "content": question},
                                        {"role": "assistant", "content": answer}]}


# ---------------------------------------------------------------------------------------------------
# documents -> tokens in threads (tiktoken releases the GIL while it encodes), tokens -> shards in the main one

def count_cpus():
    """CPUs that this process may use: fewer than there are under taskset, Slurm and in some containers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def document_batches(data, column, state):
    """
    Yields (state, documents) of a streamed data set, 64 documents at a time in a fixed order. Given a state back, it
    continues with the documents that came with it.
    """
    if state:
        data.load_state_dict(state)
    for batch in data.iter(batch_size=64):
        yield state, batch[column]
        state = data.state_dict()


def tokenize(tokenizer, documents):
    """
    Tokens of documents, (n,) uint16, <|endoftext|> before each, and the number of documents skipped: empty, no text,
    or refused by tiktoken, like about a million consecutive spaces.
    """
    eot, pieces = np.array([tokenizer.eot_token], dtype=np.uint32), []
    for text in documents:
        with suppress(TypeError, ValueError):
            if text:
                pieces += [eot, encode(tokenizer, text)]
    return np.concatenate([eot[:0], *pieces]).astype("<u2"), len(documents) - len(pieces) // 2


def tokenize_batches(batches, tokenizer, num_threads):
    """(state, documents) -> (state, tokens, skipped), in order. At most 4 * num_threads batches are in flight."""
    with ThreadPoolExecutor(num_threads) as pool:
        jobs = ((state, pool.submit(tokenize, tokenizer, documents)) for state, documents in batches)
        pending = [*islice(jobs, 4 * num_threads)]
        while pending:
            state, job = pending.pop(0)
            yield state, *job.result()
            pending += islice(jobs, 1)


def write_atomically(path, *pieces):
    """Write bytes or arrays to a file that is there whole or not at all."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as f:
        f.writelines(pieces)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


if __name__ == "__main__":
    dataset: str = "HuggingFaceFW/fineweb-edu"  # on the Hugging Face hub; or python: the standard library
    dataset_config: str | None = None  # its configuration; None: sample-10BT for FineWeb-Edu, else its default
    dataset_split: str = "train"  # the split of the data set to read
    files: str | None = None  # local files instead: paths or globs, separated by commas
    text_column: str = "text"  # the column, or key, that holds a document
    data_dir: str | None = None  # where the shards go; None: data/NAME
    tokenizer: Literal["gpt2", "bytes"] | None = None  # None: gpt2, but bytes for --dataset=python
    max_tokens: Positive | None = None  # stop after this many, validation included; None: all
    val_tokens: Positive | None = None  # the first tokens; None: 2**20, at most about a tenth of local files
    shard_size: Annotated[int, 1, 2 ** 31 - 1] = 100_000_000  # tokens per shard, 2 bytes each
    num_threads: Positive | None = None  # that tokenize; None: one per CPU
    _, overrides = configure(globals())

    # the source
    from_python = dataset == "python"
    source_name = f"--dataset={dataset}" if files is None else f"--files={files}"
    tokenizer = tokenizer or ("bytes" if from_python else "gpt2")
    encoding = get_tokenizer(tokenizer)
    if files is not None:
        for name in overrides.keys() & {"dataset", "dataset_config", "dataset_split"}:
            fail(f"--{name}={overrides[name]} and {source_name}: give one of them")
        with one_line_errors(source_name, f"expected files of one kind, {', '.join(READERS)}, the last three also "
                             "with .gz or .zst after it"):
            paths = sorted({path for pattern in files.split(",")
                            for path in glob.glob(pattern.strip(), recursive=True) or [pattern]})
            source = {"files": [[path, os.path.getsize(path)] for path in paths]}
            [kind] = {Path(path.removesuffix(".gz").removesuffix(".zst")).suffix for path in paths}
            reader = {"data_files": [*map(glob.escape, paths)], **READERS[kind]}
        tenth = sum(map(os.path.getsize, paths)) // (40 if tokenizer == "gpt2" else 10)  # gpt2: some 4 bytes a token
        val_tokens = val_tokens or min(2 ** 20, tenth or 1)
    elif from_python:
        source = {"dataset": "python", "version": sys.version.split()[0]}
    else:
        dataset_config = dataset_config or ("sample-10BT" if dataset == "HuggingFaceFW/fineweb-edu" else None)
        reader = {"path": dataset, "name": dataset_config}
        source = {"dataset": dataset, "config": dataset_config, "split": dataset_split}
    val_tokens, target_tokens = val_tokens or 2 ** 20, max_tokens or sys.maxsize
    if target_tokens <= val_tokens:
        fail(f"--max_tokens={max_tokens}: the first --val_tokens={val_tokens} are for validation, so none would be "
             f"left to train on; raise the one or lower the other")

    # What earlier runs have done. progress.json has the recipe, which all runs in a folder share, and where its last
    # shard begins: the state of the source before a batch of documents, how many tokens of that batch are left, and
    # the counts up to there. meta.json has the counts of a finished run.
    recipe = {"text_column": text_column, "tokenizer": tokenizer, "val_tokens": val_tokens, "shard_size": shard_size,
              "source": source}
    state, left, counts = None, 0, {}
    folder = Path(data_dir or f"data/{dataset.split('/')[-1] if files is None else 'files'}")
    progress_path, meta_path, chat_path = folder / "progress.json", folder / "meta.json", folder / "chat.jsonl"
    with one_line_errors(f"--data_dir={folder}", "if another run is writing to it, wait for its end; else give "
                         "another --data_dir, or remove the folder if you do not need its shards"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock").acquire(timeout=0)
        existing_tokens = sum(len(read_shard(path)) for path in folder.glob("*.bin"))
        if existing_tokens or meta_path.exists():
            earlier, state, left, counts = json.loads(progress_path.read_text())
            for key in recipe:
                if recipe[key] != earlier[key]:
                    raise ValueError(f"holds shards prepared with another {key}")
            done = Counter(json.loads(meta_path.read_text()) if meta_path.exists() else counts)
            if existing_tokens > target_tokens:
                raise ValueError(f"holds {existing_tokens} tokens; expected at most --max_tokens={max_tokens}")
            for split in ("train", "val"):
                names = sorted(path.name for path in folder.glob(f"{split}_*.bin"))
                numbered = [f"{split}_{i:06d}.bin" for i in range(len(names))]
                if names != numbered or len(names) < done[f"{split} shards"]:
                    raise ValueError(f"{split} shards are missing, or there are others")
            if done["exhausted"] or done["tokens"] == target_tokens:
                print(f"{folder} is prepared already: {done['documents']:,} documents, {done['tokens']:,} tokens")
                raise SystemExit

    # documents -> tokens -> shards
    counts, sizes, shard = Counter(counts), token_bytes(encoding), bytearray()
    print(f"opening {files or dataset} ...", flush=True)
    if counts:
        print(f"resuming after {counts['tokens']:,} tokens in complete shards")
    os.environ.setdefault("USE_TORCH", "0")  # or datasets imports torch, seconds for nothing
    with one_line_errors(f"{source_name} --text_column={text_column} to {folder}", "complete shards stay, the same "
                         "command resumes after them", (Exception, KeyboardInterrupt)):
        import datasets
        if from_python:
            data = datasets.IterableDataset.from_generator(python_files)
        else:
            data = datasets.load_dataset(**reader, split=dataset_split, streaming=True)
        data = data.select_columns(text_column)
        with (closing(document_batches(data, text_column, state)) as batches,
              tqdm(total=max_tokens, initial=counts["tokens"], unit="tok", unit_scale=True) as bar):
            for state, tokens, skipped in tokenize_batches(batches, encoding, num_threads or count_cpus()):
                tokens, left = tokens[-left:], 0  # after a resume those left of the first batch; -0 is all
                while len(tokens) and counts["tokens"] < target_tokens:
                    if not shard:
                        meta_path.unlink(missing_ok=True)
                        write_atomically(progress_path, json.dumps([recipe, state, len(tokens), counts]).encode())
                        split = "val" if counts["tokens"] < val_tokens else "train"
                        end = min(counts["tokens"] + shard_size, val_tokens if split == "val" else target_tokens)
                        path = folder / f"{split}_{counts[f'{split} shards']:06d}.bin"
                        counts[f"{split} shards"] += 1
                    piece, tokens = np.split(tokens, [end - counts["tokens"]])
                    shard += piece.tobytes()
                    counts.update(tokens=len(piece), documents=int(np.count_nonzero(piece == encoding.eot_token)),
                                  bytes=int(sizes[piece].sum()))
                    bar.update(len(piece))
                    if counts["tokens"] == end:
                        write_atomically(path, shard_header(len(shard) // 2), shard)
                        shard.clear()
                if counts["tokens"] == target_tokens:
                    break
                counts["documents skipped"] += skipped
            if shard:
                write_atomically(path, shard_header(len(shard) // 2), shard)
    summary = (f"{counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['bytes']:,} bytes, "
               f"{counts['documents skipped']:,} documents skipped")
    if counts["tokens"] <= val_tokens:
        fail(f"--val_tokens={val_tokens}: {source_name} has only {summary}, so none are left to "
             f"train on (skipped are those that are empty, no text, or refused by tiktoken); remove {folder}, and "
             f"give more text, or try --val_tokens={max(1, counts['tokens'] // 10)}")

    # what was done
    if from_python and not chat_path.exists():
        lines = [f"{json.dumps(conversation)}\n".encode() for conversation in python_conversations()]
        write_atomically(chat_path, *lines)
        print(f"{chat_path}: {len(lines):,} questions and answers, from its docstrings")
    meta = {"tokenizer": tokenizer, "vocab_size": padded_vocab_size(encoding), "source": source,
            "exhausted": counts["tokens"] < target_tokens, **counts}
    write_atomically(meta_path, json.dumps(meta, indent=1).encode())
    print(f"{folder}: {summary}\n"
          f"the first {val_tokens:,} tokens are for validation; train on the rest:\n"
          f"python train_gpt2.py {'config/quickstart.py ' if tokenizer == 'bytes' else ''}--data_dir={folder}")
