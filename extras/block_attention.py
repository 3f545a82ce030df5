"""
Attention for a model that is compiled for a CPU. Below 768 positions torch's scaled_dot_product_attention works in
smaller blocks there and takes 1.5 to 2 times as long.
"""
import functools
import math

import torch
import torch.nn.functional as F

from model import attend


def sdpa_in_blocks(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa):
    """
    torch's scaled_dot_product_attention, in blocks if it is being compiled, without dropout, over fewer than 768
    positions. q, k, v (B, heads, positions, width); attn_mask: causal, as in model.attend, or None.
    """
    if dropout_p or not torch.compiler.is_compiling() or not q.size(2) == k.size(2) < 768:
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)
    if enable_gqa:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    return BlockAttention.apply(q, k, v, attn_mask)


attend_in_blocks = functools.partial(attend, sdpa=sdpa_in_blocks)  # with all else that you change in model.attend


class BlockAttention(torch.autograd.Function):
    """
    Attention of 128 queries at a time over all keys up to the last query, written out for a compiler. The backward is
    written out as well: autograd's would sum the blocks' key gradients transposed and masked, and take 1.5 times as
    long.
    """

    @staticmethod
    def forward(ctx, q, k, v, mask):
        """q, k, v (B, nh, T, hd or vd); mask: as in model.attend, at least one key per query -> (B, nh, T, vd)."""
        if mask is None:
            positions = torch.arange(q.size(2), dtype=torch.float32, device=q.device)  # compared faster than integers
            mask = positions <= positions[:, None]
        bias = torch.where(mask, 0.0, -math.inf)
        y, probs = [], []
        for start in range(0, q.size(2), 128):
            end = start + 128
            # scaled first: float16 overflows at 65504
            scores = (q[:, :, start:end] / math.sqrt(q.size(-1)) @ k[:, :, :end].mT).float()
            probs.append((scores + bias[..., start:end, :end]).softmax(-1).type_as(q))
            y.append(probs[-1] @ v[:, :, :end])
        ctx.save_for_backward(q, k, v, *probs)
        return torch.cat(y, dim=2)

    @staticmethod
    def backward(ctx, dy):
        q, k, v, *probs = ctx.saved_tensors
        dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
        for p in probs:  # (B, nh, end - start, end)
            end = p.size(-1)
            start, below = end - p.size(-2), (0, 0, 0, k.size(2) - end)
            dp = (dy[:, :, start:end] @ v[:, :, :end].mT).float()
            dscores = (p.float() * (dp - (p.float() * dp).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))).type_as(q)
            dq.append(dscores @ k[:, :, :end])
            dk = dk + F.pad(dscores.mT @ q[:, :, start:end], below)
            dv = dv + F.pad(p.mT @ dy[:, :, start:end], below)
        return torch.cat(dq, dim=2), dk, dv, None
