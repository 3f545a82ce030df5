r"""
Text -> token shards. A Hugging Face data set (streamed), local files, or the text Python brings along:

    python prepare_data.py --max_tokens=1000000000                   # FineWeb-Edu, its first billion tokens
    python prepare_data.py --files='dir/*.parquet' --data_dir=data/mine   # also .jsonl, .txt (line ends become \n), and .gz
    python prepare_data.py --dataset=python                          # the standard library; nothing is downloaded

Documents become one stream of tokens, <|endoftext|> before each, cut into shards of a fixed size; the first
is for validation. Memory stays bounded whatever the size of the source. Stop it at any moment and start it
again: it goes on behind the last whole shard and ends with the same bytes, for any number of threads.

This file owns what a shard is, what a tokenizer is and what a conversation is; the trainers import them from here.
"""
import ast
import functools
import glob
import hashlib
import json
import math
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
import zlib
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Optional

import numpy as np
import tiktoken

from configurator import configure, expect_range, fail

# ---------------------------------------------------------------------------------------------------
# tokenizers: tiktoken's interface for all of them

END_OF_TEXT = "<|endoftext|>"
REFUSED = "refused by tiktoken, as about a million spaces on end are"


@functools.cache
def get_tokenizer(name):
    """
    The tiktoken.Encoding called `name`: gpt2, or bytes (256 ids for the bytes, nothing to download). tiktoken
    fetches gpt2's vocabulary (1.5 MB) at first use; it is kept in data/tiktoken beside this file, for nodes
    without a network, unless TIKTOKEN_CACHE_DIR names another folder.
    """
    if name == "bytes":
        return tiktoken.Encoding(name="bytes", pat_str=r"(?s:.{1,64})", special_tokens={END_OF_TEXT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    if name != "gpt2":
        fail(f"tokenizer={name!r}: expected 'gpt2' or 'bytes'")
    if "DATA_GYM_CACHE_DIR" not in os.environ:
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(Path(__file__).resolve().parent / "data" / "tiktoken"))
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # whatever the network raises
        fail(f"tokenizer='gpt2': its vocabulary could not be fetched ({type(error).__name__}) and is not in "
             f"{os.environ.get('TIKTOKEN_CACHE_DIR')}; point TIKTOKEN_CACHE_DIR to a folder that has it, or "
             f"prepare the data with --tokenizer=bytes, which needs none")


def encode(tokenizer, text):
    """
    tiktoken's encode_ordinary, without the list in between -> ids (n,) uint32. Half a surrogate pair becomes U+FFFD, as there;
    about a million spaces on end are a ValueError, and not a panic that nothing catches.
    """
    try:
        return tokenizer.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:
        return encode(tokenizer, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def padded_vocab_size(tokenizer):
    """The model's vocabulary: the tokenizer's ids and four chat tokens, up to a multiple of 128 (gpt2: 50304, bytes: 384)."""
    return -(-(tokenizer.n_vocab + 4) // 128) * 128


def token_bytes(tokenizer):
    """How many bytes of text each id stands for, 0 for special tokens and padding: (padded vocabulary,) int64."""
    sizes = np.zeros(padded_vocab_size(tokenizer), dtype=np.int64)
    special = {tokenizer.encode_single_token(token) for token in tokenizer.special_tokens_set}
    for i in range(tokenizer.n_vocab):
        sizes[i] = 0 if i in special else len(tokenizer.decode_single_token_bytes(i))
    return sizes


# ---------------------------------------------------------------------------------------------------
# the chat format: <|endoftext|>, then for each message <|role|> content <|end|>, and no newlines between

ROLES = ("system", "user", "assistant")


def chat_tokens(tokenizer):
    """The ids of <|system|>, <|user|>, <|assistant|> and <|end|>, by name: the four after the tokenizer's own."""
    return {name: tokenizer.n_vocab + i for i, name in enumerate((*ROLES, "end"))}


def render_chat(tokenizer, messages):
    """
    messages: [{"role": "system" | "user" | "assistant", "content": str}, ...] -> ids, trained: two lists of one length.
    trained: whether the model learns to write that id: what an assistant says and the <|end|> behind it. A special token
    that content spells is text. A prompt for an answer is ids + [chat_tokens(tokenizer)["assistant"]].
    """
    special = chat_tokens(tokenizer)
    ids, trained = [tokenizer.eot_token], [False]
    for message in messages:
        content = encode(tokenizer, message["content"]).tolist()
        ids += [special[message["role"]], *content, special["end"]]
        trained += [False] + [message["role"] == "assistant"] * (len(content) + 1)
    return ids, trained


def decode_chat(tokenizer, ids):
    """Text of ids, the chat tokens among them spelled out."""
    names = {i: f"<|{name}|>".encode() for name, i in chat_tokens(tokenizer).items()}
    pieces = [names.get(i) or (tokenizer.decode_single_token_bytes(i) if i < tokenizer.n_vocab else b"<|padding|>") for i in ids]
    return b"".join(pieces).decode("utf-8", errors="replace")


def chat_fault(messages):
    """Why a conversation cannot be trained on, in a few words, or None."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return "messages is no list of {role, content}"
    for message in messages:
        if message.get("role") not in ROLES:
            return f"unknown role {str(message['role'])[:40]!r}" if message.get("role") is not None else "a message without a role"
        if not isinstance(message.get("content"), str):
            return "a message without content" if message.get("content") is None else "content that is no string"
        if not message["content"].strip():
            return "an empty message"
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if "system" in turns:
        return "a system message that is not the first"
    if "assistant" not in turns:
        return "no assistant message"
    if any(role != ROLES[1 + i % 2] for i, role in enumerate(turns)):
        return "user and assistant do not take turns"
    return None


# ---------------------------------------------------------------------------------------------------
# shards: 256 int32 (magic, version, number of tokens, zeros), then uint16 tokens: the layout of llm.c and
# modded-nanogpt, whose ready-made FineWeb shards train here, and ours there

HEADER_INTS, MAGIC, VERSION = 256, 20240520, 1


def shard_header(n_tokens):
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, n_tokens
    return header.tobytes()


def read_shard(path):
    """The tokens of a shard, memory-mapped: (n,) uint16. A file that is no whole shard is named and refused."""
    size = os.path.getsize(path)
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    if len(header) < HEADER_INTS or header[0] != MAGIC:
        fail(f"{path}: not a token shard ({size} bytes, no magic number {MAGIC} at its start); if it was one, remove the "
             f"folder and run prepare_data.py again")
    if header[1] != VERSION:
        fail(f"{path}: shard version {header[1]}, expected {VERSION}")
    expected = 4 * HEADER_INTS + 2 * int(header[2])
    if size != expected or header[2] < 1:
        fail(f"{path}: damaged shard: its header says {header[2]} tokens, {expected} bytes, but it has {size} bytes; "
             f"remove the folder and run prepare_data.py again")
    return np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER_INTS, shape=(int(header[2]),))


def read_meta(data_dir):
    """meta.json of a folder of shards; where there is none, the shards are gpt2's, as the field's ready-made ones are."""
    path = Path(data_dir) / "meta.json"
    if not path.exists():
        if (path.parent / "progress.json").exists():
            fail(f"data_dir={data_dir}: its preparation was interrupted; give the same prepare_data.py command again")
        return {"tokenizer": "gpt2", "vocab_size": 50304}
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        tokenizer, vocab_size = str(meta["tokenizer"]), int(meta["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        fail(f"{path}: cannot be read ({type(error).__name__}: {error}); run prepare_data.py again")
    return {**meta, "tokenizer": tokenizer, "vocab_size": vocab_size}


class Windows:
    """
    The shards of one split as fixed windows of max_seq_len inputs and their targets. Window i of a shard is
    tokens [i T, (i + 1) T], so every token but a shard's first is a target once; the rest of a shard, shorter
    than a window, is left out and counted in `tail`.
    """

    def __init__(self, data_dir, split, max_seq_len):
        paths = sorted(glob.glob(os.path.join(glob.escape(data_dir), f"*{split}_[0-9]*.bin")))
        if not paths:
            source = {"python": "--dataset=python", "fineweb-edu": "--max_tokens=1000000000"}
            fail(f"data_dir={data_dir}: no {split} shards (*{split}_*.bin) there; make them, e.g. with python prepare_data.py "
                 f"{source.get(Path(data_dir).name, '--files=TEXTS/*.txt')} --data_dir={data_dir}")
        self.max_seq_len = max_seq_len
        self.shards = [read_shard(path) for path in paths]
        per_shard = [(len(shard) - 1) // max_seq_len for shard in self.shards]
        self.ends = np.cumsum(per_shard)  # windows up to and with each shard
        self.tokens = sum(len(shard) for shard in self.shards)
        self.tail = self.tokens - len(self) * max_seq_len
        if len(self) == 0:
            fail(f"max_seq_len={max_seq_len}: longer than every {split} shard in {data_dir} (the longest has "
                 f"{max(map(len, self.shards))} tokens); lower it, or prepare more data{' or a larger --val_tokens' if split == 'val' else ''}")

    def __len__(self):
        return int(self.ends[-1])

    def fingerprint(self):
        """What tells these shards from others: a digest of each one's length, first and last thousand tokens."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(len(shard).to_bytes(8, "little") + shard[:1000].tobytes() + shard[-1000:].tobytes())
        return digest.hexdigest()

    def __getitem__(self, indices):
        """indices: (B,) -> x, y (B, max_seq_len) int64: tokens and the token after each."""
        T, rows = self.max_seq_len, []
        for i in indices:
            shard = int(np.searchsorted(self.ends, i, side="right"))
            start = (int(i) - (int(self.ends[shard - 1]) if shard else 0)) * T
            rows.append(self.shards[shard][start:start + T + 1])
        rows = np.stack(rows).astype(np.int64)
        return rows[:, :-1], rows[:, 1:]


@functools.lru_cache(maxsize=2)  # a step may reach into the next epoch
def epoch_order(n, seed, epoch):
    return np.random.default_rng((seed, epoch)).permutation(n).astype(np.int64 if n > 2 ** 31 else np.int32)


def rows_to_windows(rows, n, seed):
    """
    Which of n windows each row of a run is: row g is window perm(seed, epoch = g // n)[g % n]. A function of
    the row's number alone, so that `rows_seen` is all a resumed run has to know.
    """
    return np.array([epoch_order(n, seed, int(g) // n)[int(g) % n] for g in rows])


# ---------------------------------------------------------------------------------------------------
# conversations -> packed rows. A conversation of n ids takes n - 1 places of a row: all but its last id are inputs, all
# but its first are targets. On disk a row is x and y, (2, max_seq_len) uint16: y holds the next id where it is trained
# on and <|endoftext|>, which never is, elsewhere; x begins each conversation with <|endoftext|> and is padded with it.

ROWS_VERSION = 1  # of the format and of what stands in the rows: another one has them made anew


def read_conversations(source):
    """
    Yields (where, messages) of one source: a local .jsonl file with {"messages": [...]} on each line, or a data set of the
    Hugging Face hub as owner/name or owner/name/config (its split train), or a folder that is laid out like one. A line that
    is none is named and refused.
    """
    if source.endswith(".jsonl") or os.path.isfile(source):
        try:
            with open(source, "rb") as f:
                for number, line in enumerate(f, 1):
                    if not line.strip():
                        continue
                    try:
                        row = json.loads(line.decode("utf-8-sig"))
                    except (ValueError, RecursionError) as error:
                        fail(f"{source}, line {number}: no JSON: {type(error).__name__}: {str(error)[:200]}")
                    if not isinstance(row, dict) or "messages" not in row:
                        fail(f'{source}, line {number}: expected {{"messages": [...]}}, got '
                             + (f"the keys {', '.join(row) or '(none)'}"[:200] if isinstance(row, dict) else type(row).__name__))
                    yield f"{source}, line {number}", row["messages"]
        except OSError as error:
            fail(f"{source}: {error}")
        return
    name, config = source, None
    if not os.path.isdir(source):
        if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(/[\w.-]+)?", source) or source.endswith((".json", ".txt", ".csv", ".parquet", ".gz")):
            fail(f"{source}: no such file; expected a .jsonl file, or a data set of the hub as owner/name or owner/name/config")
        name, config = ("/".join(part) or None for part in (source.split("/")[:2], source.split("/")[2:]))
    if name == "HuggingFaceTB/smoltalk":
        config = config or "all"
    os.environ.setdefault("USE_TORCH", "0")
    import datasets
    try:
        data = datasets.load_dataset(name, config, split="train")
    except Exception as error:  # whatever the hub, the network and the disk raise
        fail(f"{source} is no file, and as a data set of the hub it cannot be opened: {type(error).__name__}: {error}")
    if "messages" not in data.column_names:
        fail(f"{source}: has no column messages, but {', '.join(data.column_names)}")
    for i, messages in enumerate(data["messages"]):
        yield f"{source}, row {i}", messages


def parse_mixture(text, setting="data"):
    """'a.jsonl:1,b.jsonl:3' -> [("a.jsonl", 1.0), ("b.jsonl", 3.0)]; without a number a source has the weight 1. What is odd is refused."""
    sources = []
    for part in filter(None, map(str.strip, text.split(","))):
        source, colon, weight = part.rpartition(":")
        try:
            weight = float(weight)
        except ValueError:  # no number: the colon, if there is one, is the path's
            source, weight = part, 1.0
        if not (source and 0 < weight < 1e6) or source.endswith(":"):
            fail(f"--{setting}={text}: {part!r}: expected a source, or source:weight with a weight above 0 and below 1e6, in passes an epoch")
        source = os.path.expanduser(source.strip())
        if source in [other for other, _ in sources]:
            fail(f"--{setting}={text}: {source} is there twice; {source}:2 passes over it twice an epoch")
        sources.append((source, weight))
    if not sources:
        fail(f"--{setting}={text!r}: expected a .jsonl file or a data set of the hub, or several with weights: a.jsonl:1,b.jsonl:3")
    return sources


def fit_conversation(tokenizer, messages, max_seq_len):
    """
    -> x, y (2, n) uint16 of a conversation that may take max_seq_len places at most, and what was left out of it, "" for
    nothing. It is cut behind an answer: one that ends in mid-sentence teaches never to stop. None where not even the first
    answer ends within the row.
    """
    ids, trained = render_chat(tokenizer, messages)
    end = chat_tokens(tokenizer)["end"]
    length = max((i + 1 for i in range(min(len(ids), max_seq_len + 1)) if trained[i] and ids[i] == end), default=0)
    if length == 0:
        return None, "dropped: longer than a row before its first answer ends"
    ids, trained = np.array(ids, dtype="<u2"), np.array(trained)
    pair = np.stack([ids[:length - 1], np.where(trained[1:length], ids[1:length], np.uint16(tokenizer.eot_token))])
    if length == len(ids):
        return pair, ""
    return pair, "cut behind an answer: longer than a row" if len(ids) > max_seq_len + 1 else "cut behind its last answer: it ends in a question"


def best_fit(lengths, room):
    """
    Best-fit decreasing bin packing (Johnson 1974): each item, the longest first, goes where it leaves the least room, or
    into a new row. lengths: (n,) int, each at most room -> a list of rows, each a list of items.
    """
    rows, with_room = [], [[] for _ in range(room + 1)]  # with_room[r]: the rows that have r places left
    some = 0  # a bit set: bit r says that with_room[r] is not empty
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        fitting = some >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = with_room[left].pop()
            if not with_room[left]:
                some ^= 1 << left
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(item)
        with_room[left - length].append(row)
        some |= 1 << left - length
    return rows


def load_conversations(sources, tokenizer, max_seq_len, notes):
    """
    -> for each (source, weight) the (2, n) pairs of its conversations. What was cut or skipped is counted in notes:
    {reason: [count, where the first was]}.
    """
    pairs, told = [[] for _ in sources], time.time()
    for i, (source, _) in enumerate(sources):
        for where, messages in read_conversations(source):
            if isinstance(messages, list) and chat_fault(messages[:1]) == "an empty message" and messages[0]["role"] == "system":
                notes.setdefault("system message left out: it is empty", [0, where])[0] += 1
                messages = messages[1:]
            fault = chat_fault(messages)
            try:
                pair, note = (None, f"skipped: {fault}") if fault else fit_conversation(tokenizer, messages, max_seq_len)
            except ValueError:
                pair, note = None, f"skipped: {REFUSED}"
            if note:
                notes.setdefault(note, [0, where])[0] += 1
            if pair is not None:
                pairs[i].append(pair)
            if time.time() > told + 2:
                print(f"  {source}: {len(pairs[i]):,} conversations", file=sys.stderr, end="\r", flush=True)
                told = time.time()
        if not pairs[i]:
            found = "; ".join(f"{count} {note} ({where})" for note, (count, where) in notes.items())
            fail(f"{source}: no conversation in it can be used: {found or 'it is empty'}"
                 + ("; a row is --max_seq_len long" if "longer than a row" in found else ""))
    return pairs


def write_rows(path, pairs, max_seq_len, pack, eot):
    """Packs pairs (2, n) into rows at `path` -> what plan.json says of them."""
    rows = best_fit(np.array([pair.shape[1] for pair in pairs]), max_seq_len) if pack else [[i] for i in range(len(pairs))]
    rng, digest = np.random.default_rng(len(rows)), hashlib.sha256()
    rng.shuffle(rows)  # best_fit's first rows hold the longest conversations, and val may be read only in part
    out = np.lib.format.open_memmap(path, mode="w+", dtype="<u2", shape=(len(rows), 2, max_seq_len))
    for r, row in enumerate(rows):
        packed = np.concatenate([pairs[i] for i in row], axis=1)
        out[r] = eot
        out[r, :, :packed.shape[1]] = packed
        digest.update(out[r].tobytes())
    out.flush()
    return {"conversations": len(pairs), "rows": len(rows), "tokens": sum(pair.shape[1] for pair in pairs),
            "trained": sum(int((pair[1] != eot).sum()) for pair in pairs), "fingerprint": digest.hexdigest()}


def chat_rows(chat_dir, data, val_data, tokenizer_name, max_seq_len, pack, seed, build):
    """
    The packed rows of a mixture of conversations, made once and kept in chat_dir under a name that tells what they were
    made from (files by their content, a data set of the hub by its name). One process of a machine makes them (`build`),
    the others wait. val_data None: one in 50 conversations, by the digest of their ids, so that no copy of one is trained on.
    -> train, val: (rows, 2, max_seq_len) uint16, memory-mapped, and the plan: counts of what is in them and what was left out.
    """
    splits = {"train": parse_mixture(data), **({"val": parse_mixture(val_data, "val_data")} if val_data else {})}
    identity = [ROWS_VERSION, tokenizer_name, max_seq_len, pack, seed]
    for split, sources in splits.items():
        for source, weight in sources:
            paths = sorted(path for path in Path(source).rglob("*") if path.is_file()) if os.path.isdir(source) else [source]
            content = source
            if os.path.exists(source):
                content = []
                for path in paths:
                    with open(path, "rb") as f:
                        content.append(hashlib.file_digest(f, "sha256").hexdigest())
            identity.append([split, content, weight])
    folder = Path(chat_dir) / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    if build and not folder.exists():
        print(f"packing {data} into rows of {max_seq_len} ...", flush=True)
        tokenizer, notes = get_tokenizer(tokenizer_name), {}
        pairs = {split: [] for split in ("train", "val")}
        for split, sources in splits.items():
            loaded = load_conversations(sources, tokenizer, max_seq_len, notes)
            if not val_data:
                digests = [[hashlib.sha256(pair.tobytes()).digest() for pair in part] for part in loaded]
                ordered = sorted(digest for part in digests for digest in part)
                last = ordered[-(-len(ordered) // 50) - 1]
                pairs["val"] = [pair for part, told in zip(loaded, digests) for pair, digest in zip(part, told) if digest <= last]
                loaded = [[pair for pair, digest in zip(part, told) if digest > last] for part, told in zip(loaded, digests)]
            for i, (part, (source, weight)) in enumerate(zip(loaded, sources)):
                order = np.random.default_rng((seed, i)).permutation(len(part))
                passes = np.concatenate([order] * int(weight) + [order[:round(weight % 1 * len(order))]])
                if len(part) and not len(passes):
                    fail(f"--{'data' if split == 'train' else 'val_data'}: {source}:{weight:g}: of its {len(part)} conversations that is "
                         f"none; raise the weight or leave it out")
                pairs[split] += [part[j] for j in passes]
        if not pairs["train"] or not pairs["val"]:
            fail(f"--data={data}: {len(pairs['train'])} conversations to train on and {len(pairs['val'])} to validate on, expected "
                 f"at least one of each; give more, or others with --val_data")
        temporary = None
        try:
            os.makedirs(chat_dir, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(dir=chat_dir, prefix=f"{folder.name}.", suffix=".tmp"))
            plan = {split: write_rows(temporary / f"{split}.npy", pairs[split], max_seq_len, pack, tokenizer.eot_token)
                    for split in pairs}
            write_atomically(temporary / "plan.json", json.dumps({**plan, "notes": notes, "made_from": identity}, indent=1).encode())
            os.chmod(temporary, 0o755)  # mkdtemp's are their owner's alone
            os.rename(temporary, folder)
        except OSError as error:
            if not folder.exists():  # else another machine on the same disk was sooner
                fail(f"--chat_dir={chat_dir}: the packed rows cannot be written: {error}")
        finally:
            if temporary:
                shutil.rmtree(temporary, ignore_errors=True)
    while not folder.exists():
        time.sleep(0.1)
    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        train, val = (np.load(folder / f"{split}.npy", mmap_mode="r") for split in ("train", "val"))
        for split, rows in (("train", train), ("val", val)):
            told = plan[split]
            assert rows.dtype == np.uint16 and rows.shape == (told["rows"], 2, max_seq_len), f"{split}.npy is not what plan.json says"
            assert not build or hashlib.sha256(rows).hexdigest() == told["fingerprint"], f"{split}.npy is damaged"
            told["conversations"] + told["tokens"] + told["trained"]  # they are there, and numbers
        plan["notes"] = {str(note): (int(n), str(where)) for note, (n, where) in plan["notes"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        fail(f"{folder}: packed rows that cannot be read ({type(error).__name__}: {error}); remove the folder, they are made again")
    return train, val, plan


# ---------------------------------------------------------------------------------------------------
# what a teacher says of the training rows: written once, read by every run that learns from it

TEACHER_VERSION = 1  # of the format


class TeacherCache:
    """
    For each place of each row: the k likeliest next ids, their log-probabilities, and that of each other id, among whom what is left
    is shared evenly; 4 k + 2 bytes a token. By the number of a row, so the order of the data does not matter. A folder `where` the
    rows are, named after what it was made from: made_from, a dict with at least max_seq_len and k. In it rows.bin (sparse: as large as
    what is written), and sums.bin, (rows,) uint32, the CRC-32 of each row that is written, 0 else.
    """

    def __init__(self, where, made_from, n_rows, create):
        T, k = made_from["max_seq_len"], made_from["k"]
        made_from = {"version": TEACHER_VERSION, **made_from}
        self.row = np.dtype([("log_probs", "<f2", (T, k + 1)), ("ids", "<u2", (T, k))])
        self.folder = Path(where) / f"teacher-{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]}"
        self.paths, told = (self.folder / "rows.bin", self.folder / "sums.bin"), self.folder / "made_from.json"
        sizes = n_rows * self.row.itemsize, n_rows * 4

        def other_than(path):
            theirs = json.loads(path.read_text(encoding="utf-8"))
            return [key for key in made_from if theirs.get(key) != made_from[key]]

        try:
            if create and not told.exists():
                for path in sorted(Path(where).glob("teacher-*/made_from.json")):
                    print(f"{path.parent} is not used: another {', another '.join(other_than(path))}")
                os.makedirs(self.folder, exist_ok=True)
                for path, size in zip(self.paths, sizes):
                    with open(path, "wb") as f:
                        f.truncate(size)
                write_atomically(told, json.dumps(made_from, indent=1).encode())
            if other_than(told):
                fail(f"{self.folder}: made from another {', another '.join(other_than(told))}; remove it, it is made again")
            if tuple(map(os.path.getsize, self.paths)) != sizes:
                fail(f"{self.folder}: damaged, its files have other sizes than {sizes}; remove it, it is made again")
            self.rows, self.sums = (np.memmap(path, dtype, mode="r") for path, dtype in zip(self.paths, (self.row, "<u4")))
        except (OSError, ValueError, AttributeError) as error:
            fail(f"{self.folder}: what the teacher says cannot be kept there ({type(error).__name__}: {error})")

    def missing(self, indices):
        return indices[self.sums[indices] == 0]

    def write(self, indices, log_probs, ids):
        """log_probs (B, T, k + 1) and ids (B, T, k) of the rows `indices`. A row that is half written is none."""
        rows = np.empty(len(indices), self.row)
        rows["log_probs"], rows["ids"] = log_probs, ids
        with open(self.paths[0], "r+b") as f, open(self.paths[1], "r+b") as sums:
            for i, row in zip(indices, rows):
                f.seek(int(i) * self.row.itemsize)
                f.write(row.tobytes())
            f.flush()
            for i, row in zip(indices, rows):
                sums.seek(4 * int(i))
                sums.write((zlib.crc32(row.tobytes()) or 1).to_bytes(4, "little"))

    def __getitem__(self, indices):
        """indices: (B,) -> log_probs (B, T, k + 1) float16, ids (B, T, k) uint16."""
        rows = self.rows[indices]
        for i, row in zip(indices, rows):
            if self.sums[i] == 0:
                fail(f"{self.folder}: row {i} is not there yet (a run that was rolled back goes further than it was to); "
                     f"--init_from=resume adds what is missing", alone=True)
            if self.sums[i] != (zlib.crc32(row.tobytes()) or 1):
                fail(f"{self.folder}: row {i} is damaged; remove the folder, it is made again", alone=True)
        return rows["log_probs"], rows["ids"]


# ---------------------------------------------------------------------------------------------------
# sources: each yields (state, documents) in a fixed order; given a state back, it goes on from there

FILE_KINDS = {"parquet": "parquet", "jsonl": "json", "json": "json", "txt": "text"}  # suffix -> reader in `datasets`


def find_files(setting, files):
    """Paths and patterns with commas between, the value of `setting` -> sorted paths; a file that several lead to is there once."""
    paths = {}
    for pattern in map(os.path.expanduser, map(str.strip, files.split(","))):
        found = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if not found:
            fail(f"--{setting}={files}: no such file: {pattern}")
        paths |= {os.path.realpath(path): path for path in found}
    return sorted(paths.values())


class WorkStopped(Exception):
    """The source gave up. Not failed on the spot: the progress bar has to be closed first."""


def parquet_batches(paths, column, state):
    """The documents of local parquet files, 64 at a time. state: [file, row group, batch], the place to begin with."""
    import pyarrow.parquet as pq  # comes with datasets, and opens in a tenth of its time
    first = state or [0, 0, 0]
    try:
        for i in range(first[0], len(paths)):
            with pq.ParquetFile(paths[i]) as file:
                for group in range(file.num_row_groups):
                    if [i, group] < first[:2]:
                        continue
                    for number, batch in enumerate(file.iter_batches(64, [group], [column])):
                        if [i, group, number] >= first:
                            yield [i, group, number], batch[column].to_pylist()
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own are among them
        raise WorkStopped(f"{paths[i]} could not be read on: {type(error).__name__}: {error}")


def dataset_batches(data, column, state):
    """A streamed `datasets` data set, 64 documents at a time."""
    try:
        data = data.select_columns([column])
        if state is not None:
            data.load_state_dict(state)
        batches = iter(data.iter(batch_size=64))
        while True:
            state = data.state_dict()
            batch = next(batches, None)
            if batch is None:
                return
            yield state, batch[column]
    except Exception as error:  # the library raises what its readers, the file system and the network raise
        cause = error.__cause__ or error
        raise WorkStopped(f"the source could not be read on: {type(cause).__name__}: {cause}")


def python_files():
    """
    The files of Python's own standard library, in an order that mixes its packages (by the hash of each name). Its
    tests are left out, and tables that are data in disguise. -> [(name, path)]
    """
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    names = [p.relative_to(root).as_posix() for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    return [(name, root / name) for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())]


def python_batches(state):
    """The text of python_files, 16 at a time."""
    paths = [path for _, path in python_files()]
    for i in range(state or 0, len(paths), 16):
        yield i, [path.read_text(encoding="utf-8", errors="replace") for path in paths[i:i + 16]]


def python_conversations():
    """
    Questions about what the standard library documents: its public functions and classes, and the first paragraph of their
    docstrings, where that is no longer than 160 characters. -> a list of {"messages"}.
    """
    conversations = []
    for name, path in python_files():
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in tree.body:
            members = node.body if isinstance(node, ast.ClassDef) else []
            for parent, item in [("", node)] + [(f"{node.name}.", member) for member in members]:
                if not isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or "._" in f".{module}.{parent}{item.name}":
                    continue
                answer = " ".join((ast.get_docstring(item) or "").split("\n\n")[0].split())
                if 10 <= len(answer) <= 160 and answer.isascii():
                    question = f"What {'is' if isinstance(item, ast.ClassDef) else 'does'} {module}.{parent}{item.name}"
                    question += "?" if isinstance(item, ast.ClassDef) else " do?"
                    conversations.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return conversations


def parquet_text_bytes(paths, column):
    """Bytes of text in parquet files, from their footers. A file that is none, or has no such column of text, is refused."""
    import pyarrow.parquet as pq
    total = 0
    for path in paths:
        try:
            footer = pq.read_metadata(path)
            schema = footer.schema.to_arrow_schema()
        except Exception as error:  # whatever its bytes lead to
            fail(f"{path} cannot be opened: {type(error).__name__}: {error}")
        if column not in schema.names:
            fail(f"--text_column={column}: no such column in {path}; it has {', '.join(schema.names)}")
        if not re.match(r"(dictionary<values=)?(large_)?string|null", kind := str(schema.field(column).type)):
            fail(f"--text_column={column}: is no text in {path} but {kind}; its columns are {', '.join(schema.names)}")
        for group in range(footer.num_row_groups):
            columns = [footer.row_group(group).column(i) for i in range(footer.num_columns)]
            total += sum(c.total_uncompressed_size for c in columns if c.path_in_schema == column)
    return total


# ---------------------------------------------------------------------------------------------------
# the work: documents -> tokens in threads (tiktoken releases Python's lock while it encodes), tokens -> shards in the main one

def explain(kind, error, tb):
    """For sys.excepthook: one line for Ctrl-C, the traceback for the rest."""
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted: whole shards stay, and the same command goes on behind them", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, tb)


def count_cpus():
    """How many this process may use: fewer than there are under taskset, Slurm and in some containers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def tokenize(name, documents):
    """
    -> tokens (n,) uint16, <|endoftext|> before each document; where each document starts in them; how many
    were left out, by reason. Text that spells a special token is text.
    """
    tokenizer = get_tokenizer(name)
    eot, pieces, starts, left_out, length = np.array([tokenizer.eot_token], dtype=np.uint32), [], [], Counter(), 0
    for text in documents:
        if not isinstance(text, str) or not text:
            left_out["empty" if text in (None, "") else "no text"] += 1
            continue
        try:
            ids = encode(tokenizer, text)
        except ValueError:
            left_out[REFUSED] += 1
            continue
        starts.append(length)
        length += 1 + len(ids)
        pieces += [eot, ids]
    tokens = np.concatenate(pieces) if pieces else np.zeros(0)
    return tokens.astype("<u2"), np.array(starts, dtype=np.int64), left_out


def shard_name(index, shard_size, val_tokens):
    """The file name and length in tokens of shard `index`: first those of val, then those of train."""
    n_val = -(-val_tokens // shard_size)
    if index < n_val:
        return f"val_{index:06d}.bin", min(shard_size, val_tokens - index * shard_size)
    return f"train_{index - n_val:06d}.bin", shard_size


def write_atomically(path, *pieces):
    """Bytes or arrays to a file that is there whole or not at all."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as f:
        f.writelines(pieces)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def take_lock(path, refusal):
    """Refuses what another process of this machine is writing to -> a file: the lock ends when it is closed, at the latest with the process."""
    lock = open(path, "a")
    try:
        import fcntl
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        pass
    except BlockingIOError:
        fail(refusal, alone=True)
    return lock


def ends_digest(path):
    """Of a file's first and last 4 KiB: tells most files of one size apart, and not a damaged one, as a rule, from itself repaired."""
    with open(path, "rb") as f:
        digest = hashlib.sha256(f.read(2 ** 12))
        f.seek(max(0, os.path.getsize(path) - 2 ** 12))
        digest.update(f.read())
    return digest.hexdigest()[:16]


def check_progress(earlier, first, state_type, data_dir):
    """ValueError where a progress.json does not have the form of a `first` one, or its shards are no longer as it counts them."""
    recipe, counts = earlier["recipe"], earlier["counts"]
    types = [{key: type(value) for key, value in each.items()} for each in (counts, first["counts"])]
    if types[0] != types[1] or not isinstance(earlier["state"], (state_type, type(None))) or not isinstance(earlier["skip"], int):
        raise ValueError("its progress.json is another version's or was changed; remove the folder, or give another")
    for name, length in (shard_name(i, recipe["shard_size"], recipe["val_tokens"]) for i in range(counts["shards"])):
        path = Path(data_dir) / name
        if not path.exists() or path.stat().st_size != 4 * HEADER_INTS + 2 * length:
            raise ValueError(f"{name} is missing or damaged; remove the folder, or give another")




def write_shards(batches, progress, data_dir, max_tokens, num_threads, bar):
    """
    Tokenizes `batches` of (state, documents) in num_threads threads and writes them as shards. After each whole
    shard progress.json says where the source stood and what has been counted; that is where the next start
    goes on. At most 4 * num_threads batches are under way. -> the final counts.
    """
    recipe, counts, skip = progress["recipe"], dict(progress["counts"]), progress["skip"]
    sizes = token_bytes(get_tokenizer(recipe["tokenizer"]))
    shard, filled = [], 0  # pieces of the shard being filled, and their tokens
    pending = deque()

    def write_shard(name):
        write_atomically(f"{data_dir}/{name}", shard_header(filled), *shard)
        counts["shards"] += 1

    def take_batch():
        nonlocal shard, filled, skip
        state, job = pending.popleft()
        tokens, starts, left_out = job.result()
        position, skip = skip, 0  # the first `skip` tokens lie in shards that an earlier start wrote
        if position == 0 and counts["tokens"] < max_tokens:
            counts["left_out"] = dict(Counter(counts["left_out"]) + left_out)
        while position < len(tokens) and counts["tokens"] < max_tokens:
            name, capacity = shard_name(counts["shards"], recipe["shard_size"], recipe["val_tokens"])
            piece = tokens[position:position + min(capacity - filled, max_tokens - counts["tokens"])]
            counts["documents"] += int(((starts >= position) & (starts < position + len(piece))).sum())
            counts["tokens"] += len(piece)
            counts["bytes"] += int(sizes[piece].sum())
            bar.update(len(piece))
            shard.append(piece)
            filled += len(piece)
            position += len(piece)
            if filled == capacity:
                write_shard(name)
                shard, filled = [], 0
                progress.update(state=state, skip=position, counts=counts)
                write_atomically(f"{data_dir}/progress.json", json.dumps(progress, indent=1).encode())

    with ThreadPoolExecutor(num_threads) as pool:
        for state, documents in batches:
            pending.append((state, pool.submit(tokenize, recipe["tokenizer"], documents)))
            if len(pending) >= 4 * num_threads:
                take_batch()
            if counts["tokens"] >= max_tokens:
                break
        while pending:
            take_batch()
    if filled:  # the last shard is as long as what is left, and not in progress.json: more may follow
        write_shard(shard_name(counts["shards"], recipe["shard_size"], recipe["val_tokens"])[0])
    return counts


if __name__ == "__main__":
    dataset: str = "HuggingFaceFW/fineweb-edu"  # on the Hugging Face hub; or python: the standard library
    dataset_config: Optional[str] = None  # its configuration; None: sample-10BT for FineWeb-Edu, else its default
    dataset_split: str = "train"  # the split of the data set to read
    files: Optional[str] = None  # local files instead: paths or globs, separated by commas
    text_column: str = "text"  # the column, or key, that holds a document
    data_dir: Optional[str] = None  # where the shards go; None: data/NAME
    tokenizer: Optional[Literal["gpt2", "bytes"]] = None  # None: gpt2, but bytes for --dataset=python
    max_tokens: Optional[int] = None  # stop after this many, validation included; None: all
    val_tokens: Optional[int] = None  # the first tokens, for validation; None: 2**20, at most about a tenth of local files
    shard_size: int = 100_000_000  # tokens a shard, 2 bytes each
    num_threads: Optional[int] = None  # that tokenize; None: one a core
    config, given = configure(globals())
    sys.excepthook = explain

    # what was asked for
    from_python = dataset == "python" and files is None
    for name in (("dataset", "dataset_config", "dataset_split") if files is not None else
                 ("dataset_config", "dataset_split", "text_column") if from_python else ()):
        if name in given:
            fail(f"--{name}={given[name]} and {'--dataset=python' if from_python else f'--files={files}'}: give one of them")
    if shard_size > 2 ** 31 - 1:
        fail(f"--shard_size={shard_size}: expected at most {2 ** 31 - 1}, the most that a shard's header can say")
    expect_range(config, 1, math.inf, "max_tokens", "val_tokens", "shard_size", "num_threads")
    tokenizer = tokenizer or ("bytes" if from_python else "gpt2")
    get_tokenizer(tokenizer)  # fetched once, before the threads want it
    num_threads = num_threads or count_cpus()
    dataset_config = dataset_config or ("sample-10BT" if dataset == "HuggingFaceFW/fineweb-edu" else None)

    # the source, and the recipe that a second start must share
    if files is not None:
        paths = find_files("files", files)
        kinds = {next((FILE_KINDS[s] for s in path.lower().split(".")[:0:-1] if s in FILE_KINDS), path) for path in paths}
        if len(kinds) > 1 or not kinds <= set(FILE_KINDS.values()):
            fail(f"--files: expected files of one kind, .{', .'.join(FILE_KINDS)}, also with .gz or .zst behind; "
                 f"got {', '.join(sorted(kinds))}")
        kind = kinds.pop()
        if kind == "parquet" and not all(path.lower().endswith(".parquet") for path in paths):
            fail(f"--files={files}: parquet is compressed inside; expected names that end in .parquet, so unpack these first")
        try:
            source = {"files": [[path, os.path.getsize(path), ends_digest(path)] for path in paths]}
        except OSError as error:
            fail(f"--files={files}: {error}")
        if val_tokens is None:  # a token of gpt2 stands for about four bytes
            val_tokens = min(2 ** 20, max(1, sum(size for _, size, _ in source["files"]) // (40 if tokenizer == "gpt2" else 10)))
        data_dir = data_dir or "data/files"
    elif from_python:
        source = {"dataset": "python", "version": sys.version.split()[0]}
        data_dir = data_dir or "data/python"
    else:
        source = {"dataset": dataset, "config": dataset_config, "split": dataset_split}
        data_dir = data_dir or f"data/{dataset.split('/')[-1]}"
    val_tokens = val_tokens or 2 ** 20
    if max_tokens is not None and max_tokens <= val_tokens:
        fail(f"--max_tokens={max_tokens}: the first --val_tokens={val_tokens} are for validation, so none would be left "
             f"to train on; raise the one or lower the other")
    recipe = {"source": source, "text_column": text_column, "tokenizer": tokenizer, "val_tokens": val_tokens,
              "shard_size": shard_size}

    # where an earlier start stopped
    wanted = max_tokens or sys.maxsize
    state_type = int if from_python else list if files is not None and kind == "parquet" else dict
    progress = {"recipe": recipe, "state": None, "skip": 0,
                "counts": {"shards": 0, "documents": 0, "tokens": 0, "bytes": 0, "left_out": {}}}
    try:
        os.makedirs(data_dir, exist_ok=True)
        if glob.glob(f"{glob.escape(data_dir)}/*.bin") and not os.path.exists(f"{data_dir}/progress.json"):
            fail(f"--data_dir={data_dir}: holds shards that this script did not write; give another --data_dir")
        lock = take_lock(f"{data_dir}/lock", f"--data_dir={data_dir}: another start is writing to it now; wait for its end, or give another")
        written = glob.glob(f"{glob.escape(data_dir)}/*.bin")
        earlier = None
        if os.path.exists(f"{data_dir}/progress.json"):
            earlier = json.load(open(f"{data_dir}/progress.json", encoding="utf-8"))
        differs = [key for key in recipe if earlier and earlier["recipe"].get(key) != recipe[key]]
        if earlier and not differs:
            check_progress(earlier, progress, state_type, data_dir)
            progress = earlier
        elif earlier and written:
            fail(f"--data_dir={data_dir}: holds shards prepared with another {' and '.join(differs)} "
                 f"({', '.join(str(earlier['recipe'].get(key)) for key in differs)[:200]}); "
                 f"give another --data_dir or remove it")
        else:
            write_atomically(f"{data_dir}/progress.json", json.dumps(progress, indent=1).encode())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fail(f"--data_dir={data_dir}: {type(error).__name__}: {error}")
    done = read_meta(data_dir) if os.path.exists(f"{data_dir}/meta.json") else None
    if done and not {"documents", "tokens", "exhausted"} <= done.keys():
        fail(f"--data_dir={data_dir}: its meta.json is not one that this script wrote; remove the folder, or give another")
    if done and sum(os.path.getsize(path) - 4 * HEADER_INTS for path in written) != 2 * done["tokens"]:
        fail(f"--data_dir={data_dir}: its shards do not hold the {done['tokens']} tokens that its meta.json speaks of; remove the folder, or give another")
    held = max(progress["counts"]["tokens"], done["tokens"] if done else 0)
    if wanted < held:
        fail(f"--max_tokens={max_tokens}: {data_dir} holds {held} tokens already; give another --data_dir")
    if done and (done["exhausted"] or wanted == done["tokens"]):
        print(f"{data_dir} is prepared already: {done['documents']:,} documents, {done['tokens']:,} tokens")
        raise SystemExit(0)

    # how much it will be, where the source says its size
    text_bytes = None
    if from_python:
        batches = python_batches(progress["state"])
    else:
        print(f"opening {files or dataset} ...", flush=True)
        os.environ.setdefault("USE_TORCH", "0")  # or datasets imports torch, a second for nothing
        try:
            if files is not None and kind == "parquet":
                text_bytes, batches = parquet_text_bytes(paths, text_column), parquet_batches(paths, text_column, progress["state"])
            else:
                import datasets  # here and not above: training runs without it
                if files is not None:
                    data = datasets.load_dataset(kind, data_files=paths, split="train", streaming=True,
                                                 **({"sample_by": "document"} if kind == "text" else {}))
                    if not any(path.endswith((".gz", ".zst")) for path in paths):
                        text_bytes = sum(map(os.path.getsize, paths))
                else:
                    data = datasets.load_dataset(dataset, dataset_config, split=dataset_split, streaming=True)
                    splits = data.info.splits or {}
                    text_bytes = splits[dataset_split].num_bytes if dataset_split in splits else None
                if data.column_names and text_column not in data.column_names:
                    fail(f"--text_column={text_column}: no such column; the source has {', '.join(data.column_names)}")
                batches = dataset_batches(data, text_column, progress["state"])
        except Exception as error:  # whatever the readers, the file system and the network raise
            fail(f"{files or dataset} cannot be opened: {type(error).__name__}: {error}")
    total = max_tokens
    if text_bytes:  # 4.2 bytes a token: measured on text of FineWeb-Edu's kind
        total = min(wanted, int(text_bytes / (4.2 if tokenizer == "gpt2" else 1)))
    if total:
        free = shutil.disk_usage(data_dir).free
        print(f"about {total:,} tokens, {2 * total / 1e9:.2f} GB of shards; {free / 1e9:.1f} GB are free in {data_dir}")
        if 2 * (total - progress["counts"]["tokens"]) > free:
            fail(f"--data_dir={data_dir}: {2 * total / 1e9:.2f} GB of shards do not fit into {free / 1e9:.2f} GB; lower "
                 f"--max_tokens or give another --data_dir")
    if progress["counts"]["tokens"]:
        print(f"going on behind {progress['counts']['shards']} whole shards, {progress['counts']['tokens']:,} tokens")

    # the work
    if done:
        os.remove(f"{data_dir}/meta.json")  # more tokens were asked for: what it says is about to change
    try:
        from tqdm import tqdm  # comes with datasets
    except ImportError:  # --dataset=python needs neither, and takes seconds
        def tqdm(**_):
            return nullcontext(SimpleNamespace(update=lambda n: None))
    start, before = time.time(), progress["counts"]["tokens"]
    try:
        with tqdm(total=total, initial=before, unit="tok", unit_scale=True, mininterval=1 if sys.stderr.isatty() else 10) as bar:
            counts = write_shards(batches, progress, data_dir, wanted, num_threads, bar)
    except WorkStopped as error:
        fail(f"{error}; what is written stays, and once that is mended the same command goes on from there")
    except OSError as error:
        fail(f"--data_dir={data_dir}: {error}; what is written stays, and the same command goes on from there")
    left_out = [f"{count:,} documents are left out: {reason}" for reason, count in counts["left_out"].items()]
    if counts["tokens"] <= val_tokens:
        for path in glob.glob(f"{glob.escape(data_dir)}/val_*.bin") + [f"{data_dir}/progress.json"]:
            os.remove(path)
        advice = f"try --val_tokens={counts['tokens'] // 10}" if counts["tokens"] >= 10 else "that is no text"
        fail("; ".join((f"--val_tokens={val_tokens}: the source has only {counts['tokens']} tokens, so none are left to train on", advice, *left_out)))
    if from_python:
        conversations = python_conversations()
        write_atomically(f"{data_dir}/chat.jsonl", *(json.dumps(c).encode() + b"\n" for c in conversations))
    meta = {"tokenizer": tokenizer, "vocab_size": padded_vocab_size(get_tokenizer(tokenizer)),
            "documents": counts["documents"], "tokens": counts["tokens"], "bytes": counts["bytes"],
            "source": source, "exhausted": counts["tokens"] < wanted}
    write_atomically(f"{data_dir}/meta.json", json.dumps(meta, indent=1).encode())
    seconds = time.time() - start
    print(f"{data_dir}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['bytes']:,} bytes of text "
          f"in {counts['shards']} shards; {seconds:.1f} s, {(counts['tokens'] - before) / seconds:,.0f} tokens/s")
    for line in left_out:
        print(line)
    if not meta["exhausted"]:
        print(f"stopped at --max_tokens={max_tokens}; the last document may be cut")
    if from_python:
        print(f"{data_dir}/chat.jsonl: {len(conversations):,} questions and answers, from its docstrings")
    print(f"the first {val_tokens:,} tokens are for validation\n"
          f"train on it: python train_gpt2.py --data_dir={data_dir} (GPT-2 124M; in minutes on a laptop: "
          f"python train_gpt2.py config/quickstart.py --data_dir={data_dir} --out_dir=out)")
