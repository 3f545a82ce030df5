"""
GPT, twice: arch="gpt2" is GPT-2 to the letter, arch="llama" is what came after it.

    gpt2   LayerNorm with bias, learned positions, tanh GELU, biases, head tied to the embedding.
           Radford et al. 2019; equals transformers' GPT2LMHeadModel and takes OpenAI's weights.
           With gelu="exact" it equals nanoGPT's model.
    llama  RMSNorm, rotary positions, SwiGLU, no biases, grouped-query attention, untied head.
           Touvron et al. 2023; equals LlamaForCausalLM, or with qk_norm=True Qwen3ForCausalLM.

Shape letters, in this file:
    B batch, T positions in this call, S positions in the cache, C = n_embd, V = vocab_size
    nh = n_head, nkv = n_kv_head, hd = head_dim = C / nh, N = B * T
"""
import math
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

IGNORE = -1  # a target with this value is not trained on
LOSS_CHUNK = 1024  # tokens whose logits exist at one time: 1024 * 50304 float32 are 206 MB


@dataclass
class GPTConfig:
    arch: str = "gpt2"  # gpt2 | llama
    attention: str = "mha"  # mha (multi-head, or grouped-query with n_kv_head) | mla (multi-head latent)
    max_seq_len: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 128: faster matmuls, room for chat tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_kv_head: Optional[int] = None  # llama: key/value heads, each shared by n_head / n_kv_head; None: n_head
    qk_norm: bool = False  # llama: RMSNorm on queries and keys, per head (Qwen3)
    embed_norm: bool = False  # llama: RMSNorm, without weights, on the embedding, which is drawn from N(0, 1)
    intermediate_size: Optional[int] = None  # width of the MLP; None: 4 C, llama: 8/3 C up to a multiple of 64
    gelu: str = "tanh"  # gpt2: tanh (the approximation that GPT-2 is trained with) | exact (nanoGPT)
    rope_theta: float = 10000.0  # llama: base of the rotary frequencies
    kv_lora_rank: Optional[int] = None  # mla: width of the latent that keys and values are made from; None: 128, at most C / 2
    q_lora_rank: Optional[int] = None  # mla, llama: width of a latent for the queries; None: queries straight from x
    qk_nope_head_dim: Optional[int] = None  # mla: width of a head's query and key without position; None: hd - the rope's
    qk_rope_head_dim: Optional[int] = None  # mla, llama: width of the rotated part, its key shared by the heads; None: hd / 2
    v_head_dim: Optional[int] = None  # mla: width of a head's value; None: hd
    dropout: float = 0.0

    def __post_init__(self):
        """Fills in what is None; what cannot be built is refused: ValueError, naming the setting."""
        check_config(self)
        hd = self.n_embd // self.n_head
        self.n_kv_head = self.n_kv_head or self.n_head
        if self.intermediate_size is None:
            # 8/3 C in three matrices holds as many weights as 4 C in two (Shazeer 2020, section 3)
            self.intermediate_size = 4 * self.n_embd if self.arch == "gpt2" else 64 * math.ceil(self.n_embd / 24)
        if self.attention == "mla":
            # A head's query and key, nope + rope, are as wide as its value. Where they differ, SDPA's flash kernels
            # decline: CUDA has its memory-efficient one then, a CPU the plain one with all T x T weights.
            if self.kv_lora_rank is None:
                self.kv_lora_rank = min(128, self.n_embd // 2)
            if self.qk_rope_head_dim is None:
                self.qk_rope_head_dim = 0 if self.arch == "gpt2" else max(2, hd // 4 * 2)
            if self.qk_nope_head_dim is None:
                self.qk_nope_head_dim = max(1, hd - self.qk_rope_head_dim)
            if self.v_head_dim is None:
                self.v_head_dim = hd


# ---------------------------------------------------------------------------------------------------
# attention: one class per variant; each says how it projects, and which tensors its cache keeps

def attend(q, k, v, mask, dropout):
    """
    Softmax attention. q (B, T, nh, hd), k and v (B, S, nkv, hd) -> (B, T, nh * hd); v may have another width than q and k.
    mask: (B, 1, T, S) boolean, True where a query may look; None: causal, and S = T.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, positions, hd)
    if q.size(2) == 1 and mask is not None and q.device.type == "cpu" and not dropout:  # SDPA's CPU kernel is slow at one query
        return look_up(q.unflatten(1, (k.size(1), -1)).squeeze(3), k, v, mask, 1 / math.sqrt(q.size(-1))).flatten(1)[:, None]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None,
                                       enable_gqa=q.size(1) != k.size(1))
    return y.transpose(1, 2).flatten(2)


def look_up(q, k, v, mask, scale):
    """
    Attention from a cache, written out. q (B, nkv, G, hd), k (B, nkv, S, hd) and v (B, nkv, S, vd) -> (B, nkv, G, vd): queries that
    share their keys, nh / nkv heads of one position or all heads of several. mask: boolean, of a shape that goes with (B, nkv, G, S).
    """
    fuse = torch.compiler.is_compiling() and q.device.type == "cpu"  # to sums that read k and v as they lie; see compile_step
    scores = (q.unsqueeze(3).float() * k.unsqueeze(2).float()).sum(-1) if fuse else (q @ k.transpose(2, 3)).float()
    p = (scores * scale).masked_fill(~mask, -math.inf).softmax(-1).type_as(q)
    return (p.unsqueeze(-1).float() * v.unsqueeze(2).float()).sum(3).type_as(q) if fuse else p @ v


def write_cache(cache, positions, *new):
    """
    Writes each of `new` (B, T, heads, hd) into its cache tensor (B, heads, S, hd) at `positions` (B, T). Each head's keys lie
    together there, which a CPU reads several times faster. Returns the whole cache as `new` lies: (B, S, heads, hd).
    """
    row = torch.arange(positions.size(0), device=positions.device)[:, None]
    for old, values in zip(cache, new):
        old[row, :, positions] = values.to(old.dtype)  # with an index before and behind it, the slice comes last: (B, T, heads, hd)
    return [tensor.transpose(1, 2) for tensor in cache]


class GPT2Attention(nn.Module):
    """Multi-head attention as GPT-2 has it: queries, keys and values from one matrix, with biases."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def new_cache(self, batch, length, **like):
        hd = self.c_proj.in_features // self.n_head
        return [torch.zeros(batch, self.n_head, length, hd, **like) for _ in "kv"]

    def forward(self, x, rope, positions, mask, cache):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).unbind(2)
        if cache is not None:
            k, v = write_cache(cache, positions, k, v)
        return self.c_proj(attend(q, k, v, mask, self.dropout if self.training else 0.0))


class LlamaAttention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions, and optionally Qwen3's norms."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_kv_head, self.dropout = config.n_head, config.n_kv_head, config.dropout
        self.head_dim = hd = config.n_embd // config.n_head
        self.q_proj = nn.Linear(config.n_embd, config.n_head * hd, bias=False)
        self.k_proj = nn.Linear(config.n_embd, config.n_kv_head * hd, bias=False)
        self.v_proj = nn.Linear(config.n_embd, config.n_kv_head * hd, bias=False)
        self.o_proj = nn.Linear(config.n_head * hd, config.n_embd, bias=False)
        self.q_norm = nn.RMSNorm(hd, eps=1e-5) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(hd, eps=1e-5) if config.qk_norm else nn.Identity()

    def new_cache(self, batch, length, **like):
        return [torch.zeros(batch, self.n_kv_head, length, self.head_dim, **like) for _ in "kv"]

    def forward(self, x, rope, positions, mask, cache):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.n_head, self.head_dim)
        k = self.k_proj(x).view(B, T, self.n_kv_head, self.head_dim)
        v = self.v_proj(x).view(B, T, self.n_kv_head, self.head_dim)
        q, k = (rotate(norm(h.float()), rope).type_as(v) for norm, h in ((self.q_norm, q), (self.k_norm, k)))
        if cache is not None:
            k, v = write_cache(cache, positions, k, v)
        return self.o_proj(attend(q, k, v, mask, self.dropout if self.training else 0.0))


def rope_table(length, dim, theta):
    """Angles of rotary positions (Su et al. 2021, section 3.2.2): (length, dim / 2) float32, in radians."""
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return torch.outer(torch.arange(length, dtype=torch.float32), frequencies)


def rotate(x, rope):
    """
    Turns the pairs (x[i], x[i + hd/2]) of each head by their position's angles. x (B, T, heads, hd) float32.
    rope: (cos, sin), each (B or 1, T, 1, hd / 2). Pairing halves instead of neighbours is how the weights
    of Llama and Qwen are stored on the hub; it permutes the columns of q_proj and k_proj, nothing else.
    """
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class MLA(nn.Module):
    """
    Multi-head latent attention (DeepSeek-V2, section 2.1; its names). What the keys and values of all heads are made
    from is one latent of kv_lora_rank numbers a token, c = kv_a(x), and for each head k_nope = W_k c and v = W_v c.
    llama: RMSNorm on the latent, and since W_k cannot be absorbed (below) through a rotation, positions have a
    part of their own: qk_rope_head_dim more numbers in each query, and one such key a token, shared by the heads.
    gpt2: positions are in x already, so there is no such part, and no norm. GPT-2's biases stay on the queries and the
    output only: one on the keys would add the same number to all scores of a query, which softmax ignores, and one on the
    values would add a constant to the output, which has a bias.

    Training expands k and v and is ordinary attention. Decoding caches c and the rotated key alone and *absorbs* the
    up-projections: a score is q . (W_k c) = (W_k^T q) . c, so the query is taken into latent space once and
    meets the cached c directly; and the output, sum_s p_s (W_v c_s) = W_v (sum_s p_s c_s), sums latents first
    and goes up once. What remains is attention with one key, [c, k_rope], for all heads, whose value is c itself.
    "Per-head queries in latent space and per-head value up-projections", as MLA is also described, is this absorbed
    form: the same function of the same weights, one product taken earlier.
    """

    def __init__(self, config):
        super().__init__()
        c, gpt2 = config, config.arch == "gpt2"
        self.n_head, self.rank, self.dropout = c.n_head, c.kv_lora_rank, c.dropout
        self.nope_dim, self.rope_dim, self.v_dim = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        q_width = c.n_head * (self.nope_dim + self.rope_dim)
        if c.q_lora_rank is None:
            self.q_proj = nn.Linear(c.n_embd, q_width, bias=gpt2)
        else:
            self.q_a_proj = nn.Linear(c.n_embd, c.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank, eps=1e-6)
            self.q_b_proj = nn.Linear(c.q_lora_rank, q_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.n_embd, self.rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = nn.Identity() if gpt2 else nn.RMSNorm(self.rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(self.rank, c.n_head * (self.nope_dim + self.v_dim), bias=False)
        self.o_proj = nn.Linear(c.n_head * self.v_dim, c.n_embd, bias=gpt2)

    def new_cache(self, batch, length, **like):
        return [torch.zeros(batch, 1, length, self.rank + self.rope_dim, **like)]

    def forward(self, x, rope, positions, mask, cache):
        B, T, _ = x.shape
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x).float()))
        q = q.view(B, T, self.n_head, self.nope_dim + self.rope_dim)
        q_nope, q_pe = q.split([self.nope_dim, self.rope_dim], dim=-1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope_dim], dim=-1)
        latent = self.kv_a_layernorm(latent.float()).type_as(q)  # (B, T, rank)
        if self.rope_dim:
            q_pe = rotate(neighbours_to_halves(q_pe.float()), rope).type_as(q)
            k_pe = rotate(neighbours_to_halves(k_pe.float())[:, :, None], rope)[:, :, 0].type_as(q)  # (B, T, rope)
        if cache is not None:
            keys, = write_cache(cache, positions, torch.cat((latent, k_pe), dim=-1)[:, :, None])
            return self.o_proj(self.absorbed(q_nope, q_pe, keys.type_as(q), mask))
        kv = self.kv_b_proj(latent).view(B, T, self.n_head, self.nope_dim + self.v_dim)
        k_nope, v = kv.split([self.nope_dim, self.v_dim], dim=-1)
        q = torch.cat((q_nope, q_pe), dim=-1)
        k = torch.cat((k_nope, k_pe[:, :, None].expand(-1, -1, self.n_head, -1)), dim=-1)
        return self.o_proj(attend(q, k, v, mask, self.dropout if self.training else 0.0))

    def absorbed(self, q_nope, q_pe, keys, mask):
        """Attention over cached keys (B, S, 1, rank + rope), without building a key or a value of any head -> (B, T, nh * v)."""
        B, T = q_nope.shape[:2]
        up = merged_weight(self.kv_b_proj).view(self.n_head, self.nope_dim + self.v_dim, self.rank).to(q_nope.dtype)
        up_k, up_v = up.split([self.nope_dim, self.v_dim], dim=1)
        q_latent = torch.einsum("bthd,hdr->bthr", q_nope, up_k)
        q = torch.cat((q_latent, q_pe), dim=-1).flatten(1, 2)[:, None]  # (B, 1, T * nh, rank + rope): heads are but more queries
        keys, mask = keys.transpose(1, 2), mask.repeat_interleave(self.n_head, 2)  # (B, 1, S, rank + rope), (B, 1, T * nh, S)
        summed = look_up(q, keys, keys[..., :self.rank], mask, 1 / math.sqrt(self.nope_dim + self.rope_dim))
        return torch.einsum("bthr,hdr->bthd", summed.view(B, T, self.n_head, self.rank), up_v).flatten(2)


def neighbours_to_halves(x):
    """DeepSeek's weights rotate neighbours, (x[2i], x[2i + 1]): puts them where `rotate` looks for a pair."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


ATTENTION = {"gpt2": {"mha": GPT2Attention, "mla": MLA}, "llama": {"mha": LlamaAttention, "mla": MLA}}


# ---------------------------------------------------------------------------------------------------
# the rest of a block

class GPT2MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.intermediate_size)
        self.c_proj = nn.Linear(config.intermediate_size, config.n_embd)
        self.approximate = "tanh" if config.gelu == "tanh" else "none"

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


def new_norm(config):
    return nn.LayerNorm(config.n_embd, eps=1e-5) if config.arch == "gpt2" else nn.RMSNorm(config.n_embd, eps=1e-5)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = new_norm(config)
        self.attn = ATTENTION[config.arch][config.attention](config)
        self.ln_2 = new_norm(config)
        self.mlp = GPT2MLP(config) if config.arch == "gpt2" else LlamaMLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, rope, positions=None, mask=None, cache=None):
        x = x + self.drop(self.attn(self.ln_1(x), rope, positions, mask, cache))
        x = x + self.drop(self.mlp(self.ln_2(x)))
        return x


# ---------------------------------------------------------------------------------------------------
# the loss without the logits

class LinearCrossEntropy(torch.autograd.Function):
    """
    The summed cross entropy of x @ weight.T against targets, LOSS_CHUNK rows at a time: the full (N, V)
    logits, most of a small model's memory, never exist. The gradient of softmax cross entropy,
    softmax(logits) - onehot(target), needs the logits and nothing from later layers, so it is formed while
    they are at hand instead of recomputing them in backward. It is that of the *sum*: dividing by the number
    of targets here would underflow in float16; backward scales it by whatever the caller divided by.
    """

    @staticmethod
    def forward(ctx, x, weight, targets):
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        weight_x = weight.to(x.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for i in range(0, x.size(0), LOSS_CHUNK):
            xc, tc = x[i:i + LOSS_CHUNK], targets[i:i + LOSS_CHUNK, None]  # (chunk, C), (chunk, 1)
            logits = (xc @ weight_x.t()).float()  # (chunk, V)
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
        return (dx * grad_loss).to(dx.dtype), None if dweight is None else (dweight * grad_loss).to(dweight.dtype), None


def linear_cross_entropy(x, weight, targets):
    """
    Sum of the cross entropies, in nats, of x @ weight.T against targets, over targets that are not IGNORE.
    x (N, C), weight (V, C), targets (N,) int64 -> scalar float32. Under autocast the products are in its dtype,
    their logits, loss and the sum of the weight's gradient in float32.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if torch.is_grad_enabled():
        return LinearCrossEntropy.apply(x, weight, targets)
    loss, weight = 0.0, weight.to(x.dtype)
    for xc, tc in zip(x.split(LOSS_CHUNK), targets.split(LOSS_CHUNK)):
        loss = loss + F.cross_entropy((xc @ weight.t()).float(), tc, ignore_index=IGNORE, reduction="sum")
    return loss


class Distillation(torch.autograd.Function):
    """
    LinearCrossEntropy mixed with what a teacher says of the same tokens (Hinton et al. 2015), in the same chunks, so that neither
    model's full logits exist: see distillation. With u = 1 / T, student s, teacher t, p = softmax(u t), q = softmax(u s):
        d T^2 KL(p || q) / ds = T (q - p)
        d KL / du = sum p (t - E_p t) (log p - log q) - (E_p s - E_q s)
    All of it is linear in s and log q where p is one number for many ids. So the ids that a cache leaves out, which share their
    mass evenly, are one place more, with the mean of their logits, and a cached row costs its k places and not V.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, alpha, T, learned, told, teacher_head, ids):
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        weight_x, V, u = weight.to(x.dtype), weight.size(0), 1 / T
        ce, kl, dT = torch.zeros(3, dtype=torch.float32, device=x.device).unbind()
        log_n = 0.0  # of how many ids each place stands for
        if teacher_head is not None:
            teacher_head = teacher_head.to(x.dtype)
        else:
            k = ids.size(1)
            # not F.pad, whose compiled form torch 2.11's CPU compiler gets wrong
            log_n = torch.where(torch.arange(k + 1, device=x.device) < k, 0.0, math.log(V - k) if k < V else -math.inf)
        for i in range(0, x.size(0), LOSS_CHUNK):
            xc, tc, told_c = x[i:i + LOSS_CHUNK], targets[i:i + LOSS_CHUNK, None], told[i:i + LOSS_CHUNK]
            logits = (xc @ weight_x.t()).float()  # (chunk, V)
            lse, lse_T = logits.logsumexp(-1, keepdim=True), (logits * u).logsumexp(-1, keepdim=True)
            valid = tc != IGNORE
            onehot = torch.arange(V, device=x.device) == tc
            # t and s are the two models' logits at each place: each id, or a cached row's k ids and the rest
            if teacher_head is not None:
                t, s = (told_c.to(x.dtype) @ teacher_head.t()).float(), logits  # (chunk, V)
            else:
                t, ids_c = told_c.float(), ids[i:i + LOSS_CHUNK]  # (chunk, k + 1), (chunk, k)
                s = logits.gather(-1, ids_c)
                s = torch.cat((s, (logits.sum(-1, keepdim=True) - s.sum(-1, keepdim=True)) / max(V - k, 1)), -1)
            log_p = t * u - (t * u + log_n).logsumexp(-1, keepdim=True)
            mass, log_ratio = (log_p + log_n).exp(), log_p - (s * u - lse_T)
            ce += ((lse - logits.gather(-1, tc.clamp(min=0))) * valid).sum()
            kl_c = (mass * log_ratio).sum(-1, keepdim=True)
            kl += (kl_c * valid).sum()
            if learned:
                E_p_s, E_q_s = (mass * s).sum(-1, keepdim=True), ((logits * u - lse_T).exp() * logits).sum(-1, keepdim=True)
                centred = t - (mass * t).sum(-1, keepdim=True)
                dkl_du = (mass * centred * log_ratio).sum(-1, keepdim=True) - (E_p_s - E_q_s)
                dT += ((2 * T * kl_c - dkl_du) * valid).sum()

            def gradient(z, hit, log_p):  # by the student's logits z
                plain, soft = (z - lse).exp() - hit.float(), (z * u - lse_T).exp() - log_p.exp()
                return (((1 - alpha) * plain + alpha * T * soft) * valid).to(x.dtype)

            if teacher_head is not None:
                dlogits = gradient(logits, onehot, log_p)
            else:
                dlogits = gradient(logits, onehot, log_p[:, k:]).scatter(-1, ids_c, gradient(s[:, :k], ids_c == tc, log_p[:, :k]))
            dx[i:i + LOSS_CHUNK] = dlogits @ weight_x
            if dweight is not None:
                dweight += dlogits.t() @ xc
        ctx.save_for_backward(dx, None if dweight is None else dweight.to(weight.dtype), alpha * dT)
        parts = torch.stack((ce, kl))
        ctx.mark_non_differentiable(parts)
        return (1 - alpha) * ce + alpha * T * T * kl, parts

    @staticmethod
    def backward(ctx, grad_loss, grad_parts):
        dx, dweight, dT = ctx.saved_tensors
        dweight = None if dweight is None else (dweight * grad_loss).to(dweight.dtype)
        return (dx * grad_loss).to(dx.dtype), dweight, None, None, dT * grad_loss, *[None] * 4


def distillation(x, weight, targets, alpha, temperature, told, teacher_head=None, ids=None):
    """
    Sum of (1 - alpha) * cross entropy + alpha * T^2 * KL(teacher || student), both softened by T, over targets that are not IGNORE,
    and, to be logged, (2,) the sums of cross entropy and KL alone. T^2 keeps the gradient's size while T varies.
    x (N, C), weight (V, C), targets (N,) as in linear_cross_entropy; temperature: T, scalar tensor, which may want a gradient. A live
    teacher: told (N, C_t), its hidden states, and teacher_head (V, C_t), its head. A cached one: ids (N, k) int64, each once in a
    row, and told (N, k + 1), their log-probabilities and that of each other id; with k = V the last is any finite number.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return Distillation.apply(x, weight, targets, alpha, temperature, temperature.requires_grad, told, teacher_head, ids)


# ---------------------------------------------------------------------------------------------------

class GPT(nn.Module):
    def __init__(self, config):
        """config: GPTConfig. Weights are drawn from torch's global generator: seed it first."""
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=new_norm(config),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.recompute = False  # in training keep only what enters each block, and compute the rest again in backward
        if config.arch == "gpt2":
            self.transformer["wpe"] = nn.Embedding(config.max_seq_len, config.n_embd)
            self.lm_head.weight = self.transformer.wte.weight
        else:
            rotated = config.qk_rope_head_dim or config.n_embd // config.n_head  # all of a head, but with mla
            table = rope_table(config.max_seq_len, rotated, config.rope_theta)
            self.register_buffer("rope_cos", table.cos(), persistent=False)  # (max_seq_len, rotated / 2)
            self.register_buffer("rope_sin", table.sin(), persistent=False)
        self.init_weights()

    def init_weights(self):
        """
        gpt2: N(0, 0.02), the projections into the residual stream divided by sqrt(2 * n_layer) so that its
        variance does not grow with depth (Radford et al. 2019, section 2.3), positions N(0, 0.01), biases 0, as
        in OpenAI's code. llama: the papers do not say; the same 0.02 (transformers' initializer_range) and
        the same scaled projections. embed_norm: the embedding is N(0, 1): normalised, its scale does not count, and only says how
        fast it turns under a given learning rate.
        """
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 1:  # the weights of norms
                nn.init.ones_(p)
            elif name.endswith("wpe.weight"):
                nn.init.normal_(p, std=0.01)
            elif self.config.embed_norm and name.endswith("wte.weight"):
                nn.init.normal_(p, std=1.0)
            elif name.endswith(("c_proj.weight", "o_proj.weight", "down_proj.weight")):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer))
            else:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, targets=None, positions=None, mask=None, cache=None, teacher=None):
        """
        idx: (B, T) int64 token ids, T <= max_seq_len.
        targets: (B, T) int64, IGNORE where there is none -> the *sum* of the losses in nats, scalar float32; the
        caller divides by the targets of its whole step, however many calls and ranks that takes.
        No targets -> logits (B, T, V).
        positions, mask, cache: see hidden_states.
        teacher: what distillation takes from `alpha` on, told and ids with B and T for N -> its loss and parts instead.
        """
        x = self.hidden_states(idx, positions, mask, cache)
        if targets is None:
            return self.lm_head(x)
        if teacher is not None:
            alpha, temperature, told, teacher_head, ids = teacher
            return distillation(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), alpha, temperature, told.flatten(0, 1),
                                teacher_head, None if ids is None else ids.flatten(0, 1))
        return linear_cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten())

    def hidden_states(self, idx, positions=None, mask=None, cache=None):
        """
        idx (B, T) int64 -> (B, T, C), what lm_head turns into logits.
        positions: (B, T) int64, where each token stands; None: 0 .. T - 1.
        mask: (B, 1, T, T) boolean, True where a query (third) may look at a key (fourth); None: causal. See packed.
        cache: from new_cache; keys and values are written there at `positions`, and each query sees what the
        cache holds at or before its own position. Needs positions and no mask.
        """
        T = idx.size(1)
        if T > self.config.max_seq_len:
            raise ValueError(f"{T} tokens: expected at most max_seq_len={self.config.max_seq_len}")
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.embed_norm:
            x = F.rms_norm(x, (x.size(-1),), eps=1e-5)
        rope = None
        if self.config.arch == "gpt2":
            x = x + (self.transformer.wpe.weight[:T] if positions is None else self.transformer.wpe(positions))
        else:
            where = slice(T) if positions is None else positions
            rope = [table[where].view(-1, T, 1, table.size(1)) for table in (self.rope_cos, self.rope_sin)]
        if cache is not None:
            S = cache[0][0].size(2)
            mask = (torch.arange(S, device=idx.device) <= positions[..., None])[:, None]  # (B, 1, T, S)

        x = self.transformer.drop(x)
        for i, block in enumerate(self.transformer.h):
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, positions, mask, use_reentrant=False)
            else:
                x = block(x, rope, positions, mask, None if cache is None else cache[i])
        return self.transformer.ln_f(x)

    def new_cache(self, batch, length, dtype=torch.float32):
        """An empty cache for `batch` rows of up to `length` positions: per layer, the tensors its attention keeps."""
        like = dict(dtype=dtype, device=self.lm_head.weight.device)
        return [block.attn.new_cache(batch, length, **like) for block in self.transformer.h]

    def matmul_params(self):
        """Number of weights that each token is multiplied by: all but looked-up tables (a tied one is the head)."""
        looked_up = {"transformer.wpe.weight"} | ({"transformer.wte.weight"} if self.config.arch == "llama" else set())
        return sum(p.numel() for name, p in self.named_parameters() if name not in looked_up)

    def flops_per_token(self, T):
        """
        FLOPs to train on a token of a row of T: 6 a weight, 12 n_layer T C for attention (Chowdhery et al. 2022, appendix B).
        A frozen weight (LoRA) has no gradient of its own, which is 2 of the 6.
        """
        c, hd = self.config, self.config.n_embd // self.config.n_head
        widths = (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim) if c.attention == "mla" else 2 * hd  # of q . k and p . v
        frozen = 0 if self.lm_head.weight.requires_grad else sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * self.matmul_params() - 2 * frozen + 6 * c.n_layer * T * c.n_head * widths

    @torch.no_grad()
    def compile_step(self, batch):
        """
        Compiles what decodes one token for each of `batch` rows, for generate's `compiled` -> (step, cache). One shape and one graph,
        whatever comes: the cache is as long as the model's positions and used again and again. To be called in the autocast that
        generate will be called in: the matrices stay in its dtype from here on, and the model is for decoding only. (Uncompiled,
        autocast casts them once and remembers; in a compiled step it would cast all of them for each token.)
        """
        self.eval()
        dtype, device = self.cache_dtype(), self.lm_head.weight.device
        for module in self.modules():
            if isinstance(module, nn.Linear):
                for name, p in list(module.named_parameters()):  # a new one: a tied head's table stays as it is
                    setattr(module, name, nn.Parameter(p.to(dtype), requires_grad=False))
        cache = self.new_cache(batch, self.config.max_seq_len, dtype)
        for tensor in sum(cache, []):
            torch._dynamo.mark_static_address(tensor)  # CUDA graphs may write to it
        compiled = torch.compile(self, dynamic=False, fullgraph=True, mode="reduce-overhead" if device.type == "cuda" else None)

        def step(idx, positions, cache):
            # For a single row PyTorch's own bfloat16 product of matrix and vector reads twice the bytes a second that oneDNN's does
            # (torch 2.13, avx512); for more it is many times slower, and so it would be for look_up's products: they are fused.
            with torch.backends.mkldnn.flags(enabled=batch > 1, allow_tf32=None):
                return compiled(idx, positions=positions, cache=cache)

        idx, positions = (torch.zeros(batch, 1, dtype=torch.int64, device=device) for _ in range(2))  # one for both would be another graph
        for _ in range(3):  # CUDA graphs are recorded at the second
            step(idx, positions, cache)
        return step, cache

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, stop_ids=(),
                 seed=None, n_vocab=None, compiled=None):
        """
        Continues a batch of prompts from a KV cache; yields, for each new position, a list of B ids, with None
        for rows that have stopped.

        prompts: list of B non-empty lists of ids, of any lengths. No row's logits depend on the others.
        temperature 0 is greedy. top_k (0: off), top_p (Holtzman et al. 2020; 1: off) and min_p (Nguyen et al.
        2024; 0: off) are applied in this order, as in transformers. A row ends after one of stop_ids, which is
        yielded. n_vocab: ids from here on, the padding of the vocabulary, are never sampled. compiled: from compile_step, for
        as many rows as there are prompts; what reads the prompts is not compiled.
        A row that fills max_seq_len goes on from its last part, max_seq_len + 1 - (tokens still wanted) but at
        least half of it: all positions change then, so the cache is filled anew.
        """
        device, max_len = self.lm_head.weight.device, self.config.max_seq_len
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        rows = [list(prompt) for prompt in prompts]
        if not rows or not all(rows):
            raise ValueError("prompts: expected at least one, and none without ids")
        step, static_cache = compiled or (self, None)
        if static_cache and static_cache[0][0].size(0) != len(rows):
            raise ValueError(f"{len(rows)} prompts: the step is compiled for {static_cache[0][0].size(0)}")
        running = [True] * len(rows)
        cache = None
        was_training = self.training
        self.eval()
        try:
            for done in range(max_new_tokens):
                if cache is None or max(map(len, rows)) > max_len:  # fill the cache with all but what is new
                    keep = max(max_len - (max_new_tokens - done) + 1, max_len // 2, 1)
                    rows = [row if len(row) <= max_len else row[-keep:] for row in rows]
                    width = max(map(len, rows))
                    # what pads a short prompt is cached too, and overwritten before any query looks that far
                    idx = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
                    positions = torch.arange(width, device=device).expand_as(idx)
                    cache = static_cache or self.new_cache(len(rows), min(width + max_new_tokens - done, max_len), self.cache_dtype())
                    x = self.hidden_states(idx, positions, cache=cache)
                    logits = self.lm_head(x[range(len(rows)), [len(row) - 1 for row in rows]])  # of the last of each row
                else:
                    idx = torch.tensor([[row[-1]] for row in rows], device=device)
                    positions = torch.tensor([[len(row) - 1] for row in rows], device=device)
                    logits = step(idx, positions=positions, cache=cache)[:, -1]
                if not logits.isfinite().all():
                    raise ValueError("the model's logits are not finite: its weights are broken, or too large for this dtype")
                new = sample_logits(logits.float(), temperature, top_k, top_p, min_p, generator, n_vocab).tolist()
                yield [token if on else None for token, on in zip(new, running)]
                running = [on and token not in stop_ids for token, on in zip(new, running)]
                if not any(running):
                    return
                for row, token, on in zip(rows, new, running):
                    if on:
                        row.append(token)
        finally:  # also when the caller stops listening
            self.train(was_training)

    def cache_dtype(self):
        device = self.lm_head.weight.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.lm_head.weight.dtype


def packed(idx, first_id):
    """
    The positions (B, T) int64 and the mask (B, 1, T, T) boolean of rows idx (B, T) in which several texts are packed, each
    beginning with first_id, which stands nowhere else: positions restart with each text and attention stays inside it. What
    pads a row is first_id too, each place of it a text of its own, so that no query is left without a key.
    """
    text = (idx == first_id).cumsum(1)  # the number of each place's text
    mask = (text[:, None, :, None] == text[:, None, None, :]).tril()  # causal within each text
    positions = mask.sum(-1)[:, 0] - 1  # how many places of its text lie before it
    return positions, mask


def sample_logits(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, generator=None, n_vocab=None):
    """One id per row of logits (B, V) float32; see GPT.generate for the settings -> (B,) int64."""
    if n_vocab is not None:
        logits = logits[:, :n_vocab]
    if temperature < torch.finfo(logits.dtype).tiny:  # 0, or what would be 0 in the division below
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the likeliest at 0: no temperature overflows it
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass of the likelier ids
        out = before >= top_p
        out[:, 0] = False  # the likeliest always stays
        logits = logits.masked_fill(torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, out), -math.inf)
    probs = logits.softmax(-1)
    if min_p > 0:
        probs = probs.masked_fill(probs < min_p * probs.max(-1, keepdim=True).values, 0.0)
    return torch.multinomial(probs, 1, generator=generator).squeeze(1)  # multinomial normalises


# ---------------------------------------------------------------------------------------------------
# LoRA (Hu et al. 2021): a frozen model learns through small matrices beside its own

class LoRALinear(nn.Linear):
    """
    y = W x + b + alpha / rank B A dropout(x), with A (rank, in) and B (out, rank); W and b are those of `linear`, and frozen.
    B starts at zero, so the model starts as it was; A as in the paper's code. alpha / rank keeps the size of an update much the
    same from rank to rank (section 4.1), so that another rank wants no other learning rate.
    """

    def __init__(self, linear, rank, alpha, dropout):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale, self.drop = alpha / rank, nn.Dropout(dropout)

    def forward(self, x):
        return super().forward(x) + self.scale * F.linear(F.linear(self.drop(x), self.lora_A), self.lora_B)


def merged_weight(linear):
    """The matrix (out, in) that a Linear layer, with an adapter or without, multiplies by in evaluation."""
    return linear.weight + linear.scale * (linear.lora_B @ linear.lora_A) if isinstance(linear, LoRALinear) else linear.weight


def add_lora(model, rank, alpha, dropout, targets):
    """
    Freezes a GPT and gives the matrices of its blocks that `targets` names an adapter; seed torch's global generator first.
    targets: "all", or parts of their names with commas between: attn, mlp, c_attn, mlp.c_proj, ... One that none has is
    refused: ValueError, naming those there are. -> number of adapters.
    """
    linears = [(block, name) for block in model.transformer.h for name, m in block.named_modules() if isinstance(m, nn.Linear)]
    names = {name for _, name in linears}  # attn.c_attn, ...: what the matrices of each block are called
    wanted = [target.strip() for target in targets.split(",")] if targets != "all" else ["attn", "mlp"]
    for target in wanted:
        if not any(f".{target}." in f".{name}." for name in names):
            known = dict.fromkeys(part for name in sorted(names) for part in name.split("."))
            raise ValueError(f"{target!r} is none of this model's matrices: expected all, or some of {', '.join(known)}")
    model.requires_grad_(False)
    linears = [(block, name) for block, name in linears if any(f".{target}." in f".{name}." for target in wanted)]
    for block, name in linears:
        block.set_submodule(name, LoRALinear(block.get_submodule(name), rank, alpha, dropout))
    return len(linears)


def merge_lora(state_dict, alpha):
    """The state dict of a GPT with adapters as that of the plain GPT that it equals in evaluation."""
    plain = {name: tensor for name, tensor in state_dict.items() if ".lora_" not in name}
    for name in [name.removesuffix("lora_A") for name in state_dict if name.endswith(".lora_A")]:
        A, B = state_dict[name + "lora_A"], state_dict[name + "lora_B"]
        plain[name + "weight"] = plain[name + "weight"] + alpha / len(A) * (B @ A)
    return plain


# ---------------------------------------------------------------------------------------------------
# our parameters' names and our settings in Hugging Face's vocabulary

HF_NAMES = {
    "gpt2": [],  # GPT-2's names are used as they are; its Conv1D weights lie transposed
    "llama": [("transformer.wte.", "model.embed_tokens."), ("transformer.h.", "model.layers."),
              ("transformer.ln_f.", "model.norm."), (".ln_1.", ".input_layernorm."),
              (".ln_2.", ".post_attention_layernorm."), (".attn.", ".self_attn.")],
}
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def to_hf(state_dict, config):
    """
    A state dict of ours under Hugging Face's names and in its layout. gpt2 -> GPT2LMHeadModel, with mla too, its keys
    and values multiplied out; llama -> LlamaForCausalLM, with qk_norm Qwen3ForCausalLM, with mla DeepseekV3ForCausalLM.
    """
    if config.arch == "gpt2" and config.attention == "mla":
        state_dict = multiply_out(state_dict, config)
    if config.embed_norm and "transformer.wte.weight" in state_dict:  # it acts on each row alone, so the table takes it in
        table = state_dict["transformer.wte.weight"]
        state_dict = {**state_dict, "transformer.wte.weight": F.rms_norm(table, (table.size(1),), eps=1e-5)}
    return rename(state_dict, config, HF_NAMES[config.arch])


def from_hf(state_dict, config):
    """The reverse of to_hf; gpt2 with mla has none, its latent is gone."""
    if config.arch == "gpt2" and config.attention == "mla":
        raise ValueError("attention='mla': a GPT2LMHeadModel holds multiplied-out keys and values, not the latent they came from")
    return rename(state_dict, config, [(theirs, ours) for ours, theirs in HF_NAMES[config.arch]])


def rename(state_dict, config, table):
    renamed = {}
    for name, tensor in state_dict.items():
        for old, new in table:
            name = name.replace(old, new)
        renamed[name] = tensor.t() if config.arch == "gpt2" and name.endswith(CONV1D) else tensor
    return renamed


def multiply_out(state_dict, config):
    """
    gpt2 with mla as a plain gpt2: k = (W_k W_a) x and v = (W_v W_a) x for each head. The small cache is lost. Of a state dict
    with some of the blocks, those are multiplied out.
    """
    plain = {name: tensor for name, tensor in state_dict.items() if ".attn." not in name}
    for attn in [name.removesuffix("kv_b_proj.weight") for name in state_dict if name.endswith("kv_b_proj.weight")]:
        down = state_dict[attn + "kv_a_proj_with_mqa.weight"]  # (rank, C)
        up = state_dict[attn + "kv_b_proj.weight"].view(config.n_head, 2, -1, config.kv_lora_rank)  # head, key or value, hd, rank
        k, v = (up[:, part].flatten(0, 1) @ down for part in (0, 1))  # (C, C)
        plain[attn + "c_attn.weight"] = torch.cat((state_dict[attn + "q_proj.weight"], k, v))
        plain[attn + "c_attn.bias"] = torch.cat((state_dict[attn + "q_proj.bias"], down.new_zeros(2 * config.n_embd)))
        for kind in ("weight", "bias"):
            plain[attn + "c_proj." + kind] = state_dict[attn + "o_proj." + kind]
    return plain


# Per model_type of theirs: our settings that they call otherwise, and what their config has to say besides for the same
# function, which is also what they take for granted where it is missing (but for llama's 1e-6 in rms_norm_eps).
HF_SETTINGS = {
    "gpt2": dict(max_seq_len="n_positions", vocab_size="vocab_size", n_layer="n_layer", n_head="n_head", n_embd="n_embd",
                 intermediate_size="n_inner"),
    "llama": dict(max_seq_len="max_position_embeddings", vocab_size="vocab_size", n_layer="num_hidden_layers",
                  n_head="num_attention_heads", n_embd="hidden_size", n_kv_head="num_key_value_heads",
                  intermediate_size="intermediate_size"),
}
HF_SETTINGS["qwen3"] = HF_SETTINGS["llama"]
HF_SETTINGS["deepseek_v3"] = HF_SETTINGS["llama"] | {
    name: name for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
HF_FIXED = {
    "gpt2": dict(layer_norm_epsilon=1e-5, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False,
                 tie_word_embeddings=True),
    "llama": dict(hidden_act="silu", rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False, tie_word_embeddings=False),
    "qwen3": dict(hidden_act="silu", rms_norm_eps=1e-5, attention_bias=False, use_sliding_window=False, tie_word_embeddings=False),
    "deepseek_v3": dict(hidden_act="silu", rms_norm_eps=1e-5, attention_bias=False, rope_interleave=True, tie_word_embeddings=False),
}
HF_GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
HF_CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}


def config_to_hf(config):
    """What transformers' config.json says of the model that to_hf gives the weights of: a dict of plain values."""
    kind = "gpt2" if config.arch == "gpt2" else "deepseek_v3" if config.attention == "mla" else "qwen3" if config.qk_norm else "llama"
    theirs = {"architectures": [HF_CLASSES[kind]], "model_type": kind,
              **{name: getattr(config, ours) for ours, name in HF_SETTINGS[kind].items()}, **HF_FIXED[kind]}
    if kind == "gpt2":
        return theirs | dict(activation_function="gelu_new" if config.gelu == "tanh" else "gelu",
                             resid_pdrop=config.dropout, embd_pdrop=config.dropout, attn_pdrop=config.dropout)
    theirs |= dict(attention_dropout=config.dropout, rope_theta=config.rope_theta,  # transformers 5 reads the next line instead
                   rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta})
    if kind == "deepseek_v3":  # every layer dense, no layer that predicts a second token
        return theirs | dict(first_k_dense_replace=config.n_layer, num_nextn_predict_layers=0)
    return theirs | dict(head_dim=config.n_embd // config.n_head)


def config_from_hf(theirs):
    """
    The GPTConfig of a model of transformers', from its config.json as a dict. What it has and this file has not is
    refused: ValueError, naming it. Dropout is left at 0: it is the training's.
    """
    def expect(name, value, *accepted):
        if value not in accepted:
            raise ValueError(f"its config has {name}={value!r}, and this model is only built with {' or '.join(map(repr, accepted))}")

    kind = theirs.get("model_type")
    expect("model_type", kind, *HF_FIXED)
    for name, value in HF_FIXED[kind].items():
        expect(name, theirs.get(name, 1e-6 if name == "rms_norm_eps" else value), value)
    expect("quantization_config", theirs.get("quantization_config"), None)
    try:
        settings = {ours: theirs[name] for ours, name in HF_SETTINGS[kind].items() if ours not in ("n_kv_head", "intermediate_size")}
    except KeyError as error:
        raise ValueError(f"its config has no {error.args[0]}")
    for ours in ("n_kv_head", "intermediate_size"):  # may be missing, or None: as many as heads, 4 n_embd
        settings[ours] = theirs.get(HF_SETTINGS[kind].get(ours))
    for ours, value in settings.items():
        if not (type(value) is int and 0 < value < 10 ** 7) and value is not None:
            raise ValueError(f"its config has {HF_SETTINGS[kind].get(ours, ours)}={value!r}, expected a whole number above 0 and below ten million")
    if kind == "gpt2":
        activation = theirs.get("activation_function", "gelu_new")
        expect("activation_function", activation, *HF_GELU)
        return GPTConfig(arch="gpt2", gelu=HF_GELU[activation], **settings)
    # where the theta stands, and what scales it, has changed from version to version of transformers
    rope = {"rope_theta": theirs.get("rope_theta") or 10000.0}
    for part in (theirs.get("rope_scaling") or {}, theirs.get("rope_parameters") or {}):
        expect("rope_type", part.get("rope_type", part.get("type", "default")), "default")
        rope |= part
    expect("partial_rotary_factor", rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor", 1.0)), 1.0)
    for layer_type in theirs.get("layer_types") or []:
        expect("layer_types", layer_type, "full_attention")
    if kind == "deepseek_v3":
        dense = theirs.get("first_k_dense_replace", 3)
        expect("first_k_dense_replace", dense, max(dense, settings["n_layer"]))  # at least as many as there are
    else:
        hd = settings["n_embd"] // settings["n_head"]
        expect("head_dim", theirs.get("head_dim") or (128 if kind == "qwen3" else hd), hd)
    return GPTConfig(arch="llama", attention="mla" if kind == "deepseek_v3" else "mha", qk_norm=kind == "qwen3",
                     rope_theta=float(rope["rope_theta"]), **settings)


# ---------------------------------------------------------------------------------------------------
# what cannot be built

def check_config(c):
    """Raises ValueError, naming the setting and what it takes, for a GPTConfig whose model does not exist."""
    def expect(ok, name, accepted):
        if not ok:
            raise ValueError(f"{name}={getattr(c, name)}: {accepted}")

    expect(c.arch in ATTENTION, "arch", "expected gpt2 or llama")
    expect(c.attention in ATTENTION[c.arch], "attention", "expected mha or mla")
    for name in ("max_seq_len", "vocab_size", "n_layer", "n_head", "n_embd", "n_kv_head", "intermediate_size", "kv_lora_rank",
                 "q_lora_rank", "qk_nope_head_dim", "v_head_dim"):
        expect(getattr(c, name) is None or getattr(c, name) >= 1, name, "expected at least 1")
    near = max(1, c.n_embd // c.n_head) * c.n_head
    expect(c.n_embd % c.n_head == 0, "n_embd", f"expected a multiple of n_head={c.n_head}, e.g. {near}")
    expect(0 <= c.dropout < 1, "dropout", "expected a number from 0 to below 1")
    expect(c.gelu == "tanh" or c.gelu == "exact" and c.arch == "gpt2", "gelu", "expected tanh, or with arch=gpt2 exact")
    hd = c.n_embd // c.n_head
    if c.arch == "gpt2":
        expect(c.n_kv_head in (None, c.n_head), "n_kv_head", "arch=gpt2 has a key and value for each head; arch=llama can share them")
        expect(not c.qk_norm, "qk_norm", "arch=gpt2 has none; arch=llama has")
        expect(not c.embed_norm, "embed_norm", "arch=gpt2 has its embedding as head too, and has none; arch=llama has")
    else:
        expect(c.rope_theta > 0, "rope_theta", "expected a positive number")
        expect(c.n_kv_head is None or c.n_head % c.n_kv_head == 0, "n_kv_head", f"expected a divisor of n_head={c.n_head}")
    if c.attention == "mha":
        for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            expect(getattr(c, name) is None, name, "only attention=mla has it")
        expect(c.arch == "gpt2" or hd % 2 == 0, "n_head", f"rotary positions turn pairs: expected an even n_embd / n_head, got {hd}")
        return
    expect(c.n_kv_head in (None, c.n_head), "n_kv_head", "attention=mla shares a latent instead of heads")
    expect(not c.qk_norm, "qk_norm", "attention=mla normalises its latents instead")
    for name in ("kv_lora_rank", "q_lora_rank"):
        expect(getattr(c, name) is None or getattr(c, name) <= c.n_embd, name, f"expected at most n_embd={c.n_embd}")
    if c.arch == "gpt2":
        expect(c.q_lora_rank is None, "q_lora_rank", "only arch=llama has it")
        expect(c.qk_rope_head_dim in (None, 0), "qk_rope_head_dim", "arch=gpt2 learns its positions and rotates nothing")
        for name in ("qk_nope_head_dim", "v_head_dim"):  # so that it is a GPT-2 once keys and values are multiplied out
            expect(getattr(c, name) in (None, hd), name, f"arch=gpt2 has n_embd / n_head = {hd}")
    else:
        expect(c.qk_rope_head_dim is None or c.qk_rope_head_dim > 0 and c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim",
               "rotary positions turn pairs: expected an even number above 0")
