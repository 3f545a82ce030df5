"""
GPT-2 and Llama-style transformers in one file.

    gpt2   LayerNorm with bias, learned positions, tanh GELU, biases, head tied to the embedding.
           Radford et al. 2019; equals transformers' GPT2LMHeadModel, or with gelu="exact" nanoGPT's model.
    llama  RMSNorm, rotary positions, SwiGLU, no biases, grouped-query attention, untied head by default.
           Touvron et al. 2023; equals LlamaForCausalLM, or with qk_norm=True Qwen3ForCausalLM, or with qkv_bias=True
           Qwen2ForCausalLM.

Both come with multi-head (mha) or multi-head latent attention (mla). llama with mla equals DeepseekV3ForCausalLM with
dense layers only.

Shape letters in this file:
    B batch, T positions in this call, S positions in the cache, C = n_embd, V = vocab_size
    nh = n_head, nkv = n_kv_head, hd = head_dim, N = B * T
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

IGNORE = -1  # ignore_index: a target with this value has no loss
LOSS_CHUNK = 1024  # tokens per chunk of the loss: 1024 * 50304 float32 logits are 206 MB


@dataclass
class GPTConfig:
    arch: str = "gpt2"  # gpt2 | llama
    attention: str = "mha"  # mha (multi-head, or grouped-query with n_kv_head) | mla (multi-head latent)
    max_seq_len: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 128: faster matmuls, room for chat tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_kv_head: int | None = None  # llama: key/value heads, each shared by n_head / n_kv_head; None: n_head
    head_dim: int | None = None  # llama: width of a head; None: C / n_head
    tied_head: bool | None = None  # llama: the head shares the embedding's matrix, as in gpt2; None: False
    qk_norm: bool = False  # llama: RMSNorm on queries and keys, per head (Qwen3)
    qkv_bias: bool = False  # llama: biases on queries, keys and values (Qwen2)
    embed_norm: bool = False  # llama: RMSNorm without weights on the embedding, which is initialized to N(0, 1)
    intermediate_size: int | None = None  # MLP width; None: 4 C, llama: 8/3 C, next multiple of 64
    gelu: str = "tanh"  # gpt2: tanh (the approximation GPT-2 was trained with) | exact (nanoGPT)
    rope_theta: float = 10000.0  # llama: base of the rotary frequencies
    rope_factor: float = 1.0  # llama: Llama 3's factor on wavelengths of 8192 positions and more
    norm_eps: float | None = None  # of all norms but the embedding's and mla's own; None: 1e-5; llama with mla: 1e-6
    kv_lora_rank: int | None = None  # mla: latent width for keys and values; None: min(128, C / 2)
    q_lora_rank: int | None = None  # mla, llama: latent width for queries; None: queries straight from x
    qk_nope_head_dim: int | None = None  # mla: width of a head's unrotated part; None: hd - the rotated one
    qk_rope_head_dim: int | None = None  # mla, llama: width of the rotated part; None: hd / 2
    v_head_dim: int | None = None  # mla: width of a head's value; None: hd
    dropout: float = 0.0

    def __post_init__(self):
        """Replaces None with the derived value. Raises ValueError, naming the field, if no such model can be built."""
        gpt2, mla, C, hd = self.arch == "gpt2", self.attention == "mla", self.n_embd, self.n_embd // self.n_head
        # 8/3 C in three matrices holds as many weights as 4 C in two (Shazeer 2020, section 3)
        derived = {"n_kv_head": self.n_head, "head_dim": hd, "tied_head": gpt2, "intermediate_size": 4 * C if gpt2 else
                   64 * math.ceil(C / 24), "norm_eps": 1e-6 if mla and not gpt2 else 1e-5}
        if mla:
            # By default a head's query and key, nope + rope, are as wide as its value. If the widths differ, SDPA
            # cannot use its flash kernels: CUDA falls back to the memory-efficient one, a CPU to all T x T weights.
            rope = 0 if gpt2 else self.qk_rope_head_dim or max(2, hd // 4 * 2)
            derived |= {"kv_lora_rank": max(1, min(128, C // 2)), "qk_rope_head_dim": rope,
                        "qk_nope_head_dim": max(1, hd - rope), "v_head_dim": hd}
        for name, value in derived.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

        def expect(name, ok, accepted):
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)}: {accepted}")

        expect("n_embd", self.head_dim != hd or C % self.n_head == 0, f"expected a multiple of n_head={self.n_head}")
        for name in NO_CHOICE[self.arch] + NO_CHOICE[self.attention]:
            value = derived.get(name, getattr(GPTConfig, name))
            expect(name, getattr(self, name) == value,
                   f"expected {value}, the only value with arch={self.arch} attention={self.attention}")
        expect("embed_norm", not (self.embed_norm and self.tied_head), "expected False with tied_head=True")
        expect("n_kv_head", self.n_head % self.n_kv_head == 0, f"expected a divisor of n_head={self.n_head}")
        if not gpt2:
            rotated = self.qk_rope_head_dim if mla else self.head_dim
            expect("qk_rope_head_dim" if mla else "n_head", rotated and rotated % 2 == 0,
                   f"rotary positions need an even width, not {rotated}")


MLA_SIZES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Fields that a variant does not use. gpt2 with mla is a plain GPT-2 once keys and values are multiplied out.
NO_CHOICE = {
    "gpt2": ("n_kv_head", "head_dim", "tied_head", "qk_norm", "qkv_bias", "embed_norm", *MLA_SIZES[1:]),
    "llama": ("gelu",), "mha": MLA_SIZES,
    "mla": ("n_kv_head", "head_dim", "tied_head", "rope_factor", "qk_norm", "qkv_bias")}


def matmul_dtype(tensor):
    """The dtype of a matmul with this tensor: autocast's if it is on, else the tensor's."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


# -----------------------------------------------------------------------------
# attention: one class per variant, chosen in Block below

def attend(q, k, v, mask, dropout, sdpa=F.scaled_dot_product_attention):
    """
    Softmax attention. q (B, T, nh, hd), k (B, S, nkv, hd), v (B, S, nkv, vd) -> (B, T, nh * vd).
    mask: (B, 1, T, S) bool, True where a query may look, never at a later key; None: causal, and S = T; or, without
    dropout, a BlockMask: FlexAttention (Dong et al. 2024) skips the blocks of scores in which no query may look.
    sdpa: torch's, or extras/block_attention.py's on a model that is compiled for a CPU.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, positions, hd)
    if isinstance(mask, BlockMask):
        # uncompiled it would keep all scores
        attention = flex_attention if torch.compiler.is_compiling() else torch.compile(flex_attention, dynamic=False)
        return attention(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(2)
    # no fast CUDA kernel takes grouped queries with a mask or in float32 (torch 2.13)
    if q.size(1) != k.size(1) and (mask is not None or q.dtype == torch.float32):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    y = sdpa(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=q.size(1) != k.size(1))
    return y.transpose(1, 2).flatten(2)


def decode_attention(q, k, v, mask, scale, matmul=torch.matmul):
    """
    Attention of one new position over a cache. q (B, 1, nh, hd), k (B, nkv, S, hd), v (B, nkv, S, vd) ->
    (B, 1, nh, vd). nh / nkv heads share each key. mask: (B, 1, 1, S) bool. scale: factor on the scores.
    """
    q = q[:, 0].unflatten(1, (k.size(1), -1))  # (B, nkv, nh / nkv, hd)
    scores = matmul(q, k.transpose(2, 3)).float() * scale  # (B, nkv, nh / nkv, S)
    p = scores.masked_fill(~mask, -math.inf).softmax(-1).type_as(q)
    return matmul(p, v).type_as(q).flatten(1, 2)[:, None]  # sample.py's matmul returns float32


def write_cache(cache, positions, *new):
    """
    Writes each of `new` (B, T, heads, hd) into its cache tensor (B, heads, S, hd) at `positions` (B, T). In this
    layout the keys of a head are contiguous, which a CPU reads several times faster.
    """
    row = torch.arange(positions.size(0), device=positions.device)[:, None]
    for old, values in zip(cache, new):
        old[row, :, positions] = values  # (B, T, heads, hd): indexed dims come first


class Attention(nn.Module):
    """
    What all variants share. features.py replaces `attend`, and sample.py `decode`, on a model that is compiled for a
    CPU.
    """
    attend, decode = staticmethod(attend), staticmethod(decode_attention)

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.cache_shapes = [(config.n_kv_head, config.head_dim)] * 2  # (heads, width) of k and of v

    def attend_or_decode(self, q, k, v, positions, mask, cache):
        """Attends, over the whole cache if there is one: (B, T, heads, hd) each -> (B, T, nh * hd)."""
        if cache is not None:
            write_cache(cache, positions, k, v)
            if q.size(1) == 1:
                return self.decode(q, *cache, mask, 1 / math.sqrt(q.size(-1))).flatten(2)
            k, v = (tensor.transpose(1, 2) for tensor in cache)
        return self.attend(q, k, v, mask, self.config.dropout if self.training else 0.0)


class GPT2Attention(Attention):
    """Multi-head attention as in GPT-2: queries, keys and values from one matrix, with biases."""

    def __init__(self, config):
        super().__init__(config)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, rope, positions, mask, cache):
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.config.n_head, -1)).unbind(2)  # (B, T, nh, hd) each
        return self.c_proj(self.attend_or_decode(q, k, v, positions, mask, cache))


class LlamaAttention(Attention):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions, and optionally Qwen3's norms."""

    def __init__(self, config):
        super().__init__(config)
        hd = config.head_dim
        self.q_proj = nn.Linear(config.n_embd, config.n_head * hd, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.n_embd, config.n_kv_head * hd, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.n_embd, config.n_kv_head * hd, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * hd, config.n_embd, bias=False)
        self.q_norm = nn.RMSNorm(hd, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(hd, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x, rope, positions, mask, cache):
        hd = self.config.head_dim
        q, k, v = (proj(x).unflatten(-1, (-1, hd)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q = apply_rotary_emb(self.q_norm(q.float()), rope).type_as(v)
        k = apply_rotary_emb(self.k_norm(k.float()), rope).type_as(v)
        return self.o_proj(self.attend_or_decode(q, k, v, positions, mask, cache))


def apply_rotary_emb(x, rope):
    """
    Rotates the pairs (x[i], x[i + hd/2]) of each head by their position's angles. x (B, T, heads, hd) float32.
    rope: (cos, sin), each (B or 1, T, 1, hd / 2). Pairing halves instead of neighbours is how Hugging Face stores the
    weights of Llama and Qwen; it permutes the rows of q_proj's and k_proj's weights, nothing else.
    """
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class MLA(Attention):
    """
    Multi-head latent attention (names as in DeepSeek-V2, section 2.1). The keys and values of all heads come from
    one latent of kv_lora_rank numbers per token, c = kv_a(x): each head has k_nope = W_k c and v = W_v c.
    llama: the latent has an RMSNorm. W_k cannot be absorbed (see below) through a rotation, so positions get their own
    part: qk_rope_head_dim more numbers in each query, and one such key per token, shared by the heads.
    gpt2: x already carries the positions, so there is no such part, and no norm. Only queries and output keep GPT-2's
    biases: a bias on the keys would add the same number to all scores of a query, which softmax ignores, and one on
    the values would add a constant to the output, which has a bias.

    Training expands k and v and is ordinary attention. The cache holds only c and the rotated key. Prefill expands k
    and v too. Decoding *absorbs* the up-projections: a score is q . (W_k c) = (W_k^T q) . c, so the query is mapped
    into latent space once and meets the cached c directly; and the output, sum_s p_s (W_v c_s) = W_v (sum_s p_s c_s),
    sums latents first and is projected up once. What remains is attention with one key, [c, k_pe], shared by all
    heads, whose value is c itself.
    """

    def __init__(self, config):
        super().__init__(config)
        c = config
        gpt2, q_width = c.arch == "gpt2", c.n_head * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        if c.q_lora_rank is None:
            self.q_proj = nn.Linear(c.n_embd, q_width, bias=gpt2)
        else:
            self.q_a_proj = nn.Linear(c.n_embd, c.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank, eps=1e-6)
            self.q_b_proj = nn.Linear(c.q_lora_rank, q_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.n_embd, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.Identity() if gpt2 else nn.RMSNorm(c.kv_lora_rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, c.n_head * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o_proj = nn.Linear(c.n_head * c.v_head_dim, c.n_embd, bias=gpt2)
        self.cache_shapes = [(1, c.kv_lora_rank + c.qk_rope_head_dim)]  # the latent and the rotated key

    def forward(self, x, rope, positions, mask, cache):
        c = self.config
        if c.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x).float()))
        q_nope, q_pe = q.unflatten(-1, (c.n_head, -1)).split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_layernorm(latent.float()).type_as(q)  # (B, T, rank)
        k_pe = k_pe[:, :, None]  # (B, T, 1, rope): one head
        if c.qk_rope_head_dim:
            q_pe, k_pe = (apply_rotary_emb(interleaved_to_half(pe.float()), rope).type_as(q) for pe in (q_pe, k_pe))
        if cache is not None:
            write_cache(cache, positions, torch.cat((latent[:, :, None], k_pe), dim=-1))
            keys, = cache  # (B, 1, S, rank + rope)
            if x.size(1) == 1:
                return self.o_proj(self.forward_absorbed(q_nope, q_pe, keys, mask))
            latent, k_pe = keys[:, 0, :, :c.kv_lora_rank], keys[:, 0, :, None, c.kv_lora_rank:]
        kv = self.kv_b_proj(latent).unflatten(-1, (c.n_head, -1))
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        v = v.contiguous()  # CUDA's kernels read 16 bytes at a time; a slice may start in between
        q = torch.cat((q_nope, q_pe), dim=-1)
        k = torch.cat((k_nope, k_pe.expand(-1, -1, c.n_head, -1)), dim=-1)
        return self.o_proj(self.attend_or_decode(q, k, v, positions, mask, None))

    def forward_absorbed(self, q_nope, q_pe, keys, mask):
        """Attention of one position over cached keys (B, 1, S, rank + rope), not expanded -> (B, 1, nh * v)."""
        c = self.config
        up = self.kv_b_proj  # with an adapter (extras/lora.py) use the merged weight
        up = up.merged_weight() if hasattr(up, "merged_weight") else up.weight
        up = up.unflatten(0, (c.n_head, -1)).to(q_nope.dtype)
        up_k, up_v = up.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        q_latent = torch.einsum("bthd,hdr->bthr", q_nope, up_k)
        q = torch.cat((q_latent, q_pe), dim=-1)  # (B, 1, nh, rank + rope)
        scale = 1 / math.sqrt(c.qk_nope_head_dim + c.qk_rope_head_dim)
        y = self.decode(q, keys, keys[..., :c.kv_lora_rank], mask, scale)  # (B, 1, nh, rank)
        return torch.einsum("bthr,hdr->bthd", y, up_v).flatten(2)


def rotary_table(config, width):
    """
    cos and sin of each position's angles, (2, max_seq_len, width / 2) float32 (Su et al. 2021, section 3.2.2), on the
    CPU even if the model is built on the meta device. rope_factor: Llama 3.1 (Dubey et al. 2024) was trained further
    on long rows, with wavelengths of 8192 positions and more stretched by it, those of 2048 and less kept, and a
    smooth transition between.
    """
    frequencies = config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    if config.rope_factor != 1:
        kept = ((8192 * frequencies / (2 * math.pi) - 1) / 3).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / config.rope_factor)
    positions = torch.arange(config.max_seq_len, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies)  # in radians
    return torch.stack((angles.cos(), angles.sin()))


def interleaved_to_half(x):
    """DeepSeek's weights rotate neighbours, (x[2i], x[2i + 1]): moves them to where apply_rotary_emb pairs them."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


# -----------------------------------------------------------------------------
# the rest of a block

class GPT2MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.intermediate_size)
        self.c_proj = nn.Linear(config.intermediate_size, config.n_embd)
        self.approximate = "none" if config.gelu == "exact" else config.gelu

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))


class LlamaMLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def build_norm(config):
    norm = nn.LayerNorm if config.arch == "gpt2" else nn.RMSNorm
    return norm(config.n_embd, eps=config.norm_eps)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        gpt2 = config.arch == "gpt2"
        attention = MLA if config.attention == "mla" else GPT2Attention if gpt2 else LlamaAttention
        self.ln_1 = build_norm(config)
        self.attn = attention(config)
        self.ln_2 = build_norm(config)
        self.mlp = GPT2MLP(config) if gpt2 else LlamaMLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, rope, positions, mask, cache=None):
        x = x + self.drop(self.attn(self.ln_1(x.float()), rope, positions, mask, cache))
        x = x + self.drop(self.mlp(self.ln_2(x.float())))
        return x


# -----------------------------------------------------------------------------
# chunked cross entropy

def compute_logits(x, weight):
    """
    The last hidden states x (..., C) and the head's weight (V, C) -> logits (..., V). Every loss, score and
    sample gets its logits here. If you change them (with a soft cap, say), LinearCrossEntropy needs the
    derivative of your change, because it computes its gradient by hand.
    """
    return F.linear(x, weight)  # not x @ weight.t(): autocast would cast the head anew at each call


class LinearCrossEntropy(torch.autograd.Function):
    """
    The summed cross entropy of x @ weight.T against targets, LOSS_CHUNK rows at a time: the full (N, V) logits, most
    of a small model's memory, never exist. The gradient of softmax cross entropy, softmax(logits) - onehot(target),
    needs the logits and nothing from later layers, so it is computed here in forward instead of recomputing them in
    backward. This is the gradient of the *sum*. Dividing by the number of targets here would underflow in float16, so
    backward applies the caller's division instead.
    """

    @staticmethod
    def forward(ctx, x, weight, targets):
        dx = torch.empty_like(x)
        dweight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        weight_x = weight.to(x.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for i in range(0, x.size(0), LOSS_CHUNK):
            xc, tc = x[i:i + LOSS_CHUNK], targets[i:i + LOSS_CHUNK, None]  # (chunk, C), (chunk, 1)
            logits = compute_logits(xc, weight_x).float()  # (chunk, V)
            lse = logits.logsumexp(-1, keepdim=True)
            valid = tc != IGNORE
            # not +=: compiled by torch 2.11, an output that was changed in place has no gradient
            loss = loss + ((lse - logits.gather(-1, tc.clamp(min=0))) * valid).sum()
            softmax = logits.sub_(lse.where(valid, math.inf)).exp_()  # zeros where there is no target
            onehot = torch.arange(logits.size(-1), device=x.device) == tc  # fused away when compiled
            dlogits = torch.add(softmax, onehot, alpha=-1).to(x.dtype)
            dx[i:i + LOSS_CHUNK] = dlogits @ weight_x
            if dweight is not None:
                dweight += dlogits.t() @ xc
        ctx.save_for_backward(dx, None if dweight is None else dweight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        dx, dweight = ctx.saved_tensors
        return dx * grad_loss, None if dweight is None else dweight * grad_loss, None


def linear_cross_entropy(x, weight, targets):
    """
    Sum of the cross entropies, in nats, of x @ weight.T against targets, over targets that are not IGNORE.
    x (N, C), weight (V, C), targets (N,) int64 -> scalar float32. Under autocast the matmuls are in its dtype,
    and round the logits to it; the loss and the sum of the weight's gradient are float32.
    """
    x = x.to(matmul_dtype(x))
    if torch.is_grad_enabled():
        return LinearCrossEntropy.apply(x, weight, targets)
    loss, weight = 0.0, weight.to(x.dtype)
    for xc, tc in zip(x.split(LOSS_CHUNK), targets.split(LOSS_CHUNK)):
        loss = loss + F.cross_entropy(compute_logits(xc, weight).float(), tc, ignore_index=IGNORE, reduction="sum")
    return loss


# -----------------------------------------------------------------------------

class GPT(nn.Module):
    def __init__(self, config):
        """config: GPTConfig. Weights are drawn from torch's global generator: seed it first."""
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=build_norm(config),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.loss_fn = linear_cross_entropy  # for training; evaluation always uses the plain cross entropy
        self.recompute = False  # activation checkpointing
        if config.arch == "gpt2":
            self.transformer["wpe"] = nn.Embedding(config.max_seq_len, config.n_embd)
        else:
            rotated = config.qk_rope_head_dim or config.head_dim  # all of a head, except with mla
            self.rope = nn.Buffer(rotary_table(config, rotated), persistent=False)
        if config.tied_head:
            self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()

    def init_weights(self):
        """
        gpt2: N(0, 0.02), the projections into the residual stream divided by sqrt(2 * n_layer) so that its variance
        does not grow with depth (Radford et al. 2019, section 2.3), positions N(0, 0.01), biases 0, as in OpenAI's
        code.
        llama: the papers give no initialization, so we use the same 0.02 (transformers' initializer_range) and scaled
        projections.
        embed_norm: the embedding is N(0, 1). The norm hides its scale from the output; a larger scale only makes the
        embedding's direction change more slowly at a given learning rate.
        """
        for name, p in self.named_parameters():
            std = 0.02
            if name.endswith("wpe.weight"):
                std = 0.01
            elif self.config.embed_norm and name.endswith("wte.weight"):
                std = 1.0
            elif name.endswith(("c_proj.weight", "o_proj.weight", "down_proj.weight")):
                std = 0.02 / math.sqrt(2 * self.config.n_layer)
            if p.dim() > 1:
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):  # the weights of norms are ones already
                nn.init.zeros_(p)

    def forward(self, idx, targets=None, positions=None, mask=None, cache=None, **loss_inputs):
        """
        idx: (B, T) int64 token ids, T <= max_seq_len.
        targets: (B, T) int64, IGNORE where there is none -> the *sum* of the losses in nats, scalar float32. The
        caller divides by the number of targets of its whole step, over all micro-batches and ranks. Without targets ->
        logits (B, T, V).
        positions, mask, cache: see hidden_states. loss_inputs: further arguments of loss_fn in training.
        """
        x = self.hidden_states(idx, positions, mask, cache)
        if targets is None:
            return compute_logits(x, self.lm_head.weight)
        inputs = x.flatten(0, 1), self.lm_head.weight, targets.flatten()
        return self.loss_fn(*inputs, **loss_inputs) if self.training else linear_cross_entropy(*inputs)

    def hidden_states(self, idx, positions=None, mask=None, cache=None):
        """
        idx (B, T) int64 -> (B, T, C), the input of lm_head.
        positions: (B, T) int64; None: 0 .. T - 1.
        mask: (B, 1, T, T) bool, True where a query (dim 2) may look at a key (dim 3), never at a later one; or a
        BlockMask, see attend; None: causal.
        cache: from new_cache; keys and values are written there at `positions`, and each query sees the cache up to
        its own position. Needs positions and no mask.
        """
        T = idx.size(1)
        if T > self.config.max_seq_len:
            raise ValueError(f"{T} tokens: expected at most max_seq_len={self.config.max_seq_len}")
        x = self.transformer.wte(idx).float()  # (B, T, C); a frozen embedding may be in bfloat16
        if self.config.embed_norm:
            x = F.rms_norm(x, (x.size(-1),), eps=1e-5)
        if positions is None:
            positions = torch.arange(T, device=idx.device)[None]
        rope = None
        if self.config.arch == "gpt2":
            x = x + self.transformer.wpe(positions)
        else:
            rope = self.rope[:, positions].unsqueeze(3).unbind()
        if cache is not None:
            S = cache[0][0].size(2)
            mask = (torch.arange(S, device=idx.device) <= positions[..., None])[:, None]  # (B, 1, T, S)

        x = self.transformer.drop(x)
        # under autocast the residual stream is bfloat16, too, as in nanochat; float16 could overflow
        if matmul_dtype(x) == torch.bfloat16:
            x = x.bfloat16()
        for i, block in enumerate(self.transformer.h):
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, positions, mask, use_reentrant=False)
            else:
                x = block(x, rope, positions, mask, None if cache is None else cache[i])
        return self.transformer.ln_f(x.float())

    def new_cache(self, batch, length):
        """An empty KV cache for `batch` rows of up to `length` positions: for each layer, its attention's tensors."""
        weight = self.lm_head.weight
        return [[torch.zeros(batch, heads, length, width, dtype=matmul_dtype(weight), device=weight.device)
                 for heads, width in block.attn.cache_shapes] for block in self.transformer.h]

    def flops_per_token(self, T):
        """
        FLOPs to train on one token of a row of T: 6 per weight, 4 if it is frozen, and 12 n_layer T nh hd for
        attention (Chowdhery et al. 2022, appendix B), with mla by the widths of its keys and values. Embedding lookups
        cost none; a tied table counts as the head.
        """
        c = self.config
        table = "transformer.wpe.weight" if c.tied_head else "transformer.wte.weight"
        matmuls = sum((6 if p.requires_grad else 4) * p.numel() for name, p in self.named_parameters()
                      if name != table)
        widths = 2 * c.head_dim  # of q . k and of p . v
        if c.attention == "mla":
            widths = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
        return matmuls + 6 * c.n_layer * T * c.n_head * widths
