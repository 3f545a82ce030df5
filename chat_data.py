"""
Conversations -> packed or padded rows.

A conversation of n ids (see chat_format.render_chat) takes n - 1 positions of a row: its inputs are all ids but the
last, its targets all but the first. A row is inputs and targets, (2, max_seq_len) uint16, or uint32 for a large
vocabulary. Two target values are not ids: the largest means no loss; the one below it (text_start), no loss and the
start of a text. Each position of padding counts as a text.

The datasets library tokenizes each source once and keeps it on disk. Mixing and packing run again at every start.
"""
import functools
import hashlib
import json
import os
import re
from collections import Counter
from contextlib import suppress

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask
from tqdm import tqdm

from chat_format import decode_chat, render_chat
from configurator import fail, format_error
from dataloader import to_device
from distributed import get_rank
from model import IGNORE
from prepare_data import is_json_list, kind_of, open_file
from tokenizer import CHAT_TOKENS, sanitize, token_dtype

VERSION = 7  # increment when tokenize_source's output changes: all sources are tokenized again
progress = functools.partial(tqdm, delay=2, disable=get_rank() > 0)  # shown after 2 seconds


# ---------------------------------------------------------------------------------------------------
# sources of conversations

def parse_mixture(text):
    """'a.jsonl,b.jsonl:3' -> {"a.jsonl": 1.0, "b.jsonl": 3.0}: passes over each source in an epoch."""
    sources = Counter()
    for part in text.split(","):
        source, weight = re.fullmatch(r"(?s)(.*?)(?::(\d*\.?\d+))?", part.strip()).groups("1")
        if not source:
            fail(f"--data or --val_data: {text!r}: '' is not a source; expected .json, .jsonl or .parquet files, or "
                 f"hub data sets, separated by commas")
        sources[source] += float(weight)
    return sources


def split_hub_name(source):
    """owner/name/config@split on the hub -> "owner/name", "config" or None, and "split", by default "train"."""
    path, _, split = source.partition("@")
    parts = path.split("/")
    return "/".join(parts[:2]), "/".join(parts[2:]) or None, split or "train"


def read_rows(source):
    """
    Yields (where, row). source: a file with a JSON object on each line, which is yielded as bytes; a file with one
    JSON list of objects; either one also compressed (.gz or .zst); a .parquet file; or a data set on the Hugging Face
    hub (see split_hub_name).
    """
    if source.endswith(".parquet"):
        import pyarrow.parquet
        batches = pyarrow.parquet.ParquetFile(source).iter_batches(1000)  # rows at a time
        rows = (row for batch in batches for row in batch.to_pylist())
    elif os.path.exists(source):
        with open_file(source) as file:
            if not is_json_list(file):
                yield from ((f"{source}, line {i}", line) for i, line in enumerate(file, 1) if line.strip())
                return
            rows = json.load(file)
    elif source.startswith(("/", ".")):
        raise ValueError("there is no such file")
    else:
        import datasets
        name, config, split = split_hub_name(source)
        rows = datasets.load_dataset(name, config, split=split)
    yield from ((f"{source}, row {i}", row) for i, row in enumerate(rows))


def to_messages(row):
    """
    The messages of a row (a dict, or a line of JSON) that has our format, ShareGPT's or Alpaca's. Raises ValueError if
    it holds more than these, TypeError if it has none of the formats.
    """
    if isinstance(row, bytes):
        row = json.loads(row)
    if "conversations" in row and not row.get("messages"):  # ShareGPT, or our format by another name
        roles = {"human": "user", "gpt": "assistant"}
        messages = [turn if turn.get("role") else
                    {**{key: turn[key] for key in turn.keys() - {"from", "value"}},  # weight, ...
                     "role": roles.get(turn["from"], turn["from"]), "content": turn["value"]}
                    for turn in row["conversations"] or []]
    elif "messages" in row:
        messages = row["messages"]
    elif "instruction" not in row:
        raise TypeError(f"found {row}")
    else:  # Alpaca
        question = "\n".join(filter(None, [row["instruction"], row.get("input")]))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    if (row.get("tools") or "[]") != "[]" or row.get("history"):
        raise ValueError("it has tools or a history besides its messages")
    system = row.get("system") or row.get("system_prompt")
    return [{"role": "system", "content": system}, *messages] if system else messages


# ---------------------------------------------------------------------------------------------------
# a conversation -> inputs and targets

def text_start(dtype):
    """The target where a text begins: the second largest number of a type. Neither it nor the largest is an id."""
    return np.iinfo(dtype).max - 1


def text_of(content):
    """A message's content as a string; a list of parts {"type": "text", "text": str} is joined."""
    if isinstance(content, list) and {part["type"] for part in content} == {"text"}:
        return "".join(part["text"] for part in content)
    return content


def validate_conversation(messages, keep_empty_system):
    """
    Returns the messages, the system message only if it has text or keep_empty_system is True. Raises ValueError if
    they cannot be trained on.
    """
    try:
        messages = [{**message, "content": text_of(message["content"])} for message in messages]
        is_empty = [not message["content"].strip() for message in messages]
        roles = " ".join(message["role"] for message in messages)
    except Exception:
        raise ValueError("messages is not a list of {role, content}, both strings")
    if not re.fullmatch("(system )?user assistant( user assistant)*( user)?", roles):
        raise ValueError("its roles are not user and assistant in turn, after at most one system message")
    if any(message.get(name) for message in messages for name in ("reasoning_content", "reasoning", "thinking")):
        raise ValueError("its thoughts are in reasoning_content, reasoning or thinking; put them into content, as "
                         "<think>...</think>")
    if any(message.get("tool_calls") or message.get("function_call") or message.get("weight") not in (None, 1)
           or message["role"] == "assistant" and any(message.get(name) not in (None, 1) for name in ("train", "loss"))
           for message in messages):
        raise ValueError("it has tool_calls, or a weight other than 1 (also called train or loss)")
    if any(is_empty[roles.startswith("system"):]):
        raise ValueError("a message is empty")
    return messages[1:] if is_empty[0] and not keep_empty_system else messages


def tokenize_conversation(tokenizer, messages, max_seq_len):
    """
    Returns inputs and targets, (2, n) of token_dtype with n <= max_seq_len, and a note if they were truncated, or "".
    They are truncated after an answer: one cut off in mid-sentence would teach the model never to stop. Raises
    ValueError, with the reason, for a conversation that cannot be trained on.
    """
    # many templates write a default system message unless the conversation has one, even an empty one
    messages = validate_conversation(messages, keep_empty_system=bool(tokenizer.chat_template))
    asked = messages[-1]["role"] == "user"  # and not answered
    ids, trained = map(np.array, render_chat(tokenizer, messages[:len(messages) - asked]))
    dtype = token_dtype(tokenizer)
    targets = np.where(trained, ids, np.iinfo(dtype).max)  # no loss
    targets[1] = text_start(dtype)
    answer_ends = np.flatnonzero(trained & ~np.append(trained[1:], False))
    if answer_ends[0] > max_seq_len:
        raise ValueError("longer than a row before its first answer ends")
    n = answer_ends[answer_ends <= max_seq_len][-1]
    note = "truncated after the last answer, or the last that fits into a row" if asked or n < answer_ends[-1] else ""
    return np.array([ids[:n], targets[1:n + 1]], dtype), note


# ---------------------------------------------------------------------------------------------------
# a source -> its conversations, tokenized once

def tokenize_source(source, digest, tokenizer, max_seq_len, version):
    """
    Yields a record for each conversation: inputs and targets as bytes (none if it is skipped), their checksum, a note
    that says why it was truncated or skipped, and where it is. Stops at the first row in an unknown format.
    """
    yield {"pair": b"", "digest": b"", "note": "", "where": ""}  # datasets cannot keep an empty source
    for where, row in tqdm(read_rows(source), f"tokenizing {source}", delay=2):
        pair = b""
        try:
            pair, note = tokenize_conversation(tokenizer, to_messages(row), max_seq_len)
        except Exception as error:  # ValueError: ours, or tiktoken's if there are a million consecutive spaces
            note = f"skipped: {error}" if type(error) is ValueError else f"error: {format_error(error)}"
        yield {"pair": bytes(pair), "digest": hashlib.sha256(pair).digest(), "note": note, "where": where}
        if note.startswith("error: "):  # all ranks will read this and fail, and the first one prints it
            return


def digest_rows(rows, eot):
    """SHA-256 of rows (..., 2, n), with eot for targets without loss, so that runs of earlier versions resume."""
    return hashlib.sha256(np.where(rows < text_start(rows.dtype), rows, rows.dtype.type(eot)))


def load_conversations(source, tokenizer, max_seq_len, chat_dir, notes):
    """
    Yields (digest, inputs and targets) for each usable conversation of a source. The first process that asks for them
    tokenizes them, and the others wait for it; later runs find them in chat_dir. Counts what is truncated or skipped
    in `notes`: {reason: [count, where the first one is]}.
    """
    if kind_of(source) in (".json", ".jsonl", ".parquet") and not os.path.exists(source):
        fail(f"--data or --val_data: {source}: there is no such file")
    try:
        import datasets  # takes a second
        import huggingface_hub
        datasets.disable_progress_bars()  # ours names the source
        digest = None  # the commit of a hub data set, unless there is no network
        if os.path.exists(source):
            with open(source, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        else:
            with suppress(Exception):
                digest = huggingface_hub.dataset_info(split_hub_name(source)[0], timeout=10).sha
        rows = datasets.Dataset.from_generator(tokenize_source, cache_dir=chat_dir, gen_kwargs=dict(
            source=source, digest=digest, tokenizer=tokenizer, max_seq_len=max_seq_len,
            version=(VERSION, CHAT_TOKENS))).data
        rows.validate(full=True)  # without this a damaged file may crash pyarrow
        for row in progress(rows.to_pylist(), source):
            note, where = row["note"], row["where"]
            if note.startswith("error: "):
                fail(f"{where}: {note[7:]}; expected {{\"messages\": [...]}}, or ShareGPT's or Alpaca's format, as "
                     f"JSON in UTF-8")
            if note:
                notes.setdefault(note, [0, where])[0] += 1
            if row["pair"]:
                if hashlib.sha256(row["pair"]).digest() != row["digest"]:
                    raise ValueError("a checksum is wrong")
                pair = np.frombuffer(row["pair"], token_dtype(tokenizer)).reshape(2, -1)
                yield digest_rows(pair, tokenizer.eot_token).digest(), pair
    except Exception as error:
        cause = error.__cause__  # set if it failed while this process was tokenizing
        fail(f"--data or --val_data: {source!r}, cached in --chat_dir={chat_dir}: {format_error(cause or error)}; "
             f"expected .json, .jsonl (also .gz or .zst) or .parquet files, or hub data sets as owner/name or "
             f"owner/name/config@split, each as SOURCE or SOURCE:WEIGHT, WEIGHT passes per epoch; if "
             f"{chat_dir}/generator is damaged, remove it: it will be rebuilt", alone=bool(cause))


# ---------------------------------------------------------------------------------------------------
# rows

def best_fit(pairs, max_seq_len):
    """
    Best-fit decreasing bin packing (Johnson 1974): each pair (2, n), the longest first, goes into the row where it
    leaves the least space. Returns a list of rows, each a list of pairs.
    """
    rows = [[] for _ in pairs]
    rows_by_space = [[] for _ in range(max_seq_len)] + [rows[::-1]]  # [s]: those with s positions left
    for pair in progress(sorted(pairs, key=lambda pair: -pair.shape[1]), "packing"):
        n = pair.shape[1]
        space = next(s for s in range(n, max_seq_len + 1) if rows_by_space[s])
        row = rows_by_space[space].pop()
        row.append(pair)
        rows_by_space[space - n].append(row)
    return list(filter(None, rows))


def fill_rows(pairs, max_seq_len, pack, eot):
    """Pairs (2, n) -> rows (rows, 2, max_seq_len), each of one pair or, packed, as many as fit. eot pads inputs."""
    groups = best_fit(pairs, max_seq_len) if pack else [[pair] for pair in pairs]
    np.random.default_rng(len(groups)).shuffle(groups)  # the longest come first, and validation may read only some
    rows = np.full((len(groups), 2, max_seq_len), eot, pairs[0].dtype)
    rows[:, 1] = text_start(rows.dtype)
    for row, group in zip(rows, progress(groups, "filling rows")):
        packed = np.hstack(group)
        row[:, :packed.shape[1]] = packed
    return rows


# ---------------------------------------------------------------------------------------------------
# rows -> batches

def packed_mask_and_positions(begins, blocks=False):
    """
    begins: (B, T) bool, whether a text begins at a position; each padding position counts as a separate text, so every
    query has a key. Returns the mask, (B, 1, T, T) bool, causal within each text, with `blocks` as a BlockMask; and
    positions, (B, T) int64, that restart with each text.
    """
    (B, T), text = begins.shape, begins.cumsum(1)  # (B, T), the number of each position's text
    index = torch.arange(T, device=begins.device)
    positions = index - torch.where(begins, index, 0).cummax(1).values
    if blocks:
        def may_look(b, head, query, key):
            return (text[b, query] == text[b, key]) & (query >= key)
        return create_block_mask(may_look, B, None, T, T, device=begins.device), positions
    return (text[:, None, :, None] == text[:, None, None, :]).tril(), positions


class ChatDataset:
    """
    The rows of one split, (n, 2, max_seq_len), as batches. pack: whether a row may hold several texts. block_mask:
    whether their mask is a BlockMask; set it before the first batch. fingerprint: identifies the mixture.
    """

    def __init__(self, rows, tokenizer, pack, fingerprint):
        self.rows, self.tokenizer, self.pack, self.fingerprint = rows, tokenizer, pack, fingerprint
        self.max_seq_len, self.block_mask = rows.shape[2], False
        self.text_start = text_start(rows.dtype)

    def __len__(self):
        return len(self.rows)

    def get_batch(self, indices, device):
        """
        Keyword arguments of GPT.forward, on `device`: idx and targets (B, T) int64, IGNORE where not trained on; if
        packed, also mask and positions. Otherwise padding needs no mask: it comes last, and attention is causal.
        """
        # two arrays, not two views of one: a single row's view would keep a stride of 2 T and cause a recompile
        idx, targets = (self.rows[indices, i].astype(np.int64) for i in (0, 1))
        begins = targets == self.text_start
        targets[targets >= self.text_start] = IGNORE
        batch = {"idx": to_device(idx, device), "targets": to_device(targets, device)}
        if self.pack:
            begins = to_device(begins, device)
            batch["mask"], batch["positions"] = packed_mask_and_positions(begins, self.block_mask)
        return batch

    def first_question(self):
        """The inputs of the first row up to where its first answer begins."""
        idx, targets = self.rows[0]
        return idx[:(targets < self.text_start).argmax() + 1].tolist()

    def count_targets(self, indices):
        """How many targets of these rows are trained on, and how many of their positions are not padding."""
        trained = self.rows[indices, 1] < self.text_start
        padding = trained[:, ::-1].argmax(1)  # what follows the last answer of a row
        return int(trained.sum()), int(trained.size - padding.sum())

    def format_row(self, i):
        """Row i as text: its tokens separated by |, [those that are trained on] in brackets."""
        length = self.count_targets([i])[1]
        idx, targets = self.rows[i, :, :length].tolist()
        text = ""

        def show(token):
            return decode_chat(self.tokenizer, [token]).replace("\n", "\\n")

        for token, target, following in zip(idx, targets, idx[1:] + [0]):
            if target == self.text_start:
                text += f"\n\n{show(token)}"
            text += f"|[{show(target)}]" if target < self.text_start else f"|{show(following)}"
        return sanitize(f"{text.lstrip()}\n\n(padding: {self.max_seq_len - length} of {self.max_seq_len} positions)")


# ---------------------------------------------------------------------------------------------------
# a mixture -> two data sets

def build_datasets(chat_dir, data, val_data, tokenizer, max_seq_len, pack, seed):
    """
    A mixture of conversations as two ChatDatasets, for training and validation, and a summary: how many rows, how
    full, and what was truncated or skipped.

    data, val_data: see parse_mixture. Without val_data one in 50 conversations is held out, once, by digest, so that
    no copy of it is trained on. pack: as many whole conversations to a row as fit, or one. chat_dir: where the
    datasets library keeps the tokenized sources.
    """
    notes, used, eot = {}, [], tokenizer.eot_token
    train, val = [], []  # pairs of inputs and targets, repeated by their sources' weights, unless held out
    for mixed, weights in (train, parse_mixture(data)), (val, parse_mixture(val_data) if val_data else {}):
        loaded = [list(load_conversations(source, tokenizer, max_seq_len, chat_dir, notes)) for source in weights]
        digests = sorted(digest for part in loaded for digest, _ in part)
        held_out = set(digests[:0 if val_data else -(-len(digests) // 50)])
        used.append({*digests} - held_out)
        for i, (source, weight) in enumerate(weights.items()):
            if not loaded[i]:
                fail(f"--data or --val_data: {source}: it has no conversation that can be used.{list_notes(notes)}")
            kept = [pair for digest, pair in loaded[i] if digest not in held_out]
            val += [pair for digest, pair in loaded[i] if digest in held_out]
            n = int(weight) * len(kept) + round(weight % 1 * len(kept))
            if n == 0:
                fail(f"--data or --val_data: {source}:{weight:g}: none of its {len(loaded[i])} usable conversations "
                     f"is left, with {len(held_out)} of the mixture held out for validation; "
                     f"{'raise its weight, ' if kept else ''}give more conversations, a larger --max_seq_len, or "
                     f"separate ones with --val_data.{list_notes(notes)}")
            order = np.random.default_rng((seed, i)).permutation(len(kept))
            mixed += [kept[j] for j in np.resize(order, n)]  # repeats order

    rows, val_rows = (fill_rows(pairs, max_seq_len, pack, eot) for pairs in (train, val))
    fingerprint = digest_rows(rows, eot).hexdigest()
    datasets = [ChatDataset(split, tokenizer, pack, fingerprint) for split in (rows, val_rows)]
    n_targets, n_tokens = datasets[0].count_targets(slice(None))
    n_positions = len(rows) * max_seq_len
    text = (f"data: {data}, {len(train):,} conversations in {len(rows):,} rows of {max_seq_len}; "
            f"{n_tokens / n_positions:.1%} of the positions are not padding, {n_targets / n_positions:.1%} are "
            f"trained on; {len(val):,} conversations for validation{list_notes(notes)}")
    if both := len(used[0] & used[1]):
        text += f"\nWARNING: {both:,} of the conversations for validation are trained on, too"
    return *datasets, text


def list_notes(notes):
    """What was truncated or skipped, a line each."""
    return "".join(f"\n  {count:,} {note} (the first: {where})" for note, (count, where) in notes.items())
