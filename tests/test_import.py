"""Models trained elsewhere, against transformers: Hugging Face folders, OpenAI's GPT-2, nanoGPT's ckpt.pt."""
import json
import math
import sys
from fnmatch import fnmatch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from checkpoint import describe_model, load_checkpoint, load_model
from conftest import TINY, check_error, error_line, load, new_gpt, read_log, refused, run, save_model, tokens
from export_hf import to_hf, tokenizer_to_hf
from hf_tokenizer import FILES
from import_hf import LLAMA3_ROPE, config_from_hf, config_to_hf, hub_name, import_transformers
from tokenizer import get_tokenizer

import_transformers()  # without its progress bars, which would stand among the errors


def load_refused(path, words):
    """Loading path ends in one line, which names it and matches the words."""
    check_error(f"^error: {path}: .*{words}", load_model, path, "cpu")


def new_gpt2(vocab_size=384, **changes):
    """transformers' GPT-2, none of whose weights is as it was initialised."""
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=vocab_size, n_positions=48, n_embd=32, n_layer=2, n_head=4, **changes)).eval()
    for p in theirs.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return theirs


@torch.no_grad()
def load_with_logits_of(theirs, path):
    """load_model, after which the model computes the logits of transformers' model."""
    ours, loaded = load_model(path, "cpu")
    assert (ours(tokens())[..., :theirs.config.vocab_size] - theirs(tokens()).logits).abs().max() < 1e-5
    return ours, loaded


# -----------------------------------------------------------------------------
# what transformers saved

def test_openais_layout_is_padded_to_our_vocabulary(tmp_path, capsys):
    """As on the hub: no prefix, masks among the weights, 50257 ids; a .bin with the head, safetensors without it."""
    theirs = new_gpt2(50257)
    state = {name.removeprefix("transformer."): tensor.clone() for name, tensor in theirs.state_dict().items()}
    state |= {f"h.1.attn.{name}": torch.ones(1, 1, 48, 48) for name in ("bias", "masked_bias")}
    theirs.config.to_json_file(tmp_path / "config.json")
    torch.save(state, tmp_path / "pytorch_model.bin")
    load_with_logits_of(theirs, tmp_path)
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")  # transformers prefers it
    ours, loaded = load_with_logits_of(theirs, tmp_path)
    assert capsys.readouterr().err == ""  # neither warnings nor a progress bar
    rows = ours.transformer.wte.weight
    assert torch.allclose(rows[50257:], rows[:50257].mean(0).expand(47, -1), atol=1e-6) and len(rows) == 50304
    assert ours(tokens()).argmax(-1).max() < 50257
    assert (loaded["tokenizer"], loaded["stage"], loaded["iter_num"]) == ("gpt2", "base", 0)
    assert math.isnan(loaded["val_loss"]) and "nan" not in describe_model(loaded)


def test_the_four_names_are_fetched_from_the_hub(tmp_path, monkeypatch):
    new_gpt2().save_pretrained(tmp_path / "hub")
    asked = []

    def fetch(repo, allow_patterns):
        for name in (*FILES, "config.json", "model.safetensors", "model-00001-of-00002.safetensors"):
            assert any(fnmatch(name, pattern) for pattern in allow_patterns), name
        asked.append(repo)
        if len(asked) > 4:
            raise LocalEntryNotFoundError("no network")
        return tmp_path / "hub"

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    names = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    assert all(load_checkpoint(name)["path"] == name for name in names)
    assert asked == [f"openai-community/{name}" for name in names]
    load_refused("gpt2-xl", "no connection to the hub.*openai-community/gpt2-xl.*a Hugging Face folder")
    (tmp_path / "hub/model.safetensors").unlink()
    asked.clear()  # the network is back
    load_refused("gpt2", "openai-community/gpt2 has no safetensors on the hub")
    (tmp_path / "hub/adapter_config.json").touch()
    load_refused(tmp_path / "hub", "it holds PEFT's adapters; merge them")
    (tmp_path / "hub/model.safetensors").touch()  # beside its base, too
    load_refused(tmp_path / "hub", "it holds PEFT's adapters; merge them")
    (tmp_path / "hub/adapter_config.json").unlink()
    (tmp_path / "hub/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    load_refused(tmp_path / "hub", "model.safetensors is only a pointer to the file; run git lfs pull")


def test_on_windows_a_name_on_the_hub_is_a_path_with_a_backslash(monkeypatch):
    monkeypatch.setattr("os.sep", "\\")
    assert hub_name("Qwen\\Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_weights_that_are_finer_than_config_json_says_are_not_rounded(tmp_path):
    theirs = new_gpt2()
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    load_with_logits_of(theirs, tmp_path)


@pytest.mark.parametrize("rope", [
    {"rope_theta": 5000.0, "rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}])
def test_rotary_positions_are_read_as_old_and_new_versions_write_them(rope):
    config = new_gpt("qwen3", rope_theta=5000.0).config
    fields = {**config_to_hf(config), **rope}
    if "rope_parameters" in rope:
        del fields["rope_theta"]
    assert config_from_hf(transformers.AutoConfig.for_model(**fields)) == config


# -----------------------------------------------------------------------------
# refusals

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{variant: a folder that loads}. Each test writes its own config.json there."""
    paths = {variant: tmp_path_factory.mktemp(variant) for variant in ("gpt2", "llama", "qwen3", "llama_mla")}
    for variant, path in paths.items():
        gpt = new_gpt(variant)
        torch.save(to_hf(gpt.state_dict(), gpt.config), path / "pytorch_model.bin")
        (path / "config.json").write_text(json.dumps(config_to_hf(gpt.config)))
        load_model(path, "cpu")
    return paths


LOGITS = "computes different logits"


@pytest.mark.parametrize("variant, change, words", [
    ("gpt2", {"model_type": "bert"}, "model_type='bert'.* gpt2, .*qwen3"),
    ("gpt2", {"activation_function": "relu"}, "activation_function='relu'.*'gelu_new'"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, LOGITS),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
    ("gpt2", {"vocab_size": 32000}, "No such file.*tokenizer.json"),
    ("gpt2", {"n_layer": 4}, "missing_keys.*transformer.h.3"),
    ("gpt2", {"n_positions": 64, "n_ctx": 64}, "mismatched_keys.*transformer.wpe.weight"),
    ("gpt2", {"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
    *(("llama", {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 1e4, "factor": 8.0, name: value}}, f"{name}={value}")
      for name, value in (("low_freq_factor", 2.0), ("high_freq_factor", 8.0),
                          ("original_max_position_embeddings", 24))),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'.*'default'"),
    ("llama", {"attention_bias": True}, "attention_bias=True.*False"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True.*False"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
    ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("llama", {"model_type": "qwen2"}, "missing_keys.*q_proj.bias"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, ""),
    ("llama_mla", {"first_k_dense_replace": 1}, "first_k_dense_replace=1"),
    ("llama_mla", {"rope_interleave": False}, LOGITS),
], ids=str)
def test_what_model_py_does_not_compute_is_refused(variant, change, words, folders):
    (folders[variant] / "config.json").write_text(json.dumps({**config_to_hf(new_gpt(variant).config), **change}))
    load_refused(folders[variant], words)


def test_a_folder_that_brings_code_does_not_run_it(tmp_path):
    new_gpt2().save_pretrained(tmp_path)
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_checkpoint(tmp_path)  # as the GPT-2 that it says it is
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mine"}))
    load_refused(tmp_path, "custom code")
    assert not (tmp_path / "ran").exists()


def test_a_damaged_or_incomplete_folder_is_refused(tmp_path):
    new_gpt2(50304).save_pretrained(tmp_path)
    tokenizer, weights, config = (tmp_path / name for name in ("tokenizer.json", "model.safetensors", "config.json"))
    tokenizer_to_hf(get_tokenizer("gpt2")).save(str(tokenizer))
    assert load_checkpoint(tmp_path)["tokenizer"] == "gpt2"
    tokenizer.write_text(json.dumps({"model": {"vocab": {"\u0120the": 262}}}))
    load_refused(tmp_path, "not a readable checkpoint: .*ModelUntagged")
    tokenizer.write_text("{")
    load_refused(tmp_path, "Expecting")
    tokenizer_to_hf(get_tokenizer("bytes")).save(str(tokenizer))  # not GPT-2's, so the model's own
    assert load_checkpoint(tmp_path)["tokenizer"] == {
        path.name: path.read_text() for path in (tokenizer, tmp_path / "generation_config.json")}
    tokenizer.unlink()
    for module in "ln_f", "wte":
        broken = new_gpt2(50304)
        broken.transformer.get_submodule(module).weight.data[3] = math.nan
        broken.save_pretrained(tmp_path)
        load_refused(tmp_path, "its logits are not finite")
    weights.write_bytes(weights.read_bytes()[:100_000])
    load_refused(tmp_path, "Safetensor")
    weights.unlink()
    load_refused(tmp_path, "no file named")
    config.write_text('{"model_type')
    load_refused(tmp_path, "not a valid JSON file")
    config.write_text('{"n_layer": 2}')  # of a run that has saved nothing
    load_refused(tmp_path, "its run may have saved none.*config.json.*expected a ckpt.pt of ours or nanoGPT's")
    config.unlink()
    load_refused(tmp_path, "its run may have saved none.*config.json.*expected a ckpt.pt of ours or nanoGPT's")
    (tmp_path / "adapter_config.json").touch()  # beside which PEFT writes no config.json
    load_refused(tmp_path, "it holds PEFT's adapters")


def test_our_own_checkpoints_load_without_transformers(tmp_path, monkeypatch):
    for name in "transformers", "huggingface_hub":
        monkeypatch.setitem(sys.modules, name, None)  # so that importing it fails
    monkeypatch.delitem(sys.modules, "import_hf")
    load_model(save_model(tmp_path, new_gpt("llama")), "cpu")
    (tmp_path / "ckpt.pt").unlink()  # the folder could now be Hugging Face's
    line = error_line(load_checkpoint, tmp_path)
    assert f"{tmp_path}: holds no ckpt.pt; if it is a Hugging Face model: " in line
    assert "pip install transformers" in line


# -----------------------------------------------------------------------------
# nanoGPT's ckpt.pt

def nanogpt(bias, prefix="", vocab_size=384):
    """A model of transformers that computes what nanoGPT does, and the dict that nanoGPT's train.py would save."""
    theirs = new_gpt2(vocab_size, activation_function="gelu")
    model = {}
    for name, tensor in theirs.state_dict().items():
        if name.endswith("bias") and not bias:
            tensor.zero_()
        else:  # transformers' Conv1D has the transposed matrix of an nn.Linear
            model[prefix + name] = tensor.t() if ".h." in name else tensor
    model[prefix + "transformer.h.0.attn.bias"] = torch.ones(1, 1, 48, 48).tril()  # the mask, of torch before 2.0
    args = dict(n_layer=2, n_head=4, n_embd=32, block_size=48, bias=bias, vocab_size=vocab_size, dropout=0.0)
    return theirs, {"model": model, "optimizer": {"state": {}}, "model_args": args, "iter_num": 250,
                    "best_val_loss": torch.tensor(3.25), "config": {"dataset": "openwebtext", "bias": bias}}


@pytest.mark.parametrize("bias, prefix, vocab_size", [(True, "", 50304), (False, "_orig_mod.", 50257)])
def test_nanogpts_checkpoint_has_its_own_logits(bias, prefix, vocab_size, tmp_path):
    theirs, checkpoint = nanogpt(bias, prefix, vocab_size)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    _, loaded = load_with_logits_of(theirs, tmp_path)
    assert (loaded["iter_num"], loaded["val_loss"], loaded["tokenizer"]) == (250, 3.25, "gpt2")
    assert loaded["config"]["dataset"] == "openwebtext"
    assert loaded["model_args"]["max_seq_len"] == 48 and loaded["model_args"]["vocab_size"] == 50304


def test_a_run_starts_from_nanogpts_weights(shards, tmp_path):
    """With their exact GELU, which is not a setting of the run."""
    theirs, checkpoint = nanogpt(bias=True)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    small = [arg for arg in TINY if not arg.startswith("--n_")] + [f"--data_dir={shards}"]
    run("train_gpt2.py", *small, f"--init_from={tmp_path}/ckpt.pt", f"--out_dir={tmp_path}/o", "--learning_rate=1e-3")
    ids = torch.from_numpy(np.fromfile(shards / "val_000000.bin", dtype="<u2")[512:].astype(np.int64))
    with torch.no_grad():  # on the 16 rows of the validation
        logits = theirs(ids[:512].view(16, 32)).logits
    log, loss = read_log(tmp_path / "o", "val_loss"), F.cross_entropy(logits.flatten(0, 1), ids[1:513]).item()
    assert log["val_loss", 0] == pytest.approx(loss, abs=1e-4) and log["val_loss", 20] < loss - 0.1
    assert load(tmp_path / "o")["model_args"]["gelu"] == "exact"
    assert "without its optimizer" in refused("train_gpt2.py", *small, "--init_from=resume", f"--out_dir={tmp_path}")


def test_a_nanogpt_checkpoint_that_does_not_fit_is_refused(tmp_path):
    _, checkpoint = nanogpt(bias=True)
    for change, words in (dict(n_layer=3), "transformer.h.2"), (dict(vocab_size=65), "65.*50257"):
        checkpoint["model_args"] |= change
        torch.save(checkpoint, tmp_path / "ckpt.pt")
        load_refused(tmp_path / "ckpt.pt", words)
