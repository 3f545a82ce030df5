"""Scores: exact where likelihoods are known, equal to a plain formula elsewhere, and whatever comes in, one line."""
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import runtime
from conftest import refused, run, write_shards
from evaluate import TASKS, clean, final_number, generate_answers, load_problems, log_likelihoods, read_rows, result_line, score
from model import GPT, GPTConfig
from prepare_data import chat_tokens, decode_chat, get_tokenizer

BYTES = get_tokenizer("bytes")
ASSISTANT, END = (chat_tokens(BYTES)[name] for name in ("assistant", "end"))
VARIANTS = [dict(arch="gpt2"), dict(arch="gpt2", attention="mla"),
            dict(arch="llama", n_kv_head=1), dict(arch="llama", attention="mla")]


def write_task(folder, task, rows, name="test.jsonl"):
    """A task's local file -> the folder to give as task_dir."""
    (folder / task).mkdir(parents=True, exist_ok=True)
    (folder / task / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
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
    """Problems of 2 to 5 choices, all of different lengths."""
    rng = np.random.default_rng(0)
    return [arc(random_words(i, 1 + i % longest),
                [random_words((i, j), int(rng.integers(1, longest))) for j in range(2 + i % 4)], i % 2) for i in range(n)]


def random_model(**settings):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**dict(n_layer=2, n_head=2, n_embd=32, max_seq_len=64, vocab_size=384), **settings}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)  # as drawn, all tokens are about as likely
    return model


def bigram_model(table, max_seq_len=512):
    """
    A GPT whose logits after token i are table[i]: (384, 384). Each embedding is a unit vector of its own, attention and MLP
    add nothing, and the head is the table, divided by what the last norm makes of a unit vector.
    """
    model = GPT(GPTConfig(arch="llama", n_layer=1, n_head=2, n_embd=384, max_seq_len=max_seq_len, vocab_size=384)).eval()
    with torch.no_grad():
        for p in model.transformer.h.parameters():
            p.zero_()
        model.transformer.wte.weight.copy_(torch.eye(384))
        model.lm_head.weight.copy_(table.t() * math.sqrt(1 / 384 + 1e-5))
    return model


def chain(*texts):
    """A table by which each token is followed by the next one of these lists of ids, surely."""
    table = torch.zeros(384, 384)
    for ids in texts:
        for a, b in zip(ids, ids[1:]):
            table[a, b] = 30.0
    return table


# ---------------------------------------------------------------------------------------------------
# likelihoods

def test_accuracies_are_exact_where_likelihoods_are_known(tmp_path):
    """p(space) = 1/4, p(a) = 1/2, p(b) = 1/8, p(c) = 1/16, whatever came before."""
    p = torch.full((384,), 1 / 16 / 380)
    for letter, value in ((" ", 1 / 4), ("a", 1 / 2), ("b", 1 / 8), ("c", 1 / 16)):
        p[ord(letter)] = value
    three, two = ["aaa", "c", "aaaaaa"], ["b", "c"]  # bits, with the space: 5, 6, 8 and 5, 6; a character: 1.67, 6, 1.33 and 5, 6
    rows = [arc("q", three, 0), arc("r", three, 2), arc("s", two, 0), arc("t", two, 1), arc("u", three, 2),
            arc("v", ["a", "aab"], 1),  # bits: 3, 7; a character: 3, 2.33
            arc("w", ["z", "é"], 0)]  # bits: 14.6, 27.1, the second of two bytes, but one character
    write_task(tmp_path, "arc_challenge", rows)
    problems = load_problems("arc_challenge", BYTES, "base", tmp_path)
    result = score(bigram_model(p.log().expand(384, 384)), BYTES, "base", problems)
    assert result["problems"][0]["scores"] == pytest.approx([-5 * math.log(2), -6 * math.log(2), -8 * math.log(2)], abs=1e-5)
    assert [o["predicted"] for o in result["problems"]] == [0, 0, 0, 0, 0, 0, 0]
    assert [o["predicted_norm"] for o in result["problems"]] == [2, 2, 0, 0, 2, 1, 0]
    assert (result["acc"], result["acc_norm"]) == (3 / 7, 5 / 7)
    assert result["acc_stderr"] == pytest.approx(math.sqrt(3 / 7 * 4 / 7 / 6))
    assert result["acc_norm_stderr"] == pytest.approx(math.sqrt(5 / 7 * 2 / 7 / 6))
    assert result["chance"] == pytest.approx((3 * 1 / 3 + 4 * 1 / 2) / 7) and (result["n"], result["cut"]) == (7, 0)
    assert result_line("arc_challenge", result) == \
        "arc_challenge acc 0.4286 +/- 0.2020, acc_norm 0.7143 +/- 0.1844, chance 0.4286, 7 problems"
    # one problem has no standard error, and says so by 0 rather than by dividing by it
    assert score(bigram_model(p.log().expand(384, 384)), BYTES, "base", problems[:1])["acc_stderr"] == 0


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
def test_likelihoods_equal_the_plain_formula(tmp_path, variant):
    """Full logits of each sequence alone; where it is longer than the model, of its last part."""
    model = random_model(**variant, dropout=0.5).train()
    rows = random_arc(12) + [arc("long " * 12, ["one", "one two three"], 0)]
    rows += [arc("x" * 42, ["one", last], 0) for last in ("two", "four")]  # 64 and 65 ids are read
    problems = load_problems("arc_easy", BYTES, "base", write_task(tmp_path, "arc_easy", rows))
    results = [score(model, BYTES, "base", problems, batch_size) for batch_size in (5, 1, 1000)]
    assert model.training  # restored, and no dropout meanwhile
    model.eval()
    for row, outcome in zip(rows, results[0]["problems"]):
        for choice, log_p in zip(row["choices"]["text"], outcome["scores"]):
            ids = torch.tensor([[256, *f"Question: {row['question']}\nAnswer: {choice}".encode()]])[:, -65:]
            n = len(f" {choice}".encode())
            expected = model(ids[:, :-1]).log_softmax(-1)[0, -n:].gather(1, ids[0, -n:, None]).sum().item()
            assert log_p == pytest.approx(expected, abs=2e-4)
    assert results[0]["cut"] == 2 and "(2 longer than the model's positions" in result_line("arc_easy", results[0])
    for other in results[1:]:  # other batches, other padding
        assert [o["predicted"] for o in other["problems"]] == [o["predicted"] for o in results[0]["problems"]]
        for a, b in zip(other["problems"], results[0]["problems"]):
            assert a["scores"] == pytest.approx(b["scores"], abs=2e-4)


def test_a_choice_longer_than_the_model_is_scored_by_its_last_part(tmp_path):
    model = random_model(max_seq_len=8).eval()
    problems = load_problems("arc_easy", BYTES, "base", write_task(tmp_path, "arc_easy", [arc("q", ["a" * 30, "b"], 0)]))
    result = score(model, BYTES, "base", problems)
    expected = 8 * [ord("a")]
    log_p = model(torch.tensor([expected])).log_softmax(-1)[0, :, ord("a")].sum().item()
    assert result["problems"][0]["scores"][0] == pytest.approx(log_p, abs=1e-4) and result["cut"] == 1


def test_equal_choices_are_a_tie_and_the_first_is_taken(tmp_path):
    rows = [arc(random_words(i, 9), ["same", "same"], 0) for i in range(8)]
    problems = load_problems("arc_easy", BYTES, "base", write_task(tmp_path, "arc_easy", rows))
    assert score(random_model(), BYTES, "base", problems, batch_size=3)["acc"] == 1


def test_logits_that_are_not_finite_are_an_error(tmp_path):
    write_task(tmp_path, "arc_easy", random_arc(3))
    write_task(tmp_path, "gsm8k", [gsm8k("q", 1)])
    model = random_model()
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(math.nan)
    for task in ("arc_easy", "gsm8k"):
        with pytest.raises(ValueError, match="not finite"):
            score(model, BYTES, "base", load_problems(task, BYTES, "base", tmp_path))


def test_context_and_continuation_apart_are_the_ids_of_the_whole(tmp_path, gpt2_vocabulary):
    rows = [{"ctx": ctx, "endings": endings, "label": "0"} for ctx, endings in (
        ("He doesn", ["'t", "t know", "12 times"]), ("A man. then", [", he", "the   end", "[step] it"]),
        ("Ends in a space [step]", ["goes on", "[step] goes on"]), ("Two  [a] ", ["\n", "x\n\ny"]), ("12", ["34", "é!", ""]))]
    for row, problem in zip(rows, load_problems("hellaswag", gpt2_vocabulary, "base", write_task(tmp_path, "hellaswag", rows))):
        whole = [problem["context"][1:] + choice for choice in problem["choices"]]
        assert problem["context"][0] == gpt2_vocabulary.eot_token
        assert [gpt2_vocabulary.decode(ids) for ids in whole] == [clean(row["ctx"]) + " " + clean(e) for e in row["endings"]]
        assert gpt2_vocabulary.decode(problem["context"][1:]) == clean(row["ctx"]).rstrip()  # its last spaces are scored
        assert whole == [gpt2_vocabulary.encode_ordinary(gpt2_vocabulary.decode(ids)) for ids in whole]
        assert all(choice for choice in problem["choices"])


# ---------------------------------------------------------------------------------------------------
# prompts

def prompts(task, stage, row, folder):
    problem, = load_problems(task, BYTES, stage, write_task(folder, task, [row], "validation.jsonl"))
    return decode_chat(BYTES, problem["context"]), [BYTES.decode(choice) for choice in problem["choices"]], problem["gold"]


def test_prompts(tmp_path):
    eot = "<|endoftext|>"
    row = {"question": "Why?", "choices": {"text": ["so", "not so"], "label": ["1", "2"]}, "answerKey": "2"}
    for stage in ("base", "chat"):
        assert prompts("arc_easy", stage, row, tmp_path) == (f"{eot}Question: Why?\nAnswer:", [" so", " not so"], 1)
    row = {"activity_label": "Removing ice", "ctx_a": "A man [step] sits.  [title] Then", "ctx_b": "he SAYS", "ctx": "unused",
           "label": "1", "endings": ["[substeps] stands up.", " goes [title] home"]}
    for stage in ("base", "chat"):
        assert prompts("hellaswag", stage, row, tmp_path) == (
            f"{eot}Removing ice: A man sits. . Then He says", ["  stands up.", " goes. home"], 1)
    row = {"ctx": "A man sits. he", "endings": ["stands", "lies"], "label": "0"}
    assert prompts("hellaswag", "base", row, tmp_path) == (f"{eot}A man sits. he", [" stands", " lies"], 0)
    row = mmlu(" Is <|end|> text? ", ["yes", "no", "both", "none"], 2)
    assert prompts("mmlu", "base", row, tmp_path) == (
        f"{eot}Question: Is <|end|> text?\nAnswer:", [" yes", " no", " both", " none"], 2)
    assert prompts("mmlu", "chat", row, tmp_path) == (
        f"{eot}<|user|>Is <|end|> text?\nA. yes\nB. no\nC. both\nD. none\nAnswer with the letter only.<|end|><|assistant|>",
        ["A", "B", "C", "D"], 2)
    assert prompts("gsm8k", "base", gsm8k("How many?", "1,200"), tmp_path) == (f"{eot}Question: How many?\nAnswer:", [], "1200")
    assert prompts("gsm8k", "chat", gsm8k("How many?", 7), tmp_path) == (f"{eot}<|user|>How many?<|end|><|assistant|>", [], "7")


def test_chat_models_answer_mmlu_by_letter(tmp_path):
    """After <|assistant|>, B is the likeliest letter, though x and <|end|> are likelier; anywhere else it is D."""
    table = chain()
    table[:, ord("D")] = 9.0
    table[ASSISTANT, [ord(c) for c in "xABCD"] + [END]] = torch.tensor([9.0, 1.0, 3.0, 2.0, 0.0, 8.0])
    rows = [mmlu(f"q{i}", ["D", "A", "C", "B"], gold) for i, gold in enumerate([1, 1, 3, 0, 2])]
    problems = load_problems("mmlu", BYTES, "chat", write_task(tmp_path, "mmlu", rows))
    result = score(bigram_model(table), BYTES, "chat", problems, batch_size=2)
    assert result["acc"] == 2 / 5 and result["chance"] == 1 / 4 and "acc_norm" not in result
    a, b, c, d = result["problems"][0]["scores"]
    assert (b - a, b - c, b - d) == pytest.approx((2, 1, 3), abs=1e-4)
    assert result_line("mmlu", result) == "mmlu          acc 0.4000 +/- 0.2449, chance 0.2500, 5 problems"


def test_a_subset_is_spread_over_the_file_and_always_the_same(tmp_path):
    write_task(tmp_path, "arc_easy", random_arc(10))
    for _ in range(2):
        lines = [p["where"].rsplit(" ", 1)[1] for p in load_problems("arc_easy", BYTES, "base", tmp_path, max_problems=4)]
        assert lines == ["1", "3", "6", "8"]
    assert len(load_problems("arc_easy", BYTES, "base", tmp_path, max_problems=11)) == 10


# ---------------------------------------------------------------------------------------------------
# generated answers

@pytest.mark.parametrize("text, number", [
    ("#### 18", "18"), ("It is 5.\n#### 1,080", "1080"), ("#### $18.00. And 7", "18"), ("3 #### so 4, then 5\n#### 6", "4"),
    ("2 + 2 = 4.", "4"), ("first 10, then 20 eggs", "20"), ("it is $1,234.50.", "1234.5"), ("7-4", "4"), ("7 - -4", "-4"),
    ("a debt of -$5", "-5"), ("$-5", "-5"), ("-0.0", "0"), ("0.50", "0.5"), ("$.50", "0.5"), ("wait...5", "5"), ("1,2,3", "3"),
    ("12,3456", "3456"),
    ("9 #### none", "9"), ("100", "100"), ("3/4", "4"), ("50%", "50"), ("no number", None), ("", None), ("####", None)])
def test_the_final_number(text, number):
    assert final_number(text) == number


def test_answers_are_generated_until_the_model_stops(tmp_path):
    """Surely 4, 2 and the end of the turn or document, and then, if one read on, 9."""
    write_task(tmp_path, "gsm8k", [gsm8k("short", 42), gsm8k("a longer question", 9), gsm8k("mid one", "42.0")])
    eot = BYTES.eot_token
    for stage, start, stop in (("chat", ASSISTANT, END), ("chat", ASSISTANT, eot), ("base", ord(":"), eot)):
        model = bigram_model(chain([start, ord("4"), ord("2"), stop, ord("9")])).train()
        problems = load_problems("gsm8k", BYTES, stage, tmp_path)
        for batch_size in (1, 2, 16):
            result = score(model, BYTES, stage, problems, batch_size, max_new_tokens=8)
            assert [o["text"] for o in result["problems"]] == ["42"] * 3
            assert (result["acc"], result["chance"], result["cut"]) == (2 / 3, 0, 0) and "acc_norm" not in result
            assert model.training  # restored
    assert score(model, BYTES, stage, problems, max_new_tokens=1)["problems"][0]["text"] == "4"
    # a base model's chat tokens are untrained: where one is the likeliest, the next likeliest is taken
    table = chain([ord(":"), END], [ord("7"), eot])
    table[ord(":"), ord("7")] = 20.0
    assert score(bigram_model(table), BYTES, "base", problems)["problems"][0]["text"] == "7"
    # prompt and answer longer than the model, 26 and 36 and 28 ids read: answered all the same, and counted
    for max_seq_len, cut in ((28, 1), (27, 2)):
        model = bigram_model(chain([ord(":"), ord("4"), ord("2"), eot]), max_seq_len)
        result = score(model, BYTES, "base", problems, max_new_tokens=8)
        assert (result["acc"], result["cut"]) == (2 / 3, cut)


def test_a_base_models_next_question_is_not_its_answer(tmp_path):
    write_task(tmp_path, "gsm8k", [gsm8k("one", 1), gsm8k("two", 2), gsm8k("three", 3)])
    says = {"one": "It is 1.\nQuestion: what is 8?\nAnswer: #### 8", "two": "#### 2", "three": "I do not know"}
    model = bigram_model(chain())

    def generate(prompts, max_new_tokens, **_):
        texts = [next(says[q] for q in says if q in decode_chat(BYTES, ids)) for ids in prompts]
        for i in range(max(map(len, texts))):
            yield [text.encode()[i] if i < len(text) else None for text in texts]

    model.generate = generate
    for stage, right in (("base", [True, True, False]), ("chat", [False, True, False])):
        result = score(model, BYTES, stage, load_problems("gsm8k", BYTES, stage, tmp_path), batch_size=2)
        assert [o["right"] for o in result["problems"]] == right
        first = "It is 1.\n" if stage == "base" else says["one"]
        assert [o["text"] for o in result["problems"]] == [first, says["two"], says["three"]]


# ---------------------------------------------------------------------------------------------------
# the script

@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, "arc_easy", random_arc(9))
    write_task(folder, "mmlu", [mmlu(random_words(i, 8), ["0", "11", "2", "x y z"], i % 4) for i in range(5)])
    write_task(folder, "gsm8k", [gsm8k("how many", 3)])
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("checkpoint"), random_model(max_seq_len=32)
    runtime.save_checkpoint(folder, {
        "model": model.state_dict(), "model_args": asdict(model.config), "config": {}, "tokenizer": "bytes", "stage": "base",
        "iter_num": 7, "val_loss": 1.25, "val_iter": 5})
    return folder / "ckpt.pt"


def test_batches_are_dealt_to_the_ranks(tasks):
    """Each has its own, and together they have all, for more ranks than there are batches too."""
    model = random_model().eval()
    silent = lambda done, total: None  # noqa: E731
    for task, n in (("arc_easy", 9), ("gsm8k", 1)):
        problems = load_problems(task, BYTES, "base", tasks)
        for world_size in (1, 2, 3, 40):
            with torch.no_grad():
                parts = [log_likelihoods(model, problems, 2, rank, world_size, silent) if task == "arc_easy" else
                         generate_answers(model, BYTES, "base", problems, 2, 4, rank, world_size, silent)
                         for rank in range(world_size)]
            union = {key: value for part in parts for key, value in part.items()}
            assert sum(map(len, parts)) == len(union) == sum(len(p["choices"]) or 1 for p in problems) and len(problems) == n
            whole = union if world_size == 1 else whole
            assert union == whole  # to the last bit


def test_any_number_of_ranks_gives_the_same_scores(tasks, checkpoint, shards, tmp_path):
    """Two ranks share out three tasks, one of them a single problem, and the rows of a validation that do not divide."""
    files, outputs = [tmp_path / "one.json", tmp_path / "two.json"], []
    for ranks in (1, 2):
        outputs.append(run("evaluate.py", f"--checkpoint={checkpoint}", f"--task_dir={tasks}", f"--data_dir={shards}",
                           "--eval_iters=3", "--batch_size=3", "--max_new_tokens=5", f"--output={files[ranks - 1]}",
                           "--device=cpu", ranks=ranks))
    one, two = (json.loads(path.read_text()) for path in files)
    assert one.pop("validation") == pytest.approx(two.pop("validation"), rel=1e-6)
    assert one == two and one["arc_easy"]["cut"] > 0  # to the last bit
    assert [o["where"] for o in one["arc_easy"]["problems"]] == [f"{tasks}/arc_easy/test.jsonl, line {i + 1}" for i in range(9)]
    for output in outputs:
        assert "base model, gpt2" in output and "step 7, val loss 1.2500 at step 5" in output
        assert "left out: hellaswag, arc_challenge" in output
        for task in ("arc_easy", "mmlu", "gsm8k"):
            assert output.count(result_line(task, one[task])) == 1

    model = GPT(GPTConfig(**torch.load(checkpoint)["model_args"])).eval()
    model.load_state_dict(torch.load(checkpoint)["model"])
    tokens = torch.from_numpy(np.fromfile(shards / "val_000000.bin", dtype=np.uint16)[512:].astype(np.int64))[:9 * 32 + 1]
    with torch.no_grad():
        nats = F.cross_entropy(model(tokens[:-1].view(9, 32)).flatten(0, 1), tokens[1:], reduction="sum").item()
    bits_per_byte = nats / math.log(2) / (tokens[1:] != 256).sum().item()
    expected = f"loss {nats / 288:.4f}, perplexity {math.exp(nats / 288):.2f}, {bits_per_byte:.4f} bits per byte, over 9 of"
    assert expected in outputs[0] and expected in outputs[1]
    # in this process, with other batches
    problems = load_problems("arc_easy", BYTES, "base", tasks)
    for a, b in zip(score(model, BYTES, "base", problems, batch_size=7)["problems"], one["arc_easy"]["problems"]):
        assert a["scores"] == pytest.approx(b["scores"], abs=2e-4) and a["predicted"] == b["predicted"]


def test_mistakes_on_the_command_line(tasks, checkpoint, tmp_path, gpt2_vocabulary):
    assert "'helaswag' is no task; did you mean 'hellaswag'?" in refused("evaluate.py", "--tasks=helaswag")
    assert f"--task_dir={tasks}: no hellaswag/test.jsonl" in refused(
        "evaluate.py", f"--checkpoint={checkpoint}", "--tasks=mmlu,hellaswag", f"--task_dir={tasks}")
    shards = write_shards(tmp_path / "gpt2", "gpt2", train=2000, val=500)
    assert "gpt2's, 50304 ids, but the checkpoint was trained on bytes's, 384 ids" in refused(
        "evaluate.py", f"--checkpoint={checkpoint}", "--tasks=", f"--data_dir={shards}")


@pytest.mark.parametrize("task, line, expected", [
    ("arc_easy", '{"question": "q"', "line 3: no JSON"),
    ("arc_easy", b'{"question": "\xff"}', "line 3: no JSON"),
    ("arc_easy", '["q"]', "line 3: not in the schema of allenai/ai2_arc"),
    ("arc_easy", json.dumps({"question": "q", "choices": {"text": ["a"]}, "answerKey": "A"}), "line 3: no key 'label'"),
    ("arc_easy", json.dumps({**arc("q", ["a", "b"], 0), "answerKey": "E"}), "line 3: not in the schema of allenai/ai2_arc: "
     "its answer 'E' is none of its labels A, B"),
    ("arc_easy", json.dumps(arc(7, ["a", "b"], 0)), "line 3: not in the schema of allenai/ai2_arc: expected a string"),
    ("mmlu", json.dumps(mmlu("q", ["a", "b"], 2)),
     "line 3: not in the schema of cais/mmlu: its answer '2' is none of its labels 0, 1"),
    ("mmlu", json.dumps(mmlu("q", ["a", 1], 0)), "line 3: not in the schema of cais/mmlu: expected a string"),
    ("hellaswag", json.dumps({"ctx": "q", "endings": ["a", "b"], "label": ""}), "its answer '' is none of its labels 0, 1"),
    ("hellaswag", json.dumps({"ctx": "q", "label": "0"}), "line 3: no key 'endings'"),
    ("gsm8k", json.dumps({"question": "q", "answer": "7"}), "line 3: not in the schema of openai/gsm8k: its answer has no number"),
    ("gsm8k", json.dumps({"question": None, "answer": "#### 7"}), "line 3: not in the schema of openai/gsm8k: expected a string")])
def test_a_bad_line_is_named(tmp_path, capsys, task, line, expected):
    good = {"arc_easy": arc("q", ["a", "b"], 0), "mmlu": mmlu("q", ["a", "b"], 1), "gsm8k": gsm8k("q", 1),
            "hellaswag": {"ctx": "q", "endings": ["a", "b"], "label": "1"}}[task]
    write_task(tmp_path, task, [good])
    assert len(load_problems(task, BYTES, "base", tmp_path)) == 1
    with open(tmp_path / task / "test.jsonl", "ab") as f:  # behind an empty line, which is none
        f.write(b"\n" + (line.encode() if isinstance(line, str) else line) + b"\n")
    with pytest.raises(SystemExit) as stopped:
        load_problems(task, BYTES, "base", tmp_path)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and message.startswith(f"error: {tmp_path}/{task}/test.jsonl, line 3: ") and expected in message
    assert message.count("\n") == 1


def test_files_that_are_missing_or_empty_and_the_hub(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        read_rows("mmlu", tmp_path)
    assert f"error: --task_dir={tmp_path}: no mmlu/test.jsonl there" in capsys.readouterr().err
    write_task(tmp_path, "mmlu", [])
    with pytest.raises(SystemExit):
        read_rows("mmlu", tmp_path)
    assert "test.jsonl: holds no problems" in capsys.readouterr().err

    datasets = pytest.importorskip("datasets")
    hub = {("Rowan/hellaswag", None, "validation"): [{"ctx": "q", "endings": ["a"], "label": "0"}]}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, configuration, split: hub[name, configuration, split])
    assert load_problems("hellaswag", BYTES, "base")[0]["where"] == "Rowan/hellaswag, row 0"
    with pytest.raises(SystemExit):
        read_rows("gsm8k")
    assert "error: gsm8k: openai/gsm8k cannot be read from the hub (KeyError" in capsys.readouterr().err
    assert set(TASKS) == {"hellaswag", "arc_easy", "arc_challenge", "mmlu", "gsm8k"}
