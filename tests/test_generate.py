"""Cached generation against plain forward passes, sampling against transformers' filters, and sample.py itself."""
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import runtime
from conftest import ROOT, patched, refused, run
from model import GPT, GPTConfig
from sample import compile_step, generate, sample_hook, sample_logits, generation_limits
from test_model import VARIANTS, new_gpt
from tokenizer import get_tokenizer, render_chat

PROMPTS = [[5, 9, 200, 31, 7, 7, 1], [300], [12, 13, 14]]


def new_lively_gpt(variant, **changes):
    """With blocks strong enough that greedy text does not repeat itself, which would show nothing."""
    gpt = new_gpt(variant, **changes).eval()
    for p in gpt.transformer.h.parameters():
        p.data *= 4
    return gpt


def greedy(gpt, prompts, n, **settings):
    """A list of n ids per prompt."""
    return list(zip(*generate(gpt, prompts, n, temperature=0, **settings)))


def greedy_uncached(gpt, prompt, n):
    """The plain way: the whole sequence through the model for each of n ids."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            ids.append(int(gpt(torch.tensor([ids]))[0, -1].argmax()))
    return tuple(ids[len(prompt):])


# -----------------------------------------------------------------------------
# the cache

@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_equals_uncached_for_prompts_of_different_lengths(variant):
    gpt = new_lively_gpt(variant)
    for prompt, row in zip(PROMPTS, greedy(gpt, PROMPTS, 30)):
        assert row == greedy_uncached(gpt, prompt, 30)
        assert len(set(row)) > 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_logits_equal_uncached(variant):
    """For MLA: absorbed equals expanded."""
    gpt = new_gpt(variant).eval()
    idx, positions, cache = torch.randint(0, 384, (2, 40)), torch.arange(40).expand(2, 40), gpt.new_cache(2, 48)
    with torch.no_grad():
        parts = [gpt(idx[:, a:b], positions=positions[:, a:b], cache=cache) for a, b in ((0, 17), (17, 18), (18, 40))]
        assert (torch.cat(parts, 1) - gpt(idx)).abs().max() < 1e-4


@pytest.mark.parametrize("variant, fraction", [("gpt2_mla", 1 / 10), ("llama_mla", 1 / 8)])
def test_mla_caches_only_the_latent_and_decodes_without_expanding_it(variant, fraction):
    """Sizes per layer are those of GPT-2 124M; kv_b_proj is what would expand it."""
    size = dict(n_layer=1, n_head=12, n_embd=768, max_seq_len=16)
    mla, mha = new_gpt(variant, **size, kv_lora_rank=128).eval(), new_gpt(variant.removesuffix("_mla"), **size)
    mla_bytes, mha_bytes = (sum(tensor.nbytes for tensor in gpt.new_cache(1, 1)[0]) for gpt in (mla, mha))
    assert mla_bytes <= fraction * mha_bytes

    expanded = []
    for block in mla.transformer.h:
        block.attn.kv_b_proj.register_forward_hook(lambda _, inputs, __: expanded.append(inputs[0].size(0)))
    assert len(list(generate(mla, PROMPTS, 5))) == 5
    assert expanded == [len(PROMPTS)]  # once, when the prompts are read


def test_a_full_row_continues_from_its_last_part():
    gpt = new_lively_gpt("llama")  # 48 positions
    prompt = list(range(100, 140))
    [new] = greedy(gpt, [prompt], 20)
    assert len(new) == 20
    assert new[:9] == greedy_uncached(gpt, prompt, 9)  # 40 + 9 - 1 positions: full
    kept = (prompt + list(new[:9]))[-(48 - 11 + 1):]  # 11 more ids are wanted
    assert new[9:] == greedy_uncached(gpt, kept, 11)
    too_long = list(range(100))
    assert greedy(gpt, [too_long], 5) == [greedy_uncached(gpt, too_long[-44:], 5)]
    gpt = new_lively_gpt("llama", max_seq_len=5)
    assert greedy(gpt, [list(range(9))], 12)[0][:3] == greedy_uncached(gpt, [6, 7, 8], 3)  # not less than half
    gpt = new_lively_gpt("llama", max_seq_len=1)
    [[first, second, third]] = greedy(gpt, [[7]], 3)
    assert [first, second, third] == [greedy_uncached(gpt, [token], 1)[0] for token in (7, first, second)]


def test_a_full_row_does_not_change_its_neighbours():
    gpt = new_lively_gpt("llama")
    assert greedy(gpt, [[1, 2, 3]], 30)[0] == greedy(gpt, [list(range(40)), [1, 2, 3]], 30)[1]


# -----------------------------------------------------------------------------
# compiled

@pytest.mark.parametrize("variant", ["gpt2", "gpt2_mla", "qwen3", "llama_mla"])
def test_compiled_decoding_equals_uncompiled_and_compiles_once(variant):
    """Prompts of different lengths, a row that stops early, more ids than positions: the cache is refilled."""
    torch.compiler.reset()
    gpt = new_lively_gpt(variant, n_layer=1)
    expected = [greedy_uncached(gpt, prompt, 30) for prompt in PROMPTS]
    assert all(len(set(row)) > 5 for row in expected)
    beyond = greedy(gpt, PROMPTS, 60)
    stop_ids = [expected[1][9]]
    stopped = greedy(gpt, PROMPTS, 20, stop_ids=stop_ids)
    embedding = gpt.transformer.wte.weight
    before = runtime.graphs_compiled()
    compiled = compile_step(gpt, 3)
    assert runtime.graphs_compiled() == before + 1
    assert greedy(compiled, PROMPTS, 30) == expected
    assert greedy(compiled, PROMPTS, 60) == beyond
    assert greedy(compiled, PROMPTS, 20, stop_ids=stop_ids) == stopped
    assert any(None in row for row in stopped)
    assert runtime.graphs_compiled() == before + 1
    assert gpt.transformer.wte.weight is embedding


def check_a_compiled_row_in_bfloat16(gpt, device):
    """Id by id it has the logits of the whole row uncompiled."""
    torch.compiler.reset()
    idx, positions = (x.to(device) for x in (torch.randint(0, 384, (1, 20)), torch.arange(20)[None]))
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        expected = gpt(idx)
        compiled = compile_step(gpt, 1)
        cache = compiled.new_cache()
        logits = [compiled(idx[:, i:i + 1], positions=positions[:, i:i + 1], cache=cache).clone() for i in range(20)]
    assert cache[0][0].dtype == gpt.lm_head.weight.dtype == torch.bfloat16
    assert gpt.transformer.wte.weight.dtype == torch.float32
    assert (torch.cat(logits, 1) - expected).abs().max() < 0.02 * expected.abs().max()


def test_a_compiled_row_in_bfloat16_has_the_uncompiled_logits():
    """One row's matrix products are made differently from those of more rows."""
    check_a_compiled_row_in_bfloat16(new_gpt("gpt2_mla", n_layer=1).eval(), "cpu")
    assert torch.backends.mkldnn.enabled and not torch._inductor.config.freezing


# -----------------------------------------------------------------------------
# stopping and sampling

def test_stop_ids_end_a_row_and_not_the_others():
    gpt = new_lively_gpt("llama")
    free = greedy(gpt, PROMPTS, 12)
    stop = free[0][4]
    for a, b in zip(free, greedy(gpt, PROMPTS, 12, stop_ids=[stop])):
        end = a.index(stop) + 1 if stop in a else len(a)
        assert b[:end] == a[:end] and set(b[end:]) <= {None}
    assert len(greedy(gpt, PROMPTS[:1], 12, stop_ids=[stop])[0]) == free[0].index(stop) + 1


def test_the_seed_decides_the_sample():
    gpt = new_lively_gpt("llama")
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(list(generate(gpt, PROMPTS, 20)))
    assert texts[0] == texts[1] != texts[2]


def test_generation_leaves_the_prompts_as_they_were():
    prompt = [1]
    list(generate(new_gpt("gpt2").eval(), [prompt], 5))
    assert torch.is_grad_enabled() and prompt == [1]


def test_ids_beyond_the_vocabulary_are_never_sampled():
    logits = torch.zeros(1000, 384)
    logits[:, 300:] = 20.0
    assert sample_logits(logits, n_vocab=300).max() < 300
    assert sample_logits(logits, temperature=0, n_vocab=300).max() < 300
    tokenizer = get_tokenizer("bytes")
    assert generation_limits(tokenizer, chat=False) == {"stop_ids": [256], "n_vocab": 257}
    assert generation_limits(tokenizer, chat=True) == {"stop_ids": [256, 257, 258, 259, 260], "n_vocab": 261}


@pytest.mark.parametrize("settings, warpers", [
    (dict(top_k=5), [TopKLogitsWarper(5)]), (dict(top_p=0.7), [TopPLogitsWarper(0.7)]),
    (dict(min_p=0.2), [MinPLogitsWarper(0.2)]), (dict(top_k=0, top_p=1.0, min_p=0.0), []), (dict(top_k=1000), []),
    (dict(top_k=8, top_p=0.8, min_p=0.1), [TopKLogitsWarper(8), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)]),
])
def test_filters_keep_what_those_of_transformers_keep(settings, warpers):
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 40)
    kept = logits / 1.3
    for warper in warpers:
        kept = warper(None, kept)
    expected = kept.softmax(-1)[0]
    drawn = sample_logits(logits.expand(40_000, -1), temperature=1.3, **settings).bincount(minlength=40) / 40_000
    assert (drawn[expected == 0] == 0).all()
    assert (drawn - expected).abs().max() < 0.02


def test_ids_that_make_up_top_p_exactly_are_enough():
    drawn = sample_logits(torch.tensor([[0.5, 0.25, 0.25]]).log().expand(1000, -1), top_p=0.5)
    assert (drawn == 0).all()


@pytest.mark.parametrize("settings", [dict(temperature=1e-42), dict(temperature=1e300), dict(top_p=0),
                                      dict(top_p=1e-300), dict(min_p=1.0)])
def test_extreme_settings_work(settings):
    drawn = sample_logits(torch.arange(40.0).repeat(100, 1) * 1e4, **settings)
    assert (drawn == 39).all() == ("temperature" not in settings or settings["temperature"] < 1)


# -----------------------------------------------------------------------------
# the sample that a training loop prints

def test_the_hook_of_a_base_model(capsys):
    tokenizer, gpt = get_tokenizer("bytes"), new_gpt("llama", dropout=0.5).train()
    hook = sample_hook(gpt, tokenizer, nullcontext(), [256], 20, seed=7)
    assert hook(0, False) == {} and capsys.readouterr().out == ""  # an untrained model
    assert hook(3, False) == {}
    assert gpt.training
    torch.manual_seed(10)
    settings = dict(temperature=0.8, top_k=200, stop_ids=[256], n_vocab=257)
    ids = [token for token, in generate(gpt.eval(), [[256]], 20, **settings)]
    text = tokenizer.decode(ids)
    printable = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    assert capsys.readouterr().out == f"----- sample\n{printable}\n-----\n" and len(ids) > 5


def test_the_hook_of_a_chat_model(capsys):
    tokenizer, gpt = get_tokenizer("bytes"), new_gpt("llama")
    gpt.hidden_states = lambda idx, *_, **__: torch.ones(*idx.shape, 64)
    gpt.lm_head.weight.data.zero_()[260] = 1  # the likeliest id is always <|end|>
    prompt = render_chat(tokenizer, [{"role": "user", "content": "hi\x1b"}])[0] + [259]
    sample_hook(gpt, tokenizer, nullcontext(), prompt, 20, seed=7, chat=True)(0, False)
    assert capsys.readouterr().out == "----- sample\n<|user|>hi\ufffd<|end|><|assistant|><|end|>\n-----\n"


def test_the_hook_survives_weights_that_are_not_finite(capsys):
    gpt = new_gpt("llama")
    gpt.transformer.ln_f.weight.data.fill_(float("nan"))
    sample_hook(gpt, get_tokenizer("bytes"), nullcontext(), [256], 20, seed=7)(1, False)
    assert "----- sample\n(none: the model's logits are not finite" in capsys.readouterr().out


# -----------------------------------------------------------------------------
# the terminal

def save(folder, gpt, tokenizer="bytes", stage="chat", **facts):
    """A checkpoint of ours around a model."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"model": gpt.state_dict(), "model_args": asdict(gpt.config), "tokenizer": tokenizer, "stage": stage,
                "config": {}, "iter_num": 20, "val_loss": 2.5, "val_iter": 10, **facts}, folder / "ckpt.pt")
    return folder / "ckpt.pt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return {stage: save(folder / stage, new_lively_gpt("llama"), stage=stage) for stage in ("base", "chat")}


def sample(checkpoint, *args):
    return run("sample.py", f"--checkpoint={checkpoint}", "--device=cpu", "--dtype=float32", *args)


def test_it_completes_a_prompt(saved, tmp_path):
    output = sample(saved["base"].parent, "--prompt=the cat", "--num_samples=2", "--max_new_tokens=20")
    assert "step 20, val loss 2.5000" in output and output.count("the cat") == 2 and "----- sample 2" in output
    (tmp_path / "prompt.txt").write_text("then it ran")
    text, again = (sample(saved["base"], f"--prompt=FILE:{tmp_path}/prompt.txt", "--max_new_tokens=20", *args)
                   for args in (["--seed=5", "--num_samples=2"], ["--seed=5", "--num_samples=2", "--compile=True"]))
    # the first sample ends where the second begins: what torch writes to stderr comes after both
    assert "then it ran" in text and text.split("-----")[1] == again.split("-----")[1] and "compiling" in again
    sample(saved["base"], "--prompt=\u00e9", "--max_new_tokens=3", "--temperature=1e-42", "--top_p=1e-300")


def test_it_says_what_it_forgets(saved):
    output = sample(saved["base"], "--prompt=" + 20 * "the cat ", "--max_new_tokens=5")
    assert "longer than the model's 48 positions: it has forgotten the beginning" in output
    assert "forgotten the beginning" in sample(saved["base"], "--prompt=the", "--max_new_tokens=60", "--temperature=0")


@pytest.mark.parametrize("args, words", [
    (["--checkpoint=nowhere"], "nowhere"), (["--prompt=FILE:nowhere.txt"], "nowhere.txt"),
    (["--temperature=-1"], "temperature"), (["--top_p=1.5"], "top_p"), (["--num_samples=0"], "num_samples"),
    (["--chat=True", "--num_samples=2"], "num_samples"),
    ([f"--seed={2 ** 64}"], "seed"), (["--system=be brief"], "--chat=True"),
])
def test_mistakes_are_refused_in_one_line(saved, args, words):
    assert words in refused("sample.py", f"--checkpoint={saved['base']}", *args)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    gpt = new_gpt("llama")
    gpt.transformer.ln_f.weight.data.fill_(float("nan"))
    assert "not finite" in refused("sample.py", f"--checkpoint={save(tmp_path, gpt)}")


def test_it_answers_one_question(saved):
    output = sample(saved["chat"], "--chat=True", "--prompt=say cat", "--system=be brief", "--max_new_tokens=8")
    assert output.count("model: ") == 1 and "chat model" in output
    assert "base model" in sample(saved["base"], "--chat=True", "--prompt=hi", "--max_new_tokens=3")


def talk(checkpoint, typed, *args):
    command = [sys.executable, ROOT / "sample.py", f"--checkpoint={checkpoint}", "--chat=True", "--max_new_tokens=8",
               "--device=cpu", "--dtype=float32", *args]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_a_conversation_in_the_terminal(saved):
    first = talk(saved["chat"], "say on\n", "--temperature=0")
    typed = "say cat\nsay mat\nsay the cat sat\n/reset\nsay on\n/quit\nnot read\n"
    output = talk(saved["chat"], typed, "--temperature=0")
    assert output.count("model: ") == 4 and "turn does not fit any more and is forgotten" in output
    assert "forgotten the beginning" not in output
    assert "(a new conversation)" in output and output.count("/reset starts a new conversation") == 1
    assert first.split("model: ")[1].split("\n")[0] == output.split("model: ")[4].split("\n")[0]
    output = talk(saved["chat"], "x" * 80 + "\n")
    assert "longer than the model's 48 positions: it has forgotten the beginning" in output


def test_ctrl_c_before_the_first_token_stops_the_answer(saved, tmp_path):
    stop = """
import model
def hidden_states(*_, **__): raise KeyboardInterrupt
model.GPT.hidden_states = hidden_states
"""
    output = run(patched(tmp_path, "sample.py", stop), f"--checkpoint={saved['chat']}", "--chat=True", "--prompt=hi",
                 "--device=cpu")
    assert output.rstrip().endswith("model:  (stopped)")


@pytest.mark.skipif(os.name == "nt", reason="SIGINT cannot be sent to one process there")
def test_ctrl_c_stops_an_answer_and_not_the_program(tmp_path):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(arch="llama", n_layer=2, n_head=2, n_embd=32, max_seq_len=20_000, vocab_size=384))
    gpt.lm_head.weight.data[256:] = 0  # the likeliest id is never one that ends the answer
    command = [sys.executable, "-u", ROOT / "sample.py", f"--checkpoint={save(tmp_path, gpt)}", "--chat=True",
               "--max_new_tokens=9000", "--temperature=0", "--device=cpu"]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # not ignored
    program.stdin.write(b"hello\n")
    program.stdin.flush()
    seen = b""
    while b"model: " not in seen or len(seen.split(b"model: ")[1]) < 20:  # it answers
        seen += program.stdout.read(1)
    program.send_signal(signal.SIGINT)
    time.sleep(0.2)
    rest, errors = program.communicate(b"/quit\n", timeout=60)
    assert b"(stopped)" in rest and program.returncode == 0, errors
