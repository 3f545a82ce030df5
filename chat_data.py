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
import tempfile
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import fail, one_line_errors
from dataloader import to_device
from model import IGNORE
from tokenizer import ROLES, chat_tokens, decode_chat, get_tokenizer, render_chat, sanitize

ROWS_VERSION = 1  # raise it with any change to the rows: those on disk are then made again


# ---------------------------------------------------------------------------------------------------
# sources of conversations

def parse_mixture(text, setting="data"):
    """'a.jsonl,b.jsonl:3' -> {"a.jsonl": 1.0, "b.jsonl": 3.0}: passes over each source in an epoch."""
    sources = {}
    for part in text.split(","):
        source, weight = re.fullmatch(r"(.*?)(?::([-+.\de]*))?", os.path.expanduser(part.strip())).groups("1")
        with one_line_errors(f"--{setting}={text}: {part!r}",
                             "expected a .jsonl file or a data set of the Hugging Face hub, or several, as SOURCE or "
                             "SOURCE:WEIGHT; a weight above 0 and below 1e6 is the passes over it in an epoch"):
            if not source or source in sources or not 0 < float(weight) < 1e6:
                raise ValueError("no source, the same one again, or a weight out of range")
            sources[source] = float(weight)
    return sources


def source_digest(source):
    """What identifies a source: the sha256 of each of its files, or its name on the hub."""
    if not source.endswith(".jsonl") and not os.path.exists(source):
        return source
    with one_line_errors(source):
        paths = sorted(filter(Path.is_file, Path(source).rglob("*"))) or [Path(source)]
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def read_conversations(source):
    """
    Yields (where, messages). source: a file with {"messages": [...]} on each line; a data set of the Hugging Face hub,
    as owner/name or owner/name/config (its split train); or a folder that `datasets` can load.
    """
    if os.path.isfile(source):
        for number, line in enumerate(open(source, "rb"), 1):
            if line.strip():
                where = f"{source}, line {number}"
                with one_line_errors(where, 'expected {"messages": [...]}'):
                    messages = json.loads(line)["messages"]
                yield where, messages
        return
    if source == "HuggingFaceTB/smoltalk":
        source += "/all"  # it has no default config
    name = [source] if os.path.isdir(source) else source.rsplit("/", source.count("/") - 1)
    os.environ.setdefault("USE_TORCH", "0")  # datasets can do without it
    with one_line_errors(f"{source}: not a file, and as a data set",
                         "expected a .jsonl file, or owner/name or owner/name/config on the Hugging Face hub"):
        import datasets
        conversations = datasets.load_dataset(*name, split="train")["messages"]
    for i, messages in enumerate(conversations):
        yield f"{source}, row {i}", messages


# ---------------------------------------------------------------------------------------------------
# a conversation -> inputs and targets

def validate_conversation(messages):
    """Why a conversation cannot be trained on, in a few words, or None."""
    try:
        roles, contents = zip(*[(message["role"], message["content"].strip()) for message in messages])
    except (AttributeError, KeyError, TypeError, ValueError):
        return "messages is not a list of {role, content}, both strings"
    for role in roles:
        if role not in ROLES:
            return f"unknown role {str(role)[:40]!r}"
    if "assistant" not in roles:
        return "no assistant message"
    if not re.fullmatch("(system )?(user assistant )+(user )?", " ".join([*roles, ""])):
        return "user and assistant do not take turns, after at most one system message"
    if not all(contents):
        return f"an empty {roles[contents.index('')]} message"
    return None


def truncate_conversation(tokenizer, messages, max_seq_len):
    """
    Returns inputs and targets, (2, n) uint16 with n <= max_seq_len, and a note on what was truncated, "" for nothing.
    They end after an answer: one cut off in mid-sentence would teach the model never to stop. ValueError if none fits.
    """
    ids, trained = map(np.array, render_chat(tokenizer, messages))
    answer_ends = np.flatnonzero(trained & (ids == chat_tokens(tokenizer)["end"]))
    if answer_ends[0] > max_seq_len:
        raise ValueError("longer than a row before its first answer ends")
    n = answer_ends[answer_ends <= max_seq_len][-1]
    note = ("truncated after an answer: longer than a row" if n < answer_ends[-1] else
            "truncated after its last answer: it ends in a question" if n < len(ids) - 1 else "")
    targets = np.where(trained, ids, tokenizer.eot_token)
    return np.array([ids[:n], targets[1:n + 1]], "<u2"), note


def load_conversations(source, tokenizer, max_seq_len, notes):
    """
    Yields (digest, inputs and targets) for each usable conversation of a source. What is truncated or skipped is
    counted in `notes`: {reason: [count, where the first one is]}.
    """
    for where, messages in tqdm(read_conversations(source), source, delay=2, mininterval=2):
        try:
            if validate_conversation(messages) == "an empty system message":
                notes.setdefault("system message left out: it is empty", [0, where])[0] += 1
                messages = messages[1:]
            fault = validate_conversation(messages)
            if fault:
                raise ValueError(fault)
            pair, note = truncate_conversation(tokenizer, messages, max_seq_len)
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
        held_out = set(digests[:0 if splits["val"] else -(-len(digests) // 50)])
        for i, (source, weight) in enumerate(sources.items()):
            kept = [pair for digest, pair in loaded[i] if digest not in held_out]
            pairs["val"] += [pair for digest, pair in loaded[i] if digest in held_out]
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
    for i, length in tqdm(by_length, "packing", delay=2, mininterval=2):
        space = next(s for s in range(length, capacity + 1) if rows_by_space[s])
        row = rows_by_space[space].pop()
        row.append(i)
        rows_by_space[space - length].append(row)
    return [row for row in rows if row]


def write_rows(path, pairs, max_seq_len, pack, eot):
    """Packs pairs (2, n) into rows at `path`, a .npy file. Returns what is in them, as counts, and their digest."""
    lengths = [pair.shape[1] for pair in pairs]
    groups = best_fit(lengths, max_seq_len) if pack else [[i] for i in range(len(pairs))]
    np.random.default_rng(len(groups)).shuffle(groups)  # the longest come first, and validation may read only some
    rows = np.full((len(groups), 2, max_seq_len), eot, "<u2")
    for row, group in zip(rows, tqdm(groups, "writing rows", delay=2, mininterval=2)):
        packed = np.hstack([pairs[i] for i in group])
        row[:, :packed.shape[1]] = packed
    np.save(path, rows)
    return {"conversations": len(pairs), "rows": len(rows), "tokens": sum(lengths),
            "trained": int((rows[:, 1] != eot).sum()), "fingerprint": hashlib.sha256(rows).hexdigest()}


def build_rows(chat_dir, data, val_data, tokenizer_name, max_seq_len, pack, seed, build):
    """
    The rows of a mixture of conversations, made once and kept in a folder of chat_dir that is named after what they
    are made from. One process of a machine makes them (`build`), the others wait for it.

    data, val_data: see parse_mixture; val_data None: held out of data. pack: as many whole conversations to a row as
    fit, or one. Returns train_rows and val_rows, (rows, 2, max_seq_len) uint16, memory-mapped; and info: for "train"
    and "val" a dict of conversations, rows, tokens, trained, fingerprint; for "notes" see load_conversations.
    """
    splits = {"train": parse_mixture(data), "val": parse_mixture(val_data, "val_data") if val_data else {}}
    cache_key = [ROWS_VERSION, tokenizer_name, max_seq_len, pack, seed]
    for split, sources in splits.items():
        cache_key += [[split, source_digest(source), weight] for source, weight in sources.items()]
    folder = Path(chat_dir) / hashlib.sha256(json.dumps(cache_key).encode()).hexdigest()[:16]
    if build and not folder.exists():
        print(f"packing {data} into rows of {max_seq_len} ...", flush=True)
        tokenizer, notes = get_tokenizer(tokenizer_name), {}
        pairs = mix_conversations(splits, tokenizer, max_seq_len, seed, notes)
        with one_line_errors(f"--chat_dir={chat_dir}", errors=OSError):
            os.makedirs(chat_dir, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=chat_dir) as new:
                info = {split: write_rows(f"{new}/{split}.npy", pairs[split], max_seq_len, pack, tokenizer.eot_token)
                        for split in splits}
                Path(new, "plan.json").write_text(json.dumps({**info, "notes": notes}, indent=1))
                os.chmod(new, 0o755)  # it was made for its owner alone
                if not folder.exists():  # another machine that shares the disk may have been faster
                    os.rename(new, folder)
    while not folder.exists():
        time.sleep(0.1)
    with one_line_errors(str(folder), "damaged: remove the folder, and it is made again"):
        info = json.loads((folder / "plan.json").read_text())
        rows = [np.load(folder / f"{split}.npy", mmap_mode="r") for split in splits]
        for split, part in zip(splits, rows):
            if build and hashlib.sha256(part).hexdigest() != info[split]["fingerprint"]:
                raise ValueError(f"{split}.npy has another digest than plan.json says")
    return *rows, info


def describe_rows(info, data, max_seq_len):
    """Text about the rows: how many and how full, what was truncated or skipped, a warning if over a tenth is lost."""
    train = info["train"]
    positions = train["rows"] * max_seq_len
    text = (f"data: {data}, {train['conversations']:,} conversations in {train['rows']:,} rows of {max_seq_len}; "
            f"{train['tokens'] / positions:.1%} of the positions are not padding, {train['trained'] / positions:.1%} "
            f"are trained on; {info['val']['conversations']:,} conversations for validation")
    lost = 0
    for note, (count, where) in info["notes"].items():
        text += f"\n  {count:,} conversation{'s' if count > 1 else ''} {note} (the first: {where})"
        lost += count * note.startswith("skipped")
    if lost > 0.1 * (lost + train["conversations"]):
        text += (f"\nWARNING: {lost:,} of the conversations cannot be trained on, see above; a row is "
                 f"--max_seq_len={max_seq_len} long")
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
