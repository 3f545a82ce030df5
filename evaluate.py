"""
Scores a checkpoint: HellaSwag, ARC, MMLU, GSM8K, and the validation loss in bits per byte.

    python evaluate.py --checkpoint=out/ckpt.pt                              # all five tasks, from the Hugging Face hub
    python evaluate.py --tasks=hellaswag,arc_easy --data_dir=data/fineweb-edu
    torchrun --nproc_per_node=8 evaluate.py --task_dir=tasks                 # local files: tasks/mmlu/test.jsonl, ...

Prompts and scores are those of EleutherAI's lm-evaluation-harness without examples in the prompt (zero-shot), so that
figures can be compared. They do not depend on the batch size or the number of ranks, to the precision of the dtype: hence
float32 is the default, where two choices are all but equal a coarser one decides by how a batch was padded.
"""
import difflib
import json
import math
import os
import re
import sys
from decimal import Decimal
from typing import Literal, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F

import runtime
from configurator import configure, expect_range, fail
from model import IGNORE, LOSS_CHUNK
from prepare_data import REFUSED, Windows, chat_tokens, encode, get_tokenizer, read_meta, render_chat, token_bytes

# ---------------------------------------------------------------------------------------------------
# validation loss

@torch.no_grad()
def validation_loss(model, get_batch, n_rows, batch_size, bytes_of, rank=0, world_size=1):
    """
    Loss over the first n_rows rows of a split, in nats a target and in bits a byte of the targets' text: the same rows at
    every call, dealt to the ranks, so that the result is that of one.

    model: compiled or not; it sees one shape. get_batch(indices (batch_size,)) -> what model.forward takes: x, y
    (batch_size, T) int64, IGNORE where y is no target, and perhaps positions and a mask. A last batch that is not full is
    filled up with rows that do not count. bytes_of: from prepare_data.token_bytes.
    """
    was_training = model.training
    model.eval()
    bytes_of = torch.from_numpy(bytes_of)
    totals = torch.zeros(3, dtype=torch.float64)  # nats, targets, bytes
    for first in range(0, n_rows, world_size * batch_size):  # as often on each rank: a sharded model is run by all together
        rows = torch.arange(batch_size) + first + rank * batch_size
        x, y, *packing = get_batch(rows.clamp(max=n_rows - 1).numpy())
        y = torch.where((rows < n_rows)[:, None].to(y.device), y, IGNORE)  # not in place: x may share its memory
        targets = y[y != IGNORE]
        totals += torch.tensor([model(x, y, *packing).item(), len(targets), bytes_of[targets.cpu()].sum()], dtype=torch.float64)
    model.train(was_training)
    if dist.is_initialized():
        totals = totals.to(next(model.parameters()).device)
        dist.all_reduce(totals)
    nats, targets, bytes_ = totals.tolist()
    return nats / max(targets, 1), nats / math.log(2) / max(bytes_, 1)


# ---------------------------------------------------------------------------------------------------
# the tasks' problems: rows in the schemas of their hub data sets -> prompts

TASKS = {  # name on the hub, configuration, split
    "hellaswag": ("Rowan/hellaswag", None, "validation"),  # Zellers et al. 2019; the test set's labels are not public
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test"),  # Clark et al. 2018
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test"),
    "mmlu": ("cais/mmlu", "all", "test"),  # Hendrycks et al. 2021
    "gsm8k": ("openai/gsm8k", "main", "test"),  # Cobbe et al. 2021
}


def task_file(task, task_dir):
    """The file of a task in a folder of local ones: its test set, or else its validation set; None where there is neither."""
    paths = [os.path.join(task_dir, task, f"{split}.jsonl") for split in ("test", "validation")]
    return next((path for path in paths if os.path.isfile(path)), None)


def read_rows(task, task_dir=None):
    """All rows of a task, each with where it stands: [(where, row), ...]. From the hub, or a local file."""
    if task_dir is None:
        import datasets  # here and not above: training runs without it
        name, configuration, split = TASKS[task]
        try:
            rows = datasets.load_dataset(name, configuration, split=split)
            return [(f"{name}, row {i}", row) for i, row in enumerate(rows)]
        except Exception as error:  # the library raises what its readers, the file system and the network raise
            fail(f"{task}: {name} cannot be read from the hub ({type(error).__name__}: {error}); local files can, with --task_dir")
    path = task_file(task, task_dir)
    if path is None:
        fail(f"--task_dir={task_dir}: no {task}/test.jsonl there and no {task}/validation.jsonl")
    rows = []
    for number, line in enumerate(open(path, "rb"), 1):
        try:
            if line.strip():
                rows.append((f"{path}, line {number}", json.loads(line)))
        except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
            fail(f"{path}, line {number}: no JSON ({error})")
    if not rows:
        fail(f"{path}: holds no problems")
    return rows


NUMBER = re.compile(r"""
    (?: (?<!\w)-\$? | \$-? )?  # a sign, which the minus of 7-4 is not, and a dollar
    (?: (?: [0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+ ) (?:\.[0-9]+)?  # 1,234.5 and 1234.5
      | (?<!\.)\.[0-9]+ )  # .5""", re.VERBOSE)


def final_number(text):
    """
    The answer in a text: the first number behind ####, GSM8K's mark, or else the last number there is; None without one. As
    a string that is the same for the same number: 1,000 and $1000 and 1000.00 are "1000".
    """
    numbers = NUMBER.findall(text.partition("####")[2])[:1] or NUMBER.findall(text)[-1:]
    if not numbers:
        return None
    number = Decimal(numbers[0].replace("$", "").replace(",", ""))
    return f"{number.normalize():f}" if number else "0"  # and not -0


def read_row(task, row):
    """
    -> question, choices, gold. gold: the index of the right choice; for GSM8K, which has no choices, the number that is
    right. A row that is not in its data set's schema raises KeyError, TypeError or ValueError.
    """
    if task == "gsm8k":
        question, choices, gold = row["question"], [], final_number(row["answer"].partition("####")[2])
        if gold is None:
            raise ValueError("its answer has no number behind ####")
    elif task == "hellaswag":
        if "ctx_a" in row:  # the hub's rows
            question = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        else:  # ctx is the two of them, not capitalised
            question = row["ctx"]
        if not isinstance(row["endings"], list):
            raise ValueError("expected a list as its endings")
        question, choices = clean(question), [clean(ending) for ending in row["endings"]]
        labels, answer = [str(i) for i in range(len(choices))], str(row["label"])
    elif task == "mmlu":
        question, choices = row["question"].strip(), row["choices"]
        labels, answer = [str(i) for i in range(len(choices))], str(row["answer"])
    else:
        question, choices = row["question"], row["choices"]["text"]
        labels, answer = row["choices"]["label"], row["answerKey"]  # labels: A B C D, in some rows 1 2 3 4
    if not isinstance(question, str) or not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
        raise ValueError("expected a string as its question, and strings as its choices")
    if task != "gsm8k":
        if not isinstance(labels, list) or len(labels) != len(choices) or len({*map(str, labels)}) != len(labels):
            raise ValueError(f"its labels {labels} are not one for each of its {len(choices)} choices")
        if task == "mmlu" and len(choices) > 26:
            raise ValueError(f"{len(choices)} choices, but the letters end at Z")
        if answer not in labels:
            raise ValueError(f"its answer {answer!r} is none of its labels {', '.join(map(str, labels))}")
        gold = labels.index(answer)
    return question, choices, gold


def clean(text):
    """HellaSwag's text without the marks of the site it comes from, as the harness does it."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def evenly(items, n):
    """n of the items, evenly spaced, the same ones at each call; all where n is None or there are no more."""
    return items if n is None or n >= len(items) else [items[i * len(items) // n] for i in range(n)]


def task_names(text):
    """'hellaswag,mmlu' -> the names; one that is none of TASKS is refused."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in TASKS:
            close = difflib.get_close_matches(name, TASKS, n=1)
            fail(f"{name!r} is no task{f'; did you mean {close[0]!r}?' if close else ''}; there are {', '.join(TASKS)}")
    return names


def load_problems(task, tokenizer, stage, task_dir=None, max_problems=None):
    """
    What `score` takes: a list of problems, in the order of their file. max_problems: that many, evenly spaced over the
    file, the same ones at each call; None: all. stage: the checkpoint's; a "chat" model is asked in the chat format, MMLU
    by letter and GSM8K, while HellaSwag and ARC stay what they are: which text is likelier.

    A problem: where it stands; context, the ids of the prompt; choices, the ids of each continuation, none for GSM8K;
    characters of each choice, where choices of unequal lengths are compared; gold.
    """
    def prompt(text):  # -> ids
        if stage == "chat":
            return render_chat(tokenizer, [{"role": "user", "content": text}])[0] + [chat_tokens(tokenizer)["assistant"]]
        return [tokenizer.eot_token] + encode(tokenizer, f"Question: {text}\nAnswer:").tolist()

    problems = []
    for where, row in evenly(read_rows(task, task_dir), max_problems):
        try:
            question, choices, gold = read_row(task, row)
        except KeyError as error:
            fail(f"{where}: no key {error}; expected the schema of {TASKS[task][0]}")
        except (TypeError, ValueError, AttributeError) as error:
            fail(f"{where}: not in the schema of {TASKS[task][0]}: {error}")
        problem = {"where": where, "gold": gold}
        try:
            if task == "gsm8k":
                problem.update(context=prompt(question), choices=[])
            elif task == "mmlu" and stage == "chat":
                letters = [chr(ord("A") + i) for i in range(len(choices))]
                options = "".join(f"{letter}. {choice}\n" for letter, choice in zip(letters, choices))
                problem.update(context=prompt(f"{question}\n{options}Answer with the letter only."),
                               choices=[encode(tokenizer, letter).tolist() for letter in letters])
            else:
                # Context and continuation are encoded apart. That is how GPT-2's pre-tokenizer splits the whole, too: it never
                # joins a space to the letters before it. Only a run of spaces would be split elsewhere, so a context's last
                # spaces go with the continuation, as in the harness.
                text = question if task == "hellaswag" else f"Question: {question}\nAnswer:"
                space = text[len(text.rstrip()):] + " "
                problem.update(context=[tokenizer.eot_token] + encode(tokenizer, text.rstrip()).tolist(),
                               choices=[encode(tokenizer, space + choice).tolist() for choice in choices],
                               characters=[len(choice) for choice in choices])
        except ValueError:
            fail(f"{where}: {REFUSED}")
        problems.append(problem)
    return problems


# ---------------------------------------------------------------------------------------------------
# scoring

def log_likelihoods(model, problems, batch_size, rank, world_size, progress):
    """
    Of each choice after its context, in nats: {(problem, choice): log p}, those of this rank's batches.

    Rows are as long as the longest of their batch. Attention is causal, so what pads a row on its right changes nothing;
    rows are sorted by length, so there is little of it, longest first, so that memory runs out early or never. Batches
    and not problems are dealt to the ranks: any number of them computes the very same ones, to the last bit.
    """
    device, max_seq_len = model.lm_head.weight.device, model.config.max_seq_len
    rows = {}  # ids that are read -> which ids are asked for at their end; choices of a single token share a row
    for i, problem in enumerate(problems):
        for j, choice in enumerate(problem["choices"]):
            ids = (problem["context"] + choice)[-max_seq_len - 1:]  # the last one is predicted, not read
            rows.setdefault(tuple(ids[:-1]), []).append((i, j, ids[1:][-len(choice):]))
    rows = sorted(rows.items(), key=lambda row: -len(row[0]))
    batches = [rows[first:first + batch_size] for first in range(0, len(rows), batch_size)][rank::world_size]
    found = {}
    for step, batch in enumerate(batches):
        T = len(batch[0][0])
        idx = torch.tensor([[*ids, *[0] * (T - len(ids))] for ids, _ in batch], device=device)  # (B, T)
        x = model.hidden_states(idx)  # (B, T, C)
        asked = [(b, len(ids), *one) for b, (ids, choices) in enumerate(batch) for one in choices]
        # the head sees the positions that predict a continuation, some at a time: logits (B, T, V) never exist
        x = torch.cat([x[b, end - len(targets):end] for b, end, _, _, targets in asked])  # (N, C)
        targets = torch.tensor([target for *_, targets in asked for target in targets], device=device)
        nats = torch.cat([F.cross_entropy(model.lm_head(xc).float(), tc, reduction="none")
                          for xc, tc in zip(x.split(LOSS_CHUNK), targets.split(LOSS_CHUNK))])  # (N,)
        for (_, _, i, j, _), part in zip(asked, nats.cpu().double().split([len(targets) for *_, targets in asked])):
            found[i, j] = -part.sum().item()
        progress(step + 1, len(batches))
    return found


def generate_answers(model, tokenizer, stage, problems, batch_size, max_new_tokens, rank, world_size, progress):
    """The ids with which the model goes on, greedily: {problem: ids}, those of this rank's batches."""
    special = chat_tokens(tokenizer)
    n_vocab = tokenizer.n_vocab + (len(special) if stage == "chat" else 0)  # a base model's chat tokens are untrained
    order = sorted(range(len(problems)), key=lambda i: -len(problems[i]["context"]))
    batches = [order[first:first + batch_size] for first in range(0, len(order), batch_size)][rank::world_size]
    found = {}
    for step, batch in enumerate(batches):
        found.update({i: [] for i in batch})
        tokens = model.generate([problems[i]["context"] for i in batch], max_new_tokens, temperature=0,
                                stop_ids=[tokenizer.eot_token, *special.values()], n_vocab=n_vocab)
        for position, new in enumerate(tokens):
            for i, token in zip(batch, new):
                found[i] += [] if token is None else [token]
            progress(step * max_new_tokens + position + 1, len(batches) * max_new_tokens)
    return found


@torch.no_grad()
def score(model, tokenizer, stage, problems, batch_size=16, max_new_tokens=256, rank=0, world_size=1,
          progress=lambda done, total: None):
    """
    How well a model solves problems from load_problems -> dict, the same on every rank:
    acc, the part solved: the choice of the highest log-likelihood is right, or the final number generated is;
    acc_norm (not for letters or GSM8K): the log-likelihood divided by the characters of the choice, as in the harness,
    since a longer text is less likely; acc_stderr, acc_norm_stderr: their standard errors; chance: acc of guessing;
    n, problems; cut, those longer than the model's positions, whose beginning the model did not see;
    problems: for each, what was computed and whether it was right.

    model: never the compiled one, whose shape is another. A sharded one is run by all ranks together: each then says
    rank=0, world_size=1. Its mode is restored; autocast is the caller's. Raises
    ValueError where the model's logits are not finite. progress(done, total) is called after each piece of work.
    """
    was_training = model.training
    model.eval()
    found, error = {}, None
    try:
        if problems[0]["choices"]:
            found = log_likelihoods(model, problems, batch_size, rank, world_size, progress)
        else:
            found = generate_answers(model, tokenizer, stage, problems, batch_size, max_new_tokens, rank, world_size, progress)
    except ValueError as e:
        error = e  # the other ranks must hear of it: they wait below
    model.train(was_training)
    if world_size > 1:
        parts = [None] * world_size
        dist.all_gather_object(parts, (found, error))
        found = {key: value for part, _ in parts for key, value in part.items()}
        error = next((e for _, e in parts if e), None)
    if error or not all(math.isfinite(value) for value in found.values() if isinstance(value, float)):
        raise ValueError(error or "the model's logits are not finite: its weights are broken, or too large for this dtype")

    outcomes, cut = [], 0
    for i, problem in enumerate(problems):
        outcome = {"where": problem["where"], "gold": problem["gold"]}
        if problem["choices"]:
            longest = len(problem["context"]) + max(map(len, problem["choices"])) - 1  # the last id is not read
            scores = [found[i, j] for j in range(len(problem["choices"]))]
            outcome["scores"], outcome["predicted"] = scores, scores.index(max(scores))
            if "characters" in problem:  # an empty choice has none
                scores = [log_p / max(characters, 1) for log_p, characters in zip(scores, problem["characters"])]
                outcome["predicted_norm"] = scores.index(max(scores))
                outcome["right_norm"] = outcome["predicted_norm"] == problem["gold"]
        else:
            longest = len(problem["context"]) + len(found[i]) - 1
            text = tokenizer.decode([token for token in found[i] if token < tokenizer.n_vocab and token != tokenizer.eot_token])
            if stage != "chat":
                text = text.partition("Question:")[0]  # a base model goes on with the next problem
            outcome["text"], outcome["predicted"] = text, final_number(text)
        outcome["right"] = outcome["predicted"] == problem["gold"]
        outcomes.append(outcome)
        cut += longest > model.config.max_seq_len

    n = len(problems)
    result = {"n": n, "cut": cut, "chance": sum(1 / len(p["choices"]) if p["choices"] else 0 for p in problems) / n}
    for name, key in (("acc", "right"), ("acc_norm", "right_norm")):
        if key in outcomes[0]:
            p = sum(outcome[key] for outcome in outcomes) / n
            result[name], result[f"{name}_stderr"] = p, math.sqrt(p * (1 - p) / max(n - 1, 1))
    return {**result, "problems": outcomes}


def result_line(task, result):
    """A result of `score` in one line: accuracy with its standard error, beside chance."""
    figures = [f"{name} {result[name]:.4f} +/- {result[f'{name}_stderr']:.4f}" for name in ("acc", "acc_norm") if name in result]
    return (f"{task:<13} {', '.join(figures)}, chance {result['chance']:.4f}, {result['n']} problems"
            + (f" ({result['cut']} longer than the model's positions: their beginning is lost)" if result["cut"] else ""))


def score_for_log(task, model, tokenizer, stage, problems, batch_size, rank, world_size):
    """
    `score`, for the training loops -> the line to print and the figures to log. A model whose logits are not finite has no score,
    which is no reason to stop.
    """
    try:
        result = score(model, tokenizer, stage, problems, batch_size, rank=rank, world_size=world_size)
    except ValueError as error:
        return f"{task}: no score: {error}", {}
    return result_line(task, result), {f"{task}_{key}": result[key] for key in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "n")
                                       if key in result}


if __name__ == "__main__":
    checkpoint: str = "out/ckpt.pt"  # the checkpoint, or the out_dir it lies in
    tasks: Optional[str] = None  # hellaswag,arc_easy,arc_challenge,mmlu,gsm8k, or some of them; empty: none; None: all there are
    task_dir: Optional[str] = None  # folder of local tasks, TASK/test.jsonl or TASK/validation.jsonl; None: from the hub
    max_problems: Optional[int] = None  # of each task, evenly spaced over it; None: all
    data_dir: Optional[str] = None  # shards: their validation loss and bits per byte, too
    eval_iters: int = 64  # batches of the validation loss at most: always the first rows of val, as in training
    batch_size: int = 16  # rows that go through the model at a time, on each rank
    max_new_tokens: int = 256  # gsm8k: length of an answer at most
    output: Optional[str] = None  # JSON file for the results, problem by problem
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "float32"  # of the matmuls; auto: what the device is good at
    config, given = configure(globals())

    expect_range(config, 1, math.inf, "max_problems", "eval_iters", "batch_size", "max_new_tokens")
    names = list(TASKS) if tasks is None else task_names(tasks)
    if tasks is None and task_dir is not None:
        names = [name for name in TASKS if task_file(name, task_dir)]
        if not names:
            fail(f"--task_dir={task_dir}: no task there; expected {task_dir}/TASK/test.jsonl or {task_dir}/TASK/validation.jsonl, "
                 f"TASK one of {', '.join(TASKS)}")
    if not names and data_dir is None:
        fail("--tasks=: nothing to do; give tasks, or --data_dir for the validation loss")

    # model
    rank, world_size, compute_device = runtime.init_process(device)
    compute_dtype = runtime.pick_dtype(dtype, compute_device)
    if compute_dtype == "float32":
        torch.set_float32_matmul_precision("highest")  # all of its bits, no TF32
    autocast = runtime.autocast(compute_device, compute_dtype)
    model, loaded = runtime.load_model(checkpoint, compute_device)
    tokenizer = get_tokenizer(loaded["tokenizer"])
    runtime.print_once(runtime.introduce(checkpoint, loaded, sum(p.numel() for p in model.parameters())))
    if output is not None and rank == 0:
        try:
            open(output, "a").close()  # now, and not after all the work
        except OSError as error:
            fail(f"--output={output}: {error}", alone=True)

    # all problems and shards, so that what is wrong with one is known before any is scored
    missing = [name for name in TASKS if name not in names]
    if tasks is None and missing:
        runtime.print_once(f"not in {task_dir}, and left out: {', '.join(missing)}")
    if names:
        runtime.print_once("reading problems ...")
    problems = {name: load_problems(name, tokenizer, loaded["stage"], task_dir, max_problems) for name in names}
    if data_dir is not None:
        meta, windows = read_meta(data_dir), Windows(data_dir, "val", model.config.max_seq_len)
        if (meta["tokenizer"], meta["vocab_size"]) != (loaded["tokenizer"], model.config.vocab_size):
            fail(f"--data_dir={data_dir}: its tokens are {meta['tokenizer']}'s, {meta['vocab_size']} ids, but the checkpoint was "
                 f"trained on {loaded['tokenizer']}'s, {model.config.vocab_size} ids")
        highest = max(int(shard.max()) for shard in windows.shards)
        if highest >= meta["vocab_size"]:
            fail(f"--data_dir={data_dir}: holds the token {highest}, but the vocabulary of its tokenizer, {meta['tokenizer']}, "
                 f"ends at {meta['vocab_size'] - 1}: its shards come from another tokenizer, or are damaged")

    # scores
    from tqdm import tqdm  # comes with datasets

    def progress_bar(name):
        return tqdm(total=1, desc=name, disable=rank > 0, leave=False, delay=2, mininterval=1 if sys.stderr.isatty() else 10,
                    bar_format="{desc}: {percentage:3.0f}% [{elapsed}<{remaining}]")

    def progress(done, total):
        bar.total = total
        bar.update(done - bar.n)

    def val_batch(indices):
        progress(bar.n + 1, -(-n_rows // (batch_size * world_size)))
        return [torch.tensor(array, device=compute_device) for array in windows[indices]]

    results = {}
    try:
        if data_dir is not None:
            n_rows = min(len(windows), eval_iters * batch_size)
            with autocast, progress_bar("validation loss") as bar:
                val_loss, val_bpb = validation_loss(model, val_batch, n_rows, batch_size, token_bytes(tokenizer), rank, world_size)
            results["validation"] = {"val_loss": val_loss, "val_bpb": val_bpb, "rows": n_rows}
            runtime.print_once(
                f"{'validation':<13} loss {val_loss:.4f}, perplexity {math.exp(min(val_loss, 700)):.2f}, {val_bpb:.4f} bits per "
                f"byte, over {n_rows} of the {len(windows)} rows of {model.config.max_seq_len} tokens in {data_dir}")
        for name in names:
            with autocast, progress_bar(name) as bar:
                results[name] = score(model, tokenizer, loaded["stage"], problems[name], batch_size, max_new_tokens,
                                      rank, world_size, progress)
            runtime.print_once(result_line(name, results[name]))
    except ValueError as error:
        fail(f"--checkpoint={checkpoint}: {error}")
    if output is not None and rank == 0:
        with open(output, "w", encoding="utf-8") as f:
            json.dump({"checkpoint": checkpoint, "stage": loaded["stage"], "iter_num": loaded["iter_num"], **results}, f, indent=1)
    if dist.is_initialized():
        dist.destroy_process_group()
