"""
Reads models trained elsewhere: Hugging Face folders, models on the hub, and nanoGPT's ckpt.pt.

transformers opens the first two (GPT-2, Llama 2 and 3, TinyLlama, SmolLM2, Mistral, Qwen2.5, Qwen3 without experts,
and what export_hf.py writes), and model.py must compute the same logits. export_hf.py goes the other way with the same
tables of names. transformers and huggingface_hub are imported only when such a model is read.
"""
import json
import math
import os
import re
from pathlib import Path

import torch
from torch.func import functional_call

from configurator import one_line_errors
from distributed import print0
from model import GPT, GPTConfig, MLA_SIZES
from tokenizer import get_tokenizer, tokenizer_entry

GPT2_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # short for openai-community/gpt2, ... on the hub
ACCEPTED = ("expected a ckpt.pt of ours or nanoGPT's, its folder, a Hugging Face folder, or, with a network, "
            f"owner/name on the hub, or one of {', '.join(GPT2_MODELS)}")
VOCABULARIES = {50257: "gpt2", 50304: "gpt2", 384: "bytes"}
RUN_FACTS = ("stage", "iter_num", "val_loss", "val_iter", "config")  # keys of a checkpoint that run.json keeps

# -----------------------------------------------------------------------------
# config.json

LLAMA_FIELDS = {"max_position_embeddings": "max_seq_len", "vocab_size": "vocab_size", "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head", "hidden_size": "n_embd",
                "intermediate_size": "intermediate_size", "rope_theta": "rope_theta", "rms_norm_eps": "norm_eps",
                "tie_word_embeddings": "tied_head", "head_dim": "head_dim"}
LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # model.py's rotary_table has these numbers
HF_FIELDS = {  # model_type -> {transformers' name of a field: GPTConfig's}
    "gpt2": {"n_positions": "max_seq_len", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
             "n_embd": "n_embd", "n_inner": "intermediate_size"},
    "llama": LLAMA_FIELDS, "mistral": LLAMA_FIELDS, "qwen2": LLAMA_FIELDS, "qwen3": LLAMA_FIELDS,
    "deepseek_v3": {"first_k_dense_replace": "n_layer", **LLAMA_FIELDS,  # all layers are dense
                    **dict(zip(MLA_SIZES, MLA_SIZES)), "head_dim": "qk_rope_head_dim"},  # of the rotated part
}


def config_to_hf(config):
    """The fields of config.json for a GPTConfig, as a dict."""
    kind = ("gpt2" if config.arch == "gpt2" else "deepseek_v3" if config.attention == "mla" else
            "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama")
    hf_config = {"model_type": kind, **{theirs: getattr(config, ours) for theirs, ours in HF_FIELDS[kind].items()}}
    if kind == "gpt2":
        return {**hf_config, "tie_word_embeddings": True, "layer_norm_epsilon": config.norm_eps,
                "activation_function": "gelu" if config.gelu == "exact" else "gelu_new",
                "n_ctx": config.max_seq_len}  # llama.cpp's converter reads this instead of n_positions
    if config.rope_factor != 1:
        hf_config["rope_scaling"] = {**LLAMA3_ROPE, "factor": config.rope_factor}
    return hf_config


def config_from_hf(hf_config):
    """
    The GPTConfig for a config of transformers. Raises ValueError naming a field that asks for something model.py does
    not compute, that is, one whose value config_to_hf would not write. Fields that are not named here are checked only
    by comparing logits. Dropout stays 0, because it is a setting of the training.
    """
    fields = hf_config.to_dict()
    # transformers 5 has rope_theta and the scaling in rope_parameters, 4 only the scaling, in rope_scaling
    fields |= fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope = LLAMA3_ROPE if fields.get("rope_type") == "llama3" else {"rope_type": "default"}
    kind = fields["model_type"]
    if kind not in HF_FIELDS:
        raise ValueError(f"its config.json has model_type={kind!r}, expected one of {', '.join(HF_FIELDS)}")
    if fields.get("quantization_config"):
        raise ValueError(f"its weights are quantized ({fields['quantization_config'].get('quant_method')}), expected "
                         f"those of the original model")
    if kind == "mistral" and fields.get("sliding_window"):  # a window as long as the text hides nothing
        fields["max_position_embeddings"] = min(fields["max_position_embeddings"], fields.pop("sliding_window"))
    config = GPTConfig(arch="gpt2" if kind == "gpt2" else "llama", attention="mla" if kind == "deepseek_v3" else "mha",
                       qk_norm=kind == "qwen3", qkv_bias=kind == "qwen2",
                       gelu="exact" if fields.get("activation_function") == "gelu" else "tanh",
                       rope_factor=fields["factor"] if rope is LLAMA3_ROPE else 1.0,
                       **{name: fields.get(hf_name) for hf_name, name in HF_FIELDS[kind].items()})
    # rope scaling and sliding windows do not show in the logits of a short text; a Mistral is written as a Llama
    expected = {**rope, "use_sliding_window": False, "sliding_window": None, "attention_bias": False,
                "mlp_bias": False, "hidden_act": "silu", **config_to_hf(config), "model_type": kind}
    for name, value in expected.items():
        if name != "rope_scaling" and fields.get(name) not in (None, value):  # None stands for the default, ours
            raise ValueError(f"its config.json has {name}={fields[name]!r}, expected {value!r}")
    return config


# -----------------------------------------------------------------------------
# weights

LLAMA_NAMES = {"transformer.wte.": "model.embed_tokens.", "transformer.h.": "model.layers.",  # ours -> transformers'
               "transformer.ln_f.": "model.norm.", ".ln_1.": ".input_layernorm.",
               ".ln_2.": ".post_attention_layernorm.", ".attn.": ".self_attn."}


def convert_weights(weights, config, names):
    """
    Our state dict as transformers', or back. names: pairs from LLAMA_NAMES, (from, to). GPT-2's names are the same,
    and its matrices are transposed: (out, in) in nn.Linear here, (in, out) in Conv1D there.
    """
    if config.arch == "gpt2":
        return {name: tensor.t() if ".h." in name else tensor for name, tensor in weights.items()}  # vectors stay
    for old, new in names:
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    return weights


# -----------------------------------------------------------------------------
# transformers

def import_transformers(where=""):
    """Imports transformers, which takes seconds, without its warnings. Only downloads keep their progress bars."""
    with one_line_errors(where, "pip install transformers"):
        import transformers
        from huggingface_hub.utils import enable_progress_bars
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    enable_progress_bars()
    return transformers


@torch.no_grad()
def compare_logits(hf_model, model, length):
    """
    Raises ValueError unless a transformers model and ours compute the same logits for `length` tokens, or as many as
    they have positions. The logits of a barely trained model are too small to differ, so both models compute them with
    a head that is scaled up.
    """
    idx = torch.arange(min(length, model.config.max_seq_len))[None] % model.config.vocab_size
    largest = model(idx).abs().max()
    if not largest.isfinite():
        raise ValueError("its logits are not finite: its weights are broken")
    scale = (50 / largest).clamp(1, 50_000)
    theirs, ours = (functional_call(module, {"lm_head.weight": module.lm_head.weight * scale}, idx, tie_weights=False)
                    for module in (hf_model, model))
    if not torch.allclose(theirs.logits, ours, rtol=1e-3, atol=1e-3):
        raise ValueError(f"{type(hf_model).__name__} computes different logits from model.py")


def read_weights(folder, config):
    """
    The weights in a Hugging Face folder as a GPT's state dict, in bfloat16 if it holds all of them exactly, else in
    float32. Raises ValueError if they are not those that config.json describes.
    """
    import transformers
    hf_model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False,
        ignore_mismatched_sizes=True, output_loading_info=True)
    for problem, names in report.items():
        names = sorted(name for name in names if "masked_bias" not in name)  # a constant that old versions saved
        if names:
            raise ValueError(f"its weights do not fit its config.json: {problem} {names}")
    head, embedding = hf_model.lm_head.weight, hf_model.get_input_embeddings().weight
    if config.tied_head and head is not embedding and not torch.equal(head, embedding):
        raise ValueError("its config.json has tie_word_embeddings=True, but its weights have a separate head")
    with torch.device("meta"):  # no memory, until it shares that of hf_model
        model = GPT(config)
    to_ours = zip(LLAMA_NAMES.values(), LLAMA_NAMES)
    model.load_state_dict(convert_weights(hf_model.state_dict(), config, to_ours), assign=True)
    compare_logits(hf_model, model.eval(), 64)
    weights = model.state_dict()
    if all(torch.equal(tensor.bfloat16().float(), tensor) for tensor in weights.values()):
        return {name: tensor.bfloat16() for name, tensor in weights.items()}
    return weights


def load_hf(path):
    """
    load_checkpoint's dict for a Hugging Face folder, or for a model on the hub. A model with a chat template counts as
    a chat model. A folder that export_hf.py wrote has the facts about its run in run.json. Exits with an error if path
    is neither, or if model.py computes something other than transformers.
    """
    transformers = import_transformers(f"{path}: holds no ckpt.pt; if it is a Hugging Face model")
    folder, name = path, hub_name(path)
    from huggingface_hub import errors, snapshot_download
    print0(f"loading {path} with transformers ...")
    config_file = Path(path, "config.json")  # a model's, or the settings of a run that has saved nothing
    is_model = config_file.is_file() and b"model_type" in config_file.read_bytes()
    # alone: the hub may refuse one rank
    with one_line_errors(f"{path}: not a readable checkpoint", "" if is_model else ACCEPTED, alone=bool(name)):
        if name:
            try:  # this needs no network for what it has fetched before
                folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "model*.safetensors"]))
            except errors.LocalEntryNotFoundError:
                raise ValueError(f"no such folder, no connection to the hub, and no earlier download of {name}")
        for file in folder.glob("*.[js]*"):
            if file.is_file() and open(file, "rb").read(23) == b"version https://git-lfs":
                raise ValueError(f"{file.name} is only a pointer to the file; run git lfs pull in this folder")
        if (folder / "adapter_config.json").exists():
            raise ValueError("it holds PEFT's adapters; merge them into their model first (merge_and_unload)")
        if name and not any(folder.glob("model*.safetensors")):
            raise ValueError(f"{name} has no safetensors on the hub, the only weights that are fetched")
        if not (name or is_model):
            raise ValueError("it has no ckpt.pt (its run may have saved none) and no config.json with a model_type")
        config = config_from_hf(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))
        tokenizer = read_tokenizer(folder, config.vocab_size)
        facts = {"stage": "chat" if tokenizer.chat_template else "base"}
        if (folder / "run.json").exists():
            run = json.loads((folder / "run.json").read_bytes())
            facts = {key: run[key] for key in RUN_FACTS}
            facts["val_loss"] = float(facts["val_loss"] or "nan")  # JSON tools may have turned NaN into null
        return convert_checkpoint(read_weights(folder, config), config, path=str(path),
                                  tokenizer=tokenizer_entry(tokenizer), **facts)


def read_tokenizer(folder, vocab_size):
    """
    The tokenizer of a Hugging Face folder: gpt2 or bytes if its ids match, or if the vocabulary size does and
    tokenizer.json is missing; else, or if it has a chat template that is not ours, its own. Raises an exception of any
    kind if it has none.
    """
    from hf_tokenizer import HFTokenizer, read_files  # not at the top: it needs tokenizers
    files = read_files(folder)
    ours = get_tokenizer(VOCABULARIES[vocab_size]) if vocab_size in VOCABULARIES else None
    if "tokenizer.json" not in files:
        if not ours:
            raise ValueError("No such file: tokenizer.json; transformers writes it with "
                             "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)")
        vocabulary = folder / "vocab.json"
        if vocabulary.exists() and json.loads(vocabulary.read_bytes()).get("\u0120the") != 262:  # " the" in GPT-2's
            raise ValueError("its vocab.json is not GPT-2's; add the tokenizer.json that transformers writes")
        if "chat_template.jinja" in files or json.loads(files.get("tokenizer_config.json", "{}")).get("chat_template"):
            raise ValueError("it has a chat template, but no tokenizer.json; add the one that transformers writes")
        return ours
    tokenizer = HFTokenizer(files)
    # export_hf.py wrote run.json; but it may have kept the template of a model that came from elsewhere
    our_format = not tokenizer.chat_template or (folder / "run.json").exists() and "<|end|>" in tokenizer.chat_template
    if ours and our_format and all(
            tokenizer.decode_single_token_bytes(i) == ours.decode_single_token_bytes(i) for i in range(ours.n_vocab)):
        return ours
    if tokenizer.n_vocab > vocab_size:  # with a padding token, say, that was added without a row of the embedding
        content = json.loads(files["tokenizer.json"])
        content["added_tokens"] = [token for token in content["added_tokens"]
                                   if token["id"] < vocab_size or not token["special"]]
        tokenizer = HFTokenizer({**files, "tokenizer.json": json.dumps(content, ensure_ascii=False)})
    if tokenizer.n_vocab > vocab_size:
        raise ValueError(f"its tokenizer has {tokenizer.n_vocab} ids, but its model only {vocab_size}")
    return tokenizer


def hub_name(path):
    """The name on the hub, owner/name, if a path does not exist and may be one (gpt2, ..., owner/name); else None."""
    name = f"openai-community/{path}" if str(path) in GPT2_MODELS else str(path).replace(os.sep, "/")
    is_file = Path(path).exists() or name.endswith((".pt", ".json", ".jsonl", ".parquet", ".gz", ".zst"))
    return name if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not is_file else None


# -----------------------------------------------------------------------------
# our checkpoint

def convert_checkpoint(weights, gpt_config, **facts):
    """
    load_checkpoint's dict for weights trained elsewhere. gpt2's 50257 ids are padded to 50304, with the mean of their
    rows: a row of zeros would have the logit 0, far above that of GPT-2's likeliest token, and would win the softmax.
    Any other vocabulary is padded to a multiple of 128 in the same way.
    """
    n_ids = gpt_config.vocab_size
    padding = -n_ids % 128
    if padding:
        print0(f"its vocabulary of {n_ids} ids is padded to {n_ids + padding}")
        for name in ("transformer.wte.weight", "lm_head.weight"):
            weights[name] = torch.cat((weights[name], weights[name].mean(0).expand(padding, -1)))
    return {"model": weights, "model_args": {**vars(gpt_config), "vocab_size": n_ids + padding}, "stage": "base",
            "iter_num": 0, "val_loss": math.nan, "val_iter": 0, "config": {}, **facts}


def convert_nanogpt(checkpoint):
    """nanoGPT's ckpt.pt as load_checkpoint's dict. Its GELU is exact; with bias=False its biases are zero here."""
    args, iter_num = checkpoint["model_args"], checkpoint["iter_num"]
    tokenizer = VOCABULARIES.get(args["vocab_size"])
    if not tokenizer:
        raise ValueError(f"its vocabulary has {args['vocab_size']} ids, expected 50257 or 50304 (gpt2) or 384 (bytes)")
    config = GPTConfig(gelu="exact", max_seq_len=args["block_size"],
                       **{name: args[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")})
    # compiled models are saved with the prefix _orig_mod.; .attn.bias is a causal mask, saved by torch before 2.0
    weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in checkpoint["model"].items()
               if not name.endswith(".attn.bias")}
    biases = {name.replace("weight", "bias"): torch.zeros(len(tensor)) for name, tensor in weights.items()
              if ".h." in name or ".ln_f." in name}
    return convert_checkpoint({**biases, **weights}, config, tokenizer=tokenizer, config=checkpoint["config"],
                              iter_num=iter_num, val_loss=float(checkpoint["best_val_loss"]), val_iter=iter_num)
