"""
Completes a prompt with a trained model, or chats with a chat model in the terminal.

    python sample.py --checkpoint=out/ckpt.pt --prompt='def main(' --num_samples=3
    python sample.py --prompt=FILE:prompt.txt
    python sample.py --checkpoint=out-chat/ckpt.pt --chat=True
    python sample.py --checkpoint=out/ckpt.pt --num_samples=20 --compile=True
"""
import codecs
import copy
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

# before torch, whose import takes seconds: from here on Ctrl-C prints one line
from configurator import Fraction, NonNegative, NonNegativeFloat, Positive, Seed, configure, fail, one_line_errors

import torch
from torch.nn.utils.rnn import pad_sequence

from chat_format import chat_tokens, check_chat_format, decode_chat, render_chat
from checkpoint import describe_model, load_model, pick_max_seq_len
from distributed import get_rank, get_world_size, init_process, is_sharded, make_autocast, print0
from model import Attention, decode_attention, matmul_dtype
from tokenizer import count_ids, encode, get_tokenizer, sanitize


@torch.no_grad()
def generate(model, prompts, max_new_tokens, stop_ids=(), **sampling):
    """
    Continues a batch of prompts with a KV cache and a model in eval mode. Yields, for each new position, a list of B
    ids, None for rows that have stopped. Raises ValueError if the logits are not finite.

    prompts: B lists of ids, each of any length from 1 on. No row's logits depend on the others.
    stop_ids: a row stops after one of them, which is yielded. sampling: arguments of sample_logits.
    A row that outgrows max_seq_len keeps its last max_seq_len + 1 - (ids still wanted) ids, but at least half of
    max_seq_len. All positions change then, so the cache is filled again.
    """
    device, max_len = model.lm_head.weight.device, model.config.max_seq_len
    rows, running, cache = list(map(list, prompts)), set(range(len(prompts))), None
    for left in range(max_new_tokens, 0, -1):
        if cache is None or max(map(len, rows)) > max_len:  # prefill
            # leave room for all ids that are still wanted, but keep at least half of the positions
            keep = max(max_len - left + 1, (max_len + 1) // 2)
            rows = [row[-keep:] if len(row) > max_len else row for row in rows]
            # the padding of short rows is cached, then overwritten before any query looks that far
            idx = pad_sequence([torch.tensor(row, device=device) for row in rows], batch_first=True)
            positions = torch.arange(idx.size(1), device=device).expand_as(idx)
            cache = model.new_cache(len(rows), min(idx.size(1) + left, max_len))
            model.hidden_states(idx, positions, cache=cache)
        # compute the last position of the prompt again, so that the first id is decoded in the shape of the others
        idx = torch.tensor([row[-1:] for row in rows], device=device)
        positions = torch.tensor([[len(row) - 1] for row in rows], device=device)
        logits = model(idx, positions=positions, cache=cache)[:, -1]
        if not logits.isfinite().all():
            raise ValueError("the model's logits are not finite: its weights are broken or too large for --dtype")
        new = sample_logits(logits.float(), **sampling).tolist()
        yield [token if i in running else None for i, token in enumerate(new)]
        running = {i for i in running if new[i] not in stop_ids}
        if not running:
            return
        for i in running:
            rows[i].append(new[i])


def sample_logits(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, n_vocab=None):
    """
    One id per row of logits (B, V) float32 -> (B,) int64. temperature: 0 is greedy. top_k (0: off), top_p (Holtzman
    et al. 2020; 1: off) and min_p (Nguyen et al. 2024; 0: off) are applied in this order, as in transformers, except
    that exactly top_k logits stay if some are equal.
    n_vocab: ids from here on pad the vocabulary and are never sampled.
    """
    logits = logits[:, :n_vocab]
    if temperature < 1e-20:  # greedy; a division by less may overflow
        return logits.argmax(-1)
    logits, ids = logits / temperature, None
    if top_k or top_p < 1:
        logits, ids = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))  # the likeliest first
    probs = logits.softmax(-1)
    if top_p < 1:
        likelier = probs.cumsum(-1) - probs
        probs = probs.masked_fill(likelier >= max(top_p, 1e-20), 0.0)  # drop what lies beyond top_p
    probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0)
    drawn = torch.multinomial(probs, 1)  # multinomial normalises
    return (drawn if ids is None else ids.gather(1, drawn)).squeeze(1)


def fused_matmul(a, b):
    """
    a (..., n, m) @ b (..., m, k) in float32 for a compiler on a CPU: multiply and sum become one loop that reads a
    cache in place.
    """
    return (a.unsqueeze(-1).float() * b.unsqueeze(-3).float()).sum(-2)


@torch.no_grad()
def compile_step(model, batch):
    """
    Returns a model for generate with `batch` rows, from one in eval mode. It decodes compiled and reads prompts
    uncompiled. One shape, one graph: its new_cache returns the same cache of max_seq_len positions each time. Call it
    under the autocast that generate will run under. It converts the matrices of `model`, which both models share, to
    that dtype permanently. Do not change them afterwards. (In eager mode autocast casts them once and caches the
    result; in a compiled step it would cast all of them for each id.)
    """
    device = model.lm_head.weight.device.type
    model.lm_head = copy.deepcopy(model.lm_head)  # a tied head's embedding stays as it is
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(matmul_dtype(module.weight))
        elif device == "cpu" and isinstance(module, Attention):
            module.decode = partial(decode_attention, matmul=fused_matmul)
    cache = model.new_cache(batch, model.config.max_seq_len)
    for tensor in sum(cache, []):
        torch._dynamo.mark_static_address(tensor)  # CUDA graphs may write to it
    decoder = copy.copy(model)
    decoder.new_cache = lambda *_: cache
    decoder.forward = torch.compile(model.forward, dynamic=False, fullgraph=True,
                                    mode="reduce-overhead" if device == "cuda" else None)
    # on a CPU the weights become constants of the graph, which are packed once instead of for each id
    with torch._inductor.config.patch(freezing=device == "cpu"):
        list(generate(decoder, [[0]] * batch, 4, temperature=0))  # CUDA graphs are recorded at the second step
    return decoder


def generation_limits(tokenizer, chat):
    """Arguments stop_ids and n_vocab of generate. A chat token stops a chat model; a base model has learned none."""
    special = chat_tokens(tokenizer).values() if chat else []
    return {"stop_ids": [*tokenizer.stop_ids, *special],
            "n_vocab": count_ids(tokenizer) if chat else tokenizer.n_vocab}


def eval_share(model):
    """rank, world_size for sharing out sampling and scoring: a sharded model does all of it on all ranks together."""
    return (0, 1) if is_sharded(model) else (get_rank(), get_world_size())


def sample_hook(model, tokenizer, autocast, prompt, stage, config):
    """
    Returns a training loop's hook(iter_num, done) -> {} that prints config["sample_tokens"] ids after `prompt`, a list
    of ids. stage: base | chat.
    """
    def hook(iter_num, done):
        if eval_share(model)[0] > 0 or iter_num == 0 and stage == "base":
            return {}
        torch.manual_seed(config["seed"] + iter_num)
        model.eval()
        try:
            with autocast, torch.compiler.set_stance("force_eager"):
                tokens = generate(model, [prompt], config["sample_tokens"], temperature=0.8, top_k=200,
                                  **generation_limits(tokenizer, stage == "chat"))
                text = decode_chat(tokenizer, prompt[prompt[0] == tokenizer.eot_token:] + [token for token, in tokens])
        except ValueError as error:
            text = f"(none: {error})"
        model.train()
        print0(f"----- sample\n{sanitize(text)}\n-----")
        return {}

    return hook


if __name__ == "__main__":
    checkpoint: str = "out/ckpt.pt"  # ours or nanoGPT's, or its folder; a Hugging Face folder; gpt2, gpt2-medium, ...
    prompt: str = ""  # text to complete, or FILE:path to read it from; empty: the start of a document
    chat: bool = False  # chat in the terminal; with a prompt: answer it
    system: str = ""  # chat: the system message; empty: none
    num_samples: Positive = 1  # generated one after the other
    max_new_tokens: Positive = 256  # length limit of each
    temperature: NonNegativeFloat = 0.8  # 0 = greedy
    top_k: NonNegative = 200  # sample from this many likeliest tokens; 0 = all
    top_p: Fraction = 1.0  # sample from the likeliest tokens of this total probability; 1 = all
    min_p: Fraction = 0.0  # drop tokens less likely than this fraction of the likeliest
    seed: Seed | None = 1337  # sample i uses seed + i - 1; None: a new text each time
    max_seq_len: Positive | None = None  # positions to remember; None: the model's, at most 4096
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of the matmuls; auto: bfloat16 if supported
    compile: bool = False  # compile decoding: takes seconds, then about 1.7 times the tokens/s on a CPU
    configure(globals())
    if system and not chat:
        fail(f"--system={system}: needs --chat=True")
    if chat and num_samples > 1:
        fail(f"--num_samples={num_samples}: --chat=True answers once")
    with one_line_errors(f"--prompt={prompt}"):
        text = prompt
        if prompt.startswith("FILE:"):
            text = Path(prompt.removeprefix("FILE:")).read_text(encoding="utf-8")
            if chat and not text:
                raise ValueError("is empty; expected a question")

    torch_device = init_process(device)
    autocast = make_autocast(torch_device, dtype)
    model, loaded = load_model(checkpoint, torch_device)
    print(describe_model(loaded))
    tokenizer = get_tokenizer(loaded["tokenizer"])
    max_len = model.config.max_seq_len = pick_max_seq_len(max_seq_len, model.config.max_seq_len)
    if chat:
        check_chat_format(checkpoint, tokenizer, model.config.vocab_size)
    limits = generation_limits(tokenizer, chat)
    if compile:
        print("compiling the decoding step ...", flush=True)
        with autocast, one_line_errors(f"--compile=True, {checkpoint}"):
            model = compile_step(model, 1)

    def write(beginning, ids, i):
        """Prints `beginning`, then, as they are sampled with seed + i, the tokens after `ids`. Returns their text."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may take several tokens
        generated = ""
        try:
            print(sanitize(beginning), end="", flush=True)
            if seed is not None:
                torch.manual_seed(seed + i)
            with autocast, one_line_errors(checkpoint, errors=ValueError):
                for (token,) in generate(model, [ids], max_new_tokens, temperature=temperature, top_k=top_k,
                                         top_p=top_p, min_p=min_p, **limits):
                    ids = [*ids, token]
                    if not chat or token not in limits["stop_ids"]:
                        piece = decoder.decode(tokenizer.decode_single_token_bytes(token))
                        print(sanitize(piece), end="", flush=True)
                        generated += piece
        except KeyboardInterrupt:
            if not chat:
                raise
            print(" (stopped)", end="")
        print(decoder.decode(b"", final=True))  # half a character
        if len(ids) > max_len + 1:  # the last one is not read
            print(f"(that is longer than {max_len} positions: the model has forgotten the beginning)")
        return generated

    # completion
    if not chat:
        with one_line_errors("--prompt"):
            ids = [tokenizer.eot_token, *encode(tokenizer, text).tolist()]  # a special token in the prompt is text
        for i in range(num_samples):
            print(f"----- sample {i + 1}")
            write(text, ids, i)
        raise SystemExit

    # chat
    if not (text or sys.stdin):
        fail("--chat=True: there is no terminal to read from; give --prompt")
    if loaded["stage"] != "chat":
        print("this is a base model: it has not learned to answer (python chat_sft.py "
              f"--init_from={checkpoint} --data=... teaches it)")
    questions = [text]
    if not text:
        with suppress(ImportError):
            import readline  # noqa: F401 where it exists, arrow keys work in input()
        print("/reset starts a new conversation, /quit or Ctrl-D exits, Ctrl-C stops an answer or exits")
        questions = iter(lambda: input("\nyou: ").strip(), None)
    system_message = [{"role": "system", "content": system}] if system else []
    messages = []
    with suppress(EOFError, KeyboardInterrupt):
        for question in questions:
            if question in ("/quit", "quit", "exit") and not text:
                break
            if question == "/reset" and not text:
                messages = []
                print("(a new conversation)")
            elif question:
                messages.append({"role": "user", "content": question})
                room = max_len - min(max_new_tokens, max_len // 4)
                try:
                    while (len(ids := render_chat(tokenizer, system_message + messages, prompt=True)[0]) > room
                           and len(messages) > 1):
                        print("(the oldest turn no longer fits and is forgotten)")
                        del messages[:2]
                except ValueError as error:  # a model's chat template may refuse the messages
                    if text:
                        fail(f"{checkpoint}: {error}")
                    print(f"(not understood: {error})")
                    messages.pop()
                    continue
                answer = write("model: ", ids, len(messages) // 2)
                if tokenizer.chat_template:  # which may itself write the space that answers begin with
                    answer = answer.strip()
                messages.append({"role": "assistant", "content": answer})
