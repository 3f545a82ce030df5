"""
Scores a checkpoint: HellaSwag, ARC, MMLU, GSM8K, and the validation loss in bits per byte.

    python evaluate.py --checkpoint=out/ckpt.pt                         # all five tasks, from the Hugging Face hub
    python evaluate.py --tasks=hellaswag,arc_easy --data_dir=data/fineweb-edu
    torchrun --nproc_per_node=8 evaluate.py --task_dir=tasks            # local files: tasks/mmlu/test.jsonl, ...

Prompts and scores are those of EleutherAI's lm-evaluation-harness, zero-shot, so the numbers are comparable. They do
not depend on the batch size or the number of ranks, up to rounding: float32 is the default because in a coarser dtype
the padding of a batch decides between two choices that are nearly tied.
"""
import difflib
import json
import math
import re
import string
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Literal, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

import runtime
from checkpoint import check_tokenizer, describe_model, load_model
from configurator import Positive, configure, fail, one_line_errors
from dataloader import TokenDataset, validation_loss
from runtime import print0
from tokenizer import chat_tokens, encode, get_tokenizer, render_chat, token_bytes

# -----------------------------------------------------------------------------
# the tasks' rows, in the schemas of their hub data sets

TASKS = {  # name on the hub, configuration, split
    "hellaswag": ("Rowan/hellaswag", None, "validation"),  # Zellers et al. 2019; its test set has no public labels
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test"),  # Clark et al. 2018
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test"),
    "mmlu": ("cais/mmlu", "all", "test"),  # Hendrycks et al. 2021
    "gsm8k": ("openai/gsm8k", "main", "test"),  # Cobbe et al. 2021
}


def parse_tasks(text):
    """'hellaswag,mmlu' -> ["hellaswag", "mmlu"]; the program ends if a name is not in TASKS."""
    names = re.findall(r"[^,\s]+", text)
    for name in names:
        if name not in TASKS:
            close = difflib.get_close_matches(name, TASKS, n=1)
            fail(f"{name!r} is not a task{f'; did you mean {close[0]!r}?' if close else ''}; there are "
                 f"{', '.join(TASKS)}")
    return names


def task_file(task, task_dir):
    """The local file of a task: its test set, else its validation set; None if there is neither."""
    paths = [Path(task_dir, task, f"{split}.jsonl") for split in ("test", "validation")]
    return next((path for path in paths if path.exists()), None)


def read_rows(task, task_dir=None):
    """All rows of a task, from the hub or a local file: a list of (where, row), the row a dict or a line of JSON."""
    if not task_dir:
        name, configuration, split = TASKS[task]
        with one_line_errors(f"{task}: {name} on the hub", "to read local files, give --task_dir"):
            import datasets  # not at the top: training does without it
            rows = datasets.load_dataset(name, configuration, split=split)
            return [(f"{name}, row {i}", row) for i, row in enumerate(rows)]
    path = task_file(task, task_dir)
    if path is None:
        fail(f"--task_dir={task_dir}: has no {task}/test.jsonl and no {task}/validation.jsonl")
    rows = [(f"{path}, line {i}", line) for i, line in enumerate(open(path, "rb"), 1) if line.strip()]
    if not rows:
        fail(f"{path}: has no examples")
    return rows


NUMBER = re.compile(r"""
    (?: (?<!\w)-\$? | \$-? )?  # a sign, which the minus of 7-4 is not, and a dollar
    (?: (?: [0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+ ) (?:\.[0-9]+)?  # 1,234.5 and 1234.5
      | (?<!\.)\.[0-9]+ )  # .5""", re.VERBOSE)


def final_number(text):
    """
    The answer in a text: the first number after ####, GSM8K's mark, else the last number; None if there is none. Equal
    numbers are equal strings: 1,000 and $1000 and 1000.00 are "1000".
    """
    numbers = NUMBER.findall(text.partition("####")[2])[:1] or NUMBER.findall(text)[-1:]
    if not numbers:
        return None
    number = Decimal(numbers[0].replace("$", "").replace(",", ""))
    return f"{number.normalize():f}" if number else "0"  # and not -0


def clean(text):
    """HellaSwag's text without the markup of its source, as in the harness."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def read_row(task, row):
    """
    A row -> question, choices, gold. gold: the index of the correct choice, or for GSM8K, which has no choices, the
    correct number. A row that is not in its data set's schema raises whatever that leads to.
    """
    if task == "gsm8k":
        gold = final_number(row["answer"].partition("####")[2])
        if gold is None:
            raise ValueError("its answer has no number after ####")
        return row["question"], [], gold
    if task == "hellaswag":
        question, choices, answer = row["ctx"], row["endings"], int(row["label"])
        if "ctx_a" in row:  # as on the hub, where ctx is not capitalised
            question = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    elif task == "mmlu":
        question, choices, answer = row["question"].strip(), row["choices"], row["answer"]
    else:
        question, choices, answer = row["question"], row["choices"]["text"], row["answerKey"]
    if not isinstance(choices, list):
        raise ValueError("its choices are not a list")
    if task == "hellaswag":
        question, choices = clean(question), [clean(choice) for choice in choices]
    labels = row["choices"]["label"] if task.startswith("arc") else range(len(choices))  # arc: A B C D, or 1 2 3 4
    return question, choices, labels.index(answer)


# -----------------------------------------------------------------------------
# rows -> prompts

def subsample(items, n):
    """n of the items, evenly spaced and always the same; all if n is None or there are no more."""
    n = min(n or len(items), len(items))
    return [items[i * len(items) // n] for i in range(n)]


def tokenize_row(task, row, tokenizer, stage):
    """
    A row -> an example, a dict: context, the ids of the prompt; choices, the ids of each continuation, none for GSM8K;
    characters of each choice, if choices of unequal lengths are compared; gold. A chat model gets MMLU, by letter,
    and GSM8K in the chat format. HellaSwag and ARC stay the same: they ask which text is likelier.
    """
    question, choices, gold = read_row(task, row)
    if stage == "chat" and task in ("mmlu", "gsm8k"):
        letters = string.ascii_uppercase[:len(choices)]
        lines = [question] + [letter + ". " + choice for letter, choice in zip(letters, choices, strict=True)]
        lines += ["Answer with the letter only."] if choices else []
        context = render_chat(tokenizer, [{"role": "user", "content": "\n".join(lines)}])[0]
        context.append(chat_tokens(tokenizer)["assistant"])
        choices, characters = letters, []
    else:
        text = question if task == "hellaswag" else "Question: " + question + "\nAnswer:"
        characters = [len(choice) for choice in choices]
        # Context and continuation are encoded apart. GPT-2's pre-tokenizer splits the whole text there too, as it
        # never joins a space to the letters before it. Only a run of spaces would be split elsewhere, so spaces at the
        # end of a context belong to the continuation, as in the harness.
        space = text[len(text.rstrip()):] + " "
        choices = [space + choice for choice in choices]
        context = [tokenizer.eot_token] + encode(tokenizer, text.rstrip()).tolist()
    return {"context": context, "choices": [encode(tokenizer, choice).tolist() for choice in choices],
            "characters": characters, "gold": gold}


def load_examples(task, tokenizer, stage, task_dir=None, max_examples=None):
    """
    The examples of a task for `score`, in the order of their file: tokenize_row's, and where each of them stands.
    max_examples: that many, evenly spaced; None: all. stage: the checkpoint's, base | chat.
    """
    examples = []
    for where, row in subsample(read_rows(task, task_dir), max_examples):
        with one_line_errors(where, f"expected a row in the schema of {TASKS[task][0]}"):
            row = json.loads(row) if task_dir else row
            examples.append({"where": where, **tokenize_row(task, row, tokenizer, stage)})
    return examples


# -----------------------------------------------------------------------------
# scoring

def rows_to_score(examples, max_seq_len):
    """[(ids to read, {(example, choice): the choice's ids, ...}), ...]: choices of a single token share a row."""
    rows = {}
    for i, example in enumerate(examples):
        for j, choice in enumerate(example["choices"]):
            ids = (example["context"] + choice)[-max_seq_len - 1:-1]  # the last one is predicted, not read
            rows.setdefault(tuple(ids), {})[i, j] = torch.tensor(choice[-len(ids):])
    return list(rows.items())


def log_likelihoods(model, batch):
    """The log-likelihood of each choice in a batch of rows_to_score, in nats: {(example, choice): float}"""
    device = model.lm_head.weight.device
    idx = pad_sequence([torch.tensor(ids) for ids, _ in batch], batch_first=True)  # (B, T); padding is unseen: causal
    hidden = model.hidden_states(idx.to(device))  # (B, T, C)
    keys, x, targets = zip(*[(key, x[len(ids) - len(choice):len(ids)], choice)
                             for x, (ids, choices) in zip(hidden, batch) for key, choice in choices.items()])
    logits = model.lm_head(torch.cat(x)).float()  # (N, V), of the positions that predict a choice
    losses = F.cross_entropy(logits, torch.cat(targets).to(device), reduction="none").cpu().double()  # (N,)
    if not losses.isfinite().all():
        raise ValueError("the model's logits are not finite: its weights are broken, or too large for this dtype")
    return {key: -loss.sum().item() for key, loss in zip(keys, losses.split([len(choice) for choice in targets]))}


def generate_answers(model, tokenizer, stage, batch, max_new_tokens, progress):
    """Greedy continuations of a batch of [(context, example), ...]: {example: ids}"""
    from sample import generate, vocabulary
    contexts, numbers = zip(*batch)
    steps = generate(model, contexts, max_new_tokens, temperature=0, **vocabulary(tokenizer, stage == "chat"))
    answers = zip(*progress(steps))  # from one list per position to one per row
    return {i: [token for token in answer if token is not None] for i, answer in zip(numbers, answers)}


@torch.no_grad()
def score(model, tokenizer, stage, examples, batch_size=16, rank=0, world_size=1, max_new_tokens=256, progress=iter):
    """
    Scores a model on examples from load_examples. Returns a dict, the same on every rank:
    acc, the share of correct answers: the choice with the highest log-likelihood, or the final number generated;
    acc_norm (not for letters or GSM8K): the same with the log-likelihood divided by the choice's characters, as in the
    harness, since longer texts are less likely; acc_stderr, acc_norm_stderr: standard errors; chance: acc of guessing;
    n, the number of examples; truncated, those longer than max_seq_len, whose beginning the model did not see;
    examples: for each, what the model answered and what is correct.

    model: not compiled, as shapes vary; its mode is restored; autocast is the caller's. A sharded model is run by all
    ranks together, each with rank=0, world_size=1. progress: wraps an iterable, as tqdm does. Raises ValueError if the
    model's logits are not finite.
    """
    was_training = model.training
    model.eval()
    rows = rows_to_score(examples, model.config.max_seq_len)
    generating = not rows
    if generating:
        rows = [(example["context"], i) for i, example in enumerate(examples)]
    # Longest first: there is little padding, and memory runs out early or never. The ranks share batches, not rows:
    # however many they are, the batches are the same, and so are the scores, to the bit.
    rows.sort(key=lambda row: -len(row[0]))
    batches = [rows[i:i + batch_size] for i in range(0, len(rows), batch_size)][rank::world_size]
    results = {}
    try:
        for batch in progress(batches):
            results |= (generate_answers(model, tokenizer, stage, batch, max_new_tokens, progress) if generating
                        else log_likelihoods(model, batch))
    except ValueError as error:  # raised below: the other ranks are waiting there
        results["error"] = error
    model.train(was_training)
    if world_size > 1:
        parts = [None] * world_size
        dist.all_gather_object(parts, results)
        results = {key: value for part in parts for key, value in part.items()}
    if "error" in results:
        raise results["error"]

    n, truncated, answers = len(examples), 0, []
    for i, example in enumerate(examples):
        answer = {"where": example["where"], "gold": example["gold"]}
        if generating:
            text = tokenizer.decode([token for token in results[i] if token < tokenizer.eot_token])
            if stage == "base":
                text = text.partition("Question:")[0]  # the next one, which it makes up
            answer |= {"text": text, "predicted": final_number(text)}
        else:
            scores = [results[i, j] for j in range(len(example["choices"]))]
            answer |= {"scores": scores, "predicted": scores.index(max(scores))}
            if example["characters"]:
                scores = [log_p / max(length, 1) for log_p, length in zip(scores, example["characters"])]
                answer["predicted_norm"] = scores.index(max(scores))
        answers.append(answer)
        longest = max(map(len, example["choices"] or [results[i]]))
        truncated += len(example["context"]) + longest - 1 > model.config.max_seq_len  # the last token is not read

    chance = 0 if generating else sum(1 / len(example["choices"]) for example in examples) / n
    result = {"n": n, "truncated": truncated, "chance": chance, "examples": answers}
    for name, key in (("acc", "predicted"), ("acc_norm", "predicted_norm")):
        if key in answers[0]:
            p = sum(answer[key] == answer["gold"] for answer in answers) / n
            result |= {name: p, f"{name}_stderr": math.sqrt(p * (1 - p) / max(n - 1, 1))}
    return result


def format_result(task, result):
    """A result of `score` in one line."""
    scores = [f"{name} {result[name]:.4f} +/- {result[f'{name}_stderr']:.4f}" for name in ("acc", "acc_norm")
              if name in result]
    return (f"{task:<13} {', '.join(scores)}, chance {result['chance']:.4f}, {result['n']} examples"
            + (f" ({result['truncated']} longer than max_seq_len: beginning cut off)" if result["truncated"] else ""))


def task_hook(model, tokenizer, autocast, stage, config):
    """
    Loads the examples of config["eval_tasks"] and returns a training loop's hook(iter_num, done) -> dict for the log,
    which scores config["eval_problems"] of each task, or all when done. All ranks call it.
    """
    tasks = {task: load_examples(task, tokenizer, stage, config["task_dir"])
             for task in parse_tasks(config["eval_tasks"])}

    def hook(iter_num, done):
        values = {}
        for task, examples in tasks.items():
            examples = subsample(examples, None if done else config["eval_problems"])
            try:
                with autocast, torch.compiler.set_stance("force_eager"):
                    result = score(model, tokenizer, stage, examples, config["batch_size"],
                                   *runtime.eval_share(model))
                values |= {f"{task}_{key}": result[key] for key in result if key.startswith("acc") or key == "n"}
                line = format_result(task, result)
            except ValueError as error:  # no reason to end the run
                line = f"{task}: no score: {error}"
            print0(f"step {iter_num}: {line}")
        return values

    return hook


if __name__ == "__main__":
    checkpoint: str = "out/ckpt.pt"  # a checkpoint, or its out_dir
    tasks: Optional[str] = None  # hellaswag,arc_easy,arc_challenge,mmlu,gsm8k, or some of them; empty: none; None: all
    task_dir: Optional[str] = None  # folder with TASK/test.jsonl or TASK/validation.jsonl; None: from the hub
    max_problems: Optional[Positive] = None  # examples of each task, evenly spaced; None: all
    data_dir: Optional[str] = None  # shards for the validation loss and bits per byte
    eval_iters: Positive = 64  # batches of the validation loss: the first rows of val, as in training
    batch_size: Positive = 16  # rows at a time, on each rank
    max_new_tokens: Positive = 256  # gsm8k: length of an answer
    output: Optional[str] = None  # JSON file for the results, example by example
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "float32"  # of the matmuls; auto: bfloat16 if supported
    configure(globals())

    names = [name for name in TASKS if not task_dir or task_file(name, task_dir)]
    if tasks is not None:
        names = parse_tasks(tasks)
    if not names and not data_dir:
        fail(f"--tasks={tasks} --task_dir={task_dir}: no tasks; expected TASK/test.jsonl or TASK/validation.jsonl in "
             f"the task_dir, TASK one of {', '.join(TASKS)}, or a --data_dir for the validation loss")
    rank, world_size, device = runtime.init_process(device)
    dtype = runtime.pick_dtype(dtype, device)
    if dtype == "float32":
        torch.set_float32_matmul_precision("highest")  # no TF32
    model, meta = load_model(checkpoint, device)
    tokenizer = get_tokenizer(meta["tokenizer"])
    print0(describe_model(checkpoint, meta))
    if output and rank == 0:
        open(output, "a").close()  # fails now, not after all the work

    # read everything, so that mistakes in it are known before anything is scored
    if data_dir:
        val_data = TokenDataset(data_dir, "val", model.config.max_seq_len)
        check_tokenizer(f"--data_dir={data_dir}", val_data.tokenizer, meta)
    print0(f"reading {', '.join(names) or 'no task'}; left out: {', '.join(sorted(TASKS.keys() - names)) or 'none'}")
    examples = {name: load_examples(name, tokenizer, meta["stage"], task_dir, max_problems) for name in names}

    from tqdm import tqdm  # comes with datasets
    progress = partial(tqdm, disable=rank > 0, leave=False, delay=2, mininterval=2)
    results = {"checkpoint": checkpoint, "stage": meta["stage"], "iter_num": meta["iter_num"]}
    with runtime.autocast(device, dtype), one_line_errors(f"--checkpoint={checkpoint}", errors=ValueError):
        if data_dir:
            rows = min(len(val_data), eval_iters * batch_size)
            val_loss, val_bpb = validation_loss(model, val_data, batch_size, eval_iters, token_bytes(tokenizer), device,
                                                rank, world_size, partial(progress, desc="validation"))
            results["validation"] = {"val_loss": val_loss, "val_bpb": val_bpb, "rows": rows}
            print0(f"{'validation':<13} loss {val_loss:.4f}, perplexity {math.exp(min(val_loss, 700)):.2f}, "
                   f"{val_bpb:.4f} bits per byte, over {rows} of the {len(val_data)} rows of "
                   f"{model.config.max_seq_len} tokens in {data_dir}")
        for name in names:
            results[name] = score(model, tokenizer, meta["stage"], examples[name], batch_size, rank, world_size,
                                  max_new_tokens, partial(progress, desc=name))
            print0(format_result(name, results[name]))
    if output and rank == 0:
        Path(output).write_text(json.dumps(results, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()
