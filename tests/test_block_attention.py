"""Attention in blocks, compiled for a CPU, against torch's scaled_dot_product_attention."""
import sys
from types import SimpleNamespace

import pytest
import torch

from conftest import packed, small_gpt
from extras.block_attention import attend_in_blocks
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


def test_dropout_is_not_lost_and_float16_does_not_overflow():
    attention, x = torch.compile(attend_in_blocks, backend="eager"), torch.ones(1, 8, 1, 64)
    assert (attention(x, x, x, None, 0.5) != 1).any()
    x = 40 * x.half()
    assert (attention(x, x, x, None, 0.0) == 40).all()


def attention_of(device, options):
    """What a model attends with after change_model."""
    gpt, config = small_gpt("llama"), {"teacher": None, "fsdp": False}
    change_model(gpt, SimpleNamespace(device=torch.device(device)), 0, config, "float32", options, None, False, {}, [])
    [function] = {block.attn.attend for block in gpt.transformer.h}
    return function


def test_a_model_that_is_compiled_for_a_cpu_has_it(monkeypatch, capsys):
    """No other model has it; and without the file there is torch's, and a line that says so."""
    assert attention_of("cpu", {"mode": None}) is attend_in_blocks
    assert attend_in_blocks.func is attend  # so that a change in it is trained, too
    assert attention_of("cpu", None) is attend and attention_of("cuda", {"mode": None}) is attend
    assert not capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "extras.block_attention", None)  # deleted
    assert attention_of("cpu", {"mode": None}) is attend
    assert "extras/block_attention.py is not here" in capsys.readouterr().out
