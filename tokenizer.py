"""
Tokenizers with tiktoken's interface: gpt2, bytes, or another model's (hf_tokenizer.py); and the chat format:

    <|endoftext|>, then for each message <|role|> content <|end|>, with no newlines between.

<|system|>, <|user|>, <|assistant|> and <|end|> are the four ids after the tokenizer's own, inside the padded
vocabulary. A tokenizer with a chat template has that format instead. A special token that a user types is plain text.
"""
import functools
import os
from pathlib import Path
from unicodedata import category

import numpy as np
import tiktoken

from configurator import one_line_errors

END_OF_TEXT = "<|endoftext|>"
ROLES = ("system", "user", "assistant")


def get_tokenizer(name):
    """
    Returns the tiktoken.Encoding called `name`: gpt2, or bytes (256 ids, nothing to download). tiktoken downloads
    gpt2's vocabulary (1.5 MB) once and keeps it in TIKTOKEN_CACHE_DIR, by default data/tiktoken beside this file.
    Otherwise `name` is a Hugging Face folder, or what tokenizer_entry returned: returns its HFTokenizer.
    """
    if name == "bytes":
        return tiktoken.Encoding(name="bytes", pat_str=r"(?s:.{1,64})", special_tokens={END_OF_TEXT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    if name != "gpt2":
        where = f"tokenizer={name!r}" if isinstance(name, str) else "its tokenizer"
        with one_line_errors(where, "expected gpt2, bytes, or a folder with a tokenizer.json (not the file; of a "
                                    "model of the hub, fetch it with hf download NAME --local-dir FOLDER)"):
            from hf_tokenizer import HFTokenizer, read_files  # not at the top: training does without it
            return HFTokenizer(read_files(name) if isinstance(name, str) else name)
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(Path(__file__).resolve().parent / "data/tiktoken"))
    with one_line_errors("tokenizer='gpt2': its vocabulary could not be downloaded and is not in "
                         + os.environ["TIKTOKEN_CACHE_DIR"], "set TIKTOKEN_CACHE_DIR to a folder that has it, or "
                         "prepare the data with --tokenizer=bytes, which downloads nothing"):
        return tiktoken.get_encoding(name)


def tokenizer_entry(tokenizer):
    """A tokenizer as a checkpoint keeps it and get_tokenizer reads it: gpt2, bytes, or an HFTokenizer's files."""
    return getattr(tokenizer, "files", tokenizer.name)


def encode(tokenizer, text):
    """
    Returns the ids of a text, (n,) uint32, like tiktoken's encode_ordinary but without the Python list. About a
    million consecutive spaces raise ValueError, where encode_ordinary panics.
    """
    return tokenizer.encode_to_numpy(replace_surrogates(text), disallowed_special=())


def replace_surrogates(text):
    """A text with U+FFFD for each lone surrogate, which is not a character; JSON can contain one."""
    return str.encode(text, "utf-16", "surrogatepass").decode("utf-16", "replace")


def has_template(tokenizer):
    """Whether a tokenizer has a chat template; if not, it gets the four chat tokens."""
    return bool(getattr(tokenizer, "chat_template", None))


def count_ids(tokenizer):
    """How many ids the tokenizer and the chat tokens have."""
    return tokenizer.n_vocab + (0 if has_template(tokenizer) else 4)


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
    special = special_tokens(tokenizer, chat=False)
    for i in range(tokenizer.n_vocab):
        sizes[i] = 0 if i in special else len(tokenizer.decode_single_token_bytes(i))
    return sizes


def chat_tokens(tokenizer):
    """{"system": id, "user": id, "assistant": id, "end": id}; with a chat template only the last."""
    if has_template(tokenizer):
        return {"end": tokenizer.end_token}
    return {name: tokenizer.n_vocab + i for i, name in enumerate((*ROLES, "end"))}


def special_tokens(tokenizer, chat):
    """{id: text} of the special tokens, with chat those of the chat format, too."""
    format_tokens = chat_tokens(tokenizer).items() if chat and not has_template(tokenizer) else ()
    own = getattr(tokenizer, "special", {tokenizer.eot_token: END_OF_TEXT})
    return {**own, **{i: f"<|{name}|>" for name, i in format_tokens}}


def render_chat(tokenizer, messages, prompt=False):
    """
    messages: [{"role": "system" | "user" | "assistant", "content": str}, ...]. Returns (ids, trained), two lists of
    equal length; trained says which ids the model learns to write: assistant content and its <|end|>.
    prompt: add the beginning of an answer, <|assistant|>.
    """
    if has_template(tokenizer):
        return tokenizer.render_chat([{"role": message["role"], "content": replace_surrogates(message["content"])}
                                      for message in messages], prompt)
    special = chat_tokens(tokenizer)
    ids, trained = [tokenizer.eot_token], [False]
    for message in messages:
        content = encode(tokenizer, message["content"]).tolist()
        ids += [special[message["role"]], *content, special["end"]]
        trained += [False] + [message["role"] == "assistant"] * (len(content) + 1)
    return (ids + [special["assistant"]], trained + [False]) if prompt else (ids, trained)


def decode_chat(tokenizer, ids):
    """The text of ids, with the chat tokens spelled out."""
    tokens = {} if has_template(tokenizer) else chat_tokens(tokenizer)
    spelled = {i: f"<|{name}|>".encode() for name, i in tokens.items()}
    pieces = [tokenizer.decode_single_token_bytes(i) if i < tokenizer.n_vocab else spelled.get(i, b"<|padding|>")
              for i in ids]
    return b"".join(pieces).decode("utf-8", errors="replace")


def sanitize(text):
    """Text with U+FFFD for control characters, which upset a terminal, and for lone surrogates."""
    return "".join("\ufffd" if category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text)
