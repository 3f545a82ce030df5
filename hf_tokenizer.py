"""
The tokenizer of a Hugging Face folder, with the parts of tiktoken's interface that the other files use, and the chat
template of its model. Checkpoints and folders of shards keep its files.
"""
import functools
import hashlib
import json
import re
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import tokenizers  # transformers brings it

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def read_files(folder):
    """{name: text} of a folder's tokenizer. Raises FileNotFoundError if there is no tokenizer.json."""
    paths = [Path(folder, name) for name in FILES]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path == paths[0] or path.exists()}


@functools.cache
def byte_of_letter():
    """{printable character: byte}: how vocabularies like GPT-2's write bytes."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())  # printable bytes as they are, then the others
    return dict(zip(letters, sorted(range(256), key=lambda byte: (chr(byte) not in letters, byte))))


class HFTokenizer:
    """
    files: from read_files. Raises an exception of any kind if the tokenizer cannot be used here. eot_token goes before
    each document: <|endoftext|>, else the tokenizer's bos_token, else its eos_token. stop_ids end a text or an answer.
    """

    def __init__(self, files):
        self.files = {name: files[name] for name in FILES if name in files}  # no other name, which export would write
        content = json.loads(files["tokenizer.json"])  # ids of plain text depend on these; chat tokens may join them
        content = json.dumps([content.get(key) for key in ("normalizer", "pre_tokenizer", "model")])
        self.name = f"hf-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
        self.bpe = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
        self.bpe.no_truncation()
        self.bpe.no_padding()
        vocabulary = self.bpe.get_vocab(with_added_tokens=True)
        self.n_vocab = max(vocabulary.values()) + 1
        self.added = self.bpe.get_added_tokens_decoder()
        self.special = {i: token.content for i, token in self.added.items() if token.special}
        self.byte_level = "ByteLevel" in repr(self.bpe.decoder)

        settings = json.loads(files.get("tokenizer_config.json", "{}"))
        self.names = {}  # bos_token, eos_token, ..., which templates write
        for key, token in settings.items():
            if key.endswith("_token") and isinstance(token, (str, dict)):
                self.names[key] = token["content"] if isinstance(token, dict) else token
        special = self.special.values()
        marks = [mark for mark in ("<|endoftext|>", self.names.get("bos_token"), self.names.get("eos_token"))
                 if mark in special]
        if not marks:
            raise ValueError("it has no special token <|endoftext|>, bos_token or eos_token; train it with "
                             "special_tokens=['<|endoftext|>']")
        self.eot_token, self.stop_ids = vocabulary[marks[0]], {vocabulary[marks[0]], vocabulary[marks[-1]]}
        self.chat_template = files.get("chat_template.jinja") or settings.get("chat_template")
        # whether the chat tokens would get the ids after its own
        self.can_grow = len(vocabulary) == self.n_vocab and not any("<|user|>" in token for token in vocabulary)

        text = "Na\u00efve \U0001f44d  a\n\t\u4e2d\u6587 12" + "".join(special)
        ids = self.encode_ordinary(text)
        decoded = b"".join(map(self.decode_single_token_bytes, ids)).decode(errors="replace").removeprefix(" ")
        if decoded != text or self.special.keys() & set(ids) or getattr(self.bpe.model, "dropout", None):
            raise ValueError("its ids do not give back the text that they were made from, or not always, or spell "
                             "special tokens")

    def __reduce__(self):  # pickled, and hashed by the datasets library, as its files
        return HFTokenizer, (self.files,)

    def encode_ordinary(self, text):
        """The ids of a text, as a list. Text that spells a special token stays text."""
        str.encode(text)  # raises UnicodeEncodeError for half a surrogate pair, as tiktoken does
        self.bpe.encode_special_tokens = True
        return self.bpe.encode(text, add_special_tokens=False).ids

    def encode_to_numpy(self, text, disallowed_special=()):
        """The ids of a text, (n,) uint32. tiktoken's name and arguments."""
        return np.array(self.encode_ordinary(text), np.uint32)

    def decode_single_token_bytes(self, i):
        """The bytes of an id, perhaps of half a character; b"" if there is no such id."""
        token = self.bpe.id_to_token(i) or ""
        if i in self.added:
            return token.encode()
        if self.byte_level:
            return bytes(byte_of_letter()[c] for c in token)
        byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)  # SentencePiece's
        return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()

    # -----------------------------------------------------------------------------
    # the chat template

    @functools.cached_property
    def transformers_tokenizer(self):
        import transformers  # not at the top: it takes seconds
        return transformers.PreTrainedTokenizerFast(tokenizer_object=self.bpe, chat_template=self.chat_template,
                                                    **self.names)

    def apply_template(self, messages, prompt=False):
        """Messages as text. prompt: with the beginning of an answer."""
        try:  # Llama 3's template writes today's date, unless it is given one
            return self.transformers_tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, date_string="26 Jul 2024")
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the model's chat template failed: {error}")

    @functools.cached_property
    def answer_prompt(self):
        """What the template writes between a question and its answer."""
        return self.apply_template([{"role": "user", "content": "\ue000"}], prompt=True).rpartition("\ue000")[2]

    @functools.cached_property
    def end_token(self):
        """The id that ends an answer in the template. Raises ValueError if there is none."""
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        *_, last = (i for i, learned in zip(*self.render_chat(talk)) if learned)
        return last

    def render_chat(self, messages, prompt=False):
        """
        tokenizer.render_chat by the model's template. Its ids are those of transformers, unless a message spells a
        special token, which is text here. Trained is what follows the prompt for an answer, up to the special token
        that ends it. Raises ValueError if the template refuses the messages or changes more than white space at their
        ends and earlier thoughts.
        """
        messages = [{"role": message["role"], "content": message["content"].encode("utf-16", "surrogatepass").decode(
            "utf-16", "replace")} for message in messages]
        marks = [f"\ue000{i}\ue001" for i in range(len(messages))]  # private characters, to find the contents
        marked = self.apply_template([{**message, "content": mark} for message, mark in zip(messages, marks)], prompt)
        around = re.split("(\ue000[0-9]+\ue001)", marked)  # with the marks, if all is well, in every second place
        if around[1::2] != marks:
            raise ValueError("the model's chat template leaves out messages, or changes their order")
        text, contents, end = self.apply_template(messages, prompt), [], 0
        for message, before, after in zip(messages, around[::2], around[2::2]):
            content = message["content"]
            thought = content.rpartition("</think>")[2].lstrip("\n")
            content = next((kept for kept in (content, content.strip(), content.lstrip(), content.rstrip(), thought)
                            if kept and text.startswith(before + kept + after, end)), None)
            if content is None:
                raise ValueError("the model's chat template rewrites a message, maybe its thoughts")
            start = end + len(before)
            end = start + len(content)
            contents.append((start, end))
        if text[end:] != around[-1]:
            raise ValueError("the model's chat template adds something that depends on the messages")

        ids, offsets, special = self.encode_template(text, contents)
        answers, end_tokens = [], set()
        for message, before, (start, end) in zip(messages, around[::2], contents):
            if message["role"] == "assistant" and not prompt:
                if not before.startswith(self.answer_prompt):
                    raise ValueError("the model's chat template does not begin answers as it prompts for them")
                begins, ends = next(((a, b) for a, b in special if b > end), (len(text), len(text)))
                end_tokens.add("" if any(end < a < ends for a, _ in contents) else text[begins:ends])
                answers.append((start - len(before) + len(self.answer_prompt), ends))
        if len(end_tokens) > 1 or "" in end_tokens:
            raise ValueError("the model's chat template ends an answer with no special token, or each with another")
        # a token of white space has no width here; the first token of an answer may take the space before it
        return ids, [any(start < ends and begins < end for start, end in answers) for begins, ends in offsets]

    def encode_template(self, text, contents):
        """
        The ids of a rendered text, where each begins and ends in it, and where the template's special tokens do.
        contents: where each message begins and ends; special tokens in there stay text.
        """
        self.bpe.encode_special_tokens = False
        encoding = self.bpe.encode(text, add_special_tokens=False)
        special = [place for i, place in zip(encoding.ids, encoding.offsets) if i in self.special]
        template = [(a, b) for a, b in special if not any(start <= a and b <= end for start, end in contents)]
        ids, offsets = encoding.ids, encoding.offsets
        if template != special:
            if self.encode_pieces(text, special)[0] != ids:
                raise ValueError("a message spells a special token, which this tokenizer cannot encode as text")
            ids, offsets = self.encode_pieces(text, template)
        return ids, offsets, template

    def encode_pieces(self, text, special):
        """encode_template's ids and their places, with special tokens at these places and nowhere else."""
        ids, offsets = [], []
        for begins, ends in pairwise([0, *chain(*special), len(text)]):  # in turn text and a special token
            self.bpe.encode_special_tokens = (begins, ends) not in special
            encoding = self.bpe.encode(text[begins:ends], add_special_tokens=False)
            ids += encoding.ids
            offsets += [(begins + a, begins + b) for a, b in encoding.offsets]
        return ids, offsets
