"""
Conversations -> packed or padded rows, made once and kept on disk.

A conversation of n ids (see tokenizer.render_chat) occupies n - 1 positions of a row: all but its last id are inputs,
all but its first are targets. On disk a row is inputs and targets, (2, max_seq_len) uint16. Targets that are not
trained on are <|endoftext|>; inputs begin each conversation with it, and are padded with it.
"""
import hashlib
import json
import os
import re
import time
import uuid
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from configurator import fail, one_line_errors
from dataloader import to_device
from model import IGNORE
from tokenizer import chat_tokens, decode_chat, render_chat, sanitize

ROWS_VERSION = 2  # raise it with any change to the rows: those on disk are then made again


# ---------------------------------------------------------------------------------------------------
# sources of conversations

def parse_mixture(text):
    """'a.jsonl,b.jsonl:3' -> {"a.jsonl": 1.0, "b.jsonl": 3.0}: passes over each source in an epoch."""
    sources = Counter()
    for part in text.split(","):
        source, weight = re.fullmatch(r"(.*?)(?::(\d*\.?\d+))?", part.strip()).groups("1")
        sources[source] += float(weight)
    return sources


# keys of two other formats -> their name, and how a row of theirs becomes ours
OTHER_FORMATS = {
    ("conversations",): ("ShareGPT", """\
roles = {"human": "user", "gpt": "assistant"}
rows = rows.map(lambda row: {"messages": [{"role": roles.get(turn["from"], turn["from"]), "content": turn["value"]}
                                          for turn in row["conversations"]]})"""),
    ("instruction", "output"): ("Alpaca", """\
rows = rows.map(lambda row: {"messages": [
    {"role": "user", "content": "\\n".join(filter(None, [row["instruction"], row.get("input")]))},
    {"role": "assistant", "content": row["output"]}]})""")}


def refuse_other_formats(source, keys, *load):
    """Ends the program, with the code that converts it, if `keys`, a text, has those of another format."""
    for needed, (name, convert) in OTHER_FORMATS.items():
        if all(f'"{key}"' in keys for key in needed) and '"messages"' not in keys:
            load = ", ".join([*load, "split='train'"])
            fail(f"--data or --val_data: {source} is in {name}'s format; in Python this converts it:",
                 code=f"import datasets\nrows = datasets.load_dataset({load})\n{convert}\n"
                      f"rows.select_columns('messages').to_json('{Path(source).stem}-messages.jsonl')")


def read_conversations(source):
    """
    Yields (where, messages). source: a file with {"messages": [...]} on each line; or a data set of the Hugging Face
    hub, as owner/name or owner/name/config (its split train).
    """
    if source.endswith(".jsonl") or os.path.exists(source):
        with one_line_errors(f"--data or --val_data: {source}"):
            file = open(source, "rb")
            beginning = file.read(1_000_000).decode(errors="replace")
            file.seek(0)
        refuse_other_formats(source, beginning, "'json'", f"data_files={source!r}")
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{source}, line {number}"
                with one_line_errors(where, 'expected {"messages": [...]}'):
                    yield where, json.loads(line)["messages"]
        return
    with one_line_errors(f"--data or --val_data: {source!r} is not a file, and as a data set",
                         "expected .jsonl files, or owner/name or owner/name/config on the Hugging Face hub, as "
                         "SOURCE or SOURCE:WEIGHT; the weight, a decimal number, is the passes over it in an epoch"):
        import datasets
        name = source.rsplit("/", source.count("/") - 1)
        if source == "HuggingFaceTB/smoltalk":
            name.append("all")  # it has no default config
        rows = datasets.load_dataset(*name, split="train")
        refuse_other_formats(source, json.dumps(rows.column_names), *map(repr, name))
        conversations = rows["messages"]
    for i, messages in enumerate(conversations):
        yield f"{source}, row {i}", messages


# ---------------------------------------------------------------------------------------------------
# a conversation -> inputs and targets

def tokenize_conversation(tokenizer, messages, max_seq_len):
    """
    Returns inputs and targets, (2, n) uint16 with n <= max_seq_len, and a note if they were truncated, or "". They end
    after an answer: one cut off in mid-sentence would teach the model never to stop. An empty system message is left
    out. Raises ValueError, with the reason, for a conversation that cannot be trained on.
    """
    try:
        roles = " ".join(message["role"] for message in messages)
        contents = [message["content"].strip() for message in messages]
    except Exception:
        raise ValueError("messages is not a list of {role, content}, both strings")
    if not re.fullmatch("(system )?user assistant( user assistant)*( user)?", roles):
        raise ValueError("its roles are not user and assistant in turn, after at most one system message")
    if roles.startswith("system") and not contents[0]:
        messages, contents = messages[1:], contents[1:]
    if not all(contents):
        raise ValueError("a message is empty")
    ids, trained = map(np.array, render_chat(tokenizer, messages))
    targets = np.where(trained, ids, tokenizer.eot_token)
    answer_ends = np.flatnonzero(targets == chat_tokens(tokenizer)["end"])
    if answer_ends[0] > max_seq_len:
        raise ValueError("longer than a row before its first answer ends")
    n = answer_ends[answer_ends <= max_seq_len][-1]
    note = "truncated after the last answer, or the last that fits into a row" if n < len(ids) - 1 else ""
    return np.array([ids[:n], targets[1:n + 1]], "<u2"), note


def load_conversations(source, tokenizer, max_seq_len, notes):
    """
    Yields (digest, inputs and targets) for each usable conversation of a source. What is truncated or skipped is
    counted in `notes`: {reason: [count, where the first one is]}.
    """
    for where, messages in tqdm(read_conversations(source), source, delay=2):
        try:
            pair, note = tokenize_conversation(tokenizer, messages, max_seq_len)
            yield hashlib.sha256(pair).digest(), pair
        except ValueError as error:  # tiktoken's too: it refuses about a million consecutive spaces
            note = f"skipped: {error}"
        if note:
            notes.setdefault(note, [0, where])[0] += 1


def mix_conversations(sources, val_sources, tokenizer, max_seq_len, seed, notes):
    """
    sources, val_sources: {source: weight}. Returns two lists of pairs, to train on and for validation, each pair as
    often as its weight says. Without val_sources one in 50 is held out, once, by digest, so no copy is trained on.
    """
    train, val = [], []
    for mixed, weights in (train, sources), (val, val_sources):
        loaded = [list(load_conversations(source, tokenizer, max_seq_len, notes)) for source in weights]
        digests = sorted(digest for part in loaded for digest, _ in part)
        held_out = set(digests[:0 if val_sources else -(-len(digests) // 50)])
        for i, (source, weight) in enumerate(weights.items()):
            kept = []
            for digest, pair in loaded[i]:
                (val if digest in held_out else kept).append(pair)
            n = int(weight) * len(kept) + round(weight % 1 * len(kept))
            if n == 0:
                fail(f"--{'data' if mixed is train else 'val_data'}={source}:{weight:g}: none of its "
                     f"{len(loaded[i])} usable conversations is left; raise its weight, give more conversations, a "
                     f"larger --max_seq_len, or others with --val_data; skipped or truncated: {notes or 'none'}")
            order = np.random.default_rng((seed, i)).permutation(len(kept))
            mixed += [kept[j] for j in np.resize(order, n)]  # repeats it
    return train, val


# ---------------------------------------------------------------------------------------------------
# rows

def best_fit(pairs, max_seq_len):
    """
    Best-fit decreasing bin packing (Johnson 1974): each pair (2, n), the longest first, goes into the row where it
    leaves the least space. Returns a list of rows, each a list of pairs.
    """
    rows = [[] for _ in pairs]
    rows_by_space = [[] for _ in range(max_seq_len)] + [rows[::-1]]  # [s]: those with s positions left
    for pair in tqdm(sorted(pairs, key=lambda pair: -pair.shape[1]), "packing", delay=2):
        n = pair.shape[1]
        space = next(s for s in range(n, max_seq_len + 1) if rows_by_space[s])
        row = rows_by_space[space].pop()
        row.append(pair)
        rows_by_space[space - n].append(row)
    return list(filter(None, rows))


def fill_rows(pairs, max_seq_len, pack, eot):
    """Pairs (2, n) -> rows (rows, 2, max_seq_len) uint16, of as many whole pairs as fit, or of one."""
    groups = best_fit(pairs, max_seq_len) if pack else [[pair] for pair in pairs]
    np.random.default_rng(len(groups)).shuffle(groups)  # the longest come first, and validation may read only some
    rows = np.full((len(groups), 2, max_seq_len), eot, "<u2")
    for row, group in zip(rows, groups):
        packed = np.hstack(group)
        row[:, :packed.shape[1]] = packed
    return rows


# ---------------------------------------------------------------------------------------------------
# rows -> batches

def packed_mask_and_positions(idx, first_id):
    """
    idx: (B, T) int64, rows of texts that each begin with first_id, which occurs nowhere else. Returns the mask, (B, 1,
    T, T) bool, causal within each text, and positions, (B, T) int64, that restart with each text. Padding is first_id
    too, every position of it a text of its own, so that no query is without a key.
    """
    text = (idx == first_id).cumsum(1)  # (B, T), the number of each position's text
    mask = (text[:, None, :, None] == text[:, None, None, :]).tril()
    return mask, mask.sum(-1)[:, 0] - 1


class ChatDataset:
    """
    The rows of one split, (n, 2, max_seq_len) uint16, as batches. pack: whether a row may hold several texts.
    fingerprint: identifies the mixture.
    """

    def __init__(self, rows, tokenizer, pack, fingerprint):
        self.rows, self.tokenizer, self.pack, self.fingerprint = rows, tokenizer, pack, fingerprint
        self.max_seq_len = rows.shape[2]

    def __len__(self):
        return len(self.rows)

    def get_batch(self, indices, device):
        """
        Keyword arguments of GPT.forward, on `device`: idx and targets (B, T) int64, IGNORE where not trained on; if
        packed, also mask and positions. Otherwise padding needs no mask: it comes last, and attention is causal.
        """
        # two arrays and not two views of one: for a single row a view would count as contiguous with a stride of 2 T
        idx, targets = (self.rows[indices, i].astype(np.int64) for i in (0, 1))
        targets[targets == self.tokenizer.eot_token] = IGNORE
        batch = {"idx": to_device(idx, device), "targets": to_device(targets, device)}
        if self.pack:
            batch["mask"], batch["positions"] = packed_mask_and_positions(batch["idx"], self.tokenizer.eot_token)
        return batch

    def count_targets(self, indices):
        """How many targets of these rows are trained on, and how many of their positions are not padding."""
        trained = self.rows[indices, 1] != self.tokenizer.eot_token
        padding = trained[:, ::-1].argmax(1)  # what follows the last answer of a row
        return int(trained.sum()), int(trained.size - padding.sum())

    def format_row(self, i):
        """Row i as text: its tokens divided by |, [those that are trained on] in brackets."""
        length = self.count_targets([i])[1]
        idx, targets = self.rows[i, :, :length].tolist()
        text, eot = "", self.tokenizer.eot_token
        for token, target, following in zip(idx, targets, idx[1:] + [eot]):
            shown = decode_chat(self.tokenizer, [following if target == eot else target]).replace("\n", "\\n")
            if token == eot:
                text += "\n\n<|endoftext|>"
            text += f"|{shown}" if target == eot else f"|[{shown}]"
        return sanitize(f"{text.lstrip()}\n\n(padding: {self.max_seq_len - length} of {self.max_seq_len} positions)")


# ---------------------------------------------------------------------------------------------------
# a mixture -> two data sets

def build_datasets(chat_dir, data, val_data, tokenizer, max_seq_len, pack, seed, build):
    """
    A mixture of conversations as two ChatDatasets, to train on and for validation, and text about them: how many rows
    and how full, and what was truncated or skipped. The rows are made once and kept in a file of chat_dir that is
    named after what they are made from: the arguments, and when the files among the sources were last changed. One
    process of a machine makes them (`build`), the others wait for it.

    data, val_data: see parse_mixture; val_data None: held out of data. pack: as many whole conversations to a row as
    fit, or one.
    """
    sources, val_sources = parse_mixture(data), parse_mixture(val_data) if val_data else {}
    times = [os.path.getmtime(source) for source in [*sources, *val_sources] if os.path.exists(source)]
    key = json.dumps([ROWS_VERSION, tokenizer.name, max_seq_len, pack, seed, sources, val_sources, times])
    path = Path(chat_dir, f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt")
    if build and not path.exists():
        print(f"packing {data} into rows of {max_seq_len} ...", flush=True)
        notes, eot = {}, tokenizer.eot_token
        train, val = mix_conversations(sources, val_sources, tokenizer, max_seq_len, seed, notes)
        rows, val_rows = (fill_rows(pairs, max_seq_len, pack, eot) for pairs in (train, val))
        tokens = sum(pair.shape[1] for pair in train)
        text = (f"data: {data}, {len(train):,} conversations in {len(rows):,} rows of {max_seq_len}; "
                f"{tokens / rows[:, 0].size:.1%} of the positions are not padding, {(rows[:, 1] != eot).mean():.1%} "
                f"are trained on; {len(val):,} conversations for validation")
        for note, (count, where) in notes.items():
            text += f"\n  {count:,} {note} (the first: {where})"
        with one_line_errors(f"--chat_dir={chat_dir}"):
            os.makedirs(chat_dir, exist_ok=True)
            temporary = f"{path}.{uuid.uuid4()}"  # other machines may share the disk
            torch.save([text, hashlib.sha256(rows).hexdigest(), torch.from_numpy(rows), torch.from_numpy(val_rows)],
                       temporary)
            os.replace(temporary, path)
    while not path.exists():
        time.sleep(0.1)
    with one_line_errors(path, "damaged: remove it, and it is made again"):
        if build and zipfile.ZipFile(path).testzip():
            raise ValueError("its checksum is wrong")
        text, fingerprint, *splits = torch.load(path, mmap=True)
        train, val = (ChatDataset(rows.numpy(), tokenizer, pack, fingerprint) for rows in splits)
        return train, val, text
