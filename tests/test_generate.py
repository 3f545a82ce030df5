"""Cached generation against plain forward passes, sampling against transformers' filters, and sample.py itself."""
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from chat_format import render_chat
from compiling import graphs_compiled
from conftest import GPU, VARIANTS, Program, needs_gpu, new_gpt, patched, refused, run, save_model, tokens
from model import GPT, GPTConfig
from sample import compile_step, generate, generation_limits, sample_hook, sample_logits
from tokenizer import get_tokenizer, sanitize

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


@torch.no_grad()
def greedy_uncached(gpt, prompt, n):
    """The plain way: the whole sequence through the model for each of n ids."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(gpt(torch.tensor([ids]))[0, -1].argmax().item())
    return tuple(ids[len(prompt):])


# -----------------------------------------------------------------------------
# the cache

@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_logits_equal_uncached(variant):
    """For MLA: absorbed equals expanded."""
    gpt = new_gpt(variant).eval()
    idx, positions, cache = tokens(2, 40), torch.arange(40).expand(2, 40), gpt.new_cache(2, 48)
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

@pytest.mark.parametrize("device", ["cpu", pytest.param(GPU, marks=needs_gpu)])
@pytest.mark.parametrize("variant", ["gpt2", "gpt2_mla", "qwen3", "llama_mla"])
def test_compiled_decoding_equals_uncompiled_and_compiles_once(variant, device, monkeypatch):
    """
    Prompts of different lengths, a row that stops early, more ids than positions: the cache is refilled. On a CPU its
    graph without generated code.
    """
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    gpt = new_lively_gpt(variant, n_layer=1)
    expected = [greedy_uncached(gpt, prompt, 30) for prompt in PROMPTS]
    assert all(len(set(row)) > 5 for row in expected)
    beyond, stop_ids = greedy(gpt, PROMPTS, 60), [expected[1][9]]
    stopped = greedy(gpt, PROMPTS, 20, stop_ids=stop_ids)
    assert any(None in row for row in stopped)
    assert greedy(gpt.to(device), PROMPTS, 30) == expected
    embedding, before = gpt.transformer.wte.weight, graphs_compiled()
    compiled = compile_step(gpt, 3)
    assert graphs_compiled() == before + 1
    assert greedy(compiled, PROMPTS, 30) == expected
    assert greedy(compiled, PROMPTS, 60) == beyond
    assert greedy(compiled, PROMPTS, 20, stop_ids=stop_ids) == stopped
    assert graphs_compiled() == before + 1
    assert gpt.transformer.wte.weight is embedding


@pytest.mark.parametrize("device, variant, seeds", [
    pytest.param("cpu", "gpt2_mla", [0], marks=pytest.mark.slow),
    *[pytest.param(GPU, variant, [0, 1], marks=needs_gpu) for variant in ("gpt2", "qwen3", "llama_mla")]])
def test_a_compiled_row_in_bfloat16_has_the_logits_of_the_whole_row_uncompiled(device, variant, seeds):
    """The second model on a GPU must not have the graphs or the cache of the first."""
    for seed in seeds:
        torch.compiler.reset()
        gpt, idx = new_gpt(variant, seed, n_layer=1 if device == "cpu" else 3).eval().to(device), tokens(1).to(device)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            expected = gpt(idx)
            compiled = compile_step(gpt, 1)
            cache = compiled.new_cache()
            logits = [compiled(new, positions=torch.tensor([[i]], device=device), cache=cache).clone()
                      for i, new in enumerate(idx.split(1, dim=1))]
        assert cache[0][0].dtype == gpt.lm_head.weight.dtype == torch.bfloat16
        assert gpt.transformer.wte.weight.dtype == torch.float32
        error = torch.cat(logits, 1) - expected
        assert error.norm() < 0.02 * expected.norm()
        # on a GPU not for each element: rounding alone reaches 0.024 of the largest
        assert device == GPU or error.abs().max() < 0.02 * expected.abs().max()


# -----------------------------------------------------------------------------
# stopping and sampling

def test_stop_ids_end_a_row_and_not_the_others():
    gpt = new_lively_gpt("llama")
    free = greedy(gpt, PROMPTS, 12)
    stop = free[0][4]
    for a, b in zip(free, greedy(gpt, PROMPTS, 12, stop_ids=[stop])):
        end = a.index(stop) + 1 if stop in a else 12
        assert b[:end] == a[:end] and set(b[end:]) <= {None}
    assert len(greedy(gpt, PROMPTS[:1], 12, stop_ids=[stop])[0]) == free[0].index(stop) + 1


def test_the_seed_decides_the_sample_and_the_prompts_stay_as_they_were():
    gpt, prompts, texts = new_lively_gpt("llama"), [[1], [2, 3]], []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(list(generate(gpt, prompts, 20)))
    assert texts[0] == texts[1] != texts[2]
    assert prompts == [[1], [2, 3]] and torch.is_grad_enabled()


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

def print_sample(gpt, prompt, stage, iter_num):
    hook = sample_hook(gpt, get_tokenizer("bytes"), nullcontext(), prompt, stage, {"sample_tokens": 20, "seed": 7})
    assert hook(iter_num, False) == {}


def test_the_hook_of_a_base_model(capsys):
    tokenizer, gpt = get_tokenizer("bytes"), new_gpt("llama", dropout=0.5).train()
    print_sample(gpt, [256], "base", 0)
    assert capsys.readouterr().out == ""  # an untrained model
    print_sample(gpt, [256], "base", 3)
    assert gpt.training
    torch.manual_seed(10)
    settings = dict(temperature=0.8, top_k=200, stop_ids=[256], n_vocab=257)
    ids = [token for token, in generate(gpt.eval(), [[256]], 20, **settings)]
    text = tokenizer.decode(ids)
    printable = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    assert capsys.readouterr().out == f"----- sample\n{printable}\n-----\n" and len(ids) > 5


def test_the_hook_of_a_chat_model(capsys):
    gpt = new_gpt("llama")
    gpt.hidden_states = lambda idx, *_, **__: torch.ones(*idx.shape, 64)
    gpt.lm_head.weight.data.zero_()[260] = 1  # the likeliest id is always <|end|>
    prompt = render_chat(get_tokenizer("bytes"), [{"role": "user", "content": "hi\x1b"}])[0] + [259]
    for begins in 0, 1:  # with <|endoftext|>, or, as many templates have it, without
        print_sample(gpt, prompt[begins:], "chat", 0)
        assert capsys.readouterr().out == "----- sample\n<|user|>hi\ufffd<|end|><|assistant|><|end|>\n-----\n"


# -----------------------------------------------------------------------------
# the terminal

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base model and a chat model with the same weights."""
    folder, gpt = tmp_path_factory.mktemp("saved"), new_lively_gpt("qwen3")
    return {stage: save_model(folder / stage, gpt, stage=stage) for stage in ("base", "chat")}


def sample(checkpoint, *args, script="sample.py"):
    return run(script, f"--checkpoint={checkpoint}", "--device=cpu", "--dtype=float32", *args)


@pytest.fixture(scope="module")
def completed(saved, tmp_path_factory):
    """What sample.py prints for two samples, and its arguments."""
    prompt = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    prompt.write_text("then it ran \u00e9")
    args = [saved["base"].parent, f"--prompt=FILE:{prompt}", "--num_samples=2", "--max_new_tokens=60", "--seed=5"]
    return sample(*args), args


def samples(output):
    """The texts that a run printed; what torch writes to stderr comes after them."""
    return [text.partition("\n(that is longer")[0] for text in output.split("----- sample ")[1:]]


def test_it_completes_a_prompt_and_says_what_it_forgets(completed):
    output, _ = completed
    first, second = samples(output)
    assert "step 20, val loss 2.5000" in output
    assert first.startswith("1\nthen it ran \u00e9") and second.startswith("2\nthen it ran \u00e9")
    assert len(first) > 30 and first[2:] != second[2:]
    for text in output.split("----- sample ")[1:]:  # one stops early
        forgotten = "longer than 48 positions: the model has forgotten the beginning" in text
        assert forgotten != ("<|endoftext|>" in text)


def test_no_escape_sequence_of_a_prompt_or_a_checkpoint_reaches_the_terminal(tmp_path):
    (tmp_path / "prompt.txt").write_text("red \x1b[31m")
    checkpoint = save_model(tmp_path, new_gpt("llama"), stage="base\x1b[2J")
    output = sample(checkpoint, f"--prompt=FILE:{tmp_path}/prompt.txt", "--max_new_tokens=1")
    assert "base\ufffd[2J model" in output and "\nred \ufffd[31m" in output and "\x1b" not in output


def test_each_setting_reaches_the_sampler(saved):
    settings = dict(temperature=1.2, top_k=20, top_p=0.95, min_p=0.3)
    output = sample(saved["base"], "--prompt=cat", "--seed=0", "--max_seq_len=16", "--max_new_tokens=40",
                    *[f"--{name}={value}" for name, value in settings.items()])
    gpt, tokenizer = new_lively_gpt("qwen3"), get_tokenizer("bytes")
    gpt.config.max_seq_len = 16
    torch.manual_seed(0)
    new = generate(gpt, [[256, *b"cat"]], 40, **settings, **generation_limits(tokenizer, chat=False))
    text = sanitize("cat" + tokenizer.decode([token for token, in new]))
    assert samples(output) == [f"1\n{text}"] and len(text) > 30


@pytest.mark.slow
def test_it_completes_a_prompt_compiled(completed):
    output, args = completed
    compiled = sample(*args, "--compile=True")
    assert samples(compiled) == samples(output) and "compiling the decoding step" in compiled


@pytest.mark.parametrize("args, words", [
    (["--checkpoint=nowhere"], "nowhere"), (["--prompt=FILE:nowhere.txt"], "nowhere.txt"), (["--top_p=1.5"], "top_p"),
    (["--chat=True", "--num_samples=2"], "num_samples"), (["--system=be brief"], "--chat=True"),
    (["--chat=True", "--prompt=FILE:/dev/null"], "FILE:/dev/null: is empty"),
])
def test_mistakes_are_refused_in_one_line(saved, args, words):
    assert words in refused("sample.py", f"--checkpoint={saved['base']}", *args)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    gpt = new_gpt("llama")
    gpt.transformer.ln_f.weight.data.fill_(float("nan"))
    assert "not finite" in refused("sample.py", f"--checkpoint={save_model(tmp_path, gpt)}")


def typed(folder, text):
    """sample.py with this text at its standard input."""
    (folder / "typed.txt").write_text(text)
    return patched(folder, "sample.py", f"sys.stdin = open({str(folder / 'typed.txt')!r})")


def answers(output):
    return re.findall(r"^(?:you: )?model: (.*)", output, re.MULTILINE)


def test_a_conversation_in_the_terminal(saved, tmp_path):
    """The same question alone, after one that is forgotten, in a new conversation, and without a system message."""
    args = ["--chat=True", "--temperature=0", "--max_new_tokens=3"]
    alone = sample(saved["chat"], *args, "--prompt=say on", "--system=be brief")
    untaught = sample(saved["base"], *args, "--prompt=say on")
    assert answers(sample(saved["chat"], *args, "--prompt=quit"))  # a question, too
    script = typed(tmp_path, f"say the cat sat on the mat\nsay on\na\n/reset\nsay on\n{'x' * 80}\n/quit\nnot read\n")
    output = sample(saved["chat"], *args, "--system=be brief", script=script)
    assert "chat model" in alone and "base model" in untaught and "base model" not in alone
    assert len(answers(alone)) == len(answers(untaught)) == 1 and len(answers(output)) == 5
    assert answers(output)[1] == answers(output)[3] == answers(alone)[0] != answers(untaught)[0]
    before, after = output.split("(a new conversation)")
    assert "turn no longer fits and is forgotten" in before and "forgotten the beginning" not in before
    assert "longer than 48 positions: the model has forgotten the beginning" in after
    assert output.count("/reset starts a new conversation") == 1 and "/reset" not in alone
    # max_new_tokens positions are left for an answer, but at most a quarter: 36 and 43 of 48 are for the prompt
    for n, room in (20, 36), (5, 43):
        for more in 0, 1:  # the second prompt is EUq.A, n times a, .U, a question, .A
            script = typed(tmp_path, f"q\n{'q' * (room - n - 9 + more)}\n")
            output = sample(says_a(tmp_path, 48), "--chat=True", "--temperature=0", f"--max_new_tokens={n}",
                            script=script)
            assert answers(output) == ["a" * n] * 2 and output.count("turn no longer fits") == more


def says_a(folder, max_seq_len):
    """The checkpoint of a model to which the likeliest id is always a."""
    gpt = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, max_seq_len=max_seq_len, vocab_size=384))
    gpt.transformer.ln_f.weight.data.zero_()
    gpt.transformer.ln_f.bias.data.fill_(1)
    gpt.lm_head.weight.data[ord("a")] = 1
    return save_model(folder, gpt)


def test_ctrl_c_stops_an_answer_and_not_the_program(tmp_path):
    program = Program(typed(tmp_path, "hello\n/reset\n"), f"--checkpoint={says_a(tmp_path, 20_000)}", "--chat=True",
                      "--max_new_tokens=9000", "--temperature=0", "--device=cpu")
    assert program.read_until("model: aaaa")
    program.send("SIGINT")
    code, output = program.end()
    assert code == 0 and "a (stopped)" in output and "(a new conversation)" in output, output
