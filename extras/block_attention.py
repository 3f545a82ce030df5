"""
Attention in blocks, for a compiled model. On a CPU, below 768 positions, torch's scaled_dot_product_attention works in
smaller blocks and takes twice as long. On a GPU, with a mask, it computes all scores, and FlexAttention only those
blocks of scores in which a query may look at a key.
"""
import math

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from model import attend


def attach_block_attention(model, device):
    """Makes a GPT, to be compiled for a device, attend in blocks where that is faster."""
    c = model.config
    if device.type == "cuda" and not c.dropout and (c.v_head_dim or c.head_dim) >= 16:  # FlexAttention's limits
        attach_block_mask(model)
    elif device.type == "cpu":
        for block in model.transformer.h:
            block.attn.attend = attend_in_blocks


def attach_block_mask(model):
    """Makes a GPT, while it is being compiled, use FlexAttention (Dong et al. 2024) for rows with a mask."""
    hidden_states = model.hidden_states

    def hidden_states_in_blocks(idx, positions=None, mask=None, cache=None):
        if mask is None or not torch.compiler.is_compiling():
            return hidden_states(idx, positions, mask, cache)
        (B, T), S = idx.shape, mask.size(-1)
        blocks = create_block_mask(lambda b, h, query, key: mask[b, 0, query, key], B, None, T, S, idx.device)
        return hidden_states(idx, positions, blocks, cache)

    model.hidden_states = hidden_states_in_blocks  # one mask for all layers
    for block in model.transformer.h:
        block.attn.attend = attend_with_block_mask


def attend_with_block_mask(q, k, v, mask, dropout):
    """model.attend; mask may be a BlockMask."""
    if not isinstance(mask, BlockMask):
        return attend(q, k, v, mask, dropout)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, hd)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(2)


def attend_in_blocks(q, k, v, mask, dropout):
    """model.attend, in blocks if it is being compiled, without dropout, over fewer than 768 positions."""
    if dropout or not torch.compiler.is_compiling() or not q.size(1) == k.size(1) < 768:
        return attend(q, k, v, mask, dropout)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, hd)
    if q.size(1) != k.size(1):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    return BlockAttention.apply(q, k, v, mask).transpose(1, 2).flatten(2)


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
