"""The model against independent ones: transformers for the architectures, a plain formula for the loss."""
import math
from dataclasses import fields, replace
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
import transformers

import model as model_module
from conftest import literals
from export_hf import to_hf
from model import GPT, GPTConfig, IGNORE, linear_cross_entropy

SMALL = dict(max_seq_len=48, vocab_size=384, n_layer=3, n_head=4, n_embd=64)
VARIANTS = {
    "gpt2": dict(arch="gpt2"),
    "llama": dict(arch="llama"),
    "llama_gqa": dict(arch="llama", n_kv_head=2),
    "qwen3": dict(arch="llama", n_kv_head=2, qk_norm=True),
    "gpt2_mla": dict(arch="gpt2", attention="mla", kv_lora_rank=24),
    "llama_mla": dict(arch="llama", attention="mla", kv_lora_rank=24),
    "llama_mla_q": dict(arch="llama", attention="mla", kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=10,
                        qk_rope_head_dim=6, v_head_dim=12),
}


def new_gpt(variant, seed=0, **changes):
    """A small GPT all of whose parameters are random, norms and biases too, so that leaving one out shows."""
    torch.manual_seed(seed)
    gpt = GPT(GPTConfig(**{**SMALL, **VARIANTS[variant], **changes}))
    for p in gpt.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return gpt


def transformers_twin(gpt):
    """transformers' model of the same architecture with the same weights; for gpt2 with mla the equivalent GPT-2."""
    c = gpt.config
    if c.arch == "gpt2":
        twin = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=c.vocab_size, n_positions=c.max_seq_len, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    elif c.attention == "mla":
        twin = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
            vocab_size=c.vocab_size, max_position_embeddings=c.max_seq_len, hidden_size=c.n_embd,
            num_hidden_layers=c.n_layer, num_attention_heads=c.n_head, num_key_value_heads=c.n_head,
            intermediate_size=c.intermediate_size,
            q_lora_rank=c.q_lora_rank, kv_lora_rank=c.kv_lora_rank, qk_nope_head_dim=c.qk_nope_head_dim,
            qk_rope_head_dim=c.qk_rope_head_dim, v_head_dim=c.v_head_dim, first_k_dense_replace=c.n_layer,
            rms_norm_eps=1e-6, rope_theta=c.rope_theta, tie_word_embeddings=False))
    else:
        kind, settings = (transformers.Qwen3ForCausalLM, transformers.Qwen3Config) if c.qk_norm else \
                         (transformers.LlamaForCausalLM, transformers.LlamaConfig)
        twin = kind(settings(
            vocab_size=c.vocab_size, max_position_embeddings=c.max_seq_len, hidden_size=c.n_embd,
            num_hidden_layers=c.n_layer, num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head,
            head_dim=c.n_embd // c.n_head, intermediate_size=c.intermediate_size, rms_norm_eps=1e-5,
            rope_theta=c.rope_theta, tie_word_embeddings=False))
    twin.load_state_dict(to_hf(gpt.state_dict(), c))
    return twin


def tokens(batch=2, length=48, seed=1):
    return torch.randint(0, 384, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_each_field_of_the_config_is_in_a_variant():
    """So a new one is tested as the others are: cached decoding equals uncached, packed unpacked, exported ours."""
    tested = {*SMALL, "dropout", "embed_norm", "gelu", "exact", "intermediate_size", "rope_theta",
              "norm_eps"}  # elsewhere
    for variant in VARIANTS.values():
        tested |= {*variant, *variant.values()}
    choices = literals("train_gpt2.py")
    for field in fields(GPTConfig):
        for name in {field.name, *choices.get(field.name, ())} - {field.default}:
            assert name in tested, f"{field.name} is new, or its choice {name}: add a variant with it to VARIANTS"


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_transformers(variant):
    gpt = new_gpt(variant)
    twin = transformers_twin(gpt)
    idx, targets = tokens(seed=1), tokens(seed=2)
    twin_logits = twin(idx).logits
    assert (gpt(idx) - twin_logits).abs().max() < 1e-4

    gpt(idx, targets).backward()
    F.cross_entropy(twin_logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    if variant == "gpt2_mla":  # the twin has one matrix, W_k W_a, for our two: compare what comes before attention
        assert (gpt.transformer.wpe.weight.grad - twin.transformer.wpe.weight.grad).abs().max() < 1e-4
        return
    gradients = to_hf({name: p.grad for name, p in gpt.named_parameters()}, gpt.config)
    for name, p in twin.named_parameters():
        assert (p.grad - gradients[name]).abs().max() < 1e-4 * max(1, p.grad.abs().max()), name


@pytest.mark.parametrize("variant", ["llama", "qwen3", "llama_mla"])
def test_a_normalized_embedding_is_exported_as_a_plain_one(variant):
    gpt = new_gpt(variant, embed_norm=True)
    plain = GPT(replace(gpt.config, embed_norm=False))
    plain.load_state_dict(gpt.state_dict())
    logits, table = gpt(tokens()), gpt.transformer.wte.weight
    assert (logits - transformers_twin(gpt)(tokens()).logits).abs().max() < 1e-4
    assert (logits - plain(tokens())).abs().max() > 0.1
    plain.transformer.wte.weight.data = table / (table.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (logits - plain(tokens())).abs().max() < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_position_sees_the_future(variant):
    gpt = new_gpt(variant).eval()
    idx = tokens()
    before = gpt(idx)
    for t in (1, 17, 47):
        changed = idx.clone()
        changed[:, t] = (changed[:, t] + 1) % 384
        after = gpt(changed)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.equal(before[:, t:], after[:, t:])


def packed(lengths):
    """positions (1, T) and mask (1, 1, T, T) of texts of these lengths in one row."""
    text = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (text[:, None] == text) & torch.ones(len(text), len(text), dtype=torch.bool).tril()
    return {"positions": torch.cat([torch.arange(n) for n in lengths])[None], "mask": mask[None, None]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_equals_unpacked(variant):
    """Three texts in one row, each with its own attention and positions: the logits and loss of each one alone."""
    gpt = new_gpt(variant).eval()
    idx, targets = tokens(1, seed=1), tokens(1, seed=2)
    lengths = [20, 1, 27]
    alone = torch.cat([gpt(part) for part in idx.split(lengths, dim=1)], dim=1)
    assert (gpt(idx, **packed(lengths)) - alone).abs().max() < 1e-5 * alone.abs().max()
    losses = sum(gpt(x, y) for x, y in zip(idx.split(lengths, dim=1), targets.split(lengths, dim=1)))
    assert gpt(idx, targets, **packed(lengths)).item() == pytest.approx(losses.item(), rel=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_initial_loss_is_that_of_a_uniform_guess(variant):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**{**SMALL, **VARIANTS[variant], "vocab_size": 50304}))
    idx = torch.randint(0, 50304, (8, 48))
    loss = gpt(idx, torch.randint(0, 50304, (8, 48))) / (8 * 48)
    assert abs(loss.item() - math.log(50304)) < 0.02 * math.log(50304)


@pytest.mark.parametrize("variant", VARIANTS)
def test_overfits_twenty_sequences_and_every_parameter_gets_a_gradient(variant):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**{**SMALL, **VARIANTS[variant]}))
    idx = tokens(20, 33)
    has_grad = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in gpt.named_parameters()}
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=4e-3, weight_decay=0.0)
    for step in range(200):
        loss = gpt(idx[:, :-1], idx[:, 1:]) / (20 * 32)
        loss.backward()
        if step < 3:
            for name, p in gpt.named_parameters():
                assert p.grad.isfinite().all(), name
                has_grad[name] |= p.grad != 0
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < 0.05:
            break
    assert loss.item() < 0.05
    for name, found in has_grad.items():
        if name == "transformer.wpe.weight":  # only 32 positions are trained on
            found = found[:32]
        elif name == "transformer.wte.weight" and VARIANTS[variant]["arch"] == "llama":
            found = found[idx[:, :-1].unique()]  # untied: only ids that occur
        elif name.endswith("c_attn.bias"):
            found = found[[*range(64), *range(128, 192)]]  # softmax ignores a bias on all keys
        assert found.float().mean() > 0.99, name


def test_initial_weights_have_the_stated_spread():
    torch.manual_seed(0)
    for variant, scaled in (("gpt2", "attn.c_proj"), ("llama", "mlp.down_proj")):
        gpt = GPT(GPTConfig(**{**SMALL, **VARIANTS[variant], "n_embd": 256}))
        stds = {name: p.std().item() for name, p in gpt.named_parameters()}
        assert stds["transformer.wte.weight"] == pytest.approx(0.02, rel=0.05)
        assert stds[f"transformer.h.1.{scaled}.weight"] == pytest.approx(0.02 / math.sqrt(2 * 3), rel=0.05)


@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_with_both_norms_a_key_head_looks_as_far_back_as_its_number(n_kv_head, monkeypatch):
    """At the start, in each layer, on random ids; and with one of the norms alone there is no such preference."""
    seen = []

    def sdpa(q, k, v, **settings):
        k = k.repeat_interleave(q.size(1) // k.size(1), 1)
        future = torch.ones(48, 48).triu(1).bool()
        weights = (q @ k.mT / math.sqrt(q.size(3))).masked_fill(future, -math.inf).softmax(3)
        seen.append([weights[:, :, 20:].diagonal(20 - back, 2, 3).mean((0, 2)) for back in range(20)])
        return weights @ v.repeat_interleave(q.size(1) // v.size(1), 1)

    monkeypatch.setattr(model_module, "sdpa", sdpa)
    for embed_norm, qk_norm in ((True, True), (True, False), (False, True)):
        torch.manual_seed(0)
        GPT(GPTConfig(**SMALL, arch="llama", n_kv_head=n_kv_head, qk_norm=qk_norm, embed_norm=embed_norm))(tokens(8))
        for layer in seen:
            most, back = torch.stack(layer).max(0)  # (heads,)
            if embed_norm and qk_norm:
                assert (back == torch.arange(4) // (4 // n_kv_head) + 1).all()
                assert (most > 0.06).all()
            else:
                assert (most < 0.06).all()
        seen.clear()


def test_flops_count_matmuls_and_attention():
    """6 per weight, 4 if it is frozen, none for tables that are looked up."""
    weights, attention = 124_475_904 - 1024 * 768, 12 * 12 * 1024 * 768  # without positions; 12 n_layer T C
    assert GPT(GPTConfig()).flops_per_token(1024) == 6 * weights + attention
    gpt = new_gpt("llama_mla_q")
    weights, blocks = (sum(p.numel() for p in module.parameters()) for module in (gpt, gpt.transformer.h))
    weights, attention = weights - 384 * 64, 6 * 3 * 48 * 4 * (10 + 6 + 12)  # 6 n_layer T n_head (nope + rope + v)
    assert gpt.flops_per_token(48) == 6 * weights + attention
    gpt.transformer.h.requires_grad_(False)
    assert gpt.flops_per_token(48) == 6 * weights - 2 * blocks + attention


# ---------------------------------------------------------------------------------------------------
# chunked cross entropy

@pytest.mark.parametrize("n", [1, 7, 8, 29])  # less than a chunk, one, and a last one that is not full
def test_chunked_loss_equals_the_formula(monkeypatch, n):
    monkeypatch.setattr(model_module, "LOSS_CHUNK", 8)
    torch.manual_seed(0)
    x = torch.randn(n, 16, requires_grad=True)
    weight = torch.randn(40, 16, requires_grad=True)
    targets = torch.randint(0, 40, (n,))
    targets[::3] = IGNORE
    ours = linear_cross_entropy(x, weight, targets)
    gradients = torch.autograd.grad(ours * 0.37, (x, weight))

    log_probs = (x @ weight.t()).log_softmax(-1)
    formula = -sum(log_probs[i, t] for i, t in enumerate(targets.tolist()) if t != IGNORE)
    formula = formula + 0 * x.sum() + 0 * weight.sum()  # with n = 1 there is no target
    assert ours.item() == pytest.approx(formula.item(), rel=1e-5)
    for gradient, expected in zip(gradients, torch.autograd.grad(formula * 0.37, (x, weight))):
        assert (gradient - expected).abs().max() < 1e-5
    with torch.no_grad():
        assert linear_cross_entropy(x, weight, targets).item() == pytest.approx(ours.item(), rel=1e-6)


def test_the_gradient_is_that_of_the_loss(monkeypatch):
    """
    By differences, and with every further argument of the loss on: what is added to the loss must be added to its
    gradient, too, which is written by hand. And the loss is a sum over targets, and over nothing else.
    """
    monkeypatch.setattr(model_module, "LOSS_CHUNK", 8)
    further = dict.fromkeys([*signature(linear_cross_entropy).parameters][3:], 0.5)
    torch.manual_seed(0)
    inputs = torch.randn(29, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    targets = torch.randint(0, 40, (29,))
    targets[::3] = IGNORE

    def loss(x, weight, rows=slice(None)):
        return linear_cross_entropy(x[rows], weight, targets[rows], **further)

    gradients, along = torch.autograd.grad(loss(*inputs), inputs), [torch.randn_like(value) for value in inputs]
    ahead, back = (loss(*(value + step * a for value, a in zip(inputs, along))).item() for step in (0.01, -0.01))
    slope = sum((gradient * a).sum().item() for gradient, a in zip(gradients, along))
    assert (ahead - back) / 0.02 == pytest.approx(slope, rel=0.01)
    assert gradients[0][targets == IGNORE].abs().max() == 0
    parts = loss(*inputs, rows=slice(0, 11)) + loss(*inputs, rows=slice(11, 29))
    assert parts.item() == pytest.approx(loss(*inputs).item(), rel=1e-5)


def test_a_batch_without_targets_has_loss_and_gradients_of_zero():
    gpt = new_gpt("gpt2")
    loss = gpt(tokens(), torch.full((2, 48), IGNORE))
    loss.backward()
    assert loss.item() == 0 and all(p.grad.abs().max() == 0 for p in gpt.parameters())


def test_dropout_is_off_in_validation_and_on_in_training():
    gpt = new_gpt("gpt2", dropout=0.5)
    idx = tokens()
    assert torch.equal(gpt.eval()(idx), gpt(idx))
    assert not torch.equal(gpt.train()(idx), gpt(idx))
    for p in (gpt.transformer.drop, *[block.drop for block in gpt.transformer.h]):
        p.p = 0.0
    assert not torch.equal(gpt(idx), gpt(idx))  # the dropout of attention weights


# ---------------------------------------------------------------------------------------------------
# configs that do not exist

LLAMA, MLA = dict(arch="llama"), dict(attention="mla", kv_lora_rank=8)


@pytest.mark.parametrize("named, settings", [
    ("n_embd", dict(n_embd=65)),
    ("n_kv_head", dict(n_kv_head=2)), ("qk_norm", dict(qk_norm=True)), ("embed_norm", dict(embed_norm=True)),  # gpt2
    ("gelu", LLAMA | dict(gelu="exact")),
    ("n_kv_head", LLAMA | dict(n_kv_head=3)), ("n_head", LLAMA | dict(n_embd=20)),
    ("kv_lora_rank", dict(kv_lora_rank=8)), ("q_lora_rank", LLAMA | dict(q_lora_rank=8)),  # mha
    ("v_head_dim", LLAMA | dict(v_head_dim=8)),
    ("q_lora_rank", MLA | dict(q_lora_rank=8)), ("qk_rope_head_dim", MLA | dict(qk_rope_head_dim=8)),
    ("v_head_dim", MLA | dict(v_head_dim=8)), ("qk_nope_head_dim", MLA | dict(qk_nope_head_dim=8)),
    ("qk_rope_head_dim", LLAMA | MLA | dict(qk_rope_head_dim=7)),
    ("qk_rope_head_dim", LLAMA | MLA | dict(qk_rope_head_dim=0)),
    ("qk_norm", LLAMA | MLA | dict(qk_norm=True)), ("n_kv_head", LLAMA | MLA | dict(n_kv_head=2)),
])
def test_a_config_without_a_model_is_refused_by_the_name_of_its_field(named, settings):
    with pytest.raises(ValueError, match=f"^{named}="):
        GPTConfig(**{**SMALL, **settings})


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="max_seq_len=48"):
        new_gpt("llama")(tokens(length=49))
