"""Attention in blocks, compiled, against torch's scaled_dot_product_attention."""
import sys
from types import SimpleNamespace

import pytest
import torch

from compiling import graphs_compiled
from conftest import GPU, needs_gpu, new_gpt, packed, small_gpt, tokens
from extras import block_attention
from extras.block_attention import attach_block_mask, attend_in_blocks, attend_with_block_mask
from features import change_model
from model import attend


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads, value_width", [(4, 12), (2, 16)])
def test_attention_in_blocks_is_attention(masked, kv_heads, value_width):
    """300 positions are two blocks and a shorter one. Tracing alone takes the compiled path, with its own ops."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 300, 4, 16), (2, 300, kv_heads, 16), (2, 300, kv_heads, value_width)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = packed([140, 3, 157])["mask"].expand(2, 1, 300, 300) if masked else None
    results = []
    for function in (attend, torch.compile(attend_in_blocks, backend="eager", fullgraph=True)):
        y = function(*inputs, mask, 0.0)
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    for plain, blocks in zip(*results):
        assert (plain - blocks).abs().max() < 1e-5
    assert not torch.equal(results[0][0], results[1][0])  # the blocks have float32 scores: so it was them


@pytest.mark.parametrize("variant, recompute", [("gpt2", False), ("qwen3", True), ("llama_mla", False)])
@pytest.mark.parametrize("device", ["cpu", pytest.param(GPU, marks=needs_gpu)])
def test_flex_attention_of_packed_rows_is_attention_and_is_compiled_once(device, variant, recompute, monkeypatch):
    """On a CPU without generated code, and against its will: it has no backward there."""
    if device == "cpu":
        monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(block_attention, "attend", None)  # there is no other way
    torch.compiler.reset()
    plain, gpt = new_gpt(variant), new_gpt(variant).to(device)
    gpt.recompute = recompute
    attach_block_mask(gpt)
    backend = "aot_eager" if device == "cpu" else "inductor"
    model = torch.compile(gpt, backend=backend, dynamic=False, fullgraph=True)
    before = graphs_compiled()
    for lengths in [20, 1, 27], [5, 40, 3]:
        gradients = []
        for net, function in (plain, plain), (gpt, model):
            net.zero_grad()
            batch = {"idx": tokens(1), "targets": tokens(1, seed=2), **packed(lengths)}
            function(**{name: value.to(net.lm_head.weight.device) for name, value in batch.items()}).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]).cpu())
        assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()
    assert graphs_compiled() == before + 1


def attention_of(device, options, **changes):
    """What a model attends with after change_model."""
    gpt, config = small_gpt("llama", **changes), {"teacher": None, "fsdp": False}
    change_model(gpt, SimpleNamespace(device=torch.device(device)), 0, config, "float32", options, None, False, {}, [])
    [function] = {block.attn.attend for block in gpt.transformer.h}
    return function


def test_a_compiled_model_has_it(monkeypatch, capsys):
    """No other model has it; and without the file there is torch's, and a line that says so."""
    assert attention_of("cpu", {"mode": None}) is attend_in_blocks
    assert attention_of("cuda", {"mode": None}, n_embd=32) is attend_with_block_mask
    for device, options, changes in [("cpu", None, {}), ("cuda", None, dict(n_embd=32)), ("mps", {"mode": None}, {}),
                                     ("cuda", {"mode": None}, dict(n_embd=32, dropout=0.1)),
                                     ("cuda", {"mode": None}, dict(n_embd=16))]:  # heads of 8
        assert attention_of(device, options, **changes) is attend
    assert not capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "extras.block_attention", None)  # deleted
    assert attention_of("cpu", {"mode": None}) is attend
    assert "extras/block_attention.py is not here" in capsys.readouterr().out
