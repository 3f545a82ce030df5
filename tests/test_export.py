"""Exported folders, opened by transformers alone, and read back here."""
import json
import math
import sys
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import export_hf
from chat_format import chat_tokens, render_chat
from checkpoint import load_checkpoint, load_model
from conftest import CLASSES, check_error, error_line, new_gpt, run, same, save_model, tokens
from model import GPT, GPT2MLP, GPTConfig
from sample import generate
from tokenizer import get_tokenizer, padded_vocab_size

CHANGES = {"gpt2": {"gelu": "exact"}, "llama": {"rope_theta": 5000.0}, "llama_mla": {"norm_eps": 1e-5}}
RUN = {"config": {"init_from": "auto:gpt2-medium", "data": "HuggingFaceTB/smoltalk/all:2,o'w/n\"a", "max_iters": 1234},
       "iter_num": 1234, "val_loss": 2.3456, "val_iter": 1200}


def export(checkpoint, folder, dtype="float32", shard_size=10 ** 9, overwrite=False):
    export_hf.export(str(checkpoint), str(folder), dtype, shard_size, overwrite)


@pytest.fixture(scope="module", params=CLASSES)
def exported(request, tmp_path_factory):
    """variant, the model, and the folder it was exported to; once as a user starts it."""
    variant, tmp = request.param, tmp_path_factory.mktemp(request.param)
    gpt = new_gpt(variant, max_seq_len=96, dropout=0.1, **CHANGES.get(variant, {})).eval()
    args = asdict(gpt.config)
    if args["norm_eps"] == 1e-5:  # older checkpoints do not have this field, and 1e-5 with mla, too
        del args["norm_eps"]
    checkpoint = save_model(tmp, gpt, model_args=args, **RUN)
    if variant == "gpt2_mla":
        output = run("export_hf.py", f"--checkpoint={checkpoint}", f"--out_dir={tmp}/hf")
        assert "step 1234, val loss 2.3456 at step 1200" in output and "GPT2LMHeadModel, float32" in output
    else:
        export(checkpoint, tmp / "hf")
    return variant, gpt, tmp / "hf"


# -----------------------------------------------------------------------------
# each variant

def test_transformers_has_the_same_logits_and_greedy_text(exported):
    variant, gpt, folder = exported
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(theirs).__name__ == CLASSES[variant] and not any(report.values()), report
    assert theirs.dtype == torch.float32 and theirs.config.max_position_embeddings == 96
    written = json.loads((folder / "config.json").read_text())
    if gpt.config.arch == "gpt2":
        assert written["n_ctx"] == 96  # for llama.cpp's converter
    else:
        assert written["rope_theta"] == gpt.config.rope_theta  # where transformers 4 reads it
    idx = tokens(2, 96)
    with torch.no_grad():
        assert (theirs(idx).logits - gpt(idx)).abs().max() < 1e-4
    prompt = tokens(1, 20, seed=3) % 256
    ours = [token for token, in generate(gpt, [prompt[0].tolist()], 32, temperature=0, n_vocab=261)]
    assert theirs.generation_config.eos_token_id == [260, 256]  # <|end|>, <|endoftext|>
    assert theirs.generation_config.suppress_tokens == list(range(261, 384))  # no chat token: they end an answer
    # the row of a padding_idx gets no gradient, and each text begins with this token
    assert theirs.generation_config.pad_token_id == 256 and theirs.get_input_embeddings().padding_idx is None
    theirs.generation_config.eos_token_id = None
    assert theirs.generate(prompt, max_new_tokens=32, do_sample=False)[0, 20:].tolist() == ours


def test_it_loads_here_again_bit_for_bit(exported):
    variant, gpt, folder = exported
    again = load_checkpoint(folder)
    assert {key: again[key] for key in RUN} == RUN and again["stage"] == "chat" and again["tokenizer"] == "bytes"
    assert again["path"] == str(folder)
    if variant == "gpt2_mla":
        model, _ = load_model(folder, "cpu")
        assert model.config.attention == "mha" and (model(tokens()) - gpt(tokens())).abs().max() < 1e-4
        return
    assert again["model_args"] == {**asdict(gpt.config), "dropout": 0.0}
    assert same(again["model"], gpt.state_dict())


def test_the_card_says_what_it_is_and_how_to_load_it(exported):
    variant, _, folder = exported
    n_params = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    card = ModelCard.load(folder / "README.md")
    for words in ("A chat model", CLASSES[variant], f"{n_params:,} parameters", "trained with forkGPT",
                  "`run.json` has the settings and the validation loss",
                  'AutoModelForCausalLM.from_pretrained("hf")', "apply_chat_template", "spells a special token",
                  "**Not for llama.cpp**: its converter does not know the tokenizer."):
        assert words in card.text.replace("\n", " "), words
    assert (card.data.license, card.data.base_model, card.data.datasets) == (
        "other", ["openai-community/gpt2-medium"], ["HuggingFaceTB/smoltalk"])


def test_the_hubs_base_and_data_are_told_from_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here/rows").mkdir(parents=True)
    data = ("a/b/all@test:2,x/y-2.5,mine/chats.jsonl,mine/chats.parquet,a.jsonl,/home/me/chats,http://x/y,here/rows,"
            "o'w/n")
    assert export_hf.hub_sources({"init_from": "out/ckpt.pt", "data": data}) == [[], ["a/b", "x/y-2.5"]]
    (tmp_path / "meta.json").write_text('{"source": {"dataset": "HuggingFaceFW/fineweb-edu"}}')
    assert export_hf.hub_sources({"init_from": "gpt2", "data_dir": str(tmp_path)}) == [
        ["openai-community/gpt2"], ["HuggingFaceFW/fineweb-edu"]]
    for training in {}, {"data": None, "init_from": 3}, {"init_from": "scratch", "data_dir": "not/here"}:
        assert export_hf.hub_sources(training) == [[], []]


@pytest.mark.parametrize("fields, tokenizer, words", [
    ({}, "bytes", "does not know the tokenizer"),
    ({"arch": "llama", "attention": "mla"}, "gpt2", "without q_lora_rank"),
    ({"arch": "llama", "attention": "mla", "q_lora_rank": 8, "norm_eps": 1e-5}, "gpt2", "one eps for all norms"),
    ({"intermediate_size": 32}, "gpt2", "not 4 n_embd wide"),
    ({"gelu": "exact"}, "gpt2", "instead of the model's activation"),
    ({}, "gpt2", ""), ({"attention": "mla"}, "gpt2", ""), ({"arch": "llama", "intermediate_size": 32}, "gpt2", ""),
    ({"arch": "llama", "attention": "mla", "q_lora_rank": 8}, "gpt2", "")])
def test_the_faults_of_llama_cpp_are_named(fields, tokenizer, words):
    config = GPTConfig(**{"n_layer": 1, "n_head": 2, "n_embd": 16, **fields})
    fault = export_hf.llama_cpp_fault(config, get_tokenizer(tokenizer))
    assert words in fault and bool(words) == bool(fault)


# -----------------------------------------------------------------------------
# tokens and conversations

TEXTS = ["", " ", "Hello, world!  It's 2024\tand\n\n\n  they're  here. ",
         "def f(x):\n\treturn {'a': [x ** 2, -1e-9]}  # ok\r\n    pass\n",
         "naïve café — “quotes” … ½ ¿qué?", "日本語テキスト、한국어, العربية, हिन्दी, ไทย",
         "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\ufeff\u00a0\u3000x",
         "\x00\x01\x7f\x85\u2028", "a" * 300 + " " * 300 + "\n" * 50,
         "'S 'Ll I'VE we'd  'tis", "١٢٣ ⅷ ² 123456789 0x1F", "\U0010ffff \uffff Ⱥ ꙮ 𝔘"]
TALKS = [[("user", "Hi!")],
         [("system", " Be brief.\n"), ("user", "  What is 2 + 2?\n\n"), ("assistant", "4"), ("user", "ü 👍"),
          ("assistant", "\tYes. ")],
         [("user", "{{ messages }} {% if %}"), ("assistant", "<b>&amp;'\"</b>"), ("user", "\n")]]


@pytest.fixture(scope="module", params=["bytes", "gpt2"])
def exported_tokenizer(request, tmp_path_factory):
    """Our tokenizer, and transformers' from an exported chat model."""
    ours, tmp = get_tokenizer(request.param), tmp_path_factory.mktemp(request.param)
    gpt = new_gpt("gpt2", n_layer=1, n_embd=8, vocab_size=padded_vocab_size(ours))
    export(save_model(tmp, gpt, ours.name), tmp / "hf")
    assert ("`convert_hf_to_gguf.py` converts it" in (tmp / "hf/README.md").read_text()) == (ours.name == "gpt2")
    return ours, AutoTokenizer.from_pretrained(tmp / "hf")


def test_text_has_the_same_ids(exported_tokenizer):
    ours, theirs = exported_tokenizer
    # without surrogates
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000), *range(0x10000, 0x30000, 7)]))
    words = [everything[i:i + 50] for i in range(0, len(everything), 50)] if ours.name == "bytes" else []
    for text in TEXTS + words:
        assert theirs(text)["input_ids"] == ours.encode_ordinary(text), text
        assert theirs.decode(ours.encode_ordinary(text)) == text


def test_special_tokens_have_our_ids(exported_tokenizer):
    ours, theirs = exported_tokenizer
    expected = {"<|endoftext|>": ours.eot_token, **{f"<|{name}|>": i for name, i in chat_tokens(ours).items()}}
    assert theirs.get_added_vocab() == expected and len(theirs) == ours.n_vocab + 4
    assert theirs.model_max_length == 48
    assert theirs.bos_token_id == theirs.pad_token_id == ours.eot_token and theirs.eos_token_id == expected["<|end|>"]
    for text, i in expected.items():
        assert theirs(text)["input_ids"] == [i] and theirs.decode([i]) == text
        assert theirs.decode([i], skip_special_tokens=True) == ""


def test_the_chat_template_renders_the_ids_of_render_chat(exported_tokenizer):
    ours, theirs = exported_tokenizer
    for talk in TALKS:
        messages = [{"role": role, "content": content} for role, content in talk]
        ids, trained = render_chat(ours, messages)
        rendered = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert rendered["input_ids"] == ids and rendered["assistant_masks"] == list(map(int, trained))
        prompted = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert prompted == ids + [chat_tokens(ours)["assistant"]]
    with pytest.raises(Exception, match="unknown role tool"):
        theirs.apply_chat_template([{"role": "tool", "content": "x"}])


def test_a_chat_template_that_comes_from_elsewhere_stays(tmp_path):
    """A folder that transformers wrote has no run.json, and its template need not be ours."""
    folder = tmp_path / "hf"
    export(save_model(tmp_path, new_gpt("gpt2")), folder)
    assert load_checkpoint(folder)["tokenizer"] == "bytes"
    (folder / "run.json").unlink()
    loaded = load_checkpoint(folder)
    assert loaded["stage"] == "chat" and "<|assistant|>" in loaded["tokenizer"]["tokenizer_config.json"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"hello": 5}')
    assert "its vocab.json is not GPT-2's" in error_line(load_checkpoint, folder)


def test_another_template_stays_after_an_export_too(tmp_path):
    """DialoGPT's, say, whose ids are those of GPT-2."""
    export(save_model(tmp_path, new_gpt("gpt2"), stage="base"), tmp_path / "hf")
    (tmp_path / "hf" / "run.json").unlink()
    template = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "hf" / "chat_template.jinja").write_text(template)
    export(tmp_path / "hf", tmp_path / "again")
    for folder in (tmp_path / "hf", tmp_path / "again"):
        loaded = load_checkpoint(folder)
        assert loaded["stage"] == "chat" and get_tokenizer(loaded["tokenizer"]).chat_template == template
    (folder / "tokenizer.json").unlink()
    assert "a chat template, but no tokenizer.json" in error_line(load_checkpoint, folder)


def test_a_base_model_ends_with_the_document_and_has_no_chat_template(tmp_path):
    export(save_model(tmp_path, new_gpt("gpt2"), stage="base"), tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "apply_chat_template" not in card and 'tokenizer("<|endoftext|>Once upon a time", add_special' in card
    theirs, generation = (kind.from_pretrained(tmp_path / "hf") for kind in (AutoTokenizer, GenerationConfig))
    assert theirs.eos_token_id == generation.eos_token_id == generation.bos_token_id == 256
    assert theirs.chat_template is None
    config = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert config["model_input_names"] == ["input_ids", "attention_mask"]  # transformers 4: no token_type_ids
    assert generation.suppress_tokens == list(range(257, 384))
    assert load_checkpoint(tmp_path / "hf")["stage"] == "base"
    run_json = tmp_path / "hf" / "run.json"
    run_json.write_text(run_json.read_text().replace("2.5", "null"))  # what JSON tools make of NaN
    assert math.isnan(load_checkpoint(tmp_path / "hf")["val_loss"])


# -----------------------------------------------------------------------------
# files, dtypes, refusals

@pytest.mark.parametrize("variant, dtype", [("gpt2", torch.float16), ("qwen3", torch.bfloat16)])
def test_rounded_weights_in_several_files(variant, dtype, tmp_path):
    weights = new_gpt(variant).state_dict()
    path = save_model(tmp_path, new_gpt(variant))
    export(path, tmp_path / "hf", str(dtype).removeprefix("torch."), shard_size=80_000)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 84_000 for file in files)  # 4,000 for the header
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {dtype}
    again = load_checkpoint(tmp_path / "hf")["model"]
    assert same(again, {name: tensor.to(dtype).float() for name, tensor in weights.items()})


def test_a_folder_with_something_else_is_not_written_to(tmp_path):
    checkpoint, full = save_model(tmp_path / "run", new_gpt("gpt2")), tmp_path / "full"
    full.mkdir()
    (full / "model_mine.safetensors").write_text("mine")
    (full / "model-00001-of-00002.safetensors").write_text("of an earlier export")
    check_error(f"{full}: is not empty", export, checkpoint, full, overwrite=True)
    (full / "run.json").write_text("{}")  # of another program
    check_error("is not empty", export, checkpoint, full, overwrite=True)
    (full / "run.json").write_text('{"val_loss": 1}')  # an export
    (full / "special_tokens_map.json").write_text("of its tokenizer")
    check_error("is not empty.*--overwrite=True", export, checkpoint, full)
    check_error("is not empty", export, checkpoint, tmp_path / "run", overwrite=True)
    check_error("nowhere: not a readable checkpoint", export, "nowhere", tmp_path / "new")
    export(checkpoint, full, overwrite=True)
    assert sorted(file.name for file in full.glob("*.safetensors")) == ["model.safetensors", "model_mine.safetensors"]
    assert not (full / "special_tokens_map.json").exists()
    (full / "model_mine.safetensors").unlink()
    check_error("or that model itself", export, full, full, overwrite=True)


def test_an_export_that_fails_halfway_leaves_nothing_that_opens(tmp_path, monkeypatch):
    """Nor the weights that were there before; the next one is whole, for others to read."""
    checkpoint, folder = save_model(tmp_path / "run", new_gpt("gpt2")), tmp_path / "hf"
    export(checkpoint, folder)

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    check_error("no space left", export, checkpoint, folder, overwrite=True)
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(folder)
    monkeypatch.undo()
    export(checkpoint, folder, overwrite=True)
    AutoModelForCausalLM.from_pretrained(folder)
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in folder.iterdir())


def test_what_cannot_be_exported_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    gpt, folder = new_gpt("gpt2"), tmp_path / "hf"
    gpt.transformer.wpe.weight.data[0, 0] = 1e5
    checkpoint = save_model(tmp_path, gpt)
    check_error("transformer.wpe.weight.*bfloat16", export, checkpoint, folder, "float16")
    other = new_gpt("llama")
    other.config.gelu = "exact"  # as a new field would be that config_to_hf does not know, and logits do not show
    line = error_line(export_hf.build_hf_model, other, get_tokenizer("bytes"), False)
    assert "gelu=exact is not in the config.json of llama; if you changed model.py, describe" in line
    # changes of model.py: a soft cap, which small logits do not show, and ReLU squared in the MLP
    with monkeypatch.context() as patch:
        patch.setattr("model.compute_logits", lambda x, weight, *_: 30 * torch.tanh(x @ weight.t() / 30))
        untrained = save_model(tmp_path / "new", GPT(gpt.config))
        check_error("GPT2LMHeadModel computes different logits", export, untrained, folder)
    monkeypatch.setattr(GPT2MLP, "forward", lambda mlp, x: mlp.c_proj(F.relu(mlp.c_fc(x)).square()))
    check_error("GPT2LMHeadModel computes different logits", export, checkpoint, folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    check_error("pip install transformers", export, checkpoint, folder)
    assert not folder.exists()
