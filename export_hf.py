"""
Any checkpoint -> a Hugging Face folder, which transformers, and what reads its format, open without any code of ours.

    python export_hf.py --checkpoint=out/ckpt.pt --out_dir=my-model
    python export_hf.py --checkpoint=out-chat --out_dir=my-chat-model --dtype=bfloat16

gpt2 becomes GPT2LMHeadModel; llama LlamaForCausalLM, with qk_norm Qwen3ForCausalLM, with mla DeepseekV3ForCausalLM, every
layer dense. gpt2 with mla becomes a GPT2LMHeadModel whose keys and values are multiplied out: the same function, but it
caches whole keys and values again. Memory stays near one block of the model, whatever its size.
"""
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Literal

import torch

import runtime
from configurator import configure, expect_range, fail
from model import GPTConfig, config_to_hf, to_hf
from prepare_data import END_OF_TEXT, ROLES, chat_tokens, get_tokenizer

# ---------------------------------------------------------------------------------------------------
# settings
checkpoint: str = "out/ckpt.pt"  # the checkpoint, or the out_dir it lies in; nanoGPT's; a Hugging Face folder; gpt2, gpt2-medium, ...
out_dir: str = "hf-model"  # the folder to write
dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the weights; float32 loses nothing
shard_size: int = 5_000_000_000  # bytes of a .safetensors file; a model that is larger takes several
overwrite: bool = False  # write into a folder that holds something already; an export in it is replaced


# ---------------------------------------------------------------------------------------------------
# weights

def hf_tensors(state_dict, config):
    """Yields (name, tensor) as transformers has them, from one block of the model at a time: nothing else is held."""
    def part(name):  # transformer.h.0, transformer.h.1, ..., and the rest each by itself
        return name.split(".")[2] if name.startswith("transformer.h.") else name

    for _, names in itertools.groupby(state_dict, part):
        for name, tensor in to_hf({name: state_dict[name] for name in names}, config).items():
            if config.arch == "llama" or name != "lm_head.weight":  # gpt2's is the embedding
                yield name, tensor


def write_weights(folder, state_dict, config, dtype, shard_size):
    """
    Writes model.safetensors, or where it would be larger than shard_size bytes model-00001-of-0000N.safetensors and their
    index. dtype: torch's. -> number of weights.
    The safetensors library takes all tensors of a file at once. Its format is plain: the length of the header (8 bytes, little
    endian), the header (JSON: dtype, shape and place of each tensor), the tensors one after the other.
    https://github.com/huggingface/safetensors#format
    """
    letters = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    shapes = hf_tensors({name: tensor.to("meta") for name, tensor in state_dict.items()}, config)  # nothing is computed yet
    headers, end = [], math.inf
    for name, tensor in shapes:
        size = tensor.numel() * dtype.itemsize
        if end + size > shard_size and end > 0:
            headers.append({"__metadata__": {"format": "pt"}})
            end = 0
        headers[-1][name] = {"dtype": letters[dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size

    tensors, where = hf_tensors(state_dict, config), {}
    for i, header in enumerate(headers):
        file = "model.safetensors" if len(headers) == 1 else f"model-{i + 1:05d}-of-{len(headers):05d}.safetensors"
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
        with open(folder / file, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in itertools.islice(tensors, len(header) - 1):
                where[name] = file
                f.write(tensor.to(dtype).contiguous().view(torch.uint8).numpy())
    n_params = sum(math.prod(header[name]["shape"]) for header in headers for name in header if name != "__metadata__")
    if len(headers) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": n_params * dtype.itemsize}, "weight_map": where})
    return n_params


def write_json(path, content):
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------
# tokenizer

def bpe_parts(token, ranks):
    """The two parts, as bytes, that byte pair encoding merges last on its way to `token`; ranks: bytes -> rank."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        i = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], math.inf))
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def tokenizer_to_hf(tokenizer):
    """
    The content of tokenizer.json for a tiktoken.Encoding: gpt2, or bytes, which is the same with no merges and no words.
    tiktoken keeps the ranks of whole tokens; `tokenizers` wants the merges, which are worked out from them.
    """
    # the letter that stands for each byte: itself where it can be printed, else the next one from 256 on (GPT-2's encoder.py)
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    letter = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    special = {END_OF_TEXT: tokenizer.eot_token} | {f"<|{name}|>": i for name, i in chat_tokens(tokenizer).items()}
    ranks = {tokenizer.decode_single_token_bytes(i): i for i in range(tokenizer.n_vocab) if i not in special.values()}
    spelled = {token: "".join(letter[byte] for byte in token) for token in ranks}
    merges = [[spelled[part] for part in bpe_parts(token, ranks)] for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": i, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False} for name, i in special.items()],
        "pre_tokenizer": {**byte_level, "use_regex": bool(merges)},  # the regular expression is GPT-2's
        "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {spelled[token]: i for token, i in ranks.items()}, "merges": merges},
    }


# what render_chat does, in jinja
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in " + str(list(ROLES)) + " %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


# ---------------------------------------------------------------------------------------------------
# the model card

CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
# {name}

{kind}, {n_params:,} parameters, {max_seq_len:,} positions, {dtype}. It opens in
transformers as `{hf_class}`, without remote code.

| | |
|---|---|
{figures}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModelForCausalLM.from_pretrained("{name}")
{usage}
```

## What to know

{notes}

## Settings it was trained with

```json
{settings}
```
"""

USAGE = {
    "base": """inputs = tokenizer("<|endoftext|>Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))""",
    "chat": """inputs = tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}], add_generation_prompt=True,
                                       return_dict=True, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))""",
}


def model_card(name, loaded, config, n_params, dtype):
    """README.md: what the model is, the run's own figures, and what its user has to know."""
    kind = {"gpt2": "GPT-2", "llama": "Llama", "qwen3": "Qwen3", "deepseek_v3": "DeepSeek-V3, every layer dense,"}
    chat, hf_config = loaded["stage"] != "base", config_to_hf(config)
    unknown = math.isnan(loaded["val_loss"])
    figures = {
        "stage": loaded["stage"],
        "steps": "not known" if unknown else f"{loaded['iter_num']:,}",
        "validation loss": "not known" if unknown else f"{loaded['val_loss']:.4f} nats per token, at step {loaded['val_iter']:,}",
        "tokens trained on": f"{loaded['rows_seen'] * loaded['config']['max_seq_len']:,} in this stage"
                             if "rows_seen" in loaded and "max_seq_len" in loaded["config"] else "not known",
        "parameters": f"{n_params:,}",
        "shape": f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, vocabulary {config.vocab_size:,}",
        "tokenizer": "GPT-2's byte pair encoding" if loaded["tokenizer"] == "gpt2" else "the 256 bytes of UTF-8",
    }
    notes = [] if "rows_seen" not in loaded else [  # our loops trained it
        f"Every document it was trained on begins with `{END_OF_TEXT}`" + (
            ", and so does every conversation: the chat template writes it." if chat else "; the tokenizer does not add it by itself.")]
    notes += [
        "Text that spells a special token, such as `<|end|>`, becomes that token here, in a chat template as in any prompt. "
        "Where prompts come from strangers, remove such text from what goes into a template.",
        "The vocabulary is padded; the generation config keeps the ids that stand for nothing from being sampled.",
    ]
    if not chat:
        notes.append("This is a base model: it continues text. It has the chat tokens, but has not learned what they mean, so there is "
                     "no chat template.")
    if config.arch == "gpt2" and config.attention == "mla":
        notes.append(f"It was trained with multi-head latent attention, which caches {config.kv_lora_rank} numbers a token and layer. Here "
                     f"keys and values are multiplied out, so that it is a plain GPT-2 that caches {2 * config.n_embd}: the small cache "
                     f"is lost in this format, and the {dtype} logits may differ in the last digits.")
    if loaded["tokenizer"] == "bytes":
        notes.append("llama.cpp's converter refuses its tokenizer: it knows those on its list, GPT-2's among them, and not this one.")
    if dtype != "float32":
        notes.append(f"The weights were trained in float32 and are rounded to {dtype}.")
    return CARD.format(
        name=name, kind=f"A {'chat' if chat else 'base'} model of the architecture {kind[hf_config['model_type']]}".rstrip(","),
        n_params=n_params, max_seq_len=config.max_seq_len, dtype=dtype, hf_class=hf_config["architectures"][0],
        figures="\n".join(f"| {key} | {value} |" for key, value in figures.items()), usage=USAGE["chat" if chat else "base"],
        notes="\n".join(f"- {note}" for note in notes), settings=json.dumps(loaded["config"], indent=1))


# ---------------------------------------------------------------------------------------------------
# the export

OURS = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "README.md", "config.json")


def export(checkpoint, out_dir, dtype, shard_size, overwrite):
    """Writes the model in `checkpoint`, whatever runtime.load_checkpoint opens, to out_dir; the settings above say the rest."""
    folder = Path(out_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if folder.resolve() == Path(checkpoint).resolve() or any((folder / name).exists() for name in runtime.CHECKPOINTS):
            fail(f"--out_dir={out_dir}: holds a checkpoint; give another folder")
        if not folder.is_dir() or not (folder / "run.json").exists():
            fail(f"--out_dir={out_dir}: is not empty, and holds no export of this script; give another folder")
        if not overwrite:
            fail(f"--out_dir={out_dir}: is not empty; give another folder, or replace the export in it with --overwrite=True")
    loaded = runtime.load_checkpoint(checkpoint)
    config = GPTConfig(**loaded["model_args"])
    tokenizer = get_tokenizer(loaded["tokenizer"])
    end, chat = chat_tokens(tokenizer)["end"], loaded["stage"] != "base"

    if dtype == "float16":
        for name, tensor in loaded["model"].items():
            if tensor.abs().max() > 65504:
                fail(f"--dtype=float16: {name} holds {tensor.abs().max():.3g}, and float16 ends at 65504; bfloat16 holds it")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", {})  # it is this script's folder, whatever happens before the end
    for pattern in OURS:
        for path in folder.glob(pattern):
            path.unlink()
    n_params = write_weights(folder, loaded["model"], config, getattr(torch, dtype), shard_size)
    write_json(folder / "tokenizer.json", tokenizer_to_hf(tokenizer))
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_seq_len, "clean_up_tokenization_spaces": False,
        "bos_token": END_OF_TEXT, "eos_token": "<|end|>" if chat else END_OF_TEXT, "pad_token": END_OF_TEXT,
        **({"chat_template": CHAT_TEMPLATE} if chat else {})})
    ends = {"bos_token_id": tokenizer.eot_token, "eos_token_id": [end, tokenizer.eot_token] if chat else tokenizer.eot_token,
            "pad_token_id": tokenizer.eot_token}
    n_vocab = end + 1 if chat else tokenizer.n_vocab  # from here on ids stand for nothing, or nothing that was learned
    write_json(folder / "generation_config.json", {**ends, "suppress_tokens": list(range(n_vocab, config.vocab_size))})
    write_json(folder / "run.json", {key: loaded[key] for key in ("stage", "iter_num", "rows_seen", "val_loss", "val_iter", "config")
                                     if key in loaded and not (key == "val_loss" and math.isnan(loaded[key]))})
    card = model_card(folder.resolve().name, loaded, config, n_params, dtype)
    (folder / "README.md").write_text(card, encoding="utf-8")
    hf_config = {**config_to_hf(config), **ends, "dtype": dtype, "torch_dtype": dtype}  # the second for transformers before 4.56
    write_json(folder / "config.json", hf_config)  # last: without it nothing opens the folder

    print(f"{checkpoint}: {loaded['stage']} model, {n_params / 1e6:.1f}M parameters -> {out_dir}: {hf_config['architectures'][0]}, {dtype}")
    if config.arch == "gpt2" and config.attention == "mla":
        print(f"its keys and values are multiplied out: as a plain GPT-2 it caches {2 * config.n_embd} numbers a token and layer, not "
              f"{config.kv_lora_rank}; the small cache is lost in this format")


if __name__ == "__main__":
    sys.excepthook = runtime.explain
    config, given = configure(globals())
    expect_range(config, 1, math.inf, "shard_size")
    export(**config)
