"""
The tokenizer of a Hugging Face folder, with the parts of tiktoken's interface that the other files use, and the chat
template of its model. Checkpoints and folders of shards keep its files.
"""
import hashlib
import json
import os
import re
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers  # transformers requires it

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prepare_data.py starts its own threads

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
         "generation_config.json")

# Vocabularies like GPT-2's write each byte as a character: printable ones as they are, the others from U+0100 on.
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
BYTE_OF_LETTER = dict(zip(LETTERS, sorted(range(256), key=lambda byte: chr(byte) not in LETTERS)))


def read_files(folder):
    """
    {name: text} of those FILES that a folder has. Ids that generation_config.json lacks are taken from config.json.
    (transformers does so only if the whole file is missing.)
    """
    folder = Path(folder)
    files = {name: (folder / name).read_text(encoding="utf-8") for name in FILES if (folder / name).exists()}
    if (folder / "config.json").exists():
        config = json.loads((folder / "config.json").read_bytes())
        generation = json.loads(files.get("generation_config.json", "{}"))
        missing = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")
                   if generation.get(name) is None and config.get(name) is not None}
        if missing:
            files["generation_config.json"] = json.dumps({**generation, **missing}, indent=2)
    return files


def text_parts(content):
    """What decides the ids of plain text in a tokenizer.json: all but special tokens and post-processing."""
    ordinary = [token for token in content.get("added_tokens") or () if not token["special"]]
    return [*map(content.get, ("normalizer", "pre_tokenizer", "model")), *ordinary]


class HFTokenizer:
    """
    files: from read_files. Raises an exception of any kind if the tokenizer cannot be used here. eot_token goes before
    each document: <|endoftext|>, else the tokenizer's bos_token, else its eos_token. stop_ids end a text or an answer.
    """

    def __init__(self, files):
        def read(name):
            return json.loads(files.get(name, "{}"))

        if "tokenizer.json" not in files:
            raise ValueError("it has no tokenizer.json")
        self.files = {name: files[name] for name in FILES if name in files}  # no other files: export would write them
        content = json.dumps(text_parts(read("tokenizer.json")))
        self.name = f"hf-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
        self.bpe = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
        self.bpe.no_truncation()
        self.bpe.no_padding()
        vocabulary = self.bpe.get_vocab()  # with the added tokens
        self.n_vocab = max(vocabulary.values()) + 1
        self.added = self.bpe.get_added_tokens_decoder()
        self.special = {i: token.content for i, token in self.added.items() if token.special}
        self.byte_level = "ByteLevel" in repr(self.bpe.decoder)

        settings = read("tokenizer_config.json")
        if "added_tokens_decoder" not in settings:  # as in transformers
            settings |= read("special_tokens_map.json")
        self.chat_template = files.get("chat_template.jinja") or settings.get("chat_template")
        # {"bos_token": "<s>", ...}: templates may write these
        self.named_tokens = {key: token["content"] if isinstance(token, dict) else token
                             for key, token in settings.items()
                             if key.endswith("_token") and isinstance(token, (str, dict))}
        candidates = ("<|endoftext|>", self.named_tokens.get("bos_token"), self.named_tokens.get("eos_token"))
        separators = [vocabulary[token] for token in candidates if token in self.special.values()]
        if not separators:
            raise ValueError("it has no special token <|endoftext|>, bos_token or eos_token; train it with "
                             "special_tokens=['<|endoftext|>']")
        self.eot_token = separators[0]
        ends = np.ravel(read("generation_config.json").get("eos_token_id"))  # an id or a list: Llama 3.1 has three
        self.stop_ids = {*ends.tolist(), separators[0], separators[-1]} & {*vocabulary.values()}
        self.special_token = re.compile("(" + "|".join(map(re.escape, self.special.values())) + ")")
        # whether chat tokens can take the ids after its own, and a message encodes alone as it does in a whole text
        self.can_grow = (len(vocabulary) == self.n_vocab and '"prepend_scheme": "first"' not in content
                         and not vocabulary.keys() & {"<|system|>", "<|user|>", "<|assistant|>", "<|end|>"})

        text = "Na\u00efve \U0001f44d  a\n\t\u4e2d\u6587 12" + "".join(self.special.values())
        ids = self.encode_ordinary(text)
        decoded = b"".join(map(self.decode_single_token_bytes, ids)).decode(errors="replace").removeprefix(" ")
        # \u2581 is SentencePiece's space, and Code Llama's special tokens spell it
        if (decoded.replace("\u2581", " ") != text.replace("\u2581", " ") or self.special.keys() & ids
                or getattr(self.bpe.model, "dropout", None)):
            raise ValueError("its ids do not reliably decode to the text that they encode (give it a ByteLevel "
                             "pre-tokenizer and decoder, without a normalizer), or they spell special tokens")

    def __reduce__(self):  # pickled, and hashed by the datasets library, as its files
        return HFTokenizer, (self.files,)

    @property
    def text_rules(self):
        """What decides the ids of plain text, however tokenizer.json spells it (name depends on the spelling)."""
        normalizer, pre_tokenizer, model, *ordinary = text_parts(json.loads(self.bpe.to_str()))
        model = {key: value or None for key, value in model.items()}  # a prefix may be "" or null
        return normalizer, pre_tokenizer, model, ordinary

    def encode_with_offsets(self, text, special_as_text):
        """The ids of a text, with their offsets. special_as_text: text that spells a special token stays text."""
        if self.bpe.encode_special_tokens != special_as_text:  # it cannot be set while another thread encodes
            self.bpe.encode_special_tokens = special_as_text
        return self.bpe.encode_batch([text], add_special_tokens=False)[0]  # encode would keep the GIL

    def encode_ordinary(self, text):
        """The ids of a text, as a list. Text that spells a special token stays text."""
        return self.encode_with_offsets(text, special_as_text=True).ids

    def encode_to_numpy(self, text, disallowed_special=()):
        """The ids of a text, (n,) uint32. tiktoken's name and arguments."""
        return np.array(self.encode_ordinary(text), np.uint32)

    def decode_single_token_bytes(self, i):
        """The bytes of an id, perhaps of half a character; b"" if there is no such id."""
        token = self.bpe.id_to_token(i) or ""
        if i in self.added:
            return token.encode()
        if self.byte_level:
            return bytes(BYTE_OF_LETTER[letter] for letter in token)
        byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)  # SentencePiece's
        return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()

    # -----------------------------------------------------------------------------
    # the chat template

    @cached_property
    def transformers_tokenizer(self):
        import transformers  # not at the top: it takes seconds
        return transformers.PreTrainedTokenizerFast(tokenizer_object=self.bpe, chat_template=self.chat_template,
                                                    **self.named_tokens)

    def apply_template(self, messages, prompt=False):
        """Messages as text. prompt: with the beginning of an answer."""
        try:  # Llama 3's template writes today's date, unless it is given one
            return self.transformers_tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, date_string="26 Jul 2024")
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the model's chat template failed: {error}")

    @cached_property
    def end_token(self):
        """The id that ends an answer. Raises ValueError if the template has none, or writes today's date."""
        if "strftime_now" in str(self.chat_template) and "date_string" not in str(self.chat_template):
            raise ValueError("the model's chat template writes today's date; replace strftime_now(...) with a date")
        answer = "the answer of the assistant"
        _, found, rest = self.apply_template([{"role": "user", "content": "a question"},
                                              {"role": "assistant", "content": answer}]).rpartition(answer)
        end = self.special_token.search(rest)
        if not (found and end):
            raise ValueError("the model's chat template rewrites an answer, or does not end it with a special token")
        return self.bpe.token_to_id(end[0])

    def mask(self, text):
        """The text with each special token in it replaced by as many characters that mean nothing."""
        return self.special_token.sub(lambda found: "\ue000" * len(found[0]), text)

    def render_chat(self, messages, prompt=False):
        """
        chat_format.render_chat with the model's template. Its ids are those of transformers, unless a message spells a
        special token, which is text here. The loss covers each answer that the template begins like its generation
        prompt (Qwen3's thinking models do so only for the last one), from there up to and including the special end
        token. Raises ValueError if the template refuses the messages, or changes anything but their thinking and
        surrounding white space.
        """
        # the outline has the special tokens in messages masked, so that only the template's own are found
        hidden = [{**message, "content": self.mask(message["content"])} for message in messages]
        text, outline = (self.apply_template(version, prompt) for version in (messages, hidden))
        if self.mask(text) != self.mask(outline):
            raise ValueError("the model's chat template treats a message with a special token differently")

        # find each message in the outline, after the one before it, and where each answer begins and ends
        place, answers = 0, []
        for i, message in enumerate(hidden):
            is_answer = (message["role"] == "assistant" and not prompt
                         and outline.startswith(before := self.apply_template(hidden[:i], prompt=True)))
            if is_answer:
                if before.rstrip().endswith("<think>") and "</think>" not in message["content"]:
                    raise ValueError("the model's chat template prompts for thoughts, and the answer has none")
                place = len(before)
            thoughts, _, content = message["content"].rpartition("</think>")
            content = content.strip()
            place = outline.find(content, 0 if prompt else place) + len(content)  # Mistral's moves the system message
            if place < len(content):
                raise ValueError(f"the model's chat template leaves out or rewrites the {message['role']}'s message")
            if is_answer:
                thoughts = thoughts.rpartition("<think>")[2].strip()
                if i == len(hidden) - 1 and thoughts not in outline[len(before):]:  # a template may drop earlier ones
                    raise ValueError("the model's chat template drops the thoughts of the last answer")
                end = self.special_token.search(outline, place)
                if not end or self.bpe.token_to_id(end[0]) != self.end_token:
                    raise ValueError("the model's chat template does not end every answer with the same special token")
                place = end.end()
                answers.append((len(before), place))
        if not answers and not prompt:
            _, _, begins = self.apply_template(hidden[:-1], prompt=True).rpartition(hidden[-2]["content"].strip())
            raise ValueError("the model's chat template begins answers unlike its generation prompt, which ends with "
                             f"{begins.lstrip()!r}; answers must begin like that, and the template must keep it")

        encoding = self.encode_with_offsets(text, special_as_text=False)
        ids, offsets = encoding.ids, encoding.offsets
        if text != outline:
            if self.encode_pieces(text, text)[0] != ids:
                raise ValueError("a message spells a special token, which this tokenizer cannot encode as text")
            ids, offsets = self.encode_pieces(text, outline)
        special = [*map(self.bpe.token_to_id, self.special_token.findall(outline))]
        if [i for i in ids if i in self.special] != special:
            raise ValueError("the tokenizer finds other special tokens than the model's chat template writes")
        # a token of white space has no width here; the first token of an answer may take the space before it
        return ids, [any(start < ends and begins < end for start, end in answers) for begins, ends in offsets]

    def encode_pieces(self, text, outline):
        """The ids of a text and the place of each in it, with special tokens only where the outline has them."""
        ids, offsets, place = [], [], 0
        for i, piece in enumerate(self.special_token.split(outline)):  # in turn text and a special token
            encoding = self.encode_with_offsets(text[place:place + len(piece)], special_as_text=i % 2 == 0)
            ids += encoding.ids
            offsets += [(place + begins, place + ends) for begins, ends in encoding.offsets]
            place += len(piece)
        return ids, offsets
