"""To and from Hugging Face folders, and from nanoGPT's ckpt.pt, against transformers or a formula written out."""
import json
import math
import sys
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import export_hf
from checkpoint import load_checkpoint, load_model
from conftest import TINY, read_log, refused, run, write_shards
from dataloader import TokenDataset
from export_hf import config_from_hf, config_to_hf, to_hf
from model import GPT2MLP, GPTConfig
from sample import generate
from test_generate import save
from test_model import VARIANTS, new_gpt, tokens
from tokenizer import chat_tokens, get_tokenizer, render_chat

CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "llama_gqa": "LlamaForCausalLM",
           "qwen3": "Qwen3ForCausalLM", "gpt2_mla": "GPT2LMHeadModel", "llama_mla": "DeepseekV3ForCausalLM",
           "llama_mla_q": "DeepseekV3ForCausalLM"}
THETA = {"llama": {"rope_theta": 5000.0}}  # another than the default of either side
RUN = {"config": {"max_seq_len": 96, "learning_rate": 3e-4}, "iter_num": 1234, "val_loss": 2.3456, "val_iter": 1200}


def export(checkpoint, folder, dtype="float32", shard_size=10 ** 9):
    export_hf.export(str(checkpoint), str(folder), dtype, shard_size, overwrite=False)


def weights(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def load_refused(path, capsys):
    """The one line that says why path cannot be loaded."""
    with pytest.raises(SystemExit) as end:
        load_model(path, "cpu")
    error, = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert end.value.code == 2 and error.startswith(f"error: {path}: "), error
    return error


@pytest.fixture(scope="module", params=VARIANTS)
def exported(request, tmp_path_factory):
    """variant, the model, and the folder it was exported to; once as a user starts it."""
    tmp = tmp_path_factory.mktemp(request.param)
    gpt = new_gpt(request.param, max_seq_len=96, dropout=0.1, **THETA.get(VARIANTS[request.param]["arch"], {})).eval()
    checkpoint = save(tmp, gpt, **RUN)
    if request.param == "gpt2_mla":
        output = run("export_hf.py", f"--checkpoint={checkpoint}", f"--out_dir={tmp}/hf")
        assert "step 1234, val loss 2.3456 at step 1200" in output and "GPT2LMHeadModel, float32" in output
    else:
        export(checkpoint, tmp / "hf")
    return request.param, gpt, tmp / "hf"


# -----------------------------------------------------------------------------
# export: each variant, opened by transformers alone

def test_transformers_has_the_same_logits_and_greedy_text(exported):
    variant, gpt, folder = exported
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(theirs).__name__ == CLASSES[variant] and not any(report.values()), report
    assert theirs.dtype == torch.float32 and theirs.config.max_position_embeddings == 96
    assert CLASSES[variant] != "GPT2LMHeadModel" or theirs.config.n_ctx == 96  # for llama.cpp's converter
    written = json.loads((folder / "config.json").read_text())
    assert written.get("rope_theta", 10000) == gpt.config.rope_theta  # where transformers 4 reads it
    idx = tokens(2, 96)
    with torch.no_grad():
        assert (theirs(idx).logits - gpt(idx)).abs().max() < 1e-4
    prompt = tokens(1, 20, seed=3) % 256
    ours = [token for token, in generate(gpt, [prompt[0].tolist()], 64, temperature=0, n_vocab=261)]
    assert theirs.generation_config.eos_token_id == [260, 256]
    stop = next((i + 1 for i, token in enumerate(ours) if token in (256, 260)), 64)  # after <|endoftext|> or <|end|>
    assert theirs.generate(prompt, max_new_tokens=64, do_sample=False)[0, 20:].tolist() == ours[:stop]
    theirs.generation_config.eos_token_id = None
    assert theirs.generate(prompt, max_new_tokens=64, do_sample=False)[0, 20:].tolist() == ours and len(ours) == 64


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
    assert again["model"].keys() == gpt.state_dict().keys()
    assert all(torch.equal(again["model"][name], tensor) for name, tensor in gpt.state_dict().items())


def test_the_card_says_what_it_is_and_how_to_load_it(exported):
    variant, gpt, folder = exported
    card = (folder / "README.md").read_text()
    n_params = sum(tensor.numel() for tensor in weights(folder).values())
    for words in ("A chat model", CLASSES[variant], f"{n_params:,} parameters", "`run.json` has the settings",
                  'AutoModelForCausalLM.from_pretrained("hf")', "apply_chat_template", "spells a special token"):
        assert words in card.replace("\n", " "), words
    assert variant == "gpt2_mla" or n_params == sum(p.numel() for p in gpt.parameters())


def test_the_card_names_base_and_data_of_the_hub(tmp_path):
    """In YAML that the hub reads; the license is left to fill in."""
    def metadata(**training):
        checkpoint = save(tmp_path, new_gpt("gpt2", n_layer=1), config=training)
        export(checkpoint, tmp_path / str(len(list(tmp_path.iterdir()))))
        card = max(tmp_path.glob("*/README.md"), key=lambda path: path.stat().st_mtime_ns)
        data = ModelCard.load(card).data
        return data.license, data.base_model, data.datasets

    chat = {"init_from": "auto:gpt2-medium",
            "data": "HuggingFaceTB/smoltalk/all:2,x/y-2.5,mine/chats.jsonl,a.jsonl,/home/me/chats,http://x/y,o'w/n\"a"}
    assert metadata(**chat) == ("other", ["openai-community/gpt2-medium"], ["HuggingFaceTB/smoltalk", "x/y-2.5"])
    assert metadata(data=None, init_from=3) == ("other", [], [])
    (tmp_path / "meta.json").write_text('{"source": {"dataset": "HuggingFaceFW/fineweb-edu"}}')
    base = {"init_from": "scratch", "data_dir": str(tmp_path)}
    assert metadata(**base) == ("other", [], ["HuggingFaceFW/fineweb-edu"])
    assert metadata() == metadata(init_from="out/ckpt.pt", data="my.jsonl", data_dir="not/here") == ("other", [], [])


def test_an_older_latent_models_norms_keep_their_eps(tmp_path):
    """Its checkpoint has none, and its blocks had 1e-5; exported and loaded again, too."""
    gpt = new_gpt("llama_mla", norm_eps=1e-5)
    assert new_gpt("llama_mla").config.norm_eps == 1e-6
    checkpoint = torch.load(save(tmp_path, gpt), weights_only=True)
    del checkpoint["model_args"]["norm_eps"]
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    export(tmp_path / "ckpt.pt", tmp_path / "hf")
    for path in tmp_path / "ckpt.pt", tmp_path / "hf":
        model, _ = load_model(path, "cpu")
        assert model.config == gpt.config and model.transformer.ln_f.eps == 1e-5
        torch.testing.assert_close(model(tokens()), gpt.eval()(tokens()))


@pytest.mark.parametrize("fields, tokenizer, words", [
    ({}, "bytes", "does not know the tokenizer"),
    ({"arch": "llama", "attention": "mla"}, "gpt2", "without q_lora_rank"),
    ({"arch": "llama", "attention": "mla", "q_lora_rank": 8, "norm_eps": 1e-5}, "gpt2", "gives all norms one eps"),
    ({"intermediate_size": 32}, "gpt2", "not 4 n_embd wide"), ({"gelu": "exact"}, "gpt2", "in place of the exact one"),
    ({}, "gpt2", ""), ({"attention": "mla"}, "gpt2", ""), ({"arch": "llama", "intermediate_size": 32}, "gpt2", ""),
    ({"arch": "llama", "attention": "mla", "q_lora_rank": 8}, "gpt2", "")])
def test_the_card_says_what_llama_cpp_does_wrong(fields, tokenizer, words):
    config = GPTConfig(**{"n_layer": 1, "n_head": 2, "n_embd": 16, **fields})
    fault = export_hf.llama_cpp_fault(config, tokenizer)
    assert words in fault and bool(words) == bool(fault)
    loaded = {"stage": "base", "tokenizer": tokenizer, "config": {}}
    card = export_hf.model_card("name", loaded, fault, new_hf_model())
    assert (f"**Not for llama.cpp**: {fault}." in card) == bool(fault) != ("llama.cpp's `convert" in card)


def new_hf_model():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1))


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "gpt2_mla"])
def test_transformers_own_config_says_the_same(variant, tmp_path):
    """Our config, written by transformers or as an older version wrote it, gives the same GPTConfig."""
    config = new_gpt(variant, **THETA.get(VARIANTS[variant]["arch"], {})).config
    ours = config_to_hf(config)
    for_model = transformers.AutoConfig.for_model
    for_model(**ours).save_pretrained(tmp_path)
    assert config_from_hf(transformers.AutoConfig.from_pretrained(tmp_path)) == config
    assert config_from_hf(for_model(**ours)) == config
    if config.arch == "llama":
        assert config_from_hf(for_model(**ours, rope_scaling=None)) == config
        rope = {"rope_type": "default", "rope_theta": ours.pop("rope_theta")}
        assert config_from_hf(for_model(**ours, rope_parameters=rope)) == config
        assert ours.pop("rms_norm_eps") == (1e-6 if config.attention == "mla" else 1e-5)
        if config.attention == "mha":  # transformers' default is 1e-6
            with pytest.raises(ValueError, match="rms_norm_eps=1e-06: expected 1e-05"):
                config_from_hf(for_model(**ours, rope_parameters=rope))


# -----------------------------------------------------------------------------
# export: tokens and conversations

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
    if request.param == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    tmp = tmp_path_factory.mktemp(request.param)
    gpt = new_gpt("gpt2", n_layer=1, vocab_size={"bytes": 384, "gpt2": 50304}[request.param])
    export(save(tmp, gpt, request.param), tmp / "hf")
    return get_tokenizer(request.param), AutoTokenizer.from_pretrained(tmp / "hf")


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
    assert theirs.bos_token_id == theirs.pad_token_id == ours.eot_token and theirs.eos_token_id == expected["<|end|>"]
    for text, i in expected.items():
        assert theirs(text)["input_ids"] == [i] and theirs.decode([i]) == text
        assert theirs.decode([i], skip_special_tokens=True) == ""
        assert theirs(text, split_special_tokens=True)["input_ids"] == ours.encode_ordinary(text)  # as the card says


@pytest.mark.parametrize("talk", TALKS, ids=["one", "system", "odd"])
def test_the_chat_template_renders_the_ids_of_render_chat(exported_tokenizer, talk):
    ours, theirs = exported_tokenizer
    messages = [{"role": role, "content": content} for role, content in talk]
    ids, trained = render_chat(ours, messages)
    rendered = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert rendered["input_ids"] == ids and rendered["assistant_masks"] == list(map(int, trained))
    prompted = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompted == ids + [chat_tokens(ours)["assistant"]]
    with pytest.raises(Exception, match="unknown role tool"):
        theirs.apply_chat_template([{"role": "tool", "content": "x"}])


def test_a_base_model_ends_with_the_document_and_has_no_chat_template(tmp_path):
    export(save(tmp_path, new_gpt("gpt2"), stage="base"), tmp_path / "hf")
    assert "apply_chat_template" not in (tmp_path / "hf" / "README.md").read_text()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert theirs.eos_token_id == generation.eos_token_id == 256 and theirs.chat_template is None
    assert generation.suppress_tokens == list(range(257, 384))
    assert load_checkpoint(tmp_path / "hf")["stage"] == "base"


# -----------------------------------------------------------------------------
# export: shards, dtypes, refusals

@pytest.mark.parametrize("variant", ["gpt2_mla", "llama_gqa"])
def test_several_files_hold_the_same_as_one(variant, tmp_path):
    checkpoint = save(tmp_path, new_gpt(variant))
    export(checkpoint, tmp_path / "one")
    export(checkpoint, tmp_path / "several", shard_size=150_000)
    files = sorted(file.name for file in (tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "several" / file).stat().st_size < 150_000 + 4_000 for file in files)  # and a header
    one, several = weights(tmp_path / "one"), weights(tmp_path / "several")
    assert one.keys() == several.keys() and all(torch.equal(one[name], several[name]) for name in one)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "several", output_loading_info=True)
    assert not any(report.values()) and torch.equal(theirs.state_dict()[sorted(one)[0]], one[sorted(one)[0]])
    again, single = (load_checkpoint(tmp_path / name)["model"] for name in ("several", "one"))
    assert all(torch.equal(again[name], single[name]) for name in single)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_to_the_dtype_asked_for(dtype, tmp_path):
    gpt = new_gpt("qwen3").eval()
    export(save(tmp_path, gpt), tmp_path / "hf", dtype)
    wanted = getattr(torch, dtype)
    again = load_checkpoint(tmp_path / "hf")["model"]
    assert all(torch.equal(again[name], tensor.to(wanted).float()) for name, tensor in gpt.state_dict().items())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert theirs.dtype == wanted
    with torch.no_grad():
        assert (theirs.float()(tokens()).logits - gpt(tokens())).abs().max() < 0.1


def test_a_folder_with_something_else_is_not_written_to(tmp_path, capsys):
    checkpoint = save(tmp_path / "run", new_gpt("gpt2"))
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    (full / "model-00001-of-00002.safetensors").write_text("of an earlier export")
    line = refused("export_hf.py", f"--checkpoint={checkpoint}", f"--out_dir={full}", "--overwrite=True")
    assert "full" in line and "is not empty" in line and (full / "thesis.txt").read_text() == "mine"
    (full / "run.json").write_text("{}")  # somebody else's
    assert "is not empty" in refused("export_hf.py", f"--checkpoint={checkpoint}", f"--out_dir={full}",
                                     "--overwrite=True")
    (full / "run.json").write_text(json.dumps(dict.fromkeys(export_hf.RUN_FACTS)))  # an export
    (full / "model_mine.safetensors").write_text("mine")
    for checkpoint_of, out_dir, overwrite, words in (
            (checkpoint, full, False, "--overwrite=True"), (full, full, True, "full: is not empty"),
            (checkpoint, tmp_path / "run", True, "run: is not empty"),
            ("nowhere", tmp_path / "new", True, "nowhere: not a readable checkpoint")):
        with pytest.raises(SystemExit):
            export_hf.export(checkpoint_of, out_dir, "float32", 10 ** 9, overwrite)
        assert words in capsys.readouterr().err
    export_hf.export(checkpoint, full, "float32", 10 ** 9, overwrite=True)
    assert (full / "thesis.txt").read_text() == (full / "model_mine.safetensors").read_text() == "mine"
    (full / "model_mine.safetensors").unlink()
    assert len(weights(full)) == len(load_checkpoint(full)["model"]) - 1  # without the head


def test_an_export_that_fails_halfway_leaves_nothing_that_opens(tmp_path, capsys, monkeypatch):
    """Nor the weights that were there before; the next one is whole, for others to read."""
    checkpoint, folder = save(tmp_path / "run", new_gpt("gpt2")), tmp_path / "hf"
    export(checkpoint, folder)

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(SystemExit):
        export_hf.export(str(checkpoint), str(folder), "float32", 10 ** 9, overwrite=True)
    assert "no space left" in capsys.readouterr().err
    assert "no file named" in load_refused(folder, capsys)
    monkeypatch.undo()
    export_hf.export(str(checkpoint), str(folder), "float32", 10 ** 9, overwrite=True)
    assert load_checkpoint(folder)["stage"] == "chat"
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in folder.iterdir())


def test_a_model_that_computes_something_else_is_refused_before_anything_is_written(tmp_path, capsys, monkeypatch):
    """As after a change of model.py: ReLU squared in the MLP."""
    monkeypatch.setattr(GPT2MLP, "forward", lambda mlp, x: mlp.c_proj(F.relu(mlp.c_fc(x)).square()))
    with pytest.raises(SystemExit):
        export(save(tmp_path, new_gpt("gpt2")), tmp_path / "hf")
    assert "GPT2LMHeadModel computes other logits" in capsys.readouterr().err and not (tmp_path / "hf").exists()


def test_an_export_without_transformers_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit):
        export(save(tmp_path, new_gpt("gpt2")), tmp_path / "hf")
    assert "pip install transformers" in capsys.readouterr().err and not (tmp_path / "hf").exists()


def test_float16_that_overflows_is_refused_before_anything_is_written(tmp_path, capsys):
    gpt = new_gpt("gpt2")
    gpt.transformer.wpe.weight.data[0, 0] = 1e5
    with pytest.raises(SystemExit):
        export(save(tmp_path, gpt), tmp_path / "hf", "float16")
    line = capsys.readouterr().err
    assert "transformer.wpe.weight" in line and "bfloat16" in line and not (tmp_path / "hf").exists()


# -----------------------------------------------------------------------------
# import: what transformers saved

def transformers_gpt2(vocab_size=384, **changes):
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=vocab_size, n_positions=48, n_embd=32, n_layer=2, n_head=4, **changes)).eval()
    for p in theirs.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return theirs


def test_transformers_gpt2_gives_the_same_logits_and_gradients(tmp_path):
    theirs = transformers_gpt2()
    theirs.save_pretrained(tmp_path)
    ours, loaded = load_model(tmp_path, "cpu")
    assert (loaded["tokenizer"], loaded["stage"], loaded["iter_num"]) == ("bytes", "base", 0)
    assert math.isnan(loaded["val_loss"])
    idx, targets = tokens(seed=1), tokens(seed=2)
    logits = theirs(idx).logits
    assert (ours(idx) - logits).abs().max() < 1e-5
    ours(idx, targets).backward()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    gradients = to_hf({name: p.grad for name, p in ours.named_parameters()}, ours.config)
    for name, p in theirs.named_parameters():
        assert (p.grad - gradients[name]).abs().max() < 1e-4 * max(1, p.grad.abs().max()), name


def test_openais_own_layout_is_padded_to_our_vocabulary(tmp_path):
    """As on the hub: no prefix, masks among the weights, 50257 ids; with the head, or without; a .bin as well."""
    theirs = transformers_gpt2(50257)
    state = {name.removeprefix("transformer."): tensor.clone() for name, tensor in theirs.state_dict().items()}
    state |= {f"h.{i}.attn.{name}": torch.ones(1, 1, 48, 48) for i in range(2) for name in ("bias", "masked_bias")}
    theirs.config.to_json_file(tmp_path / "config.json")
    idx = tokens()
    for left_out, save_as in (("", save_file), ("lm_head.weight", save_file), ("", torch.save)):
        state.pop(left_out, None)
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        save_as(state, tmp_path / ("model.safetensors" if save_as is save_file else "pytorch_model.bin"))
        ours, loaded = load_model(tmp_path, "cpu")
        assert loaded["tokenizer"] == "gpt2" and loaded["model_args"]["vocab_size"] == 50304
        with torch.no_grad():
            logits = ours(idx)
            assert (logits[..., :50257] - theirs(idx).logits).abs().max() < 1e-5
        rows = ours.transformer.wte.weight
        assert torch.allclose(rows[50257:], rows[:50257].mean(0).expand(47, -1), atol=1e-6)
        assert ours.lm_head.weight is rows
        assert logits.argmax(-1).max() < 50257


def test_a_folder_trains_and_samples(shards, tmp_path):
    theirs = transformers_gpt2()
    theirs.save_pretrained(tmp_path / "theirs")
    small = [arg for arg in TINY if not arg.startswith(("--n_", "--max_iters"))]
    small += [f"--data_dir={shards}"]
    run("train_gpt2.py", *small, f"--init_from={tmp_path}/theirs", f"--out_dir={tmp_path}/o", "--max_iters=5",
        "--learning_rate=1e-3")
    log = read_log(tmp_path / "o", "val_loss")
    x, y = map(torch.from_numpy, TokenDataset(str(shards), "val", 32)[range(16)])
    with torch.no_grad():
        loss = F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten()).item()
    assert log["val_loss", 0] == pytest.approx(loss, abs=1e-4) and log["val_loss", 5] < loss
    output = run("sample.py", f"--checkpoint={tmp_path}/theirs", "--max_new_tokens=3")
    assert "base model" in output and "nan" not in output
    line = refused("train_gpt2.py", *small, "--init_from=resume", f"--out_dir={tmp_path}/theirs")
    assert "init_from=resume" in line and "holds no run" in line


def test_the_four_names_are_fetched_from_the_hub(tmp_path, monkeypatch, capsys):
    transformers_gpt2(50257).save_pretrained(tmp_path / "hub")
    asked = []

    def fetch(repo, **_):
        asked.append(repo)
        return str(tmp_path / "hub")

    monkeypatch.setattr(export_hf, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    names = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    assert all(load_checkpoint(name)["path"] == name for name in names)
    assert asked == [f"openai-community/{name}" for name in names]

    def offline(repo, **rest):
        raise OSError("no network")

    monkeypatch.setattr(export_hf, "snapshot_download", offline)
    line = load_refused("gpt2-xl", capsys)
    assert "no network" in line and "a Hugging Face folder" in line


LOGITS = "computes other logits"


@pytest.mark.parametrize("variant, change, words", [
    ("gpt2", {"model_type": "bert"}, ["model_type='bert'", "gpt2", "qwen3"]),
    ("gpt2", {"activation_function": "relu"}, ["activation_function='relu'", "'gelu_new'"]),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, [LOGITS]),
    ("gpt2", {"scale_attn_weights": False}, [LOGITS]),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, ["layer_norm_epsilon=1e-06"]),
    ("gpt2", {"tie_word_embeddings": False}, ["tie_word_embeddings"]),
    ("gpt2", {"vocab_size": 32000}, ["32000", "50257"]),
    ("gpt2", {"n_layer": 4}, ["missing_keys", "transformer.h.3"]),
    ("gpt2", {"n_layer": 2}, ["unexpected_keys", "transformer.h.2"]),
    ("gpt2", {"n_positions": 64, "n_ctx": 64}, ["mismatched_keys", "transformer.wpe.weight"]),
    ("gpt2", {"n_embd": None}, []),
    ("gpt2", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, ["bitsandbytes"]),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 24}},
     ["rope_type='llama3'", "'default'"]),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, []),
    ("llama", {"attention_bias": True}, ["missing_keys", "k_proj.bias"]),
    ("llama", {"mlp_bias": True}, ["missing_keys", "down_proj.bias"]),
    ("llama", {"rms_norm_eps": 1e-6}, ["rms_norm_eps=1e-06", "1e-05"]),
    ("llama", {"hidden_act": "gelu"}, [LOGITS]),
    ("llama", {"head_dim": 32}, ["head_dim=32", "16"]),
    ("llama", {"tie_word_embeddings": True}, ["tie_word_embeddings=True"]),
    ("qwen3", {"use_sliding_window": True}, ["use_sliding_window=True"]),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, []),
    ("llama_mla", {"first_k_dense_replace": 1}, ["first_k_dense_replace=1"]),
    ("llama_mla", {"rope_interleave": False}, [LOGITS]),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else None)
def test_what_model_py_does_not_compute_is_refused(variant, change, words, tmp_path, capsys):
    gpt = new_gpt(variant)
    save_file({name: tensor.contiguous() for name, tensor in to_hf(gpt.state_dict(), gpt.config).items()
               if variant != "gpt2" or name != "lm_head.weight"}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(gpt.config)))
    load_model(tmp_path, "cpu")
    (tmp_path / "config.json").write_text(json.dumps({**config_to_hf(gpt.config), **change}))
    line = load_refused(tmp_path, capsys)
    assert all(word in line for word in words), line


def test_a_folder_that_brings_code_does_not_run_it(tmp_path, capsys):
    transformers_gpt2().save_pretrained(tmp_path)
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_checkpoint(tmp_path)  # as the GPT-2 that it says it is
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mine"}))
    assert "custom code" in load_refused(tmp_path, capsys)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_or_incomplete_folder_is_refused(tmp_path, capsys, monkeypatch):
    theirs = transformers_gpt2()
    theirs.save_pretrained(tmp_path)
    capsys.readouterr()
    load_checkpoint(tmp_path)
    assert capsys.readouterr() == ("", "")  # transformers would have a bar
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:len(whole) // 2])
    assert "Safetensor" in load_refused(tmp_path, capsys)
    (tmp_path / "model.safetensors").unlink()
    assert "no file named" in load_refused(tmp_path, capsys)
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(SystemExit):
        load_checkpoint(tmp_path)
    assert "pip install transformers" in capsys.readouterr().err


def test_a_folder_with_another_tokenizer_is_refused(tmp_path, capsys):
    transformers_gpt2(50304).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    assert "tokenizer.json is not gpt2's" in load_refused(tmp_path, capsys)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"\u0120the": 262}}}))
    load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{" + '"model_type')
    assert "not a valid JSON file" in load_refused(tmp_path, capsys)
    (tmp_path / "config.json").unlink()
    line = load_refused(tmp_path, capsys)
    assert "config.json" in line and "expected a ckpt.pt of ours or nanoGPT's" in line


# -----------------------------------------------------------------------------
# import: nanoGPT's ckpt.pt

def nanogpt_checkpoint(bias, prefix="", vocab_size=50304, n_layer=2, C=16, block_size=40):
    """A dict as nanoGPT's train.py saves it, with random weights under its names."""
    torch.manual_seed(0)
    shapes = {"transformer.wte.weight": (vocab_size, C), "transformer.wpe.weight": (block_size, C),
              "transformer.ln_f": (C,)}
    for i in range(n_layer):
        h = f"transformer.h.{i}."
        shapes |= {h + "ln_1": (C,), h + "attn.c_attn": (3 * C, C), h + "attn.c_proj": (C, C), h + "ln_2": (C,),
                   h + "mlp.c_fc": (4 * C, C), h + "mlp.c_proj": (C, 4 * C)}
    model = {}
    for name, shape in shapes.items():
        model[name if name.endswith("weight") else name + ".weight"] = 0.5 * torch.randn(shape)
        if bias and not name.endswith("weight"):
            model[name + ".bias"] = torch.randn(shape[0])
    model["lm_head.weight"] = model["transformer.wte.weight"]
    args = dict(n_layer=n_layer, n_head=2, n_embd=C, block_size=block_size, bias=bias, vocab_size=vocab_size,
                dropout=0.0)
    return {"model": {prefix + name: tensor for name, tensor in model.items()}, "optimizer": {"state": {}},
            "model_args": args, "iter_num": 250, "best_val_loss": torch.tensor(3.25),
            "config": {"dataset": "openwebtext", "bias": bias}}


def nanogpt_logits(model, idx, n_layer=2, n_head=2):
    """The formula of its model.py, a position at a time, on its weights: idx (T,) -> (T, V)."""
    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], model[name + ".weight"], model.get(name + ".bias"), 1e-5)

    def linear(x, name):
        return F.linear(x, model[name + ".weight"], model.get(name + ".bias"))

    x = model["transformer.wte.weight"][idx] + model["transformer.wpe.weight"][:len(idx)]
    for i in range(n_layer):
        h = f"transformer.h.{i}."
        q, k, v = linear(norm(x, h + "ln_1"), h + "attn.c_attn").chunk(3, dim=-1)
        hd, y = q.size(-1) // n_head, torch.zeros_like(q)
        for t in range(len(idx)):
            for head in range(n_head):
                part = slice(head * hd, head * hd + hd)
                y[t, part] = (k[:t + 1, part] @ q[t, part] / math.sqrt(hd)).softmax(0) @ v[:t + 1, part]
        x = x + linear(y, h + "attn.c_proj")
        u = linear(norm(x, h + "ln_2"), h + "mlp.c_fc")
        x = x + linear(0.5 * u * (1 + torch.erf(u / math.sqrt(2))), h + "mlp.c_proj")
    return norm(x, "transformer.ln_f") @ model["transformer.wte.weight"].T


@pytest.mark.parametrize("bias, prefix, vocab_size", [(True, "", 50304), (False, "_orig_mod.", 50257)])
def test_nanogpts_checkpoint_has_its_own_logits(bias, prefix, vocab_size, gpt2_vocabulary, tmp_path):
    theirs = nanogpt_checkpoint(bias, prefix, vocab_size)
    torch.save(theirs, tmp_path / "ckpt.pt")
    ours, loaded = load_model(tmp_path, "cpu")
    assert (loaded["iter_num"], loaded["val_loss"], loaded["tokenizer"]) == (250, 3.25, "gpt2")
    assert loaded["config"]["dataset"] == "openwebtext"
    assert loaded["model_args"]["max_seq_len"] == 40 and loaded["model_args"]["vocab_size"] == 50304
    idx = torch.randint(0, 50257, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model = {name.removeprefix(prefix): tensor for name, tensor in theirs["model"].items()}
        expected = nanogpt_logits(model, idx)
        assert (ours(idx[None])[0, :, :vocab_size] - expected).abs().max() < 1e-4  # of logits of up to 10
    if bias:  # and out again, with its own activation
        export(tmp_path, tmp_path / "hf")
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(idx[None]).logits[0]
        assert (logits - expected).abs().max() < 1e-4


def test_a_run_starts_from_nanogpts_weights(gpt2_vocabulary, tmp_path):
    data = write_shards(tmp_path / "data", "gpt2", train=3000, val=500)
    torch.save(nanogpt_checkpoint(bias=False), tmp_path / "ckpt.pt")
    args = ["--max_seq_len=32", "--batch_size=2", "--gradient_accumulation_steps=1", "--max_iters=2",
            "--warmup_iters=0", "--eval_iters=1", "--compile=False", "--device=cpu", "--dtype=float32",
            f"--data_dir={data}"]
    run("train_gpt2.py", *args, f"--init_from={tmp_path}/ckpt.pt", f"--out_dir={tmp_path}/o")
    assert torch.load(tmp_path / "o" / "ckpt.pt", weights_only=True)["model_args"]["gelu"] == "exact"
    assert "without its optimizer" in refused("train_gpt2.py", *args, "--init_from=resume", f"--out_dir={tmp_path}")


@pytest.mark.parametrize("change, words", [
    (dict(vocab_size=65), ["65", "50257"]), (dict(n_layer=3), ["transformer.h.2"]),
])
def test_a_nanogpt_checkpoint_that_does_not_fit_is_refused(change, words, tmp_path, capsys):
    theirs = nanogpt_checkpoint(True, vocab_size=change.get("vocab_size", 50304))
    theirs["model_args"] |= change
    torch.save(theirs, tmp_path / "ckpt.pt")
    line = load_refused(tmp_path / "ckpt.pt", capsys)
    assert all(word in line for word in words), line
