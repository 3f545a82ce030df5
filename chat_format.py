"""
Conversations -> ids, and back:

    <|endoftext|>, then for each message <|role|> content <|end|>, with no newlines between.

<|system|>, <|user|>, <|assistant|> and <|end|> are the four ids after the tokenizer's own. A tokenizer with a chat
template has that format instead.
"""
from configurator import one_line_errors
from tokenizer import CHAT_TOKENS, count_ids, encode, replace_surrogates

ROLES = [name for name in CHAT_TOKENS if name != "end"]


def check_chat_format(path, tokenizer, vocab_size):
    """Exit with an error if the model at `path` has neither a chat template nor room for the chat tokens."""
    with one_line_errors(path):
        if tokenizer.chat_template:
            chat_tokens(tokenizer)  # raises ValueError if no special token ends the template's answers
        elif count_ids(tokenizer) > vocab_size or not tokenizer.can_grow:
            raise ValueError("its tokenizer has no chat template, and its vocabulary no room for our chat tokens; "
                             "take the model's chat version, or put its chat_template.jinja into the folder")


def chat_tokens(tokenizer):
    """{"system": id, "user": id, "assistant": id, "end": id}; with a chat template only the last."""
    if tokenizer.chat_template:
        return {"end": tokenizer.end_token}
    return {name: i for i, name in enumerate(CHAT_TOKENS, tokenizer.n_vocab)}


def render_chat(tokenizer, messages, prompt=False):
    """
    messages: [{"role": "system" | "user" | "assistant", "content": str}, ...]. Returns (ids, trained), two lists of
    equal length; trained says which ids the model learns to write: assistant content and its <|end|>.
    prompt: add the beginning of an answer, <|assistant|>.
    """
    if tokenizer.chat_template:
        return tokenizer.render_chat([{"role": message["role"], "content": replace_surrogates(message["content"])}
                                      for message in messages], prompt)
    special = chat_tokens(tokenizer)
    ids, trained = [tokenizer.eot_token], [False]
    for message in messages:
        content = encode(tokenizer, message["content"]).tolist()
        ids += [special[message["role"]], *content, special["end"]]
        trained += [False] + [message["role"] == "assistant"] * (len(content) + 1)
    if prompt:
        ids.append(special["assistant"])
        trained.append(False)
    return ids, trained


def decode_chat(tokenizer, ids):
    """The text of ids, with the chat tokens spelled out."""
    added = {} if tokenizer.chat_template else {i: name for name, i in chat_tokens(tokenizer).items()}
    pieces = [tokenizer.decode_single_token_bytes(i) if i < tokenizer.n_vocab
              else f"<|{added.get(i, 'padding')}|>".encode() for i in ids]
    return b"".join(pieces).decode(errors="replace")
