"""
Continues a prompt with a trained model, or talks to a chat model.

    python sample.py --checkpoint=out/ckpt.pt --prompt='def main(' --num_samples=3
    python sample.py --prompt=FILE:prompt.txt
    python sample.py --checkpoint=out-chat/ckpt.pt --chat=True
    python sample.py --checkpoint=out/ckpt.pt --num_samples=20 --compile=True
"""
import codecs
import math
import sys
import time
from typing import Literal, Optional

import runtime
from configurator import configure, expect_range, fail
from prepare_data import END_OF_TEXT, REFUSED, chat_tokens, encode, get_tokenizer, render_chat

# ---------------------------------------------------------------------------------------------------
# settings
checkpoint: str = "out/ckpt.pt"  # the checkpoint, or the out_dir it lies in; nanoGPT's; a Hugging Face folder; gpt2, gpt2-medium, ...
prompt: str = ""  # text to continue, or FILE:path to read it from; empty: the start of a document
chat: bool = False  # a conversation in the terminal instead; with a prompt: the answer to it
system: str = ""  # chat: what the model is told before the conversation; empty: nothing
num_samples: int = 1  # texts, one after the other
max_new_tokens: int = 256  # length of each at most
temperature: float = 0.8  # 0: always the likeliest token
top_k: int = 200  # sample among that many likeliest tokens; 0: all
top_p: float = 1.0  # sample among the likeliest tokens that make up this mass; 1: all
min_p: float = 0.0  # leave out tokens less likely than this fraction of the likeliest; 0: none
seed: Optional[int] = 1337  # sample i uses seed + i; None: another text each time
device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of the matmuls; auto: what the device is good at
compile: bool = False  # torch.compile for the step that makes a token: seconds, and then about twice the speed
config, given = configure(globals())

expect_range(config, 1, math.inf, "num_samples", "max_new_tokens")
expect_range(config, 0, math.inf, "temperature", "top_k")
expect_range(config, 0, 1, "top_p", "min_p")
expect_range(config, 0, 2 ** 63 - 1, "seed")
if top_p == 0:
    fail("--top_p=0: expected a number above 0, to 1; with --temperature=0 the likeliest token is taken")
if system and not chat or chat and num_samples != 1:
    fail("--system is for --chat=True" if system else f"--num_samples={num_samples}: --chat=True answers once")
system = system.strip()
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
print(runtime.introduce(checkpoint, loaded, sum(p.numel() for p in model.parameters())))
try:
    encode(tokenizer, text), encode(tokenizer, system)
except ValueError:
    fail(f"--prompt or --system: {REFUSED}")
special = chat_tokens(tokenizer)
stop_ids = [tokenizer.eot_token] + ([*special.values()] if chat else [])
step = None
if compile:
    problem = runtime.compiler_problem(compute_device, "inductor")
    if problem:
        print(f"WARNING: torch.compile cannot work here ({problem}): going on uncompiled, slower")
    else:
        print("compiling the decoding step ...", end="", flush=True)
        t0 = time.time()
        with autocast:
            step = model.compile_step(1)
        print(f" in {time.time() - t0:.0f} s")


def write(ids, n, seed):
    """Prints up to n tokens behind ids as they come -> the text, and what ended it: one of stop_ids, Ctrl-C or the length."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may take several tokens
    text, ended_by = "", "length"
    n_vocab = tokenizer.n_vocab + (len(special) if chat else 0)
    try:
        with autocast:
            for token, in model.generate([ids], n, temperature, top_k, top_p, min_p, stop_ids, seed, n_vocab, step):
                if token in stop_ids:
                    ended_by = "stop id"
                    break
                piece = decoder.decode(tokenizer.decode_single_token_bytes(token))
                print(runtime.printable(piece), end="", flush=True)
                text += piece
    except KeyboardInterrupt:
        if not chat:
            raise
        print(" (stopped)", end="")
        ended_by = "Ctrl-C"
    except ValueError as error:
        print()
        fail(f"--checkpoint={checkpoint}: {error}")
    rest = decoder.decode(b"", final=True)
    print(rest, flush=True)
    return text + rest, ended_by


# ---------------------------------------------------------------------------------------------------
# chat
def answer(messages, turn):
    """
    Prints the model's answer to messages -> the messages from here on: with the answer, and without the oldest turns
    where all of them are too long. None where the last one alone is, and no answer was given: --prompt fails then.
    """
    positions = model.config.max_seq_len
    start = 1 if messages[0]["role"] == "system" else 0
    forgotten = 0
    while True:
        try:
            ids = render_chat(tokenizer, messages)[0] + [special["assistant"]]
        except ValueError:
            print(f"(your message is {REFUSED})")
            return None
        if len(ids) + min(max_new_tokens, positions // 2) <= positions or len(messages) == start + 1:
            break
        messages = messages[:start] + messages[start + 2:]
        forgotten += 1
    if len(ids) >= positions:
        too_long = f"makes {len(ids)} tokens, but the model has {positions} positions: say it in fewer words"
        if one_message:
            fail(f"--prompt: {too_long}")
        print(f"(your message {too_long})")
        return None
    if forgotten:
        print("(the oldest turn does not fit any more and is forgotten)" if forgotten == 1 else
              f"(the oldest {forgotten} turns do not fit any more and are forgotten)")
    print("model: ", end="", flush=True)
    text, ended_by = write(ids, min(max_new_tokens, positions - len(ids)), None if seed is None else seed + turn)
    if ended_by == "length" and len(ids) + max_new_tokens > positions:
        print("(the model's positions are full)")
    return messages + [{"role": "assistant", "content": text}] if text else messages[:-1]


if chat:
    if loaded["stage"] != "chat":
        print("this is a base model: it has not learned to answer (python chat_sft.py teaches it)")
    beginning = [{"role": "system", "content": system}] if system else []
    if len(render_chat(tokenizer, beginning)[0]) > model.config.max_seq_len // 2:
        fail(f"--system: makes {len(render_chat(tokenizer, beginning)[0])} tokens, and may take half of the model's "
             f"{model.config.max_seq_len} positions: say it in fewer words")
    messages, turn = list(beginning), 0
    one_message = bool(text.strip())
    if one_message:
        answer(messages + [{"role": "user", "content": text}], 0)
        raise SystemExit(0)
    try:
        import readline  # noqa: F401 where it is there, arrow keys work in input()
    except ImportError:
        pass
    print("/reset begins anew, /quit or Ctrl-D ends, Ctrl-C stops an answer")
    while True:
        try:
            text = input("\nyou: ").strip()
        except KeyboardInterrupt:
            print("  (/quit or Ctrl-D ends)")
            continue
        except (EOFError, RuntimeError):  # RuntimeError: there is no stdin
            print()
            break
        if not sys.stdin.isatty():
            print(text)
        if text == "/quit":
            break
        if text == "/reset":
            messages = list(beginning)
            print("(a new conversation)")
        elif text.startswith("/"):
            print("(/reset begins anew, /quit or Ctrl-D ends)")
        elif text:
            messages = answer(messages + [{"role": "user", "content": text}], turn) or messages
            turn += 1
    raise SystemExit(0)

# ---------------------------------------------------------------------------------------------------
# a text
ids = [tokenizer.eot_token] + encode(tokenizer, text).tolist()  # a special token that the prompt spells is text
if len(ids) > model.config.max_seq_len:
    print(f"the prompt has {len(ids)} tokens, the model {model.config.max_seq_len} positions: it reads the last part of the prompt")
elif len(ids) + max_new_tokens - 1 > model.config.max_seq_len:
    print(f"prompt and answer are longer than the model's {model.config.max_seq_len} positions: it will forget the beginning")
for i in range(num_samples):
    print("-" * 5 + (f" sample {i + 1}" if num_samples > 1 else ""))
    print(text, end="", flush=True)
    _, ended_by = write(ids, max_new_tokens, None if seed is None else seed + i)
    if ended_by == "stop id":
        print(END_OF_TEXT)
