"""
Tokens per second of decoding with a cache, for models of GPT-2 124M's size with random weights. Run by hand, on a CPU
in some minutes:

    python tests/bench_decode.py                          # gpt2 and gpt2 with latent attention, compiled and not
    python tests/bench_decode.py --variants=llama,llama+mla --rows=32 --context=1024

The variants take turns; each figure is the median over the rounds.
"""
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configurator import Positive, configure  # noqa: E402
from distributed import init_process, make_autocast, pick_dtype  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from sample import compile_step, generate  # noqa: E402


def tokens_per_second(variant, compiled, device, autocast):
    torch.compiler.reset()
    model = GPT(GPTConfig(*variant.split("+"), max_seq_len=context + new_tokens)).to(device).eval()
    with autocast:
        if compiled:
            model = compile_step(model, rows)
        tokens = generate(model, [[198] * context] * rows, new_tokens + 1, top_k=200)
        next(tokens)  # reads the prompt
        start = time.perf_counter()
        return rows * len(list(tokens)) / (time.perf_counter() - start)


if __name__ == "__main__":
    variants: str = "gpt2,gpt2+mla"  # of gpt2, gpt2+mla, llama, llama+mla
    rows: Positive = 1  # texts at a time
    context: Positive = 1024  # tokens in the cache before the timed ones
    new_tokens: Positive = 64  # timed tokens of each text
    rounds: Positive = 3
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    configure(globals())
    _, _, torch_device = init_process(device)
    autocast = make_autocast(torch_device, pick_dtype("auto", torch_device))
    ways = {f"{variant}, {'compiled' if compiled else 'not compiled'}": (variant, compiled)
            for variant in variants.split(",") for compiled in (False, True)}
    measured = {name: [] for name in ways}
    for i in range(rounds):
        for name, way in ways.items():
            measured[name].append(tokens_per_second(*way, torch_device, autocast))
    for name, values in measured.items():
        print(f"{name:30} {statistics.median(values):8.1f} tokens/s")
