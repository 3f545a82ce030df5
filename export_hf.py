"""
Exports any checkpoint to a Hugging Face folder, which transformers opens without remote code; and the way back.

    python export_hf.py --checkpoint=out/ckpt.pt --out_dir=my-model
    python export_hf.py --checkpoint=out-chat --out_dir=my-chat-model --dtype=bfloat16

gpt2 becomes GPT2LMHeadModel; llama LlamaForCausalLM, with qk_norm Qwen3ForCausalLM, with mla DeepseekV3ForCausalLM,
all layers dense. gpt2 with mla becomes a GPT2LMHeadModel whose keys and values are multiplied out: the same function,
but it caches whole keys and values.
"""
import itertools
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

import runtime
from checkpoint import GPT2_MODELS, describe_model, has_checkpoint, load_model
from configurator import Positive, configure, fail, one_line_errors
from model import GPTConfig
from tokenizer import END_OF_TEXT, ROLES, chat_tokens, get_tokenizer

# -----------------------------------------------------------------------------
# weights

LLAMA_NAMES = [("transformer.wte.", "model.embed_tokens."), ("transformer.h.", "model.layers."),
               ("transformer.ln_f.", "model.norm."), (".ln_1.", ".input_layernorm."),
               (".ln_2.", ".post_attention_layernorm."), (".attn.", ".self_attn.")]


def to_hf(state_dict, config):
    """A state dict of ours with Hugging Face's names and layout, for the class that config_to_hf names."""
    if config.arch == "gpt2" and config.attention == "mla":
        state_dict = mla_to_mha(state_dict, config)
    if config.embed_norm:  # it acts on each row of the table alone, so it can be applied to the table
        table = state_dict["transformer.wte.weight"]
        state_dict = {**state_dict, "transformer.wte.weight": F.rms_norm(table, (table.size(1),), eps=1e-5)}
    return rename(state_dict, config.arch, LLAMA_NAMES)


def from_hf(state_dict, config):
    """The reverse of to_hf; there is none for gpt2 with mla, whose latent is gone."""
    return rename(state_dict, config.arch, [(hf_name, name) for name, hf_name in LLAMA_NAMES])


def rename(state_dict, arch, llama_names):
    renamed = {}
    for name, tensor in state_dict.items():
        if arch == "llama":
            for old, new in llama_names:
                name = name.replace(old, new)
        elif name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):  # a Conv1D, which is transposed
            tensor = tensor.t()
        renamed[name] = tensor
    return renamed


def mla_to_mha(state_dict, config):
    """gpt2 with mla as a plain gpt2: for each head k = (W_k W_a) x and v = (W_v W_a) x."""
    plain = {name: tensor for name, tensor in state_dict.items() if ".attn." not in name}
    for attn in [f"transformer.h.{i}.attn." for i in range(config.n_layer)]:
        down = state_dict[attn + "kv_a_proj_with_mqa.weight"]  # (rank, C)
        up = state_dict[attn + "kv_b_proj.weight"].view(config.n_head, 2, -1, config.kv_lora_rank)
        kv = up.transpose(0, 1).flatten(0, 2) @ down  # (2 C, C): the keys of all heads, then the values
        plain[attn + "c_attn.weight"] = torch.cat((state_dict[attn + "q_proj.weight"], kv))
        plain[attn + "c_attn.bias"] = F.pad(state_dict[attn + "q_proj.bias"], (0, len(kv)))
        plain[attn + "c_proj.weight"] = state_dict[attn + "o_proj.weight"]
        plain[attn + "c_proj.bias"] = state_dict[attn + "o_proj.bias"]
    return plain


# -----------------------------------------------------------------------------
# config.json

LLAMA_FIELDS = {"max_seq_len": "max_position_embeddings", "vocab_size": "vocab_size", "n_layer": "num_hidden_layers",
                "n_head": "num_attention_heads", "n_embd": "hidden_size", "n_kv_head": "num_key_value_heads",
                "intermediate_size": "intermediate_size"}
HF_FIELDS = {  # model_type -> the names of GPTConfig's fields
    "gpt2": {"max_seq_len": "n_positions", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
             "n_embd": "n_embd", "intermediate_size": "n_inner"},
    "llama": LLAMA_FIELDS, "qwen3": LLAMA_FIELDS,
    "deepseek_v3": {**LLAMA_FIELDS, "kv_lora_rank": "kv_lora_rank", "q_lora_rank": "q_lora_rank",
                    "qk_nope_head_dim": "qk_nope_head_dim", "qk_rope_head_dim": "qk_rope_head_dim",
                    "v_head_dim": "v_head_dim"},
}
LLAMA_FIXED = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": False}
HF_FIXED = {  # model_type -> values that we require, which are also the defaults, but for rms_norm_eps
    "gpt2": {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
             "add_cross_attention": False, "tie_word_embeddings": True},
    "llama": {**LLAMA_FIXED, "mlp_bias": False},
    "qwen3": {**LLAMA_FIXED, "use_sliding_window": False},
    "deepseek_v3": {**LLAMA_FIXED, "rope_interleave": True},
}
HF_CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM",
              "deepseek_v3": "DeepseekV3ForCausalLM"}
HF_GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}


def config_to_hf(config):
    """GPTConfig -> the dict of transformers' config.json, for the weights of to_hf."""
    kind = ("gpt2" if config.arch == "gpt2" else "deepseek_v3" if config.attention == "mla" else
            "qwen3" if config.qk_norm else "llama")
    hf_config = {"architectures": [HF_CLASSES[kind]], "model_type": kind, **HF_FIXED[kind],
                 **{hf_name: getattr(config, name) for name, hf_name in HF_FIELDS[kind].items()}}
    if kind == "gpt2":
        return {**hf_config, "activation_function": {"tanh": "gelu_new", "exact": "gelu"}[config.gelu],
                "resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": config.dropout}
    hf_config |= {"attention_dropout": config.dropout, "rope_theta": config.rope_theta,
                  "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}  # for transformers 5
    if kind == "deepseek_v3":  # all layers dense, no multi-token prediction
        return {**hf_config, "first_k_dense_replace": config.n_layer, "num_nextn_predict_layers": 0}
    return {**hf_config, "head_dim": config.n_embd // config.n_head}


def config_from_hf(hf_config):
    """
    The GPTConfig for a config.json, as a dict. Raises ValueError, naming the field, for what model.py does not have,
    and KeyError for a field that is missing. Dropout stays 0: it belongs to the training.
    """
    # transformers has moved the rotary settings from version to version
    hf_config = {"n_inner": None, "num_key_value_heads": None, "rope_theta": 10000.0, **hf_config,
                 **(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}

    def expect(name, value, *accepted):
        if value not in accepted:
            raise ValueError(f"its config has {name}={value!r}: expected {' or '.join(map(repr, accepted))}")

    kind = hf_config.get("model_type")
    expect("model_type", kind, *HF_FIXED)
    required = {**HF_FIXED[kind], "quantization_config": None, "partial_rotary_factor": 1.0}
    for name, value in required.items():
        expect(name, hf_config.get(name, 1e-6 if name == "rms_norm_eps" else value), value)
    settings = {name: hf_config[hf_name] for name, hf_name in HF_FIELDS[kind].items()}
    if kind == "gpt2":
        activation = hf_config.get("activation_function", "gelu_new")
        expect("activation_function", activation, *HF_GELU)
        return GPTConfig(arch="gpt2", gelu=HF_GELU[activation], **settings)
    expect("rope_type", hf_config.get("rope_type", hf_config.get("type", "default")), "default")
    for layer_type in hf_config.get("layer_types") or []:
        expect("layer_types", layer_type, "full_attention")
    if kind == "deepseek_v3":
        n_layer = settings["n_layer"]
        expect("first_k_dense_replace", min(hf_config.get("first_k_dense_replace", 3), n_layer), n_layer)
    else:
        head_dim = settings["n_embd"] // settings["n_head"]
        expect("head_dim", hf_config.get("head_dim") or (128 if kind == "qwen3" else head_dim), head_dim)
    return GPTConfig(arch="llama", attention="mla" if kind == "deepseek_v3" else "mha", qk_norm=kind == "qwen3",
                     rope_theta=float(hf_config["rope_theta"]), **settings)


# -----------------------------------------------------------------------------
# models trained elsewhere

def convert_checkpoint(state_dict, gpt_config, **facts):
    """
    The dict of load_checkpoint for a model trained elsewhere. Its vocabulary's size tells its tokenizer; ValueError
    for one that we do not have. gpt2's 50257 ids are padded to 50304 by the mean of the other rows: a row of zeros
    has the logit 0, far above what GPT-2 gives its likeliest token, and would win the softmax.
    """
    vocab_size = gpt_config.vocab_size
    tokenizer = {50257: "gpt2", 50304: "gpt2", 384: "bytes"}.get(vocab_size)
    if tokenizer is None:
        raise ValueError(f"its vocabulary has {vocab_size} ids; expected 50257 or 50304 (gpt2) or 384 (bytes)")
    if vocab_size == 50257:
        gpt_config.vocab_size = 50304
        for name in {"transformer.wte.weight", "lm_head.weight"} & state_dict.keys():
            rows = state_dict[name]
            state_dict[name] = torch.cat((rows, rows.mean(0).expand(50304 - len(rows), -1)))
    if gpt_config.arch == "gpt2":
        state_dict["lm_head.weight"] = state_dict["transformer.wte.weight"]
    return {"model": state_dict, "model_args": asdict(gpt_config), "config": {}, "tokenizer": tokenizer,
            "stage": "base", "iter_num": 0, "val_loss": math.nan, "val_iter": 0, **facts}


def convert_nanogpt(checkpoint):
    """nanoGPT's ckpt.pt -> ours. Its GELU is exact, and its bias=False is a GPT-2 whose biases are zero."""
    args = checkpoint["model_args"]
    config = GPTConfig(gelu="exact", max_seq_len=args["block_size"], vocab_size=args["vocab_size"],
                       n_layer=args["n_layer"], n_head=args["n_head"], n_embd=args["n_embd"])
    # _orig_mod. comes from saving a compiled model; attn.bias was the causal mask before torch 2
    model = {name.removeprefix("_orig_mod."): tensor for name, tensor in checkpoint["model"].items()
             if not name.endswith(".attn.bias")}
    for name in list(model):
        if name.endswith("weight") and not name.endswith(("wte.weight", "wpe.weight", "lm_head.weight")):
            model.setdefault(name.replace("weight", "bias"), torch.zeros(len(model[name])))
    return convert_checkpoint(model, config, config=checkpoint["config"], iter_num=checkpoint["iter_num"],
                              val_loss=float(checkpoint["best_val_loss"]), val_iter=checkpoint["iter_num"])


def load_hf(path):
    """
    The dict of load_checkpoint for a Hugging Face folder (config.json; safetensors or pytorch_model.bin, in one file
    or several; run.json if export_hf.py wrote it), or for one of GPT2_MODELS, from the hub. Ends the program in one
    line if path is neither.
    """
    folder = Path(path)
    if str(path) in GPT2_MODELS and not folder.exists():
        from huggingface_hub import snapshot_download  # datasets brings it
        with one_line_errors(f"{path}: cannot be fetched from the Hugging Face hub",
                             "without a network give the path of a folder with config.json and model.safetensors"):
            folder = Path(snapshot_download(f"openai-community/{path}",
                                            allow_patterns=["config.json", "model.safetensors"]))
    expected = "expected a ckpt.pt of ours or nanoGPT's, its folder, a Hugging Face folder, or one of "
    with one_line_errors(f"{path}: not a readable checkpoint", expected + ", ".join(GPT2_MODELS)):
        config = config_from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        files = [*folder.glob("model*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
        if not files:
            raise ValueError("it has a config.json, but neither model.safetensors nor pytorch_model.bin")
        with one_line_errors("", "pip install safetensors", ImportError):
            from safetensors.torch import load_file
        weights = {}
        for file in files:
            weights |= (load_file(file) if file.suffix == ".safetensors" else
                        torch.load(file, map_location="cpu", weights_only=True))
        # causal masks and rotary angles are constants; the files of OpenAI's models lack the prefix
        prefix = "transformer." if config.arch == "gpt2" else ""
        weights = {name if name.startswith((prefix, "lm_head.")) else prefix + name: tensor
                   for name, tensor in weights.items()
                   if not name.endswith((".attn.bias", ".attn.masked_bias", ".inv_freq"))}
        vocabulary = read_json(folder / "tokenizer.json").get("model", {"vocab": {"\u0120the": 262}})["vocab"]
        if config.vocab_size > 384 and vocabulary.get("\u0120the") != 262:  # " the"
            raise ValueError("its tokenizer.json is not gpt2's")
        return convert_checkpoint(from_hf(weights, config), config, path=str(path), **read_json(folder / "run.json"))


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_json(path, content):
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# -----------------------------------------------------------------------------
# tokenizer

def last_merge(token, ranks):
    """The two byte strings that byte pair encoding merges last to get `token`. ranks: byte string -> id."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        i = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], math.inf))
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def tokenizer_to_hf(tokenizer):
    """
    tokenizer.json, as a dict, for a tiktoken.Encoding: gpt2, or bytes, which has no merges. tiktoken has the ranks of
    whole tokens; Hugging Face's tokenizers wants the merges, which follow from them.
    """
    # the character that stands for each byte: itself if printable, else the next one from 256 on (GPT-2's encoder.py)
    printable, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, itertools.count(256)
    characters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    special = {END_OF_TEXT: tokenizer.eot_token, **{f"<|{name}|>": i for name, i in chat_tokens(tokenizer).items()}}
    ranks = tokenizer._mergeable_ranks  # in ascending order
    spelled = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = [[spelled[part] for part in last_merge(token, ranks)] for token in ranks if len(token) > 1]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": name, "special": True, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False} for name, i in special.items()],
        "pre_tokenizer": byte_level,  # splits with GPT-2's regular expression
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {spelled[token]: i for token, i in ranks.items()}, "merges": merges},
    }


# render_chat in jinja
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in " + str(list(ROLES)) + " %}{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


# -----------------------------------------------------------------------------
# export

USAGE = {"base": """\
inputs = tokenizer("<|endoftext|>Once upon a time", return_tensors="pt")  # the tokenizer does not add <|endoftext|>
""", "chat": """\
inputs = tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}], add_generation_prompt=True,
                                       return_dict=True, return_tensors="pt")
"""}


def model_card(name, loaded, config, n_params, note):
    """README.md, as text."""
    training = ""
    if "rows_seen" in loaded:  # by our scripts
        n_tokens = loaded["rows_seen"] * loaded["config"]["max_seq_len"]
        training = (f"Trained for {loaded['iter_num']:,} steps, {n_tokens:,} tokens in this stage. Validation loss "
                    f"{loaded['val_loss']:.4f} nats per token, at step {loaded['val_iter']:,}. Every document it was "
                    f"trained on begins with `{END_OF_TEXT}`.")
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A {loaded["stage"]} model, {config_to_hf(config)["architectures"][0]}: {n_params:,} parameters,
{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, {config.max_seq_len:,} positions,
a vocabulary of {config.vocab_size:,} ({loaded["tokenizer"]}).
{training} {note}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModelForCausalLM.from_pretrained("{name}")
{USAGE[loaded["stage"]]}print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```

Text that spells a special token, like `<|end|>`, becomes that token here, in a chat template as in any prompt: remove
it from what strangers write. A base model has not learned the chat tokens, so it has no chat template.

Settings of the training:

```json
{json.dumps(loaded["config"], indent=1)}
```
"""


def compare_with_transformers(model, hf_config):
    """Ends the program if transformers computes something else: model.py was changed, and config_to_hf was not."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        return print("not compared with transformers, which is not installed")
    print("comparing with transformers ...", flush=True)
    twin = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config)).eval()
    twin.load_state_dict(to_hf(model.state_dict(), model.config))
    idx = torch.arange(model.config.max_seq_len)[None] % model.config.vocab_size
    with torch.no_grad():
        logits = model(idx)
        difference = ((twin(idx).logits - logits).abs().max() / logits.abs().max()).item()
    if not difference < 1e-3:
        fail(f"{hf_config['architectures'][0]} is another function than this model: its logits differ by "
             f"{difference:.1%} of the largest. Was model.py changed? Then config_to_hf has to say how, or the model "
             f"cannot be exported")


def export(checkpoint, out_dir, dtype, shard_size, overwrite):
    """Writes the model in `checkpoint`, any path that load_checkpoint takes, to the folder out_dir."""
    from huggingface_hub import save_torch_state_dict
    folder = Path(out_dir)
    if folder.exists() and any(folder.iterdir()):
        if has_checkpoint(folder) or folder.resolve() == Path(checkpoint).resolve():
            fail(f"--out_dir={out_dir}: holds a checkpoint; give another folder")
        if not (folder / "run.json").exists():
            fail(f"--out_dir={out_dir}: is not empty, and holds no export of this script; give another folder")
        if not overwrite:
            fail(f"--out_dir={out_dir}: holds an export; give another folder, or replace it with --overwrite=True")
    model, loaded = load_model(checkpoint, "cpu")
    print(describe_model(checkpoint, loaded), flush=True)
    config, tokenizer, chat = model.config, get_tokenizer(loaded["tokenizer"]), loaded["stage"] == "chat"
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in to_hf(model.state_dict(), config).items()
               if config.arch == "llama" or name != "lm_head.weight"}  # gpt2's is the embedding
    for name, tensor in tensors.items():
        if dtype == "float16" and tensor.isinf().any():
            fail(f"--dtype=float16: {name} has weights above its largest number, 65504; bfloat16 holds them")
    n_params = sum(map(torch.numel, tensors.values()))
    eot, end = tokenizer.eot_token, chat_tokens(tokenizer)["end"]
    ends = {"bos_token_id": eot, "eos_token_id": [end, eot] if chat else eot, "pad_token_id": eot}
    n_vocab = end + 1 if chat else tokenizer.n_vocab  # the ids from here on are padding, or not trained
    compare_with_transformers(model, config_to_hf(config))
    hf_config = {**config_to_hf(config), **ends, "dtype": dtype, "torch_dtype": dtype}  # torch_dtype: before 4.56
    note = ""
    if config.arch == "gpt2" and config.attention == "mla":
        note = (f"Its latent attention caches {config.kv_lora_rank} numbers per token and layer; here keys and "
                f"values are multiplied out into a plain GPT-2, which caches {2 * config.n_embd}: the small cache is "
                f"lost.")

    with one_line_errors(f"--out_dir={out_dir}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "run.json", {key: loaded[key] for key in (
            "stage", "iter_num", "rows_seen", "val_loss", "val_iter", "config") if key in loaded})
        (folder / "config.json").unlink(missing_ok=True)  # written last: without it nothing opens the folder
        save_torch_state_dict(tensors, folder, max_shard_size=shard_size)
        write_json(folder / "tokenizer.json", tokenizer_to_hf(tokenizer))
        write_json(folder / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_seq_len,
            "clean_up_tokenization_spaces": False, "bos_token": END_OF_TEXT, "pad_token": END_OF_TEXT,
            "eos_token": "<|end|>" if chat else END_OF_TEXT, "chat_template": CHAT_TEMPLATE if chat else None})
        suppress_tokens = [*range(n_vocab, config.vocab_size)]
        write_json(folder / "generation_config.json", {**ends, "suppress_tokens": suppress_tokens})
        card = model_card(folder.resolve().name, loaded, config, n_params, note)
        (folder / "README.md").write_text(card, encoding="utf-8")
        write_json(folder / "config.json", hf_config)
    print(f"{out_dir}: {hf_config['architectures'][0]}, {n_params / 1e6:.1f}M parameters, {dtype}. {note}")


if __name__ == "__main__":
    checkpoint: str = "out/ckpt.pt"  # ours or nanoGPT's, or its folder; a Hugging Face folder; gpt2, gpt2-medium, ...
    out_dir: str = "hf-model"  # the folder to write
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the weights; float32 loses nothing
    shard_size: Positive = 5_000_000_000  # bytes per .safetensors file; a larger model takes several
    overwrite: bool = False  # replace the export in out_dir
    config, overrides = configure(globals())
    sys.excepthook = runtime.excepthook
    export(**config)
