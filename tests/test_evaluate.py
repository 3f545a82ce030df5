"""Scores: exact where likelihoods are known, equal to a plain formula elsewhere; bad input ends in one line."""
import json
import math
import os
import shutil
from decimal import Decimal

import numpy as np
import pytest
import torch
import torch.distributed as dist

import evaluate
from chat_format import chat_tokens, decode_chat
from conftest import error_line, new_gpt, refused, run, save_model, write_lines, write_shards
from dataloader import TokenDataset, validation_loss
from evaluate import TASKS, clean, final_number, format_result, load_examples, score, subsample, task_hook
from model import GPT, GPTConfig
from tokenizer import get_tokenizer

BYTES = get_tokenizer("bytes")
ASSISTANT, END = (chat_tokens(BYTES)[name] for name in ("assistant", "end"))


def write_task(folder, task, rows, name="test.jsonl"):
    """Writes a task's local file. Returns task_dir."""
    write_lines(folder / task / name, rows)
    return folder


def arc(question, choices, gold):
    labels = [chr(ord("A") + i) for i in range(len(choices))]
    return {"id": "x", "question": question, "choices": {"text": choices, "label": labels}, "answerKey": labels[gold]}


def mmlu(question, choices, gold):
    return {"question": question, "subject": "none", "choices": choices, "answer": gold}


def gsm8k(question, answer):
    return {"question": question, "answer": f"So it is.\n#### {answer}"}


def random_words(seed, n, letters="abcdefgh   "):
    return "".join(np.random.default_rng(seed).choice(list(letters), n)).strip() or "a"


def random_arc(n, longest=12):
    """Questions with 2 to 5 choices, all of different lengths."""
    rng = np.random.default_rng(0)
    return [arc(random_words(i, 1 + i % longest),
                [random_words((i, j), int(rng.integers(1, longest))) for j in range(2 + i % 4)], i % 2)
            for i in range(n)]


def random_model(variant="gpt2", **settings):
    return new_gpt(variant, **{"max_seq_len": 64, **settings})


def bigram_model(table, max_seq_len=512):
    """
    A GPT whose logits after token i are table[i]: (384, 384). Embeddings are one-hot, attention and MLP add nothing,
    and the head is the table, divided by what the last norm makes of a unit vector.
    """
    model = GPT(GPTConfig(arch="llama", n_layer=1, n_head=2, n_embd=384, max_seq_len=max_seq_len, vocab_size=384))
    with torch.no_grad():
        for p in model.transformer.h.parameters():
            p.zero_()
        model.transformer.wte.weight.copy_(torch.eye(384))
        model.lm_head.weight.copy_(table.t() * math.sqrt(1 / 384 + 1e-5))
    return model


def chain(*texts):
    """A table in which each token of these lists of ids is followed by the next one, for certain."""
    table = torch.zeros(384, 384)
    for ids in texts:
        for a, b in zip(ids, ids[1:]):
            table[a, b] = 30.0
    return table


# -----------------------------------------------------------------------------
# likelihoods

def test_accuracies_are_exact_where_likelihoods_are_known(tmp_path):
    """p(space) = 1/4, p(a) = 1/2, p(b) = 1/8, p(c) = 1/16, whatever came before."""
    p = torch.full((384,), 1 / 16 / 380)
    for letter, value in ((" ", 1 / 4), ("a", 1 / 2), ("b", 1 / 8), ("c", 1 / 16)):
        p[ord(letter)] = value
    # in bits, with the space: three 5, 6, 8 and two 5, 6; per character 1.67, 6, 1.33 and 5, 6
    three, two = ["aaa", "c", "aaaaaa"], ["b", "c"]
    rows = [arc("q", three, 0), arc("r", three, 2), arc("s", two, 0), arc("t", two, 1), arc("u", three, 2),
            arc("v", ["a", "aab"], 1),  # 3, 7 bits; per character 3, 2.33
            arc("w", ["z", "é"], 0)]  # 14.6, 27.1 bits, the second of two bytes, but one character
    examples = load_examples("arc_challenge", BYTES, "base", write_task(tmp_path, "arc_challenge", rows))
    model = bigram_model(p.log().expand(384, 384))
    result = score(model, BYTES, "base", examples)
    assert result["examples"][0]["scores"] == pytest.approx([-n * math.log(2) for n in (5, 6, 8)], abs=1e-5)
    assert [answer["predicted"] for answer in result["examples"]] == [0, 0, 0, 0, 0, 0, 0]
    assert [answer["predicted_norm"] for answer in result["examples"]] == [2, 2, 0, 0, 2, 1, 0]
    assert [answer["gold"] for answer in result["examples"]] == [0, 2, 0, 1, 2, 1, 0]
    assert (result["acc"], result["acc_norm"]) == (3 / 7, 5 / 7)
    assert result["acc_stderr"] == pytest.approx(math.sqrt(3 / 7 * 4 / 7 / 6))
    assert result["acc_norm_stderr"] == pytest.approx(math.sqrt(5 / 7 * 2 / 7 / 6))
    assert result["chance"] == pytest.approx((3 * 1 / 3 + 4 * 1 / 2) / 7)
    assert (result["n"], result["truncated"]) == (7, 0)
    assert format_result("arc_challenge", result) == \
        "arc_challenge acc 0.4286, acc_stderr 0.202, acc_norm 0.7143, acc_norm_stderr 0.1844, chance 0.4286, n 7, " \
        "truncated 0"
    assert score(model, BYTES, "base", examples[:1])["acc_stderr"] == 0  # of one example, and no division by 0


@pytest.mark.parametrize("variant", ["gpt2_mla", "llama_gqa"])
def test_likelihoods_equal_the_plain_formula(tmp_path, variant):
    """Full logits of each sequence alone; of its last part if it is longer than the model."""
    model = random_model(variant).eval()
    rows = random_arc(12) + [arc("long " * 12, ["one", "one two three"], 0)]
    rows += [arc("x" * 42, ["one", last], 0) for last in ("two", "four", "a" * 99)]  # 64, 65 and 160 ids to read
    rows += [arc("twice", ["same", "same"], 0)]
    examples = load_examples("arc_easy", BYTES, "base", write_task(tmp_path, "arc_easy", rows))
    results = [score(model, BYTES, "base", examples, batch_size) for batch_size in (5, 1, 1000)]
    for row, answer in zip(rows, results[0]["examples"]):
        for choice, log_p in zip(row["choices"]["text"], answer["scores"]):
            ids = torch.tensor([[256, *f"Question: {row['question']}\nAnswer: {choice}".encode()]])[:, -65:]
            n = min(len(f" {choice}".encode()), 64)
            expected = model(ids[:, :-1]).log_softmax(-1)[0, -n:].gather(1, ids[0, -n:, None]).sum().item()
            assert log_p == pytest.approx(expected, abs=2e-4)
    assert results[0]["truncated"] == 3 and "truncated 3" in format_result("arc_easy", results[0])
    for other in results[1:]:  # other batches, other padding
        for a, b in zip(other["examples"], results[0]["examples"]):
            assert a["predicted"] == b["predicted"] and a["scores"] == pytest.approx(b["scores"], abs=2e-4)
        assert other["examples"][-1]["predicted"] == 0  # of equal choices the first


def test_context_and_continuation_apart_are_the_ids_of_the_whole(tmp_path, gpt2_vocabulary):
    rows = [{"ctx": ctx, "endings": endings, "label": "0"} for ctx, endings in (
        ("He doesn", ["'t", "t know", "12 times"]), ("A man. then", [", he", "the   end", "[step] it"]),
        ("Ends in a space [step]", ["goes on", "[step] goes on"]), ("Two  [a] ", ["\n", "x\n\ny"]),
        ("12", ["34", "é!", ""]))]
    examples = load_examples("hellaswag", gpt2_vocabulary, "base", write_task(tmp_path, "hellaswag", rows))
    decode = gpt2_vocabulary.decode
    for row, example in zip(rows, examples, strict=True):
        context, whole = clean(row["ctx"]), [example["context"][1:] + choice for choice in example["choices"]]
        assert example["context"][0] == gpt2_vocabulary.eot_token
        assert [decode(ids) for ids in whole] == [context + " " + clean(ending) for ending in row["endings"]]
        assert decode(example["context"][1:]) == context.rstrip()  # its last spaces are scored
        assert whole == [gpt2_vocabulary.encode_ordinary(decode(ids)) for ids in whole]
        assert all(example["choices"])


# -----------------------------------------------------------------------------
# prompts

def test_prompts(tmp_path):
    def prompt(task, stage, row):
        example, = load_examples(task, BYTES, stage, write_task(tmp_path, task, [row], "validation.jsonl"))
        choices = [BYTES.decode(choice) for choice in example["choices"]]
        return decode_chat(BYTES, example["context"]), choices, example["gold"]

    eot = "<|endoftext|>"
    row = {"question": "Why?", "choices": {"text": ["so", "not so"], "label": ["1", "2"]}, "answerKey": "2"}
    for stage in ("base", "chat"):
        assert prompt("arc_easy", stage, row) == (f"{eot}Question: Why?\nAnswer:", [" so", " not so"], 1)
    row = {"activity_label": "Removing ice", "ctx_a": "A man [step] sits.  [title] Then", "ctx_b": "he SAYS",
           "ctx": "unused", "label": "1", "endings": ["[substeps] stands up.", " goes [title] home"]}
    for stage in ("base", "chat"):
        assert prompt("hellaswag", stage, row) == (
            f"{eot}Removing ice: A man sits. . Then He says", ["  stands up.", " goes. home"], 1)
    row = {"ctx": "A man sits. he", "endings": ["stands", "lies"], "label": "0"}
    assert prompt("hellaswag", "base", row) == (f"{eot}A man sits. he", [" stands", " lies"], 0)
    row = mmlu(" Is <|end|> text? ", ["yes", "no", "both", "none"], 2)
    for task in "mmlu", "riddles":  # a task of another name, with mmlu's columns
        assert prompt(task, "base", row) == (
            f"{eot}Question: Is <|end|> text?\nAnswer:", [" yes", " no", " both", " none"], 2)
        assert prompt(task, "chat", row) == (
            f"{eot}<|user|>Is <|end|> text?\nA. yes\nB. no\nC. both\nD. none\nAnswer with the letter only.<|end|>"
            f"<|assistant|>", ["A", "B", "C", "D"], 2)
    assert prompt("gsm8k", "base", gsm8k("How many?", "1,200")) == (f"{eot}Question: How many?\nAnswer:", [], 1200)
    for task in "gsm8k", "sums":
        assert prompt(task, "chat", gsm8k("How many?", 7)) == (f"{eot}<|user|>How many?<|end|><|assistant|>", [], 7)
    assert prompt("sums", "base", gsm8k("How many?", 7)) == (f"{eot}How many?", [], 7)
    assert prompt("sums", "base", gsm8k("Q: 1 + 6\nA:\n", 7)) == (f"{eot}Q: 1 + 6\nA:\n", [], 7)  # as it stands


def test_chat_models_answer_mmlu_by_letter(tmp_path):
    """After <|assistant|>, B is the likeliest letter, though x and <|end|> are likelier; anywhere else it is D."""
    table = chain()
    table[:, ord("D")] = 9.0
    table[ASSISTANT, [ord(c) for c in "xABCD"] + [END]] = torch.tensor([9.0, 1.0, 3.0, 2.0, 0.0, 8.0])
    rows = [mmlu(f"q{i}", ["D", "A", "C", "B"], gold) for i, gold in enumerate([1, 1, 3, 0, 2])]
    examples = load_examples("mmlu", BYTES, "chat", write_task(tmp_path, "mmlu", rows))
    result = score(bigram_model(table), BYTES, "chat", examples, batch_size=2)
    assert result["acc"] == 2 / 5 and result["chance"] == 1 / 4 and "acc_norm" not in result
    a, b, c, d = result["examples"][0]["scores"]
    assert (b - a, b - c, b - d) == pytest.approx((2, 1, 3), abs=1e-4)
    assert format_result("mmlu", result) == \
        "mmlu          acc 0.4, acc_stderr 0.2449, chance 0.25, n 5, truncated 0"


def test_letters_are_enough_for_26_choices(tmp_path):
    choices = [f"choice {i}" for i in range(27)]
    write_task(tmp_path, "mmlu", [mmlu("q", choices[:26], 25), mmlu("q", choices, 25)])
    [example] = load_examples("mmlu", BYTES, "chat", tmp_path, max_problems=1)
    assert "\nZ. choice 25\n" in BYTES.decode(example["context"][2:-2]) and len(example["choices"]) == 26
    line = error_line(load_examples, "mmlu", BYTES, "chat", tmp_path)
    assert "mmlu/test.jsonl, line 2: 27 choices" in line
    assert len(load_examples("mmlu", BYTES, "base", tmp_path)[1]["choices"]) == 27  # as texts


def test_a_subset_is_spread_over_the_file_and_always_the_same(tmp_path):
    write_task(tmp_path, "arc_easy", random_arc(10))
    for _ in range(2):
        examples = load_examples("arc_easy", BYTES, "base", tmp_path, max_problems=4)
        assert [example["where"].rsplit(" ", 1)[1] for example in examples] == ["1", "3", "6", "8"]
    assert len(load_examples("arc_easy", BYTES, "base", tmp_path, max_problems=11)) == 10
    assert subsample(list("abc"), None) == list("abc")


# -----------------------------------------------------------------------------
# generated answers

@pytest.mark.parametrize("text, number", [
    ("#### 18", "18"), ("It is 5.\n#### 1,080", "1080"), ("#### $18.00. And 7", "18"),
    ("3 #### so 4, then 5\n#### 6", "4"), ("2 + 2 = 4.", "4"), ("first 10, then 20 eggs", "20"),
    ("it is $1,234.50.", "1234.5"), ("7-4", "4"), ("7 - -4", "-4"), ("a debt of -$5", "-5"), ("$-5", "-5"),
    ("-0.0", "0"), ("0.50", "0.5"), ("$.50", "0.5"), ("wait...5", "5"), ("1,2,3", "3"), ("12,3456", "3456"),
    ("\u22125", "-5"),
    ("9 #### none", "9"), ("#### " + "12345" * 9, "12345" * 9), ("0." + "012345" * 9, "0." + "012345" * 9),
    ("1" + "0" * 40, "1" + "0" * 40), ("100", "100"), ("3/4", "4"), ("50%", "50"),
    ("no number", None), ("", None), ("####", None)])
def test_the_final_number(text, number):
    assert final_number(text) == (number and Decimal(number))


def test_answers_are_generated_until_the_model_stops(tmp_path):
    """The model says 4, 2, the end of the turn or document, and then, if one read on, 9."""
    write_task(tmp_path, "gsm8k", [gsm8k("short", 42), gsm8k("a longer question", 9), gsm8k("mid one", "42.0")])
    eot = BYTES.eot_token
    for stage, start, stop in (("chat", ASSISTANT, END), ("chat", ASSISTANT, eot), ("base", ord(":"), eot)):
        model = bigram_model(chain([start, ord("4"), ord("2"), stop, ord("9")]))
        examples = load_examples("gsm8k", BYTES, stage, tmp_path)
        for batch_size in (1, 2, 16):
            result = score(model, BYTES, stage, examples, batch_size, max_new_tokens=8)
            assert [answer["text"] for answer in result["examples"]] == ["42"] * 3
            assert (result["acc"], result["chance"], result["truncated"]) == (2 / 3, 2 / 3, 0)
            assert "acc_norm" not in result
    result = score(model, BYTES, stage, examples, max_new_tokens=1)
    assert result["examples"][0]["text"] == "4" and result["truncated"] == 3
    # a base model has not learned the chat tokens: if one is the likeliest, the next likeliest token is taken
    table = chain([ord(":"), END], [ord("7"), eot])
    table[ord(":"), ord("7")] = 20.0
    assert score(bigram_model(table), BYTES, "base", examples)["examples"][0]["text"] == "7"
    table = chain([ord(":"), ord("7"), eot]) / 30  # greedy, however unsure the model is
    assert score(bigram_model(table), BYTES, "base", examples)["examples"][0]["text"] == "7"
    # prompt and answer longer than the model, 26, 36 and 28 ids read: answered, and counted
    for max_seq_len, truncated in ((28, 1), (27, 2)):
        model = bigram_model(chain([ord(":"), ord("4"), ord("2"), eot]), max_seq_len)
        result = score(model, BYTES, "base", examples, max_new_tokens=8)
        assert (result["acc"], result["truncated"]) == (2 / 3, truncated)


def test_a_base_models_next_question_is_not_its_answer(tmp_path, monkeypatch):
    says = "It is 1.\nQuestion: what is 8?\nAnswer: #### 8"
    monkeypatch.setattr(evaluate, "generate", lambda *_, **__: ([token] for token in says.encode()))
    write_task(tmp_path, "gsm8k", [gsm8k("one", 1)])
    for stage, text, number in (("base", "It is 1.\n", 1), ("chat", says, 8)):
        result = score(random_model(max_seq_len=128), BYTES, stage,
                       load_examples("gsm8k", BYTES, stage, tmp_path))
        [answer] = result["examples"]
        assert (answer["text"], answer["predicted"]) == (text, number)
        assert result["truncated"] == (stage == "chat")


# -----------------------------------------------------------------------------
# ranks, logits that are not finite, and the hook of the training loops

@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, "arc_easy", random_arc(9))
    write_task(folder, "mmlu", [mmlu(random_words(i, 8), ["0", "11", "2", "x y z"], i % 4) for i in range(5)])
    write_task(folder, "gsm8k", [gsm8k("how many", 3)])
    return folder


def broken_model():
    model = random_model()
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(math.nan)
    return model


def test_logits_that_are_not_finite_are_an_error_on_each_rank(tasks, monkeypatch):
    for task in ("arc_easy", "gsm8k"):
        with pytest.raises(ValueError, match="not finite"):
            score(broken_model(), BYTES, "base", load_examples(task, BYTES, "base", tasks))

    def gather(parts, mine):
        assert mine == {}  # the second of two ranks has no batch of gsm8k
        parts[:] = [{"error": ValueError("not finite")}, mine]

    monkeypatch.setattr(evaluate, "eval_share", lambda model: (1, 2))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(ValueError, match="not finite"):
        score(random_model(), BYTES, "base", load_examples("gsm8k", BYTES, "base", tasks))


def test_the_training_loops_hook(tasks, tmp_path, capsys):
    write_task(tmp_path, "arc_easy", random_arc(130))
    write_task(tmp_path, "mmlu", [mmlu("q", ["a", "b"], 1)])
    config = {"eval_tasks": "arc_easy, mmlu", "task_dir": tmp_path, "batch_size": 32}
    autocast = torch.autocast("cpu", torch.bfloat16)
    model, dtypes = random_model(dropout=0.5), set()
    model.transformer.h[0].mlp.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))

    def backend(graph, inputs):
        raise AssertionError("compiled for another shape")

    model.transformer.h[0].compile(backend=backend)
    hook = task_hook(model, BYTES, autocast, "base", config)
    some, everything = hook(5, False), hook(10, True)
    assert dtypes == {torch.bfloat16} and model.training  # restored, and no dropout meanwhile
    assert [values[f"{task}_n"] for values in (some, everything) for task in ("arc_easy", "mmlu")] == [64, 1, 130, 1]
    with autocast, torch.compiler.set_stance("force_eager"):
        examples = load_examples("arc_easy", BYTES, "base", tmp_path, max_problems=64)
        expected = score(model.eval(), BYTES, "base", examples, batch_size=32)
    assert some["arc_easy_acc"] == expected["acc"] and some["arc_easy_acc_norm"] == expected["acc_norm"]
    assert f"step 5: {format_result('arc_easy', expected)}\nstep 5: mmlu " in capsys.readouterr().out
    # logits that are not finite: no score, and the run goes on
    assert task_hook(broken_model(), BYTES, autocast, "base", config)(7, False) == {}
    assert capsys.readouterr().out.startswith("step 7: arc_easy: no score: the model's logits are not finite")
    # mistakes are found before training
    for mistake in "helaswag", ",", "mmlu,":
        error_line(task_hook, model, BYTES, autocast, "base", {**config, "eval_tasks": mistake})


# -----------------------------------------------------------------------------
# the script

@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("checkpoint"), random_model(max_seq_len=32), stage="base", iter_num=7,
                      val_loss=1.25, val_iter=5)


def test_any_number_of_ranks_gives_the_same_scores(tasks, checkpoint, shards, tmp_path):
    """Two ranks, three tasks, one of them of a single example, and validation rows that two do not divide."""
    files, outputs = [tmp_path / "one.json", tmp_path / "two.json"], []
    for ranks in (1, 2):
        outputs.append(run("evaluate.py", f"--checkpoint={checkpoint}", "--tasks=arc_easy,mmlu,gsm8k",
                           f"--task_dir={tasks}", f"--data_dir={shards}", "--eval_iters=3", "--batch_size=3",
                           "--max_seq_len=16", "--max_problems=8", "--max_new_tokens=5",
                           f"--output={files[ranks - 1]}", "--device=cpu", ranks=ranks))
    one, two = (json.loads(path.read_text()) for path in files)
    validation = one.pop("validation")
    assert validation == pytest.approx(two.pop("validation"), rel=1e-6)
    assert one == two and one["arc_easy"]["truncated"] > 0  # to the bit
    assert (one["checkpoint"], one["stage"], one["iter_num"]) == (str(checkpoint), "base", 7)
    assert [answer["where"] for answer in one["arc_easy"]["examples"]] == [
        f"{tasks}/arc_easy/test.jsonl, line {i + 1}" for i in range(8)]
    for output in outputs:
        assert "base model, gpt2" in output and "step 7, val loss 1.2500 at step 5" in output
        for task in ("arc_easy", "mmlu", "gsm8k"):
            assert output.count(format_result(task, one[task])) == 1
    model, rows = random_model(max_seq_len=32).eval(), TokenDataset(shards, "val", 16)
    examples = load_examples("gsm8k", BYTES, "base", tasks)
    answers = score(model, BYTES, "base", examples, max_new_tokens=5)["examples"]
    assert [answer["text"] for answer in one["gsm8k"]["examples"]] == [answer["text"] for answer in answers]
    loss, bits_per_byte = validation_loss(model, rows, 9, 1, torch.device("cpu"))
    assert (validation["val_loss"], validation["val_bpb"]) == pytest.approx((loss, bits_per_byte), rel=1e-4)
    expected = f"loss {loss:.4f}, perplexity {math.exp(loss):.2f}, {bits_per_byte:.4f} bits per byte, over 9 of"
    assert expected in outputs[0] and expected in outputs[1]


def test_names_that_are_not_utf8_and_an_escape_sequence(tasks, shards, tmp_path):
    """A folder may have any bytes as its name; those, and what ASCII lacks, are replaced where they are printed."""
    folder = tmp_path / os.fsdecode(b"\xff")
    shutil.copytree(tasks, folder / "tasks")
    shutil.copytree(shards, folder / "data", ignore=shutil.ignore_patterns("teacher-*"))
    checkpoint = save_model(tmp_path / "\u00e9", random_model(max_seq_len=32), stage="base\x1b[2J")
    output = run("evaluate.py", f"--checkpoint={checkpoint}", "--device=cpu", "--tasks=arc_easy", "--eval_iters=1",
                 f"--task_dir={folder}/tasks", f"--data_dir={folder}/data", env={"PYTHONIOENCODING": "ascii"})
    assert "?/ckpt.pt: base?[2J model" in output and "?/data\narc_easy" in output


def test_mistakes_on_the_command_line(tasks, checkpoint, tmp_path, gpt2_vocabulary):
    given = ["evaluate.py", f"--checkpoint={checkpoint}", "--device=cpu"]
    assert "nothing to score" in refused(*given, "--tasks=")
    assert "error: task '', --task_dir=None: KeyError" in refused(*given, "--tasks=,")
    write_task(tmp_path, "validation", [gsm8k("q", 1)])
    assert "under checkpoint, iter_num, stage, validation; rename the task" in refused(
        *given, "--tasks=validation", f"--task_dir={tmp_path}")
    (tmp_path / "there.json").write_text("kept")
    for output in (f"{tmp_path}/no/results.json", f"{tmp_path}/there.json"):
        assert output in refused(*given, "--tasks=mmlu", f"--task_dir={tasks}", f"--output={output}")
    assert (tmp_path / "there.json").read_text() == "kept"
    shards = write_shards(tmp_path / "gpt2", "gpt2", train=2000, val=500)
    broken = save_model(tmp_path / "broken", broken_model())
    assert "not finite" in refused(
        "evaluate.py", f"--checkpoint={broken}", "--tasks=", f"--data_dir={write_shards(tmp_path / 'b')}")
    error = refused(*given, "--tasks=", f"--data_dir={shards}")
    assert f"--data_dir={shards}: has gpt2 tokens" in error and f"{checkpoint} has bytes tokens" in error


@pytest.mark.parametrize("task, row, expected", [
    ("arc_easy", '{"question": "q"', "JSONDecodeError"),
    ("arc_easy", {**arc("q", ["a", "b"], 0), "answerKey": "E"}, "'E' is not in list"),
    ("arc_easy", arc(7, ["a", "b"], 0), "TypeError"),
    ("mmlu", mmlu("q", ["a", "b"], 2), "with the answer among them"),
    ("mmlu", mmlu("q", ["a", 1], 0), "TypeError"),
    ("mmlu", mmlu("q", "['a', 'b']", 0), "expected a list of choices"),
    ("gsm8k", {"question": "q", "answer": "seven"}, "or an answer that is a number"),
    ("chess", {"question": "1. e4 e5?", "answer": "2. Nf3"}, "its answer does not end with a number"),
    *(("chess", {"question": "1 + 1?", "answer": answer}, "its answer does not end with a number")
      for answer in ("2 or 3 ...", "1,5", "1 000", "1.2.3", "12 \u0663", "")),
    ("chess", mmlu("q", ["a", "b"], 1), "some rows have choices and some have none")])
def test_a_bad_line_is_named(tmp_path, task, row, expected):
    good = {"arc_easy": arc("q", ["a", "b"], 0), "mmlu": mmlu("q", ["a", "b"], 1)}.get(task, gsm8k("q", 1))
    write_task(tmp_path, task, [good])
    with open(tmp_path / task / "test.jsonl", "a") as f:
        f.write((row if isinstance(row, str) else json.dumps(row)) + "\n\n")  # empty lines at the end are none
    for stage in ("base", "chat"):
        assert len(load_examples(task, BYTES, stage, tmp_path, max_problems=1)) == 1
        message = error_line(load_examples, task, BYTES, stage, tmp_path)
        assert message.startswith(f"error: {tmp_path}/{task}/test.jsonl, line 2: ")
        assert expected in message and f"the schema of {TASKS.get(task, TASKS['gsm8k'])[0]}" in message


def test_empty_lines_are_no_rows_but_count_as_lines(tmp_path):
    path = write_task(tmp_path, "gsm8k", [gsm8k("q", 1)]) / "gsm8k/test.jsonl"
    path.write_text(f"\n{path.read_text()}\n \n{json.dumps(gsm8k('q', 'seven'))}\n")
    [example] = load_examples("gsm8k", BYTES, "base", tmp_path, max_problems=1)
    assert example["where"] == f"{path}, line 2"
    assert f"{path}, line 5: " in error_line(load_examples, "gsm8k", BYTES, "base", tmp_path)


def test_files_that_are_missing_or_empty_and_the_hub(tmp_path, monkeypatch):
    def failure(task, task_dir=None):
        return error_line(load_examples, task, BYTES, "base", task_dir)

    error = failure("helaswag")
    assert "task 'helaswag'" in error and "the tasks are hellaswag, arc_easy, arc_challenge, mmlu, gsm8k" in error
    error = failure("mmlu", tmp_path)
    assert f"error: task 'mmlu', --task_dir={tmp_path}: FileNotFoundError" in error
    assert "/mmlu/validation.jsonl" in error and "expected TASK/test.jsonl or TASK/validation.jsonl" in error
    write_task(tmp_path, "mmlu", [])
    assert "it has no examples" in failure("mmlu", tmp_path)
    assert "/sums/validation.jsonl" in failure("sums", tmp_path)  # a task of one's own

    datasets = pytest.importorskip("datasets")
    hub = {("Rowan/hellaswag", None, "validation"): [{"ctx": "q", "endings": ["a"], "label": "0"}],
           ("allenai/ai2_arc", "ARC-Easy", "test"): [arc("q", ["a"], 0)],
           ("allenai/ai2_arc", "ARC-Challenge", "test"): [arc("q", ["a"], 0)],
           ("cais/mmlu", "all", "test"): [mmlu("q", ["a"], 0)], ("openai/gsm8k", "main", "test"): [gsm8k("q", 1)]}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, configuration, split: hub[name, configuration, split])
    for task, (name, *_) in zip(TASKS, hub):
        assert load_examples(task, BYTES, "base")[0]["where"] == f"{name}, row 0"
    del hub["openai/gsm8k", "main", "test"]
    error = failure("gsm8k")
    assert "error: task 'gsm8k', --task_dir=None: KeyError" in error and "openai/gsm8k" in error
