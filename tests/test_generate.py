"""Generation from the cache against plain forward passes, and sampling against transformers' own filters."""
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import runtime
from model import sample_logits
from test_model import VARIANTS, new_gpt

PROMPTS = [[5, 9, 200, 31, 7, 7, 1], [300], [12, 13, 14]]


def new_lively_gpt(variant, **changes):
    """With blocks strong enough that greedy text does not repeat itself, which would show nothing."""
    gpt = new_gpt(variant, **changes).eval()
    for p in gpt.transformer.h.parameters():
        p.data *= 4
    return gpt


def greedy_without_cache(gpt, prompt, n):
    """The plain way: the whole sequence through the model for each token. -> ids, and the logits each came from."""
    ids, logits = list(prompt), []
    with torch.no_grad():
        for _ in range(n):
            logits.append(gpt(torch.tensor([ids]))[0, -1])
            ids.append(int(logits[-1].argmax()))
    return ids[len(prompt):], logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_equals_uncached_for_prompts_of_different_lengths(variant):
    gpt = new_lively_gpt(variant)
    together = list(zip(*gpt.generate(PROMPTS, 30, temperature=0)))
    for prompt, row in zip(PROMPTS, together):
        assert list(row) == greedy_without_cache(gpt, prompt, 30)[0]
        assert len(set(row)) > 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_logits_equal_uncached(variant):
    gpt = new_gpt(variant).eval()
    idx = torch.randint(0, 384, (2, 40))
    cache = gpt.new_cache(2, 48)
    with torch.no_grad():
        full = gpt(idx)
        positions = torch.arange(40).expand(2, 40)
        parts = [gpt(idx[:, a:b], positions=positions[:, a:b], cache=cache) for a, b in ((0, 17), (17, 18), (18, 40))]
    assert (torch.cat(parts, 1) - full).abs().max() < 1e-4


@pytest.mark.parametrize("variant, fraction", [("gpt2_mla", 1 / 10), ("llama_mla", 1 / 8)])
def test_mla_caches_the_latent_alone_and_builds_no_key_or_value_from_it(variant, fraction):
    """At GPT-2 124M's size, from the tensors themselves; kv_b_proj is what would build them."""
    size = dict(n_layer=12, n_head=12, n_embd=768, max_seq_len=16)
    mla = new_gpt(variant, **size, kv_lora_rank=128).eval()
    mha = new_gpt(variant.removesuffix("_mla"), **size)
    a, b = (sum(tensor.nbytes for layer in gpt.new_cache(1, 1) for tensor in layer) for gpt in (mla, mha))
    assert a <= fraction * b

    def forbidden(*_):
        raise AssertionError("a key or value was built from the cache")
    for block in mla.transformer.h:
        block.attn.kv_b_proj.register_forward_hook(forbidden)
    assert len(list(mla.generate(PROMPTS, 5))) == 5


def test_a_full_context_goes_on_from_its_last_part():
    gpt = new_lively_gpt("llama")  # 48 positions
    prompt = list(range(100, 140))
    new = [ids[0] for ids in gpt.generate([prompt], 20, temperature=0)]
    assert len(new) == 20
    assert new[:9] == greedy_without_cache(gpt, prompt, 9)[0]  # 40 + 9 - 1 positions: the context is full
    kept = (prompt + new[:9])[-(48 - 11 + 1):]  # 11 tokens are still wanted
    assert new[9:] == greedy_without_cache(gpt, kept, 11)[0]
    too_long = list(range(100))
    assert [ids[0] for ids in gpt.generate([too_long], 5, temperature=0)] == greedy_without_cache(gpt, too_long[-44:], 5)[0]


def test_a_full_row_does_not_change_its_neighbours():
    gpt = new_lively_gpt("llama")
    alone = [ids[0] for ids in gpt.generate([[1, 2, 3]], 30, temperature=0)]
    beside = [ids[1] for ids in gpt.generate([list(range(40)), [1, 2, 3]], 30, temperature=0)]
    assert alone == beside


@pytest.mark.parametrize("variant", ["gpt2", "gpt2_mla", "qwen3", "llama_mla"])
def test_compiled_decoding_equals_the_plain_way_and_compiles_once(variant):
    """Prompts of different lengths, one that stops early, and more tokens than the model has positions: the cache is filled anew."""
    torch.compiler.reset()
    gpt = new_lively_gpt(variant, n_layer=1)
    expected = [greedy_without_cache(gpt, prompt, 30)[0] for prompt in PROMPTS]
    assert all(len(set(row)) > 5 for row in expected)
    beyond = list(gpt.generate(PROMPTS, 60, temperature=0))
    stop = expected[1][9]
    stopped = list(gpt.generate(PROMPTS, 20, temperature=0, stop_ids=[stop]))
    tied = gpt.transformer.wte.weight
    before = runtime.graphs_compiled()
    compiled = gpt.compile_step(3)
    assert runtime.graphs_compiled() == before + 1
    assert list(map(list, zip(*gpt.generate(PROMPTS, 30, temperature=0, compiled=compiled)))) == expected
    assert list(gpt.generate(PROMPTS, 60, temperature=0, compiled=compiled)) == beyond
    assert list(gpt.generate(PROMPTS, 20, temperature=0, stop_ids=[stop], compiled=compiled)) == stopped
    assert None in [token for tokens in stopped for token in tokens]
    assert runtime.graphs_compiled() == before + 1
    assert gpt.transformer.wte.weight is tied
    with pytest.raises(ValueError, match="2 prompts"):
        list(gpt.generate(PROMPTS[:2], 5, compiled=compiled))


def test_a_compiled_row_in_bfloat16_keeps_its_matrices_and_the_uncompiled_logits():
    """The step of a single row, whose products are made otherwise than those of more."""
    torch.compiler.reset()
    gpt = new_gpt("gpt2_mla", n_layer=1).eval()
    idx, positions = torch.randint(0, 384, (1, 20)), torch.arange(20)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = gpt(idx)
        step, cache = gpt.compile_step(1)
        logits = torch.cat([step(idx[:, i:i + 1], positions[:, i:i + 1], cache) for i in range(20)], 1)
    assert cache[0][0].dtype == gpt.lm_head.weight.dtype == torch.bfloat16 and gpt.transformer.wte.weight.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.02 * expected.abs().max()
    assert torch.backends.mkldnn.enabled


def test_stop_ids_end_a_row_and_not_the_others():
    gpt = new_lively_gpt("llama")
    free = list(zip(*gpt.generate(PROMPTS, 12, temperature=0)))
    stop = free[0][4]
    stopped = list(zip(*gpt.generate(PROMPTS, 12, temperature=0, stop_ids=[stop])))
    for a, b in zip(free, stopped):
        end = a.index(stop) + 1 if stop in a else len(a)
        assert b[:end] == a[:end] and set(b[end:]) <= {None}
    assert len(list(gpt.generate(PROMPTS[:1], 12, temperature=0, stop_ids=[stop]))) == free[0].index(stop) + 1


def test_the_seed_decides_the_sample():
    gpt = new_lively_gpt("llama")
    draw = lambda seed: list(gpt.generate(PROMPTS, 20, seed=seed))  # noqa: E731
    assert draw(1) == draw(1) != draw(2)


def test_generation_leaves_the_model_as_it_was():
    gpt = new_gpt("gpt2").train()
    for _ in gpt.generate([[1]], 5):
        break  # the caller stops listening
    assert gpt.training
    list(gpt.generate([[1]], 5))
    assert gpt.training and torch.is_grad_enabled()


def test_ids_beyond_the_vocabulary_are_never_sampled():
    logits = torch.zeros(1000, 384)
    logits[:, 300:] = 20.0
    assert sample_logits(logits, n_vocab=300).max() < 300
    assert sample_logits(logits, temperature=0, n_vocab=300).max() < 300


@pytest.mark.parametrize("settings, warpers", [
    (dict(top_k=5), [TopKLogitsWarper(5)]), (dict(top_p=0.7), [TopPLogitsWarper(0.7)]), (dict(min_p=0.2), [MinPLogitsWarper(0.2)]),
    (dict(top_k=8, top_p=0.8, min_p=0.1), [TopKLogitsWarper(8), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)]),
    (dict(top_k=0, top_p=1.0, min_p=0.0), []), (dict(top_k=1000), []),
])
def test_filters_keep_what_those_of_transformers_keep(settings, warpers):
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 40)
    kept = logits / 1.3
    for warper in warpers:
        kept = warper(None, kept)
    expected = kept.softmax(-1)[0]
    drawn = torch.bincount(sample_logits(logits.expand(40_000, -1), temperature=1.3, **settings), minlength=40) / 40_000
    assert torch.equal(drawn > 0, expected > 0) or (drawn[expected == 0] == 0).all()
    assert (drawn - expected).abs().max() < 0.02


def test_prompts_without_ids_are_refused():
    for prompts in ([], [[]], [[1, 2], []]):
        with pytest.raises(ValueError, match="prompts"):
            list(new_gpt("gpt2").generate(prompts, 3))
