"""
Exports any checkpoint to a Hugging Face folder, which transformers opens without remote code; and the way back.

    python export_hf.py --checkpoint=out/ckpt.pt --out_dir=my-model
    python export_hf.py --checkpoint=out-chat --out_dir=my-chat-model --dtype=bfloat16

gpt2 becomes GPT2LMHeadModel; llama LlamaForCausalLM, with qk_norm Qwen3ForCausalLM, with mla DeepseekV3ForCausalLM,
all layers dense. gpt2 with mla becomes a GPT2LMHeadModel whose keys and values are multiplied out: the same function,
but it caches whole keys and values. Both ways need transformers, which reads and writes the files.
"""
import json
import math
import re
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download  # datasets brings it
from huggingface_hub.utils import enable_progress_bars

import runtime
from chat_data import parse_mixture
from checkpoint import GPT2_MODELS, describe_model, load_model
from configurator import Positive, configure, fail, one_line_errors
from model import GPT, GPTConfig
from tokenizer import END_OF_TEXT, ROLES, chat_tokens, get_tokenizer

# -----------------------------------------------------------------------------
# weights

LLAMA_NAMES = {"transformer.wte.": "model.embed_tokens.", "transformer.h.": "model.layers.",
               "transformer.ln_f.": "model.norm.", ".ln_1.": ".input_layernorm.",
               ".ln_2.": ".post_attention_layernorm.", ".attn.": ".self_attn."}


def to_hf(state_dict, config):
    """
    A state dict of ours with Hugging Face's names and layout, for the class that config_to_hf names. Its tensors are
    views of ours, so copying into them is the way back, except where they are computed: gpt2's mla, embed_norm.
    """
    if config.arch == "gpt2":
        if config.attention == "mla":
            state_dict = mla_to_mha(state_dict, config)
        return {name.replace(".o_proj.", ".c_proj."):  # so named in mla
                tensor.t() if ".h." in name else tensor  # matrices are Conv1D's, which are transposed; vectors stay
                for name, tensor in state_dict.items()}
    if config.embed_norm:  # it acts on each row of the table alone, so it can be applied to the table
        table = state_dict["transformer.wte.weight"]
        state_dict = {**state_dict, "transformer.wte.weight": F.rms_norm(table, table.shape[1:], eps=1e-5)}
    for old, new in LLAMA_NAMES.items():
        state_dict = {name.replace(old, new): tensor for name, tensor in state_dict.items()}
    return state_dict


def mla_to_mha(state_dict, config):
    """gpt2 with mla as a plain gpt2: for each head k = (W_k W_a) x and v = (W_v W_a) x."""
    plain = dict(state_dict)
    for i in range(config.n_layer):
        attn = f"transformer.h.{i}.attn."
        q, q_bias, down, up = (plain.pop(attn + name) for name in (
            "q_proj.weight", "q_proj.bias", "kv_a_proj_with_mqa.weight", "kv_b_proj.weight"))
        # up has each head's keys before its values; kv, (2 C, C), all keys before all values
        kv = up.unflatten(0, (config.n_head, 2, -1)).transpose(0, 1).flatten(0, 2) @ down
        plain[attn + "c_attn.weight"] = torch.cat((q, kv))
        plain[attn + "c_attn.bias"] = F.pad(q_bias, (0, len(kv)))
    return plain


# -----------------------------------------------------------------------------
# config.json

LLAMA_FIELDS = {"max_position_embeddings": "max_seq_len", "vocab_size": "vocab_size", "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head", "hidden_size": "n_embd",
                "intermediate_size": "intermediate_size", "rope_theta": "rope_theta"}
HF_FIELDS = {  # model_type -> its names of GPTConfig's fields
    "gpt2": {"n_positions": "max_seq_len", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
             "n_embd": "n_embd", "n_inner": "intermediate_size"},
    "llama": LLAMA_FIELDS, "qwen3": LLAMA_FIELDS,
    "deepseek_v3": {"first_k_dense_replace": "n_layer",  # all layers are dense
                    "rms_norm_eps": "norm_eps",  # 1e-5 in older exports
                    "kv_lora_rank": "kv_lora_rank", "q_lora_rank": "q_lora_rank",
                    "qk_nope_head_dim": "qk_nope_head_dim", "qk_rope_head_dim": "qk_rope_head_dim",
                    "v_head_dim": "v_head_dim", **LLAMA_FIELDS},
}
HF_GELU = {"tanh": "gelu_new", "exact": "gelu"}


def config_to_hf(config):
    """GPTConfig -> what config.json has to say of the weights that to_hf returns, a dict."""
    kind = ("gpt2" if config.arch == "gpt2" else "deepseek_v3" if config.attention == "mla" else
            "qwen3" if config.qk_norm else "llama")
    hf_config = {"model_type": kind, "tie_word_embeddings": kind == "gpt2",
                 **{hf_name: getattr(config, name) for hf_name, name in HF_FIELDS[kind].items()}}
    if kind == "gpt2":
        return {**hf_config, "layer_norm_epsilon": config.norm_eps, "activation_function": HF_GELU[config.gelu],
                "n_ctx": config.max_seq_len}  # transformers' n_positions; llama.cpp's converter wants this
    # deepseek_v3 calls the width of the rotated part head_dim
    return {**hf_config, "rms_norm_eps": config.norm_eps,
            "head_dim": config.qk_rope_head_dim or config.n_embd // config.n_head}


def config_from_hf(hf_config):
    """
    The reverse, for a config of transformers. Raises ValueError, naming the field, where config_to_hf would say
    something else; whether the rest, like the scaling of rotary positions, is what model.py computes, the logits show.
    Dropout stays 0: it belongs to the training.
    """
    fields = hf_config.to_dict()
    fields |= fields.get("rope_parameters") or {}  # where transformers 5 has rope_theta
    kind = fields["model_type"]
    if kind not in HF_FIELDS:
        raise ValueError(f"its config has model_type={kind!r}: expected one of {', '.join(HF_FIELDS)}")
    config = GPTConfig(arch="gpt2" if kind == "gpt2" else "llama", attention="mla" if kind == "deepseek_v3" else "mha",
                       qk_norm=kind == "qwen3",
                       gelu=dict(zip(HF_GELU.values(), HF_GELU)).get(fields.get("activation_function"), "tanh"),
                       **{name: fields[hf_name] for hf_name, name in HF_FIELDS[kind].items()})
    # what only long texts would show, and the rest
    for name, value in {"rope_type": "default", "use_sliding_window": False, **config_to_hf(config)}.items():
        if fields.get(name) not in (None, value):  # None: the default, which is ours
            raise ValueError(f"its config has {name}={fields[name]!r}: expected {value!r}")
    return config


# -----------------------------------------------------------------------------
# transformers

def import_transformers():
    """transformers, without its warnings and progress bars. It takes seconds to import, and is needed here alone."""
    with one_line_errors("", "pip install transformers"):
        import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    enable_progress_bars()  # those of a download stay
    return transformers


def compare_logits(twin, model, length):
    """Raises AssertionError unless a model of transformers has our model's logits, on `length` tokens."""
    idx = torch.arange(length)[None] % model.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(
            twin(idx).logits, model(idx), rtol=1e-3, atol=1e-3,
            msg=f"{type(twin).__name__} computes other logits than model.py")


# -----------------------------------------------------------------------------
# models trained elsewhere

RUN_FACTS = "stage", "iter_num", "val_loss", "val_iter", "config"  # of run.json, which an export has besides


def tokenizer_of(config):
    """The name of the tokenizer of a model trained elsewhere, which its vocabulary's size tells, or ValueError."""
    tokenizer = {50257: "gpt2", 50304: "gpt2", 384: "bytes"}.get(config.vocab_size)
    if tokenizer is None:
        raise ValueError(f"its vocabulary has {config.vocab_size} ids; expected 50257 or 50304 (gpt2) or 384 (bytes)")
    return tokenizer


def convert_checkpoint(weights, gpt_config, **facts):
    """
    The dict of load_checkpoint for the weights of a model trained elsewhere. gpt2's 50257 ids are padded to 50304 by
    the mean of the other rows: a row of zeros has the logit 0, far above what GPT-2 gives its likeliest token, and
    would win the softmax.
    """
    tokenizer, padding = tokenizer_of(gpt_config), -gpt_config.vocab_size % 128
    for name in ("transformer.wte.weight", "lm_head.weight"):
        rows = weights[name]
        weights[name] = torch.cat((rows, rows.mean(0).expand(padding, -1)))
    gpt_config.vocab_size += padding
    return {"model": weights, "model_args": asdict(gpt_config), "config": {}, "tokenizer": tokenizer, "stage": "base",
            "iter_num": 0, "val_loss": math.nan, "val_iter": 0, **facts}


def convert_nanogpt(checkpoint):
    """nanoGPT's ckpt.pt -> ours. Its GELU is exact, and its bias=False is a GPT-2 whose biases are zero."""
    args, iter_num = checkpoint["model_args"], checkpoint["iter_num"]
    config = GPTConfig(gelu="exact", max_seq_len=args["block_size"],
                       **{name: args[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")})
    # _orig_mod. comes from saving a compiled model, .attn.bias is a mask, saved where torch had no flash attention
    weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in checkpoint["model"].items()
               if not name.endswith(".attn.bias")}
    biases = {name.replace("weight", "bias"): torch.zeros(len(tensor)) for name, tensor in weights.items()
              if ".h." in name or ".ln_f." in name}
    return convert_checkpoint({**biases, **weights}, config, config=checkpoint["config"], iter_num=iter_num,
                              val_loss=float(checkpoint["best_val_loss"]), val_iter=iter_num)


def load_hf(path):
    """
    The dict of load_checkpoint for a Hugging Face folder (with run.json if export_hf.py wrote it), or for one of
    GPT2_MODELS, from the hub; float32. Ends the program in one line if path is neither, or if transformers computes
    something else with it than model.py.
    """
    transformers, folder = import_transformers(), path
    with one_line_errors(f"{path}: not a readable checkpoint", "expected a ckpt.pt of ours or nanoGPT's, its folder, "
                         f"a Hugging Face folder, or, with a network, one of {', '.join(GPT2_MODELS)}"):
        if not folder.exists():  # without a network, what was fetched before
            folder = Path(snapshot_download(f"openai-community/{path}",
                                            allow_patterns=["config.json", "model.safetensors"]))
        config = config_from_hf(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))
        tokenizer_file, run = folder / "tokenizer.json", folder / "run.json"
        if tokenizer_of(config) == "gpt2" and tokenizer_file.exists():
            if json.loads(tokenizer_file.read_bytes())["model"]["vocab"].get("\u0120the") != 262:  # " the"
                raise ValueError("its tokenizer.json is not gpt2's")
        twin, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False,
            ignore_mismatched_sizes=True, output_loading_info=True)
        for problem, names in report.items():
            names = sorted(name for name in names if "masked_bias" not in name)  # a constant that old versions saved
            if names:
                raise ValueError(f"its weights are not those of its config.json: {problem} {names}")
        model = GPT(config)
        for name, tensor in to_hf(model.state_dict(), config).items():
            tensor.copy_(twin.get_parameter(name).data)
        compare_logits(twin, model, min(64, config.max_seq_len))
        del twin
        facts = {"path": str(path)}
        if run.exists():
            found = json.loads(run.read_bytes())
            facts |= {key: found[key] for key in RUN_FACTS}
        return convert_checkpoint(model.state_dict(), config, **facts)


# -----------------------------------------------------------------------------
# tokenizer

def tokenizer_to_hf(tokenizer):
    """
    A tiktoken.Encoding (gpt2, or bytes, which has no merges), with the chat tokens, as one of tokenizers. tiktoken
    has the ranks of whole tokens, and merges any two that make a third.
    """
    from tokenizers import ByteLevelBPETokenizer  # splits as GPT-2's pattern does; transformers brings it
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    letters = bytes_to_unicode()  # the printable character that stands for each byte
    vocab = {"".join(letters[byte] for byte in token): i for token, i in tokenizer._mergeable_ranks.items()}
    merges = [(token[:i], token[i:]) for token in vocab for i in range(1, len(token))
              if token[:i] in vocab and token[i:] in vocab]
    hf_tokenizer = ByteLevelBPETokenizer(vocab, merges)
    hf_tokenizer.add_special_tokens([END_OF_TEXT, *(f"<|{name}|>" for name in chat_tokens(tokenizer))])
    return hf_tokenizer


# render_chat in jinja; what stands within generation is trained on (TRL's assistant_only_loss)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in " + str(list(ROLES)) + " %}{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


# -----------------------------------------------------------------------------
# export

USAGE = {"base": """\
inputs = tokenizer("<|endoftext|>Once upon a time", return_tensors="pt")  # the tokenizer does not add <|endoftext|>
""", "chat": """\
inputs = tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}], add_generation_prompt=True,
                                       return_dict=True, return_tensors="pt")
"""}


def llama_cpp_fault(config, tokenizer):
    """What llama.cpp (b9993) would do wrong with a model, as text, or "". tests/llama_cpp.py tries each."""
    if tokenizer == "bytes":
        return "its converter does not know the tokenizer"
    if config.arch == "llama" and config.attention == "mla":
        if config.q_lora_rank is None:
            return "it does not load latent attention without q_lora_rank"
        if config.norm_eps != 1e-6:
            return "it gives all norms one eps, and those of this older model differ"
    if config.arch == "gpt2" and config.intermediate_size != 4 * config.n_embd:
        return "it does not load a GPT-2 whose MLP is not 4 n_embd wide"
    if config.gelu == "exact":
        return "it would compute GPT-2's GELU in place of the exact one, and not say so"
    return ""


def hub_sources(training):
    """By the settings of a run: the model of the Hugging Face hub that it began with, and its data sets, as lists."""
    init_from, names = str(training.get("init_from")).removeprefix("auto:"), []
    with suppress(Exception):  # chat tuning; or pretraining, if the shards are still there
        names = parse_mixture(training["data"]) if "data" in training else [
            json.loads(Path(training["data_dir"], "meta.json").read_bytes())["source"]["dataset"]]
    found = [re.fullmatch(r"([\w-][\w.-]*/[\w.-]+)(/[\w.-]+)?", name) for name in names if not name.endswith(".jsonl")]
    return ([f"openai-community/{init_from}"] if init_from in GPT2_MODELS else [],
            [name[1] for name in found if name and not Path(name[0]).exists()])


def model_card(name, loaded, fault, twin):
    """README.md, as text. fault: llama_cpp_fault's."""
    stage, (base, found) = loaded["stage"], hub_sources(loaded["config"])
    return f"""---
library_name: transformers
pipeline_tag: text-generation
license: other  # yours to choose
base_model: {base}  # what it was tuned from, if that is on the hub
datasets: {found}
---
# {name}

A {stage} model, {type(twin).__name__}, {twin.num_parameters():,} parameters. `run.json` has the settings of its
training and its validation loss.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModelForCausalLM.from_pretrained("{name}")
{USAGE[stage]}print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```

{f"**Not for llama.cpp**: {fault}." if fault else "llama.cpp's `convert_hf_to_gguf.py` converts it."}

Text that spells a special token, like `<|end|>`, becomes that token here, in a chat template as in any prompt: strip
it from untrusted input. A base model has not learned the chat tokens, so it has no chat template.
"""


def export(checkpoint, out_dir, dtype, shard_size, overwrite):
    """Writes the model in `checkpoint`, any path that load_checkpoint takes, to the folder out_dir."""
    folder, run = Path(out_dir), Path(out_dir, "run.json")
    text = run.read_text(errors="replace") if run.exists() else ""
    replace = overwrite and all(key in text for key in RUN_FACTS) and folder.resolve() != Path(checkpoint).resolve()
    if any(folder.glob("*")) and not replace:
        fail(f"--out_dir={out_dir}: is not empty; give another folder, or, where it holds an export of another "
             f"checkpoint, --overwrite=True")
    model, loaded = load_model(checkpoint, "cpu")
    if "lora" in loaded and folder.resolve() == Path(loaded["lora"]["absolute"]).resolve():
        fail(f"--out_dir={out_dir}: holds the base of {checkpoint}; give another folder")
    config, tokenizer, chat = model.config, get_tokenizer(loaded["tokenizer"]), loaded["stage"] == "chat"
    eot, end = tokenizer.eot_token, chat_tokens(tokenizer)["end"]
    fault = llama_cpp_fault(config, tokenizer.name)
    transformers = import_transformers()
    print("comparing with transformers ...")
    with one_line_errors("", "was model.py changed? Then config_to_hf has to say how, or it cannot be exported"):
        twin = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(
            **config_to_hf(config), bos_token_id=eot, eos_token_id=[end, eot] if chat else eot, pad_token_id=eot))
        twin.load_state_dict(to_hf(model.state_dict(), config))
        compare_logits(twin.eval(), model, config.max_seq_len)
    for name, p in twin.to(getattr(torch, dtype)).named_parameters():
        if p.isinf().any():
            fail(f"--dtype={dtype}: {name} has weights above its largest number; bfloat16 holds them")

    twin.config.update(config_to_hf(config))  # with rope_theta where transformers 4 reads it
    twin.generation_config.suppress_tokens = [  # never trained
        *range(end + 1 if chat else tokenizer.n_vocab, config.vocab_size)]
    with one_line_errors(f"--out_dir={out_dir}"):
        folder.mkdir(parents=True, exist_ok=True)
        # the weights, or the index of several files, are written last: without them nothing opens the folder
        for file in folder.glob("model.safetensors*"):
            file.unlink()
        run.write_text(json.dumps({key: loaded[key] for key in RUN_FACTS}, indent=1))
        tokenizer_to_hf(tokenizer).save(f"{folder}/tokenizer.json")
        (folder / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_seq_len,
            "clean_up_tokenization_spaces": False, "bos_token": END_OF_TEXT, "pad_token": END_OF_TEXT,
            "eos_token": "<|end|>" if chat else END_OF_TEXT, "chat_template": CHAT_TEMPLATE if chat else None}))
        (folder / "README.md").write_text(model_card(folder.resolve().name, loaded, fault, twin), encoding="utf-8")
        twin.save_pretrained(folder, max_shard_size=shard_size)
        for file in folder.glob("*.safetensors"):
            file.chmod(0o644)  # they are written for their owner alone
    print(f"{describe_model(loaded)}\n{out_dir}: {type(twin).__name__}, {dtype}, "
          f"{twin.num_parameters():,} parameters" + (f"; not for llama.cpp: {fault}" if fault else ""))


if __name__ == "__main__":
    checkpoint: str = "out/ckpt.pt"  # ours or nanoGPT's, or its folder; a Hugging Face folder; gpt2, gpt2-medium, ...
    out_dir: str = "hf-model"  # the folder to write
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the weights; float32 loses nothing
    shard_size: Positive = 5_000_000_000  # bytes per .safetensors file; a larger model takes several
    overwrite: bool = False  # replace the export in out_dir
    sys.excepthook = runtime.excepthook
    export(**configure(globals())[0])
