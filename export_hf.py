"""
Exports a checkpoint as a Hugging Face folder, which transformers opens without remote code.

    python export_hf.py --checkpoint=out/ckpt.pt --out_dir=my-model
    python export_hf.py --checkpoint=out-chat --out_dir=my-chat-model --dtype=bfloat16

gpt2 becomes GPT2LMHeadModel. llama becomes LlamaForCausalLM (with qk_norm: Qwen3ForCausalLM; with qkv_bias:
Qwen2ForCausalLM; with mla: DeepseekV3ForCausalLM with dense layers only). gpt2 with mla becomes a GPT2LMHeadModel with
full matrices for keys and values: the same function with a larger cache. An imported model keeps its tokenizer and its
chat template. All scripts here open such a folder, too. Needs transformers.
"""
import json
from contextlib import suppress
from pathlib import Path
from typing import Literal

# before torch, whose import takes seconds: from here on Ctrl-C prints one line
from configurator import Positive, configure, fail, one_line_errors

import torch
import torch.nn.functional as F

from chat_data import parse_mixture, split_hub_name
from chat_format import ROLES, chat_tokens, check_chat_format
from checkpoint import describe_model, load_model
from import_hf import (LLAMA_NAMES, RUN_FACTS, compare_logits, config_from_hf, config_to_hf, convert_weights,
                       hub_name, import_transformers)
from model import MLA_SIZES
from tokenizer import CHAT_TOKENS, END_OF_TEXT, count_ids, get_tokenizer

# fields that training alone reads, or that to_hf multiplies out
NOT_IN_EXPORTS = ("dropout", "embed_norm", "attention", *MLA_SIZES)
# settings of generate that an export keeps; transformers refuses to save those for sampling without do_sample
KEPT = ("do_sample", "max_length", "max_new_tokens", "repetition_penalty", "no_repeat_ngram_size")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")

# -----------------------------------------------------------------------------
# weights

def to_hf(weights, config):
    """Our state dict with the names and layout of the transformers class that config_to_hf chooses."""
    if config.arch == "gpt2" and config.attention == "mla":
        weights = mla_to_mha(weights, config)
    if config.embed_norm:  # it normalizes each row of the table separately, so we export normalized rows
        table = weights["transformer.wte.weight"]
        weights = {**weights, "transformer.wte.weight": F.rms_norm(table, table.shape[1:], eps=1e-5)}
    return convert_weights(weights, config, LLAMA_NAMES.items())


def mla_to_mha(weights, config):
    """A gpt2 with mla as a plain gpt2. A head's key is W_kb (W_a x), its value W_vb (W_a x): multiply them out."""
    weights = {name.replace(".o_proj.", ".c_proj."): tensor for name, tensor in weights.items()}
    for i in range(config.n_layer):
        attn = f"transformer.h.{i}.attn."
        q, q_bias, down, up = (weights.pop(attn + name) for name in (
            "q_proj.weight", "q_proj.bias", "kv_a_proj_with_mqa.weight", "kv_b_proj.weight"))
        # up: for each head the rows of its key, then of its value; kv, (2 C, C): those of all keys, then of all values
        kv = up.unflatten(0, (config.n_head, 2, -1)).transpose(0, 1).flatten(0, 2) @ down
        weights[attn + "c_attn.weight"] = torch.cat((q, kv))
        weights[attn + "c_attn.bias"] = F.pad(q_bias, (0, len(kv)))
    return weights


def build_hf_model(model, tokenizer, chat):
    """transformers' model with our weights. Exits with an error unless both compute the same logits."""
    config, fields, transformers = model.config, config_to_hf(model.config), import_transformers()
    own = json.loads((tokenizer.files or {}).get("generation_config.json", "{}"))
    bos, pad = (own.get(name) if own.get(name) in range(config.vocab_size) else tokenizer.eot_token
                for name in ("bos_token_id", "pad_token_id"))
    end = {chat_tokens(tokenizer)["end"]} if chat else set()
    ends = [*end, *tokenizer.stop_ids - end]
    print("comparing logits with transformers ...")
    with one_line_errors("", "if you changed model.py, describe the change in config_to_hf"):
        hf_config = transformers.AutoConfig.for_model(**fields, bos_token_id=bos,
                                                      eos_token_id=ends if len(ends) > 1 else ends[0])
        for name, value in vars(config_from_hf(hf_config)).items():  # logits of 1,024 tokens may not show a field
            if getattr(config, name) != value and name not in NOT_IN_EXPORTS:
                raise ValueError(f"{name}={getattr(config, name)} is not in the config.json of {fields['model_type']}")
        hf_model = transformers.AutoModelForCausalLM.from_config(hf_config)
        hf_model.load_state_dict(to_hf(model.state_dict(), config))
        compare_logits(hf_model.eval(), model, 1024)
    kept = KEPT + (SAMPLING if own.get("do_sample") else ())
    known = count_ids(tokenizer) if chat else tokenizer.n_vocab
    hf_model.generation_config.update(
        **{name: own[name] for name in kept if name in own}, bos_token_id=bos, eos_token_id=hf_config.eos_token_id,
        # not in the model's config, where it would keep transformers from training this token's embedding
        pad_token_id=pad,
        suppress_tokens=[*range(known, config.vocab_size)])  # the model was never trained to write these
    return hf_model


# -----------------------------------------------------------------------------
# tokenizer

def tokenizer_to_hf(tokenizer):
    """
    A tokenizer and the chat tokens, as a tokenizer of Hugging Face's library. tiktoken stores no merges: it merges any
    two tokens that form a third, lowest id first. bytes has none.
    """
    from tokenizers import ByteLevelBPETokenizer, Tokenizer  # splits text as GPT-2 does; transformers depends on it
    from hf_tokenizer import BYTE_OF_LETTER
    if tokenizer.files:
        hf_tokenizer = Tokenizer.from_str(tokenizer.files["tokenizer.json"])
    else:  # gpt2 or bytes
        letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
        vocab = {"".join(letters[byte] for byte in token): i for token, i in tokenizer._mergeable_ranks.items()}
        merges = [(token[:i], token[i:]) for token in vocab for i in range(1, len(token))
                  if token[:i] in vocab and token[i:] in vocab]
        hf_tokenizer = ByteLevelBPETokenizer(vocab, merges)
        hf_tokenizer.add_special_tokens([END_OF_TEXT])
    hf_tokenizer.add_special_tokens([f"<|{name}|>" for name in CHAT_TOKENS])
    return hf_tokenizer


def write_tokenizer(tokenizer, chat, max_seq_len, folder):
    """Writes a tokenizer to a Hugging Face folder: its own files, or new ones with our chat format."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq_len,
                "clean_up_tokenization_spaces": False,
                # transformers 4 would add token_type_ids, which its GPT-2 embeds, too
                "model_input_names": ["input_ids", "attention_mask"]}
    if not tokenizer.chat_template:  # a template may write bos_token if there is one
        eot = tokenizer.decode_single_token_bytes(tokenizer.eot_token).decode()
        settings |= {"bos_token": eot, "eos_token": eot, "pad_token": eot}
    if tokenizer.chat_template or tokenizer.files and not chat:
        files = tokenizer.files
        if own := files.get("tokenizer_config.json"):  # for the class in it transformers 5 may build another tokenizer
            settings = {**json.loads(own), "tokenizer_class": settings["tokenizer_class"]}
    else:
        files = {"tokenizer.json": tokenizer_to_hf(tokenizer).to_str(pretty=True)}
        if chat:
            settings |= {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    for name, text in {**files, "tokenizer_config.json": json.dumps(settings)}.items():
        (folder / name).write_text(text, encoding="utf-8")


# render_chat in jinja; TRL's assistant_only_loss trains on what is inside generation
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in " + str(ROLES) + " %}{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


# -----------------------------------------------------------------------------
# README.md

USAGE = {"base": """\
# a base model continues a text; each text that it was trained on begins with EOT
inputs = tokenizer("EOTOnce upon a time", add_special_tokens=False, return_tensors="pt")
""", "chat": """\
inputs = tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}], add_generation_prompt=True,
                                       return_dict=True, return_tensors="pt")
"""}


def llama_cpp_fault(config, tokenizer):
    """Why llama.cpp (b9993) cannot run a model, as text, or "". tests/llama_cpp.py tries each case."""
    if tokenizer.name == "bytes":
        return "its converter does not know the tokenizer"
    if not tokenizer.byte_level:
        return "its converter needs the original model's tokenizer.model in the folder, or it splits text wrongly"
    if config.arch == "llama" and config.attention == "mla":
        if config.q_lora_rank is None:
            return "it does not load latent attention without q_lora_rank"
        if config.norm_eps != 1e-6:
            return "it uses one eps for all norms, and this older model has two"
    if config.arch == "gpt2" and config.intermediate_size != 4 * config.n_embd:
        return "it does not load a GPT-2 whose MLP is not 4 n_embd wide"
    if config.gelu != "tanh":
        return "it would compute GPT-2's approximate GELU instead of the model's activation, without a warning"
    return ""


def hub_sources(training):
    """The base model and the data sets on the Hugging Face hub that the settings of a run name, as two lists."""
    base, data = str(training.get("init_from")).removeprefix("auto:"), []
    with suppress(Exception):  # a card without them is better than no export: the shards may be gone
        data = parse_mixture(training["data"]) if "data" in training else [
            json.loads(Path(training["data_dir"], "meta.json").read_bytes())["source"]["dataset"]]
    data = [split_hub_name(name)[0] for name in data]  # without /config@split
    return [[name for name in map(hub_name, names) if name] for names in ([base], data)]


def model_card(name, loaded, tokenizer, fault, hf_model):
    """The text of README.md. fault: from llama_cpp_fault."""
    eot = tokenizer.decode_single_token_bytes(tokenizer.eot_token).decode()
    stage, (base, datasets) = loaded["stage"], hub_sources(loaded["config"])
    return f"""---
library_name: transformers
pipeline_tag: text-generation
license: other  # choose one
base_model: {base}  # on the hub
datasets: {datasets}
---
# {name}

A {stage} model, {type(hf_model).__name__}, with {hf_model.num_parameters():,} parameters, trained with forkGPT.
`run.json` has the settings and the validation loss.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModelForCausalLM.from_pretrained("{name}")
{USAGE[stage].replace("EOT", eot)}print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```

{f"**Not for llama.cpp**: {fault}." if fault else "llama.cpp's `convert_hf_to_gguf.py` converts it."
 if tokenizer.name == "gpt2" else "llama.cpp's `convert_hf_to_gguf.py` converts it if it knows the tokenizer."}

The tokenizer turns text that spells a special token, such as `{eot}`, into that token, in chat messages too. Strip
such text from untrusted input.
"""


# -----------------------------------------------------------------------------

def export(checkpoint, out_dir, dtype, shard_size, overwrite):
    """Writes a Hugging Face folder. checkpoint: any path that load_checkpoint takes."""
    folder, run = Path(out_dir), Path(out_dir, "run.json")
    is_export = run.exists() and (b"val_loss" in run.read_bytes() or not run.stat().st_size)  # empty after a full disk
    if any(folder.glob("*")) and not (overwrite and is_export):
        fail(f"--out_dir={out_dir}: is not empty; give another folder, or --overwrite=True if it holds an export")
    model, loaded = load_model(checkpoint, "cpu")
    source = loaded["lora"]["absolute"] if "lora" in loaded else checkpoint
    if folder.resolve() == Path(source).resolve():
        fail(f"--out_dir={out_dir}: holds the base of {checkpoint}, or that model itself; give another folder")
    tokenizer, chat = get_tokenizer(loaded["tokenizer"]), loaded["stage"] == "chat"
    fault = llama_cpp_fault(model.config, tokenizer)
    if chat:
        check_chat_format(checkpoint, tokenizer, model.config.vocab_size)
    hf_model = build_hf_model(model, tokenizer, chat).to(getattr(torch, dtype))
    for name, p in hf_model.named_parameters():
        if p.isinf().any():
            fail(f"--dtype={dtype}: {name} has weights that are too large for it; use bfloat16")
    print(f"writing {out_dir} ...")
    from hf_tokenizer import FILES  # not at the top: it needs tokenizers, which transformers brings
    with one_line_errors(f"--out_dir={out_dir}"):
        folder.mkdir(parents=True, exist_ok=True)
        # the weights are removed first and written last: a half-written folder does not open
        for pattern in ("model.safetensors*", *FILES):
            for file in folder.glob(pattern):
                file.unlink()
        run.write_text(json.dumps({key: loaded[key] for key in RUN_FACTS}, indent=1))
        write_tokenizer(tokenizer, chat, model.config.max_seq_len, folder)
        (folder / "README.md").write_text(model_card(folder.resolve().name, loaded, tokenizer, fault, hf_model),
                                          encoding="utf-8")
        hf_model.save_pretrained(folder, max_shard_size=shard_size)
        # transformers 5 nests the rope fields, 4 reads them at the top level: write both
        fields = json.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps({**fields, **config_to_hf(model.config)}, indent=1))
        for file in folder.glob("*.safetensors"):
            file.chmod(0o644)  # safetensors lets only the owner read them
    print(f"{describe_model(loaded)}\n{out_dir}: {type(hf_model).__name__}, {dtype}, "
          f"{hf_model.num_parameters():,} parameters" + (f"; not for llama.cpp: {fault}" if fault else ""))


if __name__ == "__main__":
    checkpoint: str = "out/ckpt.pt"  # ours or nanoGPT's, or its folder; a Hugging Face folder; gpt2, gpt2-medium, ...
    out_dir: str = "hf-model"  # the folder to write
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the weights; float32 is exact
    shard_size: Positive = 5_000_000_000  # bytes per .safetensors file; a larger model gets several files
    overwrite: bool = False  # replace the export in out_dir
    export(**configure(globals())[0])
