"""
Conversations -> packed or padded rows, made once and kept on disk.

A conversation of n ids (see tokenizer.render_chat) takes n - 1 positions of a row: all but its last id are inputs,
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
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from configurator import fail, one_line_errors
from dataloader import to_device
from model import IGNORE
from tokenizer import chat_tokens, decode_chat, get_tokenizer, render_chat, sanitize

ROWS_VERSION = 1  # raise it with any change to the rows: those on disk are then made again


# ---------------------------------------------------------------------------------------------------
# sources of conversations

def parse_mixture(text):
    """'a.jsonl,b.jsonl:3' -> {"a.jsonl": 1.0, "b.jsonl": 3.0}: passes over each source in an epoch."""
    sources = {}
    for part in text.split(","):
        source, weight = re.fullmatch(r"(.*?)(?::(\d*\.?\d+))?", part.strip()).groups("1")
        sources[source] = sources.get(source, 0) + float(weight)
    return sources


def read_conversations(source):
    """
    Yields (where, messages). source: a file with {"messages": [...]} on each line; or a data set of the Hugging Face
    hub, as owner/name or owner/name/config (its split train).
    """
    if os.path.exists(source):
        for number, line in enumerate(open(source, "rb"), 1):
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
        conversations = datasets.load_dataset(*name, split="train")["messages"]
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
    if roles.startswith("system") and not contents.pop(0):
        messages = messages[1:]
    if not all(contents):
        raise ValueError("a message is empty")
    ids, trained = map(np.array, render_chat(tokenizer, messages))
    targets = np.where(trained, ids, tokenizer.eot_token)
    answer_ends = np.flatnonzero(targets == chat_tokens(tokenizer)["end"])
    if answer_ends[0] > max_seq_len:
        raise ValueError("longer than a row before its first answer ends")
    n = answer_ends[answer_ends <= max_seq_len][-1]
    note = "truncated after the last answer that fits into a row" if n < len(ids) - 1 else ""
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


def mix_conversations(splits, tokenizer, max_seq_len, seed, notes):
    """
    splits: {"train": {source: weight}, "val": {...}}. Returns {"train": pairs, "val": pairs}, each as often as its
    weight says. If val has no source, one in 50 conversations is held out for it, by digest: no copy is trained on.
    """
    pairs = {"train": [], "val": []}
    for split, sources in splits.items():
        loaded = [list(load_conversations(source, tokenizer, max_seq_len, notes)) for source in sources]
        digests = sorted(digest for part in loaded for digest, _ in part)
        held_out = set() if splits["val"] else set(digests[:-(-len(digests) // 50)])
        for i, (source, weight) in enumerate(sources.items()):
            kept = []
            for digest, pair in loaded[i]:
                (pairs["val"] if digest in held_out else kept).append(pair)
            n = int(weight) * len(kept) + round(weight % 1 * len(kept))
            if n == 0:
                fail(f"--{'data' if split == 'train' else 'val_data'}={source}:{weight:g}: none of its "
                     f"{len(loaded[i])} usable conversations is left for {split}; raise its weight, give more "
                     f"conversations, a larger --max_seq_len, or others with --val_data; skipped or truncated: "
                     f"{notes or 'none'}")
            order = np.random.default_rng((seed, i)).permutation(len(kept))
            pairs[split] += [kept[j] for j in np.resize(order, n)]  # repeats it
    return pairs


# ---------------------------------------------------------------------------------------------------
# rows

def best_fit(lengths, capacity):
    """
    Best-fit decreasing bin packing (Johnson 1974): each item, the longest first, goes into the row where it leaves the
    least space. lengths: ints from 1 to capacity -> a list of rows, each a list of indices into lengths.
    """
    rows = [[] for _ in lengths]
    rows_by_space = [[] for _ in range(capacity)] + [rows[::-1]]  # [s]: those with s positions left
    by_length = sorted(enumerate(lengths), key=lambda item: -item[1])
    for i, length in tqdm(by_length, "packing", delay=2):
        space = next(s for s in range(length, capacity + 1) if rows_by_space[s])
        row = rows_by_space[space].pop()
        row.append(i)
        rows_by_space[space - length].append(row)
    return [row for row in rows if row]


def fill_rows(pairs, max_seq_len, pack, eot):
    """Packs pairs (2, n) into rows (rows, 2, max_seq_len) uint16. Returns them, their digest, and counts."""
    lengths = [pair.shape[1] for pair in pairs]
    groups = best_fit(lengths, max_seq_len) if pack else [[i] for i in range(len(pairs))]
    np.random.default_rng(len(groups)).shuffle(groups)  # the longest come first, and validation may read only some
    rows = np.full((len(groups), 2, max_seq_len), eot, "<u2")
    for row, group in zip(rows, groups):
        packed = np.hstack([pairs[i] for i in group])
        row[:, :packed.shape[1]] = packed
    return {"rows": torch.from_numpy(rows), "fingerprint": hashlib.sha256(rows).hexdigest(),
            "conversations": len(pairs), "tokens": sum(lengths), "trained": int((rows[:, 1] != eot).sum())}


def build_rows(chat_dir, data, val_data, tokenizer_name, max_seq_len, pack, seed, build):
    """
    The rows of a mixture of conversations, made once and kept in a file of chat_dir that is named after what they are
    made from. One process of a machine makes them (`build`), the others wait for it.

    data, val_data: see parse_mixture; val_data None: held out of data. pack: as many whole conversations to a row as
    fit, or one. Returns train_rows and val_rows, (rows, 2, max_seq_len) uint16, memory-mapped; and info: for "train"
    and "val" see fill_rows, for "notes" load_conversations.
    """
    splits = {"train": parse_mixture(data), "val": parse_mixture(val_data) if val_data else {}}
    with one_line_errors(f"--data={data} --val_data={val_data}", "expected .jsonl files, or data sets of the hub"):
        digests = [hashlib.sha256(Path(source).read_bytes()).hexdigest()
                   for sources in splits.values() for source in sources
                   if os.path.exists(source) or source.endswith(".jsonl")]
    key = json.dumps([ROWS_VERSION, tokenizer_name, max_seq_len, pack, seed, splits, digests])
    path = Path(chat_dir, f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt")
    if build and not path.exists():
        print(f"packing {data} into rows of {max_seq_len} ...", flush=True)
        tokenizer, notes = get_tokenizer(tokenizer_name), {}
        pairs = mix_conversations(splits, tokenizer, max_seq_len, seed, notes)
        info = {split: fill_rows(pairs[split], max_seq_len, pack, tokenizer.eot_token) for split in splits}
        with one_line_errors(f"--chat_dir={chat_dir}"):
            os.makedirs(chat_dir, exist_ok=True)
            temporary = f"{path}.{uuid.uuid4()}"  # other machines may share the disk
            torch.save({**info, "notes": notes}, temporary)
            os.replace(temporary, path)
    while not path.exists():
        time.sleep(0.1)
    with one_line_errors(str(path), "damaged: remove it, and it is made again"):
        if build and zipfile.ZipFile(path).testzip():
            raise ValueError("its checksum is wrong")
        info = torch.load(path, mmap=True)
        return info["train"]["rows"].numpy(), info["val"]["rows"].numpy(), info


def describe_rows(info, data, max_seq_len):
    """Text about the rows: how many and how full, and what was truncated or skipped."""
    train = info["train"]
    positions = train["rows"][:, 0].numel()
    text = (f"data: {data}, {train['conversations']:,} conversations in {len(train['rows']):,} rows of {max_seq_len}; "
            f"{train['tokens'] / positions:.1%} of the positions are not padding, {train['trained'] / positions:.1%} "
            f"are trained on; {info['val']['conversations']:,} conversations for validation")
    for note, (count, where) in info["notes"].items():
        text += f"\n  {count:,} {note} (the first: {where})"
    return text


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
    """The rows of one split, (n, 2, max_seq_len) uint16, as batches. pack: whether a row may hold several texts."""

    def __init__(self, rows, tokenizer, pack, fingerprint):
        self.rows, self.tokenizer, self.pack, self.fingerprint = rows, tokenizer, pack, fingerprint
        self.max_seq_len = rows.shape[2]

    def __len__(self):
        return len(self.rows)

    def get_batch(self, indices, device):
        """
        What GPT.forward takes, on `device`: idx and targets (B, T) int64, IGNORE where not trained on; if packed, also
        mask and positions. Otherwise padding needs no mask: it comes last, and attention is causal.
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
        for token, target, following in zip(idx, targets, [*idx[1:], None]):  # the last target is trained on
            shown = decode_chat(self.tokenizer, [following if target == eot else target]).replace("\n", "\\n")
            text += ("\n\n<|endoftext|>|" if token == eot else "|") + (shown if target == eot else f"[{shown}]")
        return sanitize(f"{text.lstrip()}\n\n(padding: {self.max_seq_len - length} of {self.max_seq_len} positions)")
