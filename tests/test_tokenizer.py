"""Tokenizers: ids are tiktoken's, special tokens in text are text, and bytes are counted right."""
import random

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from conftest import error_line, random_texts
from chat_format import chat_tokens, check_chat_format, decode_chat
from tokenizer import count_ids, encode, get_tokenizer, padded_vocab_size, sanitize, token_bytes

TEXTS = random_texts(random.Random(0), 100)


@pytest.fixture(params=["bytes", "gpt2"])
def tokenizer(request):
    return get_tokenizer("bytes") if request.param == "bytes" else request.getfixturevalue("gpt2_vocabulary")


@given(text=st.text() | st.sampled_from(TEXTS))
def test_gpt2_ids_are_tiktokens(gpt2_vocabulary, text):
    assert encode(gpt2_vocabulary, text).tolist() == tiktoken.get_encoding("gpt2").encode_ordinary(text)


@pytest.mark.parametrize("text", ["a\ud83d b", "\udc00", "\ud83d\ude00"])
def test_half_a_surrogate_pair_is_encoded_as_tiktoken_does(tokenizer, text):
    assert encode(tokenizer, text).tolist() == tokenizer.encode_ordinary(text)


def test_token_bytes_add_up_to_those_of_the_text(tokenizer):
    sizes = token_bytes(tokenizer)
    assert sizes.shape == (padded_vocab_size(tokenizer),)
    assert not sizes[tokenizer.eot_token:].any() and sizes[:tokenizer.eot_token].all()
    for text in TEXTS:
        assert sizes[encode(tokenizer, text)].sum() == len(text.encode("utf-8"))


def test_decode_chat_spells_out_special_tokens_and_padding(tokenizer):
    end = chat_tokens(tokenizer)["end"]
    ids = [tokenizer.eot_token, *encode(tokenizer, "é"), end, padded_vocab_size(tokenizer) - 1]
    assert decode_chat(tokenizer, ids) == "<|endoftext|>é<|end|><|padding|>"
    check_chat_format("a vocabulary with just enough room", tokenizer, count_ids(tokenizer))


def test_sanitize_keeps_text_and_drops_control_characters():
    text = "a\n\té🙂 Bonjour\u00a0! \u3000 \U0001f469\u200d\U0001f4bb \u0645\u06cc\u200c"  # wide spaces, joiners
    assert sanitize(text) == text
    assert sanitize("\x1b[2J\r\x07\x9b\ud800") == "\ufffd[2J\ufffd\ufffd\ufffd\ufffd"


def test_an_unknown_tokenizer_is_refused():
    assert "gpt5" in error_line(get_tokenizer, "gpt5")
