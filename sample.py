"""
Continues a prompt with a trained model.

    python sample.py --checkpoint=out/ckpt.pt --prompt='def main(' --num_samples=3
    python sample.py --prompt=FILE:prompt.txt
"""
import codecs
import math
from typing import Literal, Optional

import runtime
from configurator import configure, expect_range, fail
from prepare_data import END_OF_TEXT, get_tokenizer

# ---------------------------------------------------------------------------------------------------
# settings
checkpoint: str = "out/ckpt.pt"  # the checkpoint, or the out_dir it lies in; nanoGPT's; a Hugging Face folder; gpt2, gpt2-medium, ...
prompt: str = ""  # text to continue, or FILE:path to read it from; empty: the start of a document
num_samples: int = 1  # texts, one after the other
max_new_tokens: int = 256  # length of each at most
temperature: float = 0.8  # 0: always the likeliest token
top_k: int = 200  # sample among that many likeliest tokens; 0: all
top_p: float = 1.0  # sample among the likeliest tokens that make up this mass; 1: all
min_p: float = 0.0  # leave out tokens less likely than this fraction of the likeliest; 0: none
seed: Optional[int] = 1337  # sample i uses seed + i; None: another text each time
device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of the matmuls; auto: what the device is good at
config, given = configure(globals())

expect_range(config, 1, math.inf, "num_samples", "max_new_tokens")
expect_range(config, 0, math.inf, "temperature", "top_k")
expect_range(config, 0, 1, "top_p", "min_p")
expect_range(config, 0, 2 ** 63 - 1, "seed")
if top_p == 0:
    fail("--top_p=0: expected a number above 0, to 1; with --temperature=0 the likeliest token is taken")
text = prompt
if prompt.startswith("FILE:"):
    try:
        with open(prompt.removeprefix("FILE:"), encoding="utf-8") as f:
            text = f.read()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--prompt={prompt}: {error}")

# ---------------------------------------------------------------------------------------------------
# model
_, _, compute_device = runtime.init_process(device)
autocast = runtime.autocast(compute_device, runtime.pick_dtype(dtype, compute_device))
model, loaded = runtime.load_model(checkpoint, compute_device)
tokenizer = get_tokenizer(loaded["tokenizer"])
print(f"{checkpoint}: {loaded['stage']} model, {loaded['model_args']['arch']}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M "
      f"parameters" + ("" if math.isnan(loaded["val_loss"]) else  # one that others trained
                       f", step {loaded['iter_num']}, val loss {loaded['val_loss']:.4f} at step {loaded['val_iter']}"))

ids = [tokenizer.eot_token] + tokenizer.encode_ordinary(text)  # a special token that the prompt spells is text
if len(ids) > model.config.max_seq_len:
    print(f"the prompt has {len(ids)} tokens, the model {model.config.max_seq_len} positions: it reads the last part of the prompt")
elif len(ids) + max_new_tokens - 1 > model.config.max_seq_len:
    print(f"prompt and answer are longer than the model's {model.config.max_seq_len} positions: it will forget the beginning")

# ---------------------------------------------------------------------------------------------------
# text
for i in range(num_samples):
    print("-" * 5 + (f" sample {i + 1}" if num_samples > 1 else ""))
    print(text, end="", flush=True)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may take several tokens
    try:
        with autocast:
            for token, in model.generate([ids], max_new_tokens, temperature, top_k, top_p, min_p, [tokenizer.eot_token],
                                         None if seed is None else seed + i, tokenizer.n_vocab):
                if token != tokenizer.eot_token:
                    print(runtime.printable(decoder.decode(tokenizer.decode_single_token_bytes(token))), end="", flush=True)
    except ValueError as error:
        print()
        fail(f"--checkpoint={checkpoint}: {error}")
    print(decoder.decode(b"", final=True) + (f"\n{END_OF_TEXT}" if token == tokenizer.eot_token else ""))
