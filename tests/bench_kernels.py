"""
Ways to compute two parts of the model, in turns, forward and backward: attention of packed rows, and the loss. Run by
hand, on a GPU in some minutes:

    python tests/bench_kernels.py attention     # a dense mask, as in model.py; FlexAttention; variable lengths
    python tests/bench_kernels.py loss          # model.py's chunks of several sizes; full logits; torch's own

error: of the gradients, |a - b| / |b|, against float32 (of attention and without a mask, which is wrong: its price).
"""
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import model as model_module  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
ROUNDS = 10
# rows, heads, positions, head width; a text's mean length: as in chat tuning
ATTENTION = (16, 12, 2048, 64, 174) if ON_GPU else (1, 2, 256, 16, 40)
# tokens, width, ids: one micro-batch of GPT-2 124M
LOSS = (16 * 1024, 768, 50304) if ON_GPU else (2048, 64, 4096)


def gradients(function, inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    function(*inputs).float().sum().backward()
    return torch.cat([x.grad.float().flatten() for x in inputs])


def compare(ways, inputs, reference):
    """ways: {name: function of inputs}. Prints milliseconds (median), peak memory and error of each."""
    ms, errors, peak = {name: [] for name in ways}, {}, {}
    for name, way in list(ways.items()):
        try:
            errors[name] = ((gradients(way, inputs) - reference).norm() / reference.norm()).item()
        except Exception as error:  # not on this device, or not in this torch
            print(f"{name:32} {type(error).__name__}: {' '.join(str(error).split())[:100]}", flush=True)
            del ways[name]
    for _ in range(ROUNDS):
        for name, way in ways.items():
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            start = time.perf_counter()
            gradients(way, inputs)
            if ON_GPU:
                torch.cuda.synchronize()
                peak[name] = torch.cuda.max_memory_allocated() / 2 ** 20
            ms[name].append(1000 * (time.perf_counter() - start))
    for name in ways:
        print(f"{name:32} {statistics.median(ms[name]):10.2f} ms {peak.get(name, 0):10,.0f} MB",
              f"error {errors[name]:.1e}")


def attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    B, H, T, D, mean = ATTENTION
    cuts = torch.rand(B, T, device=DEVICE) < 1 / mean  # where a new text begins
    text = cuts.cumsum(1)
    causal = torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril()
    mask = (text[:, None, :, None] == text[:, None, None, :]) & causal
    block_mask = torch.compile(create_block_mask)(
        lambda b, h, q, k: (text[b, q] == text[b, k]) & (q >= k), B, None, T, T, device=DEVICE)
    cuts[:, 0] = True  # each row begins a text, too
    starts = F.pad(cuts.flatten().nonzero().flatten(), (0, 1), value=B * T).int()
    longest = int(starts.diff().max())

    def variable_lengths(q, k, v):
        from torch.nn.attention.varlen import varlen_attn
        flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B * T, H, D)
        return varlen_attn(*flat, starts, starts, longest, longest, window_size=(-1, 0))

    inputs = [torch.randn(B, H, T, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    dense = partial(F.scaled_dot_product_attention, attn_mask=mask)
    reference = gradients(dense, [x.float() for x in inputs])
    print(f"{B} rows of {T}, {H} heads of {D}, texts of {mean} on average, {int(starts.numel()) - 1} of them")
    compare({"dense mask": torch.compile(dense, dynamic=False),
             "FlexAttention, block mask": torch.compile(partial(flex_attention, block_mask=block_mask), dynamic=False),
             "variable lengths": variable_lengths,
             "causal, no mask": torch.compile(partial(F.scaled_dot_product_attention, is_causal=True), dynamic=False)},
            inputs, reference)


def loss():
    N, C, V = LOSS
    targets = torch.randint(V, (N,), device=DEVICE)
    inputs = [torch.randn(N, C, device=DEVICE).bfloat16(), 0.02 * torch.randn(V, C, device=DEVICE)]

    def full(x, weight):
        return F.cross_entropy((x @ weight.to(x.dtype).t()).float(), targets, reduction="sum")

    def torchs(x, weight):
        return F.linear_cross_entropy(x, weight.to(x.dtype), targets, reduction="sum")

    def chunked(x, weight, size):
        model_module.LOSS_CHUNK = size
        return model_module.linear_cross_entropy(x, weight, targets)

    reference = gradients(full, [x.float() for x in inputs])
    print(f"{N} tokens, {C} wide, {V} ids")
    ways = {f"chunks of {size}": torch.compile(partial(chunked, size=size), dynamic=False)
            for size in (512, 1024, 2048, 4096, 8192) if size <= N}
    ways |= {"full logits": torch.compile(full, dynamic=False), "torch's linear_cross_entropy": torchs}
    compare(ways, inputs, reference)


if __name__ == "__main__":
    ways = {"attention": attention, "loss": loss}
    if sys.argv[1:2] == [] or sys.argv[1] not in ways:
        sys.exit(f"usage: python {sys.argv[0]} {' | '.join(ways)}")
    torch.manual_seed(0)
    print(torch.cuda.get_device_name() if ON_GPU else "cpu", torch.__version__)
    ways[sys.argv[1]]()
