"""
--local_heads=True: initial weights that make the first two layers attend to what the next token depends on most: the
last few positions, and what followed an earlier occurrence of the latest tokens. Training does not have to discover
either. Small models needed a thousand steps to learn copying, or never did. Only initial weights change, so exports
stay as they are.
"""
import math

import torch
import torch.nn.functional as F

from configurator import fail


def init_local_heads(model, checkpoint):
    """Changes the initial weights of a llama model in place. checkpoint: where they come from instead, or None."""
    if checkpoint:
        if not checkpoint["config"].get("local_heads"):
            fail("--local_heads=True: changes only the initial weights of a new model; leave it out here")
        return
    if not (model.config.qk_norm and model.config.embed_norm):
        fail("--local_heads=True: give it with --qk_norm=True and --embed_norm=True, which need --arch=llama and "
             "--attention=mha")
    look_back(model)
    if model.config.n_layer > 1:
        look_for_earlier_occurrences(model)


@torch.no_grad()
def look_back(model):
    """
    Makes the i-th head of the first layer attend to the i-th position before the query. A constant added to all
    embeddings gives queries and keys a part that is the same for every token; in the queries of the i-th head that
    part is rotated back by i positions. It is larger in the pairs that rotate faster, which tell neighbouring
    positions apart.
    """
    c = model.config
    model.transformer.wte.weight += 1
    amplitude = c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim / 2)  # root of each pair's frequency
    amplitude *= 0.5 / math.sqrt(c.n_embd) / amplitude.square().mean().sqrt()
    cos, sin = (amplitude * model.rope)[:, torch.arange(c.n_head + 1) % c.max_seq_len]  # (n_head + 1, hd / 2) each
    attn = model.transformer.h[0].attn  # first layer only: in later ones it delays copying
    attn.q_proj.weight += torch.cat((cos[1:], -sin[1:]), 1).flatten()[:, None]
    attn.k_proj.weight += torch.cat((cos[0], sin[0])).repeat(c.n_kv_head)[:, None]


@torch.no_grad()
def look_for_earlier_occurrences(model):
    """
    Makes the first head of the second layer an induction head (Olsson et al. 2022): it attends to positions whose
    preceding tokens are the latest ones, and copies what stands there. Tokens are compared and copied as features,
    random projections of their embeddings.
    """
    c, first, second = model.config, model.transformer.h[0].attn, model.transformer.h[1].attn
    C, hd, group = c.n_embd, c.head_dim, c.n_head // c.n_kv_head  # heads that share a key and a value

    def random_directions(*size):
        x = torch.randn(*size, C)
        return F.normalize(x - x.mean(-1, keepdim=True), dim=-1)  # orthogonal to the constant that look_back adds

    compared = min(2, c.n_head, hd // 2)  # tokens; one head of the first layer fetches each
    pairs = max(1, 3 * hd // 16 // compared)  # of query and key, for each token
    slowest = torch.arange(hd).view(2, -1)[:, -pairs * compared:]  # their rotation hardly depends on the distance
    back = random_directions(compared + 1, 2 * pairs)  # back[i]: where the residual stream holds the token i back
    first.v_proj.weight.unflatten(0, (-1, hd))[:math.ceil(compared / group), :2 * pairs] += back[0]
    for i in range(compared):
        first.o_proj.weight[:, i * hd:i * hd + 2 * pairs] += 2 * back[i + 1].t()
        rows = slowest[:, i::compared].flatten()
        second.q_proj.weight[rows] += back[i]
        second.k_proj.weight[rows] += back[i + 1]
    token, copied = random_directions(2, hd)
    second.v_proj.weight[:hd] += token
    second.o_proj.weight[:, :hd] += copied.t()
    embedding = (model.transformer.wte.weight - 1) / math.sqrt(2)  # as normalized, without the constant
    model.lm_head.weight += 0.1 * (embedding @ token.t()) @ copied
