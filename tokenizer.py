"""
Tokenizers with tiktoken's interface: gpt2, bytes, or another model's (hf_tokenizer.py). The padded vocabulary has room
for the chat tokens. A special token that a user types is plain text.
"""
import functools
import os
import re
from pathlib import Path

import numpy as np
import tiktoken

from configurator import one_line_errors

END_OF_TEXT = "<|endoftext|>"
CHAT_TOKENS = ("system", "user", "assistant", "end")  # in the order of their ids: append a new one


def get_tokenizer(name):
    """
    Returns the tiktoken.Encoding called `name`: gpt2, or bytes (256 ids, nothing to download). tiktoken downloads
    gpt2's vocabulary (1.5 MB) once and keeps it in TIKTOKEN_CACHE_DIR, by default data/tiktoken beside this file.
    Otherwise `name` is a Hugging Face folder, or what tokenizer_entry returned: returns its HFTokenizer.
    """
    if name == "bytes":
        encoding = tiktoken.Encoding(name="bytes", pat_str=r"(?s:.{1,64})", special_tokens={END_OF_TEXT: 256},
                                     mergeable_ranks={bytes([i]): i for i in range(256)})
    elif name == "gpt2":
        cache = os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(Path(__file__).resolve().parent / "data/tiktoken"))
        with one_line_errors(f"tokenizer='gpt2': its vocabulary could not be downloaded and is not in {cache}",
                             "set TIKTOKEN_CACHE_DIR to a folder that has it, or prepare the data with "
                             "--tokenizer=bytes, which downloads nothing"):
            encoding = tiktoken.get_encoding("gpt2")
    else:
        where = f"tokenizer={name!r}" if isinstance(name, str) else "its tokenizer"
        with one_line_errors(where, "expected gpt2, bytes, or a folder with a tokenizer.json (not the file; for a "
                                    "model on the hub, run hf download NAME --local-dir FOLDER)"):
            from hf_tokenizer import HFTokenizer, read_files  # not at the top: gpt2 and bytes do not need it
            return HFTokenizer(read_files(name) if isinstance(name, str) else name)
    # the attributes of an HFTokenizer that other files read
    encoding.files, encoding.chat_template, encoding.text_rules = None, None, encoding.name
    encoding.special = encoding.stop_ids = {encoding.eot_token}
    encoding.can_grow = encoding.byte_level = True
    return encoding


def tokenizer_entry(tokenizer):
    """A tokenizer as a checkpoint keeps it and get_tokenizer reads it: gpt2, bytes, or an HFTokenizer's files."""
    return tokenizer.files or tokenizer.name


def encode(tokenizer, text):
    """
    Returns the ids of a text, (n,) uint32, like tiktoken's encode_ordinary but without the Python list. About a
    million consecutive spaces raise ValueError, where encode_ordinary panics.
    """
    return tokenizer.encode_to_numpy(replace_surrogates(text), disallowed_special=())


def replace_surrogates(text):
    """A text with U+FFFD for each lone surrogate, which is not a character; JSON can contain one."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def count_ids(tokenizer):
    """How many ids the tokenizer and the chat tokens have. With a chat template there are no chat tokens."""
    return tokenizer.n_vocab + (0 if tokenizer.chat_template else len(CHAT_TOKENS))


def padded_vocab_size(tokenizer):
    """count_ids, rounded up to a multiple of 128 (gpt2: 50304)."""
    return -(-count_ids(tokenizer) // 128) * 128


def token_dtype(tokenizer):
    """The type of tokens on disk: uint16 if it holds all ids and two more for targets without loss, else uint32."""
    return "<u2" if count_ids(tokenizer) <= 2 ** 16 - 2 else "<u4"


@functools.cache
def token_bytes(tokenizer):
    """The number of bytes of text each id stands for, 0 for special tokens and padding: (padded vocabulary,) int64."""
    sizes = np.zeros(padded_vocab_size(tokenizer), dtype=np.int64)
    for i in range(tokenizer.n_vocab):
        if i not in tokenizer.special:
            sizes[i] = len(tokenizer.decode_single_token_bytes(i))
    return sizes


def sanitize(text):
    """Text with U+FFFD for control characters, which upset a terminal, and for lone surrogates."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", text)
