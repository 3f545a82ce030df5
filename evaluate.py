"""
Scores a checkpoint: HellaSwag, ARC, MMLU, GSM8K, and the validation loss in bits per byte.

    python evaluate.py --checkpoint=out/ckpt.pt                         # all five tasks, from the Hugging Face hub
    python evaluate.py --tasks=hellaswag,arc_easy --data_dir=data/fineweb-edu
    torchrun --nproc_per_node=8 evaluate.py --tasks=mmlu,gsm8k --task_dir=tasks  # local: tasks/mmlu/test.jsonl, ...

Each line of a local file is a row as on the hub:

    {"ctx": "He sits down and", "endings": ["sings.", "flies.", "eats.", "melts."], "label": 2}      hellaswag
    {"question": "Ice is?", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]}, "answerKey": "B"}   arc_*
    {"question": "1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1}                                   mmlu
    {"question": "Two and three apples?", "answer": "2 + 3 = 5 #### 5"}                                    gsm8k

A task of any other name has the rows of mmlu or of gsm8k. Every task is zero-shot.

HellaSwag and ARC use the prompts and scores of EleutherAI's lm-evaluation-harness, after an <|endoftext|>. MMLU
compares the texts of the choices, like the harness's mmlu_continuation, without naming the subject; a chat model
answers with a letter. GSM8K compares numbers: the one after ####, or else the last one of the answer. So does
a task of another name if its rows have no choices; its prompt is the question as it stands, and each answer in the
file must end with a number. Scores of tasks do not depend on the batch size or the number of ranks. The default is
float32, because with less precision the padding of a batch can decide between two choices that are nearly tied.
"""
import json
import math
import re
from collections import Counter
from decimal import Decimal
from functools import partial
from itertools import compress
from pathlib import Path
from string import ascii_uppercase
from typing import Literal

# before torch, whose import takes seconds: from here on Ctrl-C prints one line
from configurator import Positive, configure, fail, one_line_errors

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm  # comes with datasets

from chat_format import decode_chat, render_chat
from checkpoint import check_tokenizer, describe_model, load_model, pick_max_seq_len, replacing
from dataloader import TokenDataset, validation_loss
from distributed import get_rank, init_process, make_autocast, print0
from model import compute_logits
from sample import eval_share, generate, generation_limits
from tokenizer import encode, get_tokenizer

TASKS = {  # name on the hub, configuration, split
    "hellaswag": ("Rowan/hellaswag", None, "validation"),  # Zellers et al. 2019; its test set has no public labels
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test"),  # Clark et al. 2018
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test"),
    "mmlu": ("cais/mmlu", "all", "test"),  # Hendrycks et al. 2021
    "gsm8k": ("openai/gsm8k", "main", "test"),  # Cobbe et al. 2021
}
progress = partial(tqdm, disable=get_rank() > 0, leave=False, delay=2)


# -----------------------------------------------------------------------------
# rows, in the schemas of the hub's data sets -> prompts

NUMBER = re.compile(r"""
    (?: (?<!\w)[-\u2212]\$? | \$[-\u2212]? )?  # a sign (not the minus of 7-4) and a dollar
    (?: (?: [0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+ ) (?:\.[0-9]+)?  # 1,234.5 and 1234.5
      | (?<!\.)\.[0-9]+ )  # .5
    """, re.VERBOSE)
# a number that ends the text: alone, after =, or after a space that does not group digits, as in 1 000
LAST_NUMBER = re.compile(rf"(?: ^ | (?<![0-9])\s | = ) [^\w\s]*? {NUMBER.pattern} [^\w\s]* \s* $", re.VERBOSE)


def final_number(text):
    """
    Returns the answer in a text: the first number after ####, GSM8K's mark, else the last number, or None if there is
    no number. 1,000 and $1000 and 1000.00 are equal.
    """
    numbers = NUMBER.findall(text.partition("####")[2]) or NUMBER.findall(text)[::-1]
    return Decimal(re.sub("[$,]", "", numbers[0]).replace("\u2212", "-")) if numbers else None


def clean(text):
    """Removes the markup of HellaSwag's source from its text, as the harness does."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def tokenize_row(task, row, tokenizer, stage):
    """
    Turns a row of a data set into an example, a dict: context, the ids of the prompt; choices, the ids of each
    continuation (empty for GSM8K); characters, the length of each choice (empty for letters); gold, the index of the
    correct choice, or GSM8K's number. Raises an exception of any kind if the row does not have its data set's schema.

    A chat model gets MMLU (answered by letter), GSM8K and tasks of other names, which have the columns of either, in
    the chat format. HellaSwag and ARC ask which text is likelier, so they are the same for both stages.
    """
    columns = task if task in TASKS else "mmlu" if "choices" in row else "gsm8k"
    free_form = columns == "gsm8k"
    if free_form:
        question, choices, gold = row["question"], [], final_number(row["answer"])
        if task not in TASKS and "####" not in row["answer"] and not LAST_NUMBER.search(row["answer"]):
            raise ValueError("its answer does not end with a number, such as -5, 1,000 or 0.5")
    elif columns == "hellaswag":
        question, choices, gold = row["ctx"], row["endings"], int(row["label"])
        if "ctx_a" in row:  # as on the hub, where ctx is not capitalised
            question = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    elif columns == "mmlu":
        question, choices, gold = row["question"].strip(), row["choices"], row["answer"]
    else:
        question, choices, labels = row["question"], row["choices"]["text"], row["choices"]["label"]
        if row["answerKey"] not in labels:
            raise ValueError(f"answerKey {row['answerKey']!r} is not in list {labels}")
        gold = labels.index(row["answerKey"])  # A B C D, or 1 2 3 4
    valid = gold is not None if free_form else isinstance(choices, list) and gold in range(len(choices))
    if not valid:
        raise ValueError("expected a list of choices with the answer among them, as its index (in ARC its label), or "
                         "an answer that is a number")

    text = "Question: " + question + "\nAnswer:"
    if columns == "hellaswag":
        text, choices = clean(question), [clean(choice) for choice in choices]
    elif free_form and task not in TASKS:
        text = question
    characters = [max(len(choice), 1) for choice in choices]
    if stage == "chat" and columns in ("gsm8k", "mmlu"):
        if len(choices) > 26:
            raise ValueError(f"{len(choices)} choices, but a chat model answers with a letter: at most 26")
        if choices:
            lines = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices)]
            question = "\n".join([question, *lines, "Answer with the letter only."])
            choices, characters = ascii_uppercase[:len(choices)], []
        user = {"role": "user", "content": question}
        context = render_chat(tokenizer, [user], prompt=True)[0]
        talks = [[user, {"role": "assistant", "content": choice}] for choice in choices]
        choices = [[*compress(*render_chat(tokenizer, talk))][:-1] for talk in talks]  # trained, without the end
    else:
        # Spaces at the end of a context move to the continuation, as in the harness: a space is never joined to the
        # letters before it, so context and continuation are split there.
        ids = encode(tokenizer, text.rstrip() if choices else text).tolist()
        context = [tokenizer.eot_token, *ids]
        choices = [encode(tokenizer, f"{text} {choice}").tolist()[len(ids):] for choice in choices]
    return {"context": context, "choices": choices, "characters": characters, "gold": gold}


def subsample(items, n):
    """Returns n of the items, evenly spaced and always the same; all of them if n is None or there are no more."""
    n = min(n or len(items), len(items))
    return [items[i * len(items) // n] for i in range(n)]


def load_examples(task, tokenizer, stage, task_dir=None, max_problems=None):
    """
    Loads the examples of a task for `score`, from the hub or a local file, in the order of the source. Each is
    tokenize_row's dict plus "where", its line or row. max_problems: take this many, evenly spaced; None takes all.
    stage: the checkpoint's, base or chat.
    """
    with one_line_errors(f"task {task!r}, --task_dir={task_dir}",
                         f"the tasks are {', '.join(TASKS)}; expected TASK/test.jsonl or TASK/validation.jsonl in the "
                         f"folder, or None: from the hub", alone=not task_dir):  # the hub may refuse one rank
        if task_dir:
            path = Path(task_dir, task, "test.jsonl")
            if not path.exists():
                path = path.with_name("validation.jsonl")
            rows = path.read_bytes().splitlines()
            indices = [i for i, line in enumerate(rows) if line.strip()]
        else:
            import datasets  # not at the top: local tasks do not need it
            name, configuration, split = TASKS[task]
            rows = datasets.load_dataset(name, configuration, split=split)
            indices = range(len(rows))
        if not indices:
            raise ValueError("it has no examples")
    # TASK/test.jsonl may be your own task
    schemas = TASKS[task][0] if task in TASKS else f"{TASKS['gsm8k'][0]}, or all in that of {TASKS['mmlu'][0]}"
    examples = []
    for i in subsample(indices, max_problems):
        where = f"{path}, line {i + 1}" if task_dir else f"{name}, row {i}"
        with one_line_errors(where, f"expected a row in the schema of {schemas}"):
            row = json.loads(rows[i]) if task_dir else rows[i]
            examples.append({"where": where, **tokenize_row(task, row, tokenizer, stage)})
            if bool(examples[0]["choices"]) != bool(examples[-1]["choices"]):
                raise ValueError("some rows have choices and some have none")
    return examples


def load_tasks(names, *arguments):
    """{task: load_examples(task, *arguments)} for comma-separated task names; {} for none."""
    return {task: load_examples(task, *arguments) for task in names.replace(" ", "").split(",") if names}


# -----------------------------------------------------------------------------
# scoring

def rows_to_score(examples, max_seq_len):
    """
    Returns [(ids to read, {(example, choice): the choice's ids, ...}), ...]. Choices that read the same ids, as
    single-token choices do, share a row. If the examples have no choices: [(prompt, example), ...].
    """
    rows = {}
    for i, example in enumerate(examples):
        for j, choice in enumerate(example["choices"]):
            ids = (example["context"] + choice)[-max_seq_len - 1:-1]  # the last one is predicted, not read
            rows.setdefault(tuple(ids), {})[i, j] = torch.tensor(choice[-len(ids):])
    return list(rows.items()) or [(example["context"], i) for i, example in enumerate(examples)]


def log_likelihoods(model, batch):
    """Returns the log-likelihood, in nats, of each choice in a batch of rows_to_score: {(example, choice): float}."""
    device = model.lm_head.weight.device
    idx = pad_sequence([torch.tensor(ids) for ids, _ in batch], batch_first=True)  # (B, T); padding is unseen: causal
    hidden = model.hidden_states(idx.to(device))  # (B, T, C)
    keys, x, targets = zip(*[(key, x[:len(ids)][-len(choice):], choice)
                             for x, (ids, choices) in zip(hidden, batch) for key, choice in choices.items()])
    # (N, V), of the positions that predict a choice
    logits = compute_logits(torch.cat(x), model.lm_head.weight).float()
    losses = F.cross_entropy(logits, torch.cat(targets).to(device), reduction="none").cpu().double()  # (N,)
    if not losses.isfinite().all():
        raise ValueError("the model's logits are not finite: its weights are broken, or too large for this dtype")
    return {key: -loss.sum().item() for key, loss in zip(keys, losses.split(list(map(len, targets))))}


@torch.no_grad()
def score(model, tokenizer, stage, examples, batch_size=16, max_new_tokens=256):
    """
    Scores a model on examples from load_examples. Returns a dict, the same on every rank:
    acc: the share of correct answers, where an answer is the choice with the highest log-likelihood, or the final
    number generated; acc_norm (not for letters or GSM8K): the same with each log-likelihood divided by the number of
    characters of its choice, as in the harness, because longer texts are less likely; acc_stderr, acc_norm_stderr:
    their standard errors; chance: the acc of guessing a choice, or the commonest number; n: the number of examples;
    truncated: how many were longer than max_seq_len and lost their beginning, or had their answer cut off by
    max_new_tokens; examples: what the model answered and what is correct, for each.

    model: in eval mode and not compiled, because shapes vary. The caller sets autocast. All ranks must call this: they
    share the batches, or run a sharded model together. Raises ValueError if the model's logits are not finite.
    """
    has_choices, max_seq_len = bool(examples[0]["choices"]), model.config.max_seq_len
    share, n_shares = eval_share(model)
    # only generation needs the token that ends an answer, which a chat template may lack
    limits = {} if has_choices else generation_limits(tokenizer, stage == "chat")
    rows = rows_to_score(examples, max_seq_len)
    # Longest first, so that there is little padding, and memory runs out early or never. The ranks share batches and
    # not rows, so that any number of ranks sees the same batches and gets the same scores, to the bit.
    rows.sort(key=lambda row: -len(row[0]))
    results = {}
    try:
        for start in progress(range(0, len(rows), batch_size)[share::n_shares]):
            batch = rows[start:start + batch_size]
            if has_choices:
                results |= log_likelihoods(model, batch)
            else:
                contexts, numbers = zip(*batch)
                steps = generate(model, contexts, max_new_tokens, temperature=0, **limits)
                results |= zip(numbers, zip(*progress(steps)))  # from a list per position to one per example
    except ValueError as error:  # raised below, where the other ranks wait
        results["error"] = error
    if n_shares > 1:
        parts = [None] * n_shares
        dist.all_gather_object(parts, results)
        for part in parts:
            results |= part
    if "error" in results:
        raise results["error"]

    answers, chance, truncated = [], 0, 0
    for i, example in enumerate(examples):
        if has_choices:
            scores = [results[i, j] for j in range(len(example["choices"]))]
            answer = {"scores": scores, "predicted": scores.index(max(scores))}
            if example["characters"]:
                per_character = [log_p / length for log_p, length in zip(scores, example["characters"])]
                answer["predicted_norm"] = per_character.index(max(per_character))
            length, cut_off = max(map(len, example["choices"])), False
            chance += 1 / len(scores)
        else:
            ids = [token for token in results[i] if token is not None]
            length, cut_off = len(ids), ids[-1] not in limits["stop_ids"]
            text = decode_chat(tokenizer, ids if cut_off else ids[:-1])
            if stage == "base" and "Question:" in text:
                text, cut_off = text.partition("Question:")[0], False  # it goes on to invent the next question
            answer = {"text": text, "predicted": final_number(text)}
        answers.append({"where": example["where"], "gold": example["gold"], **answer})
        truncated += cut_off or len(example["context"]) + length - 1 > max_seq_len  # the last token is not read

    chance = chance or max(Counter(answer["gold"] for answer in answers).values())

    n, result = len(examples), {}
    for norm in ("", "_norm"):
        if f"predicted{norm}" in answers[0]:
            p = sum(answer[f"predicted{norm}"] == answer["gold"] for answer in answers) / n
            result |= {f"acc{norm}": p, f"acc{norm}_stderr": math.sqrt(p * (1 - p) / max(n - 1, 1))}
    return {**result, "chance": chance / n, "n": n, "truncated": truncated, "examples": answers}


def format_result(task, result):
    """Returns a result of `score` as one line of text."""
    return f"{task:<13} " + ", ".join(f"{key} {round(value, 4)}" for key, value in result.items() if key != "examples")


def task_hook(model, tokenizer, autocast, stage, config):
    """
    Loads the examples of config["eval_tasks"] and returns a training loop's hook(iter_num, done) -> dict for the log,
    which scores 64 examples of each task, evenly spaced, or all of them when the run is done. All ranks must call it.
    """
    tasks = load_tasks(config["eval_tasks"], tokenizer, stage, config["task_dir"])

    def hook(iter_num, done):
        values = {}
        model.eval()
        for task, examples in tasks.items():
            examples = subsample(examples, None if done else 64)
            try:
                with autocast, torch.compiler.set_stance("force_eager"):
                    result = score(model, tokenizer, stage, examples, config["batch_size"])
                values |= {f"{task}_{key}": value for key, value in result.items() if key != "examples"}
                print0(f"step {iter_num}: {format_result(task, result)}")
            except ValueError as error:  # a task that cannot be scored must not stop the run
                print0(f"step {iter_num}: {task}: no score: {error}")
        model.train()
        return values

    return hook


if __name__ == "__main__":
    checkpoint: str = "out/ckpt.pt"  # ours or nanoGPT's, or its folder; a Hugging Face folder; gpt2, gpt2-medium, ...
    tasks: str = "hellaswag,arc_easy,arc_challenge,mmlu,gsm8k"  # empty: none
    task_dir: str | None = None  # folder with TASK/test.jsonl or TASK/validation.jsonl; None: from the hub
    max_problems: Positive | None = None  # of each task, evenly spaced; None: all
    data_dir: str | None = None  # shards for the validation loss and bits per byte
    max_seq_len: Positive | None = None  # length of their rows; None: the model's positions, at most 4096
    eval_iters: Positive = 64  # batches for the validation loss, from the start of val (training has its own setting)
    batch_size: Positive = 16  # rows at a time, on each rank
    max_new_tokens: Positive = 256  # gsm8k: length of an answer
    output: str | None = None  # JSON file for the results, example by example
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "float32"  # of the matmuls; auto: bfloat16 if supported
    configure(globals())

    if not tasks and not data_dir:
        fail(f"--tasks={tasks} and no --data_dir: there is nothing to score; give one of them")
    if output and (Path(output).exists() or not Path(output).parent.is_dir()):
        fail(f"--output={output}: expected a new file, in a folder that exists")
    torch_device = init_process(device)
    torch.set_float32_matmul_precision("highest")  # no TF32
    model, meta = load_model(checkpoint, torch_device)
    tokenizer = get_tokenizer(meta["tokenizer"])
    print0(describe_model(meta))
    if tasks:
        print0(f"reading {tasks} ...")
    examples = load_tasks(tasks, tokenizer, meta["stage"], task_dir, max_problems)

    results = {"checkpoint": checkpoint, "stage": meta["stage"], "iter_num": meta["iter_num"]}
    taken = {*results, "validation"}
    if taken & examples.keys():
        fail(f"--tasks={tasks}: the results have something else under {', '.join(sorted(taken))}; rename the task")
    autocast = make_autocast(torch_device, dtype)
    with autocast, one_line_errors(f"--checkpoint={checkpoint}", errors=ValueError):
        if data_dir:
            val_data = TokenDataset(data_dir, "val", pick_max_seq_len(max_seq_len, model.config.max_seq_len))
            check_tokenizer(f"--data_dir={data_dir}", val_data.tokenizer, meta)
            rows = min(len(val_data), eval_iters * batch_size)
            val_loss, val_bpb = validation_loss(model, val_data, batch_size, eval_iters, torch_device, progress)
            if not math.isfinite(val_loss):
                raise ValueError("its validation loss is not finite: its weights are broken")
            results["validation"] = {"val_loss": val_loss, "val_bpb": val_bpb, "rows": rows}
            print0(f"{'validation':<13} loss {val_loss:.4f}, perplexity {math.exp(min(val_loss, 700)):.2f}, "
                   f"{val_bpb:.4f} bits per byte, over {rows} of the {len(val_data)} rows of "
                   f"{val_data.max_seq_len} tokens in {data_dir}")
        for task in examples:
            results[task] = score(model, tokenizer, meta["stage"], examples[task], batch_size, max_new_tokens)
            print0(format_result(task, results[task]))
    if output and get_rank() == 0:
        with one_line_errors(f"--output={output}", errors=OSError), replacing(Path(output)) as temporary:
            temporary.write_text(json.dumps(results, indent=1, default=str))  # str: the numbers of gsm8k
    if dist.is_initialized():
        dist.destroy_process_group()
