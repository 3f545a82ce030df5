"""Released models with their own tokenizers and chat templates, against transformers."""
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from chat_data import tokenize_conversation
from chat_format import chat_tokens, check_chat_format, decode_chat, render_chat
from checkpoint import check_tokenizer, load_checkpoint, load_model
from conftest import (ROOT, check_error, check_resumed, error_line, extra_flags, hellaswag, jsonl, patched, read_log,
                      refused, run, turns, write_lines)
from dataloader import TokenDataset
from evaluate import load_examples, score
from export_hf import export
from families import FAMILIES, write_family
from hf_tokenizer import HFTokenizer, read_files
from import_hf import config_from_hf
from model import rotary_table
from sample import generate, generation_limits
from tokenizer import encode, get_tokenizer

TALKS = [turns("What is a shard?", "the tokens of a file."),
         turns("Say hi.", "Hi!", "And in French, na\u00efve \U0001f44d?", "Salut, \u00e7a va?", system="Be brief."),
         turns("  indented\n\ncode:\n", "\n    x = 1\n", "one more", "two  spaces"),
         turns("1234567 + 1", "1234568")]
RUN = ["--max_seq_len=128", "--batch_size=2", "--gradient_accumulation_steps=2", "--dtype=float32", "--device=cpu",
       "--sample_tokens=8", "--log_interval=1", "--learning_rate=1e-3"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(name, folder, transformers' model, tokenizer)"""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_family(request.param, folder)
    return request.param, folder, theirs, HFTokenizer(read_files(folder))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    write_family("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    jsonl(path, [turns(f"What is {i} + {i}?", f"It is {2 * i}.", *["And then?", "Nothing."] * (i % 3))
                 for i in range(120)])
    return path


def learned_text(tokenizer, talk):
    """What a conversation trains on."""
    return decode_chat(tokenizer, [i for i, learn in zip(*render_chat(tokenizer, talk)) if learn])


def test_logits_gradients_and_greedy_text_equal_transformers(family):
    name, folder, theirs, tokenizer = family
    ours, loaded = load_model(folder, "cpu")
    assert loaded["stage"] == "chat" and ours.config.max_seq_len == theirs.config.max_position_embeddings
    idx = torch.randint(600, (2, 300), generator=torch.Generator().manual_seed(1))
    targets = idx.roll(1, 1)
    assert (ours(idx) - theirs(idx).logits).abs().max() < 1e-4
    ours.train()(idx, targets).backward()
    F.cross_entropy(theirs(idx).logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    pairs = [(ours.transformer.wte, theirs.model.embed_tokens), (ours.transformer.h[0].attn.q_proj,
             theirs.model.layers[0].self_attn.q_proj), (ours.transformer.h[1].mlp.down_proj,
             theirs.model.layers[1].mlp.down_proj), (ours.lm_head, theirs.lm_head)]
    for mine, its in pairs:
        assert (mine.weight.grad - its.weight.grad).abs().max() < 1e-4 * max(1, its.weight.grad.abs().max())
    theirs.zero_grad()

    prompt = render_chat(tokenizer, TALKS[0][:1], prompt=True)[0]
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None,
                               pad_token_id=0)[0, len(prompt):].tolist()
    assert [token for token, in generate(ours.eval(), [prompt], 40, temperature=0)] == expected


def test_a_positions_angle_is_llama_3s_far_away_too():
    """A few positions cannot tell one scaling from another."""
    config = FAMILIES["llama3"][0]
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1), torch.tensor([[0, 1, 100, 8191, 16383]]))
    table = rotary_table(config_from_hf(config), 16)[:, [0, 1, 100, 8191, 16383]]
    assert torch.allclose(table, torch.stack((cos[0, :, :8], sin[0, :, :8])), atol=2e-3)


def test_conversations_have_transformers_ids_and_the_answers_are_trained_on(family):
    name, folder, _, tokenizer = family
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    end = decode_chat(tokenizer, [chat_tokens(tokenizer)["end"]])
    for talk in TALKS:
        for prompt in (False, True):
            messages = talk[:-1] if prompt else talk
            text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt,
                                                 date_string="26 Jul 2024")
            expected = reference(text, add_special_tokens=False)["input_ids"]
            assert render_chat(tokenizer, messages, prompt)[0] == expected
        learned = learned_text(tokenizer, talk)
        answers = [message["content"] for message in talk if message["role"] == "assistant"]
        parts = re.sub("<think>\n\n</think>\n\n", "", learned).split(end)
        assert [part.strip() for part in parts] == [*(answer.strip() for answer in answers), ""], learned
        assert name != "qwen3" or learned.count("<think>") == 1


def test_a_special_token_that_is_typed_is_text(family):
    name, folder, _, tokenizer = family
    typed = "".join(tokenizer.special.values()) + " or not"
    plain = render_chat(tokenizer, turns("a", "b", system=None if name == "smollm2" else "c"))[0]
    talk = turns(typed, typed + ".", system=None if name == "smollm2" else typed)
    ids, _ = render_chat(tokenizer, talk)
    assert [i for i in ids if i in tokenizer.special] == [i for i in plain if i in tokenizer.special]
    assert decode_chat(tokenizer, ids).count(" or not") == (2 if name == "smollm2" else 3)
    assert not any(i in tokenizer.special for i in encode(tokenizer, typed).tolist())
    assert typed + "." in learned_text(tokenizer, talk)


def test_special_tokens_that_only_the_map_names(family, tmp_path):
    """special_tokens_map.json, which transformers reads if tokenizer_config.json lists no added tokens."""
    _, folder, _, tokenizer = family
    files = read_files(folder)
    settings = json.loads(files["tokenizer_config.json"])
    named = {key: settings.pop(key) for key in ("bos_token", "eos_token", "pad_token") if key in settings}
    assert named and "added_tokens_decoder" not in settings
    for name, content in {**files, "tokenizer_config.json": json.dumps(settings),
                          "special_tokens_map.json": json.dumps(named)}.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = reference.apply_chat_template(TALKS[0], tokenize=False, date_string="26 Jul 2024")
    ours = HFTokenizer(read_files(tmp_path))
    assert ours.named_tokens == tokenizer.named_tokens and ours.eot_token == tokenizer.eot_token
    assert render_chat(ours, TALKS[0])[0] == reference(text, add_special_tokens=False)["input_ids"]
    listed = json.loads(files["tokenizer_config.json"]) | {"added_tokens_decoder": {}}
    ignored = {"tokenizer_config.json": json.dumps(listed), "special_tokens_map.json": '{"eos_token": "other"}'}
    assert HFTokenizer({**files, **ignored}).named_tokens == tokenizer.named_tokens


def test_a_template_that_looks_for_a_special_token_in_a_message_is_refused(qwen3):
    """Qwen3's looks for </think>, which is not special in its tokenizer."""
    files = read_files(qwen3)
    bpe = Tokenizer.from_str(files["tokenizer.json"])
    bpe.add_special_tokens(["<think>", "</think>"])
    tokenizer = HFTokenizer({**files, "tokenizer.json": bpe.to_str()})
    with pytest.raises(ValueError, match="treats a message with a special token differently"):
        render_chat(tokenizer, turns("2 + 2?", "<think>\nhmm\n</think>\n\nfour"))


def test_special_tokens_that_the_tokenizer_would_not_find_are_refused(qwen3):
    files = read_files(qwen3)
    content = json.loads(files["tokenizer.json"])
    for token in content["added_tokens"]:
        token["single_word"] = True  # only between spaces
    tokenizer = HFTokenizer({**files, "tokenizer.json": json.dumps(content)})
    with pytest.raises(ValueError, match="finds other special tokens"):
        render_chat(tokenizer, TALKS[0])


@pytest.mark.parametrize("special, pre_tokenizer, gap, room", [
    (["<|endoftext|>", "<|end|>"], pre_tokenizers.ByteLevel(add_prefix_space=False), 0, False),
    (["<|endoftext|>"], pre_tokenizers.Metaspace(prepend_scheme="first"), 0, False),
    (["<|endoftext|>"], pre_tokenizers.ByteLevel(add_prefix_space=False), 1, False),
    (["<|endoftext|>"], pre_tokenizers.ByteLevel(add_prefix_space=False), 0, True)])
def test_chat_tokens_are_not_added_where_an_export_would_have_other_ids(special, pre_tokenizer, gap, room):
    """gap: ids that no token has, before the last token."""
    bpe = Tokenizer(models.BPE())
    byte_level = type(pre_tokenizer) is pre_tokenizers.ByteLevel
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizer, decoders.ByteLevel() if byte_level else decoders.Metaspace()
    letters = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    text = "Na\u00efve \U0001f44d  a\n\t\u4e2d\u6587 12 <|endoftext|>"
    bpe.train_from_iterator([text], trainers.BpeTrainer(special_tokens=special, initial_alphabet=letters))
    content = json.loads(bpe.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] += gap
    tokenizer = HFTokenizer({"tokenizer.json": json.dumps(content)})
    if not room:
        assert "no room for our chat tokens" in error_line(check_chat_format, "model", tokenizer, 2000)
    else:
        check_chat_format("model", tokenizer, 2000)


def test_a_text_begins_and_ends_with_the_tokens_of_its_family(family):
    name, _, _, tokenizer = family
    _, _, bos, eos, more = FAMILIES[name]
    assert tokenizer.special[tokenizer.eot_token] == ("<|endoftext|>" if "<|endoftext|>" in more else bos)
    assert tokenizer.bpe.token_to_id(eos) in tokenizer.stop_ids


def test_bytes_of_ids_are_those_of_the_text(family):
    """So bits per byte are right, and text that is printed id by id is whole."""
    _, _, _, tokenizer = family
    text = "Na\u00efve \U0001f44d  spaces\n\ttab \u4e2d\u6587 123"
    ids = encode(tokenizer, text).tolist()
    assert b"".join(map(tokenizer.decode_single_token_bytes, ids)).decode().removeprefix(" ") == text
    assert tokenizer.decode_single_token_bytes(tokenizer.n_vocab + 5) == b""
    assert encode(tokenizer, "half \ud800").tolist() == encode(tokenizer, "half \ufffd").tolist()


@pytest.mark.parametrize("flags", [[], extra_flags(lora=["--lora_rank=4"])], ids=["full", "lora"])
def test_a_tuned_model_leaves_as_it_came(family, flags, talks, tmp_path):
    """Twenty steps, then an export: transformers' class, logits and ids, and the same bits when it comes back."""
    name, folder, theirs, tokenizer = family
    run("chat_sft.py", *RUN, *flags, f"--init_from={folder}", f"--data={talks}", f"--chat_dir={tmp_path}/chat",
        f"--out_dir={tmp_path}/out", "--max_iters=20", "--compile=False")
    losses = [*read_log(tmp_path / "out", "train_loss").values()]
    assert losses[-1] < losses[0] - (0.05 if flags else 0.5)
    export(f"{tmp_path}/out", f"{tmp_path}/hf", "float32", 10 ** 9, False)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ours, _ = load_model(tmp_path / "out", "cpu")
    idx = torch.arange(600)[None, :400]
    expected = "LlamaForCausalLM" if name == "mistral" else type(theirs).__name__
    assert type(exported).__name__ == expected and (exported(idx).logits - ours(idx)).abs().max() < 1e-4
    back = load_checkpoint(tmp_path / "hf")
    for key, weights in ours.state_dict().items():
        assert torch.equal(weights, back["model"][key]), key
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (folder / file).read_bytes()
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = reference.apply_chat_template(TALKS[0], tokenize=False, date_string="26 Jul 2024")
    assert reference(text, add_special_tokens=False)["input_ids"] == render_chat(tokenizer, TALKS[0])[0]
    ends = {*np.ravel(exported.generation_config.eos_token_id).tolist()}
    assert ends == {chat_tokens(tokenizer)["end"], *tokenizer.stop_ids}


def test_an_exported_tokenizer_is_the_one_that_was_trained_with(tmp_path):
    """transformers 5 would rebuild a LlamaTokenizer, which has no space after special tokens."""
    write_family("tinyllama", tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace("PreTrainedTokenizerFast", "LlamaTokenizer"))
    export(f"{tmp_path}", f"{tmp_path}/hf", "float32", 10 ** 9, False)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids, _ = render_chat(get_tokenizer(f"{tmp_path}"), TALKS[3])
    assert reference.apply_chat_template(TALKS[3], return_dict=False) == ids and reference.eos_token == "</s>"


def test_a_sliding_window_limits_the_context(tmp_path):
    """Mistral 7B v0.1 has one; in a text that is no longer it hides nothing."""
    write_family("mistral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours, _ = load_model(tmp_path, "cpu")
    idx = torch.arange(64)[None]
    assert ours.config.max_seq_len == 64 and (ours(idx) - theirs(idx).logits).abs().max() < 1e-4


def test_packed_rows_equal_padded_ones_and_resumed_runs_uninterrupted_ones(qwen3, talks, tmp_path):
    args = [*RUN, f"--init_from={qwen3}", f"--data={talks}", f"--chat_dir={tmp_path}/chat", "--compile=False"]
    for pack in (True, False):
        run("chat_sft.py", *args, f"--pack={pack}", "--max_iters=0", "--eval_iters=4", f"--out_dir={tmp_path}/{pack}")
    packed, padded = (read_log(tmp_path / str(pack), "val_loss")["val_loss", 0] for pack in (True, False))
    assert packed == pytest.approx(padded, rel=1e-5)
    check_resumed("chat_sft.py", [*args, "--max_iters=20"], tmp_path)


@pytest.mark.slow
def test_two_ranks_train_the_model_of_one_and_nothing_is_recompiled(qwen3, talks, tmp_path):
    args = [*RUN, f"--init_from={qwen3}", f"--data={talks}", f"--chat_dir={tmp_path}/chat", "--max_iters=5"]
    run("chat_sft.py", *args, "--compile=True", f"--out_dir={tmp_path}/one")
    run("chat_sft.py", *args, "--compile=False", f"--out_dir={tmp_path}/two", ranks=2)
    one, two = (read_log(tmp_path / name, "train_loss", "recompiles") for name in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-4) and one["recompiles", 5] == 0


def test_a_tokenizer_of_ones_own_goes_from_text_to_chat_and_back(talks, tmp_path):
    """The lines of docs/howto.md."""
    commands = (ROOT / "docs/howto.md").read_text(encoding="utf-8").partition("```py\n")[2].partition("```")[0]
    (tmp_path / "texts").mkdir()
    for path in (ROOT / "docs").glob("*.md"):
        (tmp_path / "texts" / f"{path.stem}.txt").write_bytes(path.read_bytes())
    subprocess.run([sys.executable, "-c", commands.replace("32000", "800")], cwd=tmp_path, check=True)
    run("prepare_data.py", f"--files={tmp_path}/texts/*.txt", f"--tokenizer={tmp_path}/my-tokenizer",
        f"--data_dir={tmp_path}/data")
    small = ["--max_seq_len=64", "--batch_size=2", "--gradient_accumulation_steps=1", "--compile=False",
             "--sample_tokens=8", "--eval_iters=1", "--device=cpu"]
    run("train_gpt2.py", *small, f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/out", "--max_iters=2",
        "--warmup_iters=0", "--n_layer=1", "--n_head=2", "--n_embd=16")
    run("chat_sft.py", *small, f"--init_from={tmp_path}/out", f"--data={talks}", f"--chat_dir={tmp_path}/chat",
        f"--out_dir={tmp_path}/chat-out", "--max_iters=2")
    export(f"{tmp_path}/chat-out", f"{tmp_path}/base", "float32", 10 ** 9, overwrite=False)
    export(f"{tmp_path}/out", f"{tmp_path}/base", "float32", 10 ** 9, overwrite=True)
    left = read_files(tmp_path / "base")  # nothing of the chat model
    assert left.keys() == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert "<|end|>" not in "".join(left.values())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "base").eos_token == "<|endoftext|>"
    run("export_hf.py", f"--checkpoint={tmp_path}/chat-out", f"--out_dir={tmp_path}/hf")
    ours, reference = get_tokenizer(f"{tmp_path}/data/tokenizer"), transformers.AutoTokenizer.from_pretrained(
        tmp_path / "hf")
    ids = reference.apply_chat_template(TALKS[1])
    assert getattr(ids, "input_ids", ids) == render_chat(ours, TALKS[1])[0]
    output = run("sample.py", f"--checkpoint={tmp_path}/hf", "--chat=True", "--prompt=Hello", "--max_new_tokens=4",
                 "--device=cpu")
    assert "model: " in output


def test_text_trains_a_model_whose_vocabulary_is_full_and_leaves_its_template(qwen3, tmp_path):
    """Text needs none of the four chat tokens, and a folder without the template has the same tokenizer."""
    (tmp_path / "text.txt").write_text("some text " * 2000)
    (tmp_path / "plain").mkdir()
    shutil.copy(qwen3 / "tokenizer.json", tmp_path / "plain")
    run("prepare_data.py", f"--files={tmp_path}/text.txt", f"--data_dir={tmp_path}/data", "--val_tokens=500",
        f"--tokenizer={tmp_path}/plain")
    run("train_gpt2.py", f"--init_from={qwen3}", f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/out",
        "--max_iters=1", "--compile=False", *RUN)
    kept = load_checkpoint(tmp_path / "out")["tokenizer"]
    assert kept == read_files(qwen3) and "chat_template.jinja" in kept
    tokenizer = HFTokenizer(read_files(tmp_path / "plain"))
    full = {"tokenizer": tokenizer.files, "model_args": {"vocab_size": tokenizer.n_vocab}, "path": "full"}
    check_tokenizer("data", tokenizer, full)
    content = json.loads(tokenizer.files["tokenizer.json"])  # as another version of the library writes it
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    content["model"] |= {"merges": merges, "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    other = HFTokenizer({"tokenizer.json": json.dumps(content)})
    check_tokenizer("data", other, full)
    assert other.name != tokenizer.name
    content["added_tokens"] = [token | {"special": token["special"] and token["content"] != "<|im_end|>"}
                               for token in content["added_tokens"]]  # text that spells it is one token then
    other = HFTokenizer({"tokenizer.json": json.dumps(content)})
    assert other.name in error_line(check_tokenizer, "data", other, full)
    full["model_args"]["vocab_size"] -= 1
    assert f"{tokenizer.n_vocab - 1} ids" in error_line(check_tokenizer, "data", tokenizer, full)
    full["tokenizer"] = {  # the same ids for text, but texts begin with another token
        "tokenizer.json": tokenizer.files["tokenizer.json"].replace("<|endoftext|>", "<|other|>"),
        "tokenizer_config.json": json.dumps({"bos_token": "<|im_start|>"})}
    full["model_args"]["vocab_size"] += 1
    expected = "data: texts begin with the token .*, but with .* for the model full"
    check_error(expected, check_tokenizer, "data", tokenizer, full)


def test_threads_share_a_tokenizer(qwen3, tmp_path):
    write_lines(tmp_path / "text.jsonl", [{"text": f"{i} is a number, {i * i} its square. " * (i % 50)}
                                          for i in range(700)])
    for n in (1, 3):
        run("prepare_data.py", f"--files={tmp_path}/text.jsonl", f"--tokenizer={qwen3}", f"--data_dir={tmp_path}/{n}",
            "--val_tokens=500", f"--num_threads={n}")
    one, three = ((tmp_path / str(n) / "train_000000.bin").read_bytes() for n in (1, 3))
    assert one == three and len(one) > 10 ** 5


# -----------------------------------------------------------------------------
# vocabularies of more than 65,536 ids

def write_large_tokenizer(folder, size):
    """Bytes with the last 256 ids before <|endoftext|>: a number that wraps would be another one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"unused{i}" for i in range(size - 257)] + alphabet
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir()
    tokenizer.save(f"{folder}/tokenizer.json")


@pytest.mark.parametrize("size", [65_531, 151_932])
def test_large_vocabularies_from_text_to_chat(size, tmp_path, talks):
    write_large_tokenizer(tmp_path / "tokenizer", size)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    run("prepare_data.py", f"--files={tmp_path}/text.txt", f"--tokenizer={tmp_path}/tokenizer", "--val_tokens=1000",
        f"--data_dir={tmp_path}/data")
    shards = [(tmp_path / "data" / f"{name}_000000.bin").read_bytes() for name in ("val", "train")]
    wide = size + 4 > 2 ** 16 - 2
    assert np.frombuffer(shards[0], "<i4", 2).tolist() == ([20240801, 7] if wide else [20240520, 1])
    tokens = np.concatenate([np.frombuffer(shard[1024:], "<u4" if wide else "<u2") for shard in shards])
    tokenizer = get_tokenizer(f"{tmp_path}/data/tokenizer")
    assert tokens[0] == tokenizer.eot_token == size - 1
    assert b"".join(map(tokenizer.decode_single_token_bytes, tokens[1:].tolist())).decode() == text

    small = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--arch=llama", "--max_seq_len=64", "--batch_size=2",
             "--gradient_accumulation_steps=1", "--dtype=float32", "--device=cpu", "--compile=False",
             "--log_interval=1"]
    run("train_gpt2.py", *small, f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/out", "--max_iters=3",
        "--eval_iters=2", "--warmup_iters=0", "--learning_rate=0.01", "--sample_tokens=4")
    first, *_, last = read_log(tmp_path / "out", "train_loss").values()
    assert last < first == pytest.approx(np.log(-(-(size + 4) // 128) * 128), abs=0.1)
    output = run("evaluate.py", f"--checkpoint={tmp_path}/out", "--tasks=", f"--data_dir={tmp_path}/data",
                 "--eval_iters=1", "--device=cpu")
    assert "bits per byte, over" in output
    run("sample.py", f"--checkpoint={tmp_path}/out", "--prompt=The", "--max_new_tokens=4", "--device=cpu")
    run("chat_sft.py", f"--init_from={tmp_path}/out", f"--data={talks}", f"--chat_dir={tmp_path}/chat",
        f"--out_dir={tmp_path}/chat-out", "--max_iters=2", *small[-7:], "--sample_tokens=4", "--eval_iters=1",
        *extra_flags(distill=[f"--teacher={tmp_path}/out", "--teacher_cache=4"]))
    run("export_hf.py", f"--checkpoint={tmp_path}/chat-out", f"--out_dir={tmp_path}/hf")
    back = get_tokenizer(load_checkpoint(tmp_path / "hf")["tokenizer"])
    assert render_chat(back, TALKS[0]) == render_chat(tokenizer, TALKS[0])  # the four chat tokens have joined it


# -----------------------------------------------------------------------------
# refusals

def test_what_cannot_be_tuned_is_refused_with_its_reason(qwen3, talks, tmp_path):
    def changed(**settings):
        folder = tmp_path / f"changed{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for path in qwen3.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        for name, content in settings.items():
            name = name.replace("__", ".")
            if content is None:
                (folder / name).unlink()
            else:
                (folder / name).write_text(content)
        return folder

    def tune(folder):
        return refused("chat_sft.py", *RUN, f"--init_from={folder}", f"--data={talks}", f"--chat_dir={tmp_path}/chat",
                       f"--out_dir={tmp_path}/out")

    template = (qwen3 / "chat_template.jinja").read_text()
    tokenizer = HFTokenizer(read_files(changed(chat_template__jinja=None)))
    assert "its vocabulary no room" in error_line(check_chat_format, "model", tokenizer, tokenizer.n_vocab + 3)
    dated = HFTokenizer(read_files(changed(chat_template__jinja=template + "{{ strftime_now('%Y') }}")))
    assert "writes today's date" in error_line(check_chat_format, "model", dated, 640)
    assert "does not end it with a special token" in tune(
        changed(chat_template__jinja=template.replace("<|im_end|>", "[end]")))
    failing = changed(chat_template__jinja="{{ raise_exception('no') }}")
    assert "failed: no" in tune(failing)
    write_family("llama3", tmp_path / "llama3")  # has the same text tokens, and other special ones
    line = refused("chat_sft.py", *RUN, f"--init_from={qwen3}", f"--teacher={tmp_path}/llama3", f"--data={talks}",
                   f"--chat_dir={tmp_path}/chat", f"--out_dir={tmp_path}/out")
    assert "its token 600 is <|e" in line and "the student's <|endoftext|>" in line
    plain = changed(chat_template__jinja=None)  # so the four chat tokens follow the tokenizer's own
    longer = json.loads((qwen3 / "tokenizer.json").read_text())
    first = max(token["id"] for token in longer["added_tokens"]) + 1
    longer["added_tokens"].append({**longer["added_tokens"][-1], "id": first, "content": "<|new|>"})
    teacher = changed(chat_template__jinja=None, tokenizer__json=json.dumps(longer))
    line = refused("chat_sft.py", *RUN, f"--init_from={plain}", f"--teacher={teacher}", f"--data={talks}",
                   f"--chat_dir={tmp_path}/chat", f"--out_dir={tmp_path}/out")
    assert f"its token {first} is <|new|>, the student's <|system|>" in line
    # a message that the template refuses does not end a chat, and is gone; an answer, here three spaces, is stripped
    (tmp_path / "typed.txt").write_text("hi\nhello\nbye\n")
    picky = changed(chat_template__jinja=template.replace(
        "{%- set ns", "{%- if messages[0].content == 'hi' or messages[1:] and messages[1].content.startswith(' ') %}"
                      "{{ raise_exception('no') }}{%- endif %}{%- set ns", 1))
    patch = (f"import torch\nsys.stdin = open({str(tmp_path / 'typed.txt')!r})\n"
             f"torch.multinomial = lambda *_: torch.tensor([{encode(dated, ' ').tolist()}])")
    output = run(patched(tmp_path, "sample.py", patch), f"--checkpoint={picky}", "--chat=True", "--max_new_tokens=3",
                 "--device=cpu", "--top_k=0")
    assert output.count("(not understood: the model's chat template failed: no)") == 1, output
    assert output.count("model:    \n") == 2
    assert "failed: no" in refused("export_hf.py", f"--checkpoint={failing}", f"--out_dir={tmp_path}/exported")
    for name, content, words in [("tokenizer.json", "{", "Expecting"), ("tokenizer.json", None, "tokenizer.json"),
                                 ("tokenizer_config.json", "[]", "list")]:
        folder = changed(**{name.replace(".", "__"): content})
        line = error_line(load_checkpoint, folder)
        assert line.startswith(f"error: {folder}: not a readable checkpoint") and words in line
        assert "expected a ckpt.pt" not in line  # the right kind of folder


def changed_template(folder, old, new):
    files = read_files(folder)
    assert old in files["chat_template.jinja"]
    return HFTokenizer({**files, "chat_template.jinja": files["chat_template.jinja"].replace(old, new)})


def test_an_empty_system_message_replaces_the_templates_own(qwen3):
    tokenizer = changed_template(qwen3, "{%- set ns", "{%- if messages[0].role != 'system' %}{{- 'Be kind. ' }}"
                                                      "{%- endif %}{%- set ns")
    for system, kind in (None, True), ("", False), (" ", False):
        ids = tokenize_conversation(tokenizer, turns("a", "b", system=system), 64)[0][0]
        assert decode_chat(tokenizer, ids.tolist()).startswith("Be kind. ") == kind


def test_texts_are_scored_whatever_the_template_does_to_answers(qwen3, tmp_path):
    dated = changed_template(qwen3, "{%- set ns", "{{- strftime_now('%Y') }}{%- set ns")
    with pytest.raises(ValueError, match="writes today's date"):
        dated.end_token
    hellaswag(tmp_path, 3)
    examples = load_examples("hellaswag", dated, "chat", tmp_path)
    assert score(load_model(qwen3, "cpu")[0], dated, "chat", examples)["n"] == 3


def test_a_template_that_would_train_on_questions_is_refused(qwen3):
    """It ends only the last answer, or prompts for an answer in another way than it begins one, and says how."""
    talk = turns("a", "b", "secret", "d")
    for old, new in [("{{- '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor %}",
                      "{%- if loop.last %}{{- '<|im_end|>' }}{%- endif %}\n    {%- endif %}\n{%- endfor %}"),
                     ("assistant\\n' }}\n{%- endif %}", "assistant\\n<thought>' }}\n{%- endif %}")]:
        tokenizer = changed_template(qwen3, old, new)
        # the reason does not show the question, so that it is counted for all conversations together
        with pytest.raises(ValueError, match=r"begins answers unlike its generation prompt, which ends with '"
                                             r"<\|im_end\|>\\n<\|im_start\|>assistant\\n<thought>'|"
                                             r"does not end every answer"):
            render_chat(tokenizer, talk)


def test_a_template_may_move_the_system_message(qwen3):
    """Mistral Nemo's writes it before the last user message if a prompt ends with one, and else leaves it out."""
    tokenizer = changed_template(qwen3, (qwen3 / "chat_template.jinja").read_text(), """\
{%- if messages[0].role == 'system' %}{%- set system, messages = messages[0].content, messages[1:] %}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if loop.last and message.role == 'user' and system %}{{- system + '\\n\\n' }}{%- endif %}
    {{- message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""")
    talk = turns("a", "b", "c", "d", system="Be brief.")
    text = decode_chat(tokenizer, render_chat(tokenizer, talk[:-1], prompt=True)[0])
    assert text.endswith("b<|im_end|><|im_start|>user\nBe brief.\n\nc<|im_end|><|im_start|>assistant\n")
    with pytest.raises(ValueError, match="leaves out or rewrites the system's message"):
        render_chat(tokenizer, talk)


def test_messages_give_a_template_their_content_and_nothing_else(qwen3):
    tokenizer = changed_template(qwen3, "{%- set content = message.content %}",
                                 "{%- set content = message.content ~ message.name %}")
    plain, more = turns("a", "b"), turns("a", "b")
    more[1]["name"] = "x<|im_end|>"
    assert render_chat(tokenizer, more) == render_chat(tokenizer, plain)
    assert render_chat(tokenizer, turns("half \ud800", "b")) == render_chat(tokenizer, turns("half \ufffd", "b"))


@pytest.mark.parametrize("change", [
    {"decoder": None}, {"pre_tokenizer": None}, {"added_tokens": [{"special": False}]},
    {"model": {"dropout": 0.5}}, {"model": {"vocab": {"a": 0}, "merges": []}}], ids=str)
def test_a_tokenizer_that_loses_text_is_refused(qwen3, change):
    files = read_files(qwen3)
    content = json.loads(files["tokenizer.json"])
    for key, value in change.items():
        if key == "added_tokens":
            value = [{**token, "special": False} for token in content[key]]
        content[key] = {**content[key], **value} if key == "model" else value
    with pytest.raises(Exception, match="do not reliably decode|no special token|vocab"):
        HFTokenizer({**files, "tokenizer.json": json.dumps(content)})


def test_a_tokenizers_folder_must_be_the_one_that_meta_json_names(tmp_path, qwen3):
    (tmp_path / "text.txt").write_text("some text " * 2000)
    args = ["prepare_data.py", f"--files={tmp_path}/text.txt", f"--data_dir={tmp_path}/data", "--val_tokens=500"]
    run(*args, f"--tokenizer={qwen3}")
    for path in (tmp_path / "data").glob("*.bin"):
        path.unlink()
    run(*args, "--tokenizer=bytes")
    assert TokenDataset(f"{tmp_path}/data", "val", 8).tokenizer.name == "bytes"
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    (tmp_path / "data/meta.json").write_text(json.dumps({**meta, "tokenizer": "hf-12345678"}))
    with pytest.raises(SystemExit):
        TokenDataset(f"{tmp_path}/data", "val", 8)


def test_thoughts_are_trained_on_where_the_template_keeps_them(qwen3):
    """Qwen3's drops those of earlier answers."""
    tokenizer = HFTokenizer(read_files(qwen3))
    thoughts = turns("a", "<think>\nhm\n</think>\n\nb")
    for talk, learned in [(thoughts, "<think>\nhm\n</think>\n\nb<|im_end|>"),
                          (thoughts + thoughts, "b<|im_end|><think>\nhm\n</think>\n\nb<|im_end|>")]:
        assert learned_text(tokenizer, talk) == learned
    earlier = render_chat(tokenizer, [*thoughts, *turns("c")], prompt=True)[0]  # as sample.py sends them back
    assert "hm" not in decode_chat(tokenizer, earlier)
    for kept in ("<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n",
                 "reasoning_content.strip('\\n') +"):
        tokenizer = changed_template(qwen3, kept, "")  # as DeepSeek-R1-Distill's
        with pytest.raises(ValueError, match="drops the thoughts of the last answer"):
            render_chat(tokenizer, thoughts)


def test_a_template_that_prompts_for_thoughts_trains_the_last_answer(qwen3):
    """As that of Qwen3-4B-Thinking-2507: earlier answers have no thoughts, so they do not follow such a prompt."""
    tokenizer = changed_template(qwen3, "assistant\\n' }}\n{%- endif %}", "assistant\\n<think>\\n' }}\n{%- endif %}")
    thoughts = turns("a", "<think>\nhm\n</think>\n\nb")
    assert learned_text(tokenizer, thoughts + thoughts) == "hm\n</think>\n\nb<|im_end|>"
    prompt = decode_chat(tokenizer, render_chat(tokenizer, [*thoughts, *turns("c")], prompt=True)[0])
    assert prompt.endswith("<|im_start|>assistant\n<think>\n") and "hm" not in prompt
    assert tokenizer.end_token == tokenizer.bpe.token_to_id("<|im_end|>")
    with pytest.raises(ValueError, match="the answer has none"):  # the empty line after <think> would be one token
        render_chat(tokenizer, turns("a", "b"))


def test_a_text_is_neither_cut_off_nor_padded(qwen3):
    files, text = read_files(qwen3), "one two three four five six"
    bpe = Tokenizer.from_str(files["tokenizer.json"])
    for change in (lambda: bpe.enable_truncation(4), lambda: bpe.enable_padding(length=99)):
        change()
        tokenizer = HFTokenizer({**files, "tokenizer.json": bpe.to_str()})
        assert tokenizer.encode_ordinary(text) == HFTokenizer(files).encode_ordinary(text)
        bpe.no_truncation()


def test_a_template_in_its_own_file_comes_first(qwen3):
    """As in transformers."""
    files = read_files(qwen3)
    settings = {**json.loads(files["tokenizer_config.json"]), "chat_template": "another"}
    tokenizer = HFTokenizer({**files, "tokenizer_config.json": json.dumps(settings)})
    assert tokenizer.chat_template == files["chat_template.jinja"]


def test_what_splits_text_otherwise_has_another_name(qwen3):
    """So that its shards are not taken for those of this one."""
    files = read_files(qwen3)
    content = json.loads(files["tokenizer.json"])
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    assert len({HFTokenizer({**files, "tokenizer.json": json.dumps({**content, **change})}).name
                for change in ({}, {"normalizer": None}, {"pre_tokenizer": whole})}) == 3


def test_a_special_token_beyond_the_vocabulary_is_left_out(qwen3, tmp_path):
    """As the padding of Llama 2's fine-tunes; one that is not special is refused."""
    shutil.copytree(qwen3, tmp_path / "model")
    tokenizer = HFTokenizer(read_files(qwen3))
    size = load_model(qwen3, "cpu")[0].config.vocab_size
    tokenizer.bpe.add_special_tokens([f"[PAD{i}]" for i in range(size)])
    tokenizer.bpe.save(f"{tmp_path}/model/tokenizer.json")
    kept = HFTokenizer(load_checkpoint(tmp_path / "model")["tokenizer"])
    assert kept.n_vocab == size and kept.bpe.token_to_id(f"[PAD{size - 1}]") is None
    tokenizer.bpe.add_tokens(["zebra"])
    tokenizer.bpe.save(f"{tmp_path}/model/tokenizer.json")
    assert "its tokenizer has" in error_line(load_checkpoint, tmp_path / "model")


def test_a_special_token_is_not_typed_where_its_neighbours_would_get_other_ids(tmp_path):
    write_family("llama2", tmp_path)
    bpe = HFTokenizer(read_files(tmp_path)).bpe
    bpe.normalizer, bpe.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = HFTokenizer({**read_files(tmp_path), "tokenizer.json": bpe.to_str()})
    render_chat(tokenizer, turns("a", "b"))
    with pytest.raises(ValueError, match="which this tokenizer cannot encode as text"):
        render_chat(tokenizer, turns("a</s>b", "c"))


def test_special_tokens_may_spell_sentencepieces_space(tmp_path):
    """As Code Llama's."""
    write_family("llama2", tmp_path)
    bpe = HFTokenizer(read_files(tmp_path)).bpe
    bpe.add_special_tokens(["\u2581<PRE>"])
    tokenizer = HFTokenizer({**read_files(tmp_path), "tokenizer.json": bpe.to_str()})
    assert tokenizer.n_vocab - 1 not in tokenizer.encode_ordinary("a \u2581<PRE> b")


def test_a_text_ends_where_generation_config_says(qwen3, tmp_path):
    """Llama 3.1 has three ends. Without that file config.json names them."""
    files = read_files(qwen3)
    folder = shutil.copytree(qwen3, tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    fields = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**fields, "eos_token_id": [3, 5], "pad_token_id": None}))
    assert {3, 5} <= HFTokenizer(read_files(folder)).stop_ids
    assert json.loads(read_files(folder)["generation_config.json"])["eos_token_id"] == [3, 5]
    special = HFTokenizer(files).special
    files["generation_config.json"] = json.dumps({"eos_token_id": [*special, 10 ** 6]})
    tokenizer = HFTokenizer(files)
    assert tokenizer.stop_ids == special.keys() == {*generation_limits(tokenizer, chat=False)["stop_ids"]}


@pytest.mark.parametrize("sampling", [{"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, {}])
def test_an_export_keeps_how_the_model_samples(qwen3, tmp_path, sampling):
    """Llama 2 came with a temperature but without do_sample, which transformers does not save."""
    shutil.copytree(qwen3, tmp_path / "model")
    kept = {"repetition_penalty": 1.1, "bos_token_id": 3, "pad_token_id": 5}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(
        {"temperature": 0.9, "top_p": 0.6, **kept, **sampling}))
    export(f"{tmp_path}/model", f"{tmp_path}/hf", "float32", 10 ** 9, False)
    exported = json.loads((tmp_path / "hf/generation_config.json").read_text())
    names = ("do_sample", "temperature", "top_k", "top_p", *kept)
    assert {name: exported[name] for name in names if name in exported} == {**sampling, **kept}


def test_what_a_template_rewrites_is_skipped_and_said(qwen3, tmp_path):
    """Here anything in capitals."""
    template = (qwen3 / "chat_template.jinja").read_text()
    folder = tmp_path / "model"
    shutil.copytree(qwen3, folder)
    (folder / "chat_template.jinja").write_text(template.replace("= message.content %}", "= message.content|lower %}"))
    jsonl(tmp_path / "a.jsonl", [turns(f"{i}", "b") for i in range(60)] + [turns("HM", "b"), turns("hm", "B")])
    output = run("chat_sft.py", *RUN, f"--init_from={folder}", f"--data={tmp_path}/a.jsonl", "--print_batch=True",
                 f"--chat_dir={tmp_path}/chat")
    assert "1 skipped: the model's chat template leaves out or rewrites the user's message" in output
    assert "1 skipped: the model's chat template leaves out or rewrites the assistant's message" in output
