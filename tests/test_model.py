"""The model against independent ones: transformers for the architectures, a plain formula for the loss."""
import math
from dataclasses import fields
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
import transformers

import evaluate
import model as model_module
from conftest import CLASSES, SMALL, VARIANTS, literals, new_gpt, packed, tokens
from export_hf import to_hf
from import_hf import config_to_hf
from model import GPT, IGNORE, Block, GPTConfig, linear_cross_entropy


def transformers_twin(gpt):
    """transformers' model of the same architecture with the same weights; for gpt2 with mla the equivalent GPT-2."""
    twin = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config_to_hf(gpt.config)))
    twin.load_state_dict(to_hf(gpt.state_dict(), gpt.config))
    return twin.eval()  # without GPT-2's dropout


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


@pytest.mark.parametrize("variant", CLASSES)
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


def test_small_latents_of_mla_show_the_eps_of_their_norms():
    gpt = new_gpt("llama_mla_q")
    for block in gpt.transformer.h:
        block.attn.q_a_proj.weight.data *= 1e-3
        block.attn.kv_a_proj_with_mqa.weight.data *= 1e-3
    assert (gpt(tokens()) - transformers_twin(gpt)(tokens()).logits).abs().max() < 1e-4


def test_a_normalized_embedding_is_exported_as_a_plain_one():
    gpt = new_gpt("qwen3", embed_norm=True)
    gpt.transformer.wte.weight.data *= 3
    assert (gpt(tokens()) - transformers_twin(gpt)(tokens()).logits).abs().max() < 1e-4


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_equals_unpacked(variant):
    """Three texts in one row, each with its own attention and positions: the logits of each one alone."""
    gpt, idx, lengths = new_gpt(variant).eval(), tokens(1), [20, 1, 27]
    alone = torch.cat([gpt(part) for part in idx.split(lengths, dim=1)], dim=1)
    assert (gpt(idx, **packed(lengths)) - alone).abs().max() < 1e-5 * alone.abs().max()


def test_initial_weights_have_the_stated_spread():
    for variant, scaled in (("gpt2", "attn.c_proj"), ("llama", "mlp.down_proj"), ("llama_mla_q", "attn.o_proj")):
        torch.manual_seed(0)
        gpt = GPT(GPTConfig(**{**SMALL, **VARIANTS[variant], "n_embd": 256}))
        stds = {name: p.std().item() for name, p in gpt.state_dict().items()}
        assert stds["transformer.wte.weight"] == pytest.approx(0.02, rel=0.05) == stds["lm_head.weight"]
        assert stds[f"transformer.h.1.{scaled}.weight"] == pytest.approx(0.02 / math.sqrt(2 * 3), rel=0.05)
        assert variant != "gpt2" or stds["transformer.wpe.weight"] == pytest.approx(0.01, rel=0.05)
    gpt = GPT(GPTConfig(**{**SMALL, "arch": "llama", "embed_norm": True}))
    assert gpt.transformer.wte.weight.std().item() == pytest.approx(1, rel=0.05)


# ---------------------------------------------------------------------------------------------------
# FLOPs

def test_flops_count_matmuls_and_attention():
    """6 per weight, 4 if it is frozen, none for tables that are looked up."""
    weights, attention = 124_475_904 - 1024 * 768, 12 * 12 * 1024 * 768  # without positions; 12 n_layer T C
    with torch.device("meta"):  # no memory, no values
        assert GPT(GPTConfig()).flops_per_token(1024) == 6 * weights + attention
    gpt = new_gpt("llama_mla_q")
    weights, blocks = (sum(p.numel() for p in module.parameters()) for module in (gpt, gpt.transformer.h))
    weights, attention = weights - 384 * 64, 6 * 3 * 48 * 4 * (10 + 6 + 12)  # 6 n_layer T n_head (nope + rope + v)
    assert gpt.flops_per_token(48) == 6 * weights + attention
    gpt.transformer.h.requires_grad_(False)
    assert gpt.flops_per_token(48) == 6 * weights - 2 * blocks + attention


# ---------------------------------------------------------------------------------------------------
# chunked cross entropy

@pytest.fixture
def loss_inputs(monkeypatch):
    """x (29, 16), weight (40, 16) and targets (29,), every third of them ignored, for chunks of 8."""
    monkeypatch.setattr(model_module, "LOSS_CHUNK", 8)
    torch.manual_seed(0)
    targets = torch.randint(0, 40, (29,))
    targets[::3] = IGNORE
    return torch.randn(29, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True), targets


@pytest.mark.parametrize("n", [1, 7, 8, 29])  # no target; less than a chunk; one chunk; a last one that is not full
def test_chunked_loss_equals_the_formula(loss_inputs, n):
    x, weight, targets = loss_inputs
    ours = linear_cross_entropy(x[:n], weight, targets[:n])
    formula = F.cross_entropy(x[:n] @ weight.t(), targets[:n], ignore_index=IGNORE, reduction="sum")
    assert ours.item() == pytest.approx(formula.item(), rel=1e-5)
    gradients, expected = (torch.autograd.grad(loss * 0.37, (x, weight)) for loss in (ours, formula))
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        assert linear_cross_entropy(x[:n], weight, targets[:n]).item() == pytest.approx(ours.item(), rel=1e-6)


def test_the_gradient_is_that_of_the_loss(loss_inputs, monkeypatch):
    """
    By differences in float64, and with every further argument of the loss on: what is added to the loss must be added
    to its gradient, too, which is written by hand. And the loss is a sum over targets, and over nothing else.
    """
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)  # logits in float64, too
    *inputs, targets = loss_inputs
    inputs = [value.detach().double().requires_grad_() for value in inputs]
    further = dict.fromkeys([*signature(linear_cross_entropy).parameters][3:], 0.5)

    def loss(x, weight, rows=slice(None)):
        return linear_cross_entropy(x[rows], weight, targets[rows], **further)

    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-6, rtol=1e-5)
    assert torch.autograd.grad(loss(*inputs), inputs)[0][targets == IGNORE].abs().max() == 0
    parts = loss(*inputs, slice(11)) + loss(*inputs, slice(11, None))
    assert parts.item() == pytest.approx(loss(*inputs).item(), rel=1e-5)


def test_all_logits_come_from_one_function(monkeypatch):
    """Without it there is no loss, no score and no teacher."""
    distill = pytest.importorskip("extras.distill")
    for module in (model_module, evaluate, distill):
        monkeypatch.setattr(module, "compute_logits", None)
    gpt, idx, x = new_gpt("gpt2"), tokens(), torch.randn(7, 16)
    rows, targets = [((1, 2), {(0, 0): torch.tensor([3])})], torch.zeros(7, dtype=torch.int64)
    for function, *args in ((gpt, idx), (gpt, idx, idx), (torch.no_grad()(gpt.forward), idx, idx),
                            (evaluate.log_likelihoods, gpt, rows),
                            (distill.distill_loss, x, x, torch.tensor(1.0), targets, 0.5, x, x)):
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            function(*args)


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_scores_are_those_of_the_logits(variant):
    """Whatever changes the logits, such as a soft cap: forgotten in a loss or a score, it would change only others."""
    gpt, idx = new_gpt(variant), tokens()
    gpt.lm_head.weight.data *= 100
    targets = idx.roll(-1, 1)
    expected = F.cross_entropy(gpt(idx).flatten(0, 1), targets.flatten(), reduction="sum").item()
    rows = [(row[:-1].tolist(), {(i, 0): row[1:]}) for i, row in enumerate(torch.hstack((idx, targets[:, -1:])))]
    with torch.no_grad():
        losses = [gpt(idx, targets).item(), -sum(evaluate.log_likelihoods(gpt, rows).values())]
    losses += [gpt(idx, targets).item(), gpt.train()(idx, targets).item()]
    assert losses == pytest.approx([expected] * 4, rel=1e-5)


def test_recompute_runs_each_block_again_in_backward_and_changes_no_gradient(monkeypatch):
    gpt, idx, calls = new_gpt("llama"), tokens(), []
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda block, *args: calls.append(block) or forward(block, *args))
    gradients = {}
    for gpt.recompute in (False, True):
        gradients[gpt.recompute] = torch.autograd.grad(gpt(idx, idx), [*gpt.parameters()])
        assert len(calls) == (1 + gpt.recompute) * len(gpt.transformer.h)
        calls.clear()
    assert all(map(torch.equal, *gradients.values()))


@pytest.mark.parametrize("variant", ["gpt2", "llama_mla"])
def test_dropout_is_off_in_validation_and_on_in_training(variant):
    gpt = new_gpt(variant, dropout=0.5)
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
    ("n_embd", dict(n_embd=65)), ("qkv_bias", LLAMA | MLA | dict(qkv_bias=True)),
    ("qk_norm", dict(qk_norm=True)), ("gelu", LLAMA | dict(gelu="exact")),  # of another arch
    ("n_kv_head", LLAMA | dict(n_kv_head=3)), ("n_head", LLAMA | dict(n_embd=20)),
    ("embed_norm", LLAMA | dict(embed_norm=True, tied_head=True)),
    ("kv_lora_rank", dict(kv_lora_rank=8)), ("qk_norm", LLAMA | MLA | dict(qk_norm=True)),  # of another attention
    ("q_lora_rank", MLA | dict(q_lora_rank=8)),  # of gpt2 with mla
    ("qk_rope_head_dim", LLAMA | MLA | dict(qk_rope_head_dim=7)),
    ("qk_rope_head_dim", LLAMA | MLA | dict(qk_rope_head_dim=0)),
])
def test_a_config_without_a_model_is_refused_by_the_name_of_its_field(named, settings):
    with pytest.raises(ValueError, match=f"^{named}="):
        GPTConfig(**{**SMALL, **settings})


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="max_seq_len=48"):
        new_gpt("llama")(tokens(length=49))


def test_derived_sizes():
    """And none is zero at the smallest width."""
    assert GPTConfig().intermediate_size == 4 * 768 and GPTConfig(arch="llama").intermediate_size == 8 * 768 / 3
    config = GPTConfig(arch="llama", attention="mla")
    assert (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (
        128, 32, 32, 64) and config.norm_eps == 1e-6  # DeepSeek's
    config = GPTConfig(n_head=1, n_embd=1, attention="mla")
    assert config.kv_lora_rank == config.qk_nope_head_dim == config.v_head_dim == 1
