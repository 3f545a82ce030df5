"""
The format of token shards: 256 int32 (magic, version, number of tokens, zeros), then the tokens, uint16, or uint32 for
more than 65,534 ids, chat tokens included. Both are llm.c's layouts, so ready-made shards of llm.c and modded-nanogpt
work here, and ours there. A folder holds {train,val}_000000.bin, ..., meta.json, and tokenizer/ with the files of a
tokenizer that is neither gpt2 nor bytes. This file does not import torch, so that prepare_data.py starts at once.
"""
import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from configurator import fail, one_line_errors

HEADER_BYTES = 1024
HEADERS = {"<u2": [20240520, 1], "<u4": [20240801, 7]}  # type of the tokens -> magic and version


def shard_header(n_tokens, dtype="<u2"):
    return struct.pack("<3i", *HEADERS[dtype], n_tokens).ljust(HEADER_BYTES, b"\0")


def read_shard(path, recorded=None):
    """
    The tokens of a shard, memory-mapped: (n,) uint16 or uint32. Exits with an error if it is not a whole shard.
    recorded: its entry in meta.json, the CRC-32 of its tokens and the time of its last change in ns, or None. The
    CRC-32 reads the whole shard, so it is compared only if the shard has changed since, or is a copy.
    """
    with one_line_errors(path, "if prepare_data.py wrote it, remove the folder and run it again",
                         (ValueError, LookupError, TypeError)):  # meta.json may be damaged, too
        header = np.fromfile(path, dtype="<i4", count=3).tolist()
        dtype = "<u4" if header[:2] == HEADERS["<u4"] else "<u2"
        n = (os.path.getsize(path) - HEADER_BYTES) / np.dtype(dtype).itemsize  # not an integer if it ends mid-token
        expected = [*HEADERS[dtype], n]
        if header != expected or n < 1:
            raise ValueError(f"not a token shard, of another version, or damaged: it begins with {header}, expected "
                             f"{expected}, the last being its number of tokens")
        shard = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES)
        if recorded and os.stat(path).st_mtime_ns != recorded[1] and zlib.crc32(shard) != recorded[0]:
            raise ValueError("its tokens have changed since they were prepared")
        return shard


def read_headerless(path):
    """The tokens of nanoGPT's train.bin or val.bin, GPT-2's without a header, memory-mapped: (n,) uint16."""
    with one_line_errors(path, "if nanoGPT's prepare.py wrote it, run that again"):
        return np.memmap(path, dtype="<u2", mode="r")  # ValueError if it is empty or ends in half a token


def read_meta(data_dir):
    """meta.json of a folder of shards, a dict with at least tokenizer and shards. No file means gpt2 tokens."""
    path = Path(data_dir) / "meta.json"
    if not path.exists():
        return {"tokenizer": "gpt2", "shards": {}}
    with one_line_errors(path, "run prepare_data.py again"):
        meta = json.loads(path.read_text(encoding="utf-8"))
        meta["tokenizer"], meta["shards"] = str(meta["tokenizer"]), dict(meta.get("shards", {}))
    if not meta.get("finished", True):  # only prepare_data.py writes it
        fail(f"data_dir={data_dir}: its preparation was interrupted; run the same prepare_data.py command again")
    return meta
