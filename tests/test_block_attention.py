"""Attention in blocks, compiled for a CPU, against torch's scaled_dot_product_attention."""
import pytest
import torch
import torch.nn.functional as F

import configurator
import model
import runtime
from extras import block_attention
from model import GPT, GPTConfig
from test_model import packed


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads, kv_heads, width, value_width", [(4, 4, 16, 16), (4, 2, 16, 16), (4, 4, 16, 12)])
def test_attention_in_blocks_is_attention(masked, heads, kv_heads, width, value_width, monkeypatch):
    """300 positions are two blocks and a shorter one. Tracing alone takes the compiled path, with its own ops."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 300, heads, width), (2, 300, kv_heads, width), (2, 300, kv_heads, value_width)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = packed([140, 3, 157])["mask"].expand(2, 1, 300, 300)
    monkeypatch.setattr(model, "sdpa", block_attention.sdpa)
    results = []
    for function in (model.attend, torch.compile(model.attend, backend="eager", fullgraph=True)):
        y = function(*inputs, mask if masked else None, 0.0)
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    for plain, blocks in zip(*results):
        assert (plain - blocks).abs().max() < 1e-5
    assert not torch.equal(results[0][0], results[1][0])  # the blocks have float32 scores: so it was them


def test_a_model_that_is_compiled_for_a_cpu_has_it(monkeypatch, tmp_path, capsys):
    """Not one that is uncompiled; and without the file there is torch's, and a line that says so."""
    monkeypatch.setattr(model, "sdpa", F.scaled_dot_product_attention)
    gpt, cpu, options = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8)), torch.device("cpu"), {"mode": None}
    runtime.wrap_model(gpt, cpu, "float32", None, {"fsdp": False})
    with monkeypatch.context() as deleted:
        deleted.setattr(configurator, "EXTRAS", tmp_path)
        runtime.wrap_model(gpt, cpu, "float32", options, {"fsdp": False})
    assert "extras/block_attention.py is not here" in capsys.readouterr().out
    assert model.sdpa is F.scaled_dot_product_attention
    runtime.wrap_model(gpt, cpu, "float32", options, {"fsdp": False})
    assert model.sdpa is block_attention.sdpa
