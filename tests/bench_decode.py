"""
Tokens per second of decoding with a cache, for models of GPT-2 124M's size with random weights. Run by hand, on a CPU
in some minutes:

    python tests/bench_decode.py                          # gpt2 and gpt2 with latent attention, compiled and not
    python tests/bench_decode.py --variants=llama,llama+mla --rows=32 --context=1024
    python tests/bench_decode.py --variants=gpt2,llama --transformers=True    # beside transformers' generate

The variants take turns; each figure is the median over the rounds.
"""
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configurator import Positive, configure  # noqa: E402
from distributed import init_process, make_autocast, pick_dtype  # noqa: E402
from import_hf import config_to_hf, import_transformers  # noqa: E402
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


def transformers_tokens_per_second(variant, dtype, device):
    """Of transformers' generate, whose first token is not timed either."""
    transformers = import_transformers()
    fields = config_to_hf(GPTConfig(*variant.split("+"), max_seq_len=context + new_tokens + 1))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields))
    model, idx = model.to(device, dtype).eval(), torch.full((rows, context), 198, device=device)
    seconds = []
    for n in (1, 1, 1 + new_tokens):  # the first one warms up
        start = time.perf_counter()
        model.generate(idx, attention_mask=torch.ones_like(idx), min_new_tokens=n, max_new_tokens=n, do_sample=True,
                       top_k=200)
        seconds.append(time.perf_counter() - start)
    return rows * new_tokens / (seconds[2] - seconds[1])


if __name__ == "__main__":
    variants: str = "gpt2,gpt2+mla"  # of gpt2, gpt2+mla, llama, llama+mla
    rows: Positive = 1  # texts at a time
    context: Positive = 1024  # tokens in the cache before the timed ones
    new_tokens: Positive = 64  # timed tokens of each text
    rounds: Positive = 3
    transformers: bool = False  # time its generate, too; without mla
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    configure(globals())
    torch_device = init_process(device)
    dtype = pick_dtype("auto", torch_device)
    autocast = make_autocast(torch_device, dtype)
    measured = defaultdict(list)
    for i in range(rounds):
        for variant in variants.split(","):
            for compiled in (False, True):
                measured[f"{variant}, {'compiled' if compiled else 'not compiled'}"].append(
                    tokens_per_second(variant, compiled, torch_device, autocast))
            if transformers:
                measured[f"{variant}, transformers"].append(
                    transformers_tokens_per_second(variant, getattr(torch, dtype), torch_device))
    for name, values in measured.items():
        print(f"{name:30} {statistics.median(values):8.1f} tokens/s")
