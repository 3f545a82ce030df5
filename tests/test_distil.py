"""Distillation: the loss against its plain formula, the cache against the live teacher, and both loops with either."""
import json
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model as model_module
import runtime
from conftest import TINY, read_log, refused, run
from model import GPT, GPTConfig, IGNORE, distillation, linear_cross_entropy, packed
from prepare_data import TeacherCache, chat_rows, rows_to_windows
from test_chat import SFT as CHAT, E, jsonl, turns
from test_train import load, same

N, C, V = 21, 12, 40  # in chunks of 8, and a last one that is not full


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(model_module, "LOSS_CHUNK", 8)


def inputs(T=2.0, teacher_width=20):
    """x, weight, targets, temperature, and a teacher's hidden states and head."""
    torch.manual_seed(0)
    x, weight, hidden, head = (torch.randn(*shape) for shape in ((N, C), (V, C), (N, teacher_width), (V, teacher_width)))
    targets = torch.randint(0, V, (N,))
    targets[::3] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets, torch.tensor(T, requires_grad=True), hidden, head


def formula(x, weight, targets, alpha, T, teacher_logits):
    logits = x @ weight.t()
    ce = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    kl = F.kl_div((logits / T).log_softmax(-1), (teacher_logits / T).log_softmax(-1), reduction="none", log_target=True).sum(-1)
    kl = kl[targets != IGNORE].sum()
    return (1 - alpha) * ce + alpha * T ** 2 * kl, torch.stack((ce, kl))


def top_k(logits, k):
    """A cache's rows: log-probabilities of the k likeliest and of each other id, and the k ids."""
    log_probs, ids = logits.log_softmax(-1).sort(descending=True)
    rest = log_probs[:, k:].logsumexp(-1, keepdim=True) - math.log(V - k) if k < V else torch.zeros(len(logits), 1)
    return torch.cat((log_probs[:, :k], rest), -1), ids[:, :k]


def check(ours, parts, theirs, their_parts, wanted):
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5) and torch.allclose(parts, their_parts, rtol=1e-5)
    for mine, other in zip(torch.autograd.grad(ours * 0.37, wanted), torch.autograd.grad(theirs * 0.37, wanted)):
        assert (mine - other).abs().max() < 1e-5 * max(1, other.abs().max())


@pytest.mark.parametrize("T, alpha, compiled", [(1.0, 0.5, False), (2.0, 0.9, False), (0.5, 1.0, False), (4.0, 0.3, False),
                                                (2.0, 0.5, True)])
def test_chunks_equal_the_formula_with_all_gradients(T, alpha, compiled):
    x, weight, targets, temperature, hidden, head = inputs(T)
    n = 8 if compiled else N  # every chunk is compiled for itself
    x, targets, hidden = x[:n], targets[:n], hidden[:n]
    loss = torch.compile(distillation, fullgraph=True, dynamic=False) if compiled else distillation
    wanted = x, weight, temperature
    check(*loss(x, weight, targets, alpha, temperature, hidden, head),
          *formula(x, weight, targets, alpha, temperature, hidden @ head.t()), wanted)
    for k in (V,) if compiled else (1, 5, V - 1, V):  # against the formula on the whole row that the cache stands for
        told, ids = top_k(hidden @ head.t(), k)
        row = told[:, -1:].expand(n, V).scatter(-1, ids, told[:, :-1])
        assert row.exp().sum(-1).sub(1).abs().max() < 1e-5
        check(*loss(x, weight, targets, alpha, temperature, told, None, ids), *formula(x, weight, targets, alpha, temperature, row), wanted)


def test_a_cache_of_the_whole_vocabulary_is_the_live_teacher():
    x, weight, targets, temperature, hidden, head = inputs()
    told, ids = top_k(hidden @ head.t(), V)
    wanted = x, weight, temperature
    check(*distillation(x, weight, targets, 0.5, temperature, told, None, ids),
          *distillation(x, weight, targets, 0.5, temperature, hidden, head), wanted)


def test_weight_zero_is_plain_cross_entropy_and_a_teacher_like_the_student_teaches_nothing():
    x, weight, targets, temperature, hidden, head = inputs()
    for told in ((hidden, head), (top_k(hidden @ head.t(), 5)[0], None, top_k(hidden @ head.t(), 5)[1])):
        ours, theirs = distillation(x, weight, targets, 0.0, temperature, *told)[0], linear_cross_entropy(x, weight, targets)
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
        for mine, other in zip(torch.autograd.grad(ours, (x, weight)), torch.autograd.grad(theirs, (x, weight))):
            assert (mine - other).abs().max() < 1e-5
    loss, parts = distillation(x, weight, targets, 1.0, temperature, x.detach(), weight.detach())
    assert abs(loss.item()) < 1e-4 and abs(parts[1].item()) < 1e-4
    assert all(gradient.abs().max() < 1e-4 for gradient in torch.autograd.grad(loss, (x, weight, temperature)))


def test_a_frozen_head_has_no_gradient_and_the_rest_has_the_same():
    x, weight, targets, temperature, hidden, head = inputs()
    theirs = torch.autograd.grad(distillation(x, weight, targets, 0.5, temperature, hidden, head)[0] * 0.37, (x, temperature))
    ours = torch.autograd.grad(distillation(x, weight.detach(), targets, 0.5, temperature, hidden, head)[0] * 0.37, (x, temperature))
    assert same(ours, theirs)


def test_a_fixed_temperature_has_no_gradient_and_bfloat16_is_near():
    x, weight, targets, temperature, hidden, head = inputs()
    exact, _ = distillation(x, weight, targets, 0.5, temperature.detach(), hidden, head)
    exact.backward()
    assert temperature.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        near, _ = distillation(x, weight, targets, 0.5, temperature.detach(), hidden, head)
    assert near.item() == pytest.approx(exact.item(), rel=0.02)


# ---------------------------------------------------------------------------------------------------
# the loops

SHORT = [*TINY, "--max_iters=6", "--lr_decay_iters=6", "--eval_interval=2", "--sample_tokens=0"]
SFT = [*CHAT, "--max_iters=4", "--lr_decay_iters=4", "--eval_interval=2", "--sample_tokens=0"]
LOGGED = "train_loss", "ce_loss", "kl_loss", "temperature", "val_loss", "grad_norm"


def distil(args, out_dir, *more, **how):
    return run("train_gpt2.py", *args, f"--out_dir={out_dir}", *more, **how)


@pytest.fixture(scope="module")
def teacher(shards, tmp_path_factory):
    """Of another architecture, another width and more positions than its student."""
    out_dir = tmp_path_factory.mktemp("teacher") / "out"
    distil([*TINY, f"--data_dir={shards}", "--arch=llama", "--n_embd=48", "--max_seq_len=64", "--sample_tokens=0"], out_dir)
    return out_dir


@pytest.fixture(scope="module")
def runs(teacher, shards, tmp_path_factory):
    """Two runs with a learned temperature, from the live teacher and from a cache of all its probabilities; their settings and folder."""
    folder = tmp_path_factory.mktemp("runs")
    args = [*SHORT, f"--data_dir={shards}", f"--teacher={teacher}", "--learn_temperature=True",
            "--teacher_temperature=2"]
    distil(args, folder / "live")
    output = distil(args, folder / "cached", "--teacher_cache=384")
    assert "384 likeliest ids for 52 rows" in output and "52 are missing" in output  # 6 steps of 8 rows, and what is read ahead
    return args, folder


def model_in(out_dir):
    checkpoint = load(out_dir)
    gpt = GPT(GPTConfig(**checkpoint["model_args"])).eval()
    gpt.load_state_dict(checkpoint["model"])
    return gpt


def close(one, other, **within):
    one, other = (read_log(out_dir, *LOGGED) for out_dir in (one, other))
    assert one.keys() == other.keys() and len(one) == 6 * 5 + 4
    for key in one:
        assert one[key] == pytest.approx(other[key], **within), key


def test_the_first_step_is_the_formula_and_the_temperature_moves(runs, teacher, shards):
    from prepare_data import Windows
    _, folder = runs
    log = read_log(folder / "live", *LOGGED)
    windows = Windows(str(shards), "train", 32)
    x, y = map(torch.from_numpy, windows[rows_to_windows(range(8), len(windows), 1337)])
    torch.manual_seed(1337)
    student = GPT(GPTConfig(**load(folder / "live")["model_args"]))
    with torch.no_grad():
        loss, parts = formula(student.hidden_states(x).flatten(0, 1), student.lm_head.weight, y.flatten(), 0.5, 2.0,
                              model_in(teacher)(x).flatten(0, 1))
    for key, value in zip(LOGGED, (loss, *parts)):
        assert log[key, 1] == pytest.approx(value.item() / 256, rel=1e-5), key
    assert log["kl_loss", 6] < 0.9 * log["kl_loss", 1] and log["val_loss", 6] < log["val_loss", 0]
    temperatures = [log["temperature", i] for i in range(1, 7)]
    saved = load(folder / "live")["teacher"]["log_temperature"]
    assert len(set(temperatures)) == 6 and math.log(temperatures[5]) == pytest.approx(saved, rel=1e-4)


def test_a_cached_teacher_is_the_live_one(runs):
    close(runs[1] / "live", runs[1] / "cached", rel=2e-3)  # float16


@pytest.mark.parametrize("kind", ["live", "cached"])
def test_interrupted_twice_equals_uninterrupted(runs, tmp_path, kind):
    args, folder = runs
    distil(args, tmp_path, f"--teacher_cache={384 * (kind == 'cached')}", "--max_iters=2")
    for stop in (4, 6):
        run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", f"--max_iters={stop}")
    whole, parts = load(folder / kind), load(tmp_path)
    for key in ("model", "optimizer", "teacher", "rows_seen", "iter_num", "best_val_loss", "val_loss"):
        assert same(whole[key], parts[key]), key
    assert read_log(folder / kind, *LOGGED) == read_log(tmp_path, *LOGGED)


COMPILED = ["--compile=True", "--compile_backend=aot_eager"]  # the graphs of training, and not minutes for their code


def test_two_ranks_share_out_the_cache_and_train_the_model_of_one(runs, shards, tmp_path):
    shutil.copytree(shards, tmp_path / "data", ignore=shutil.ignore_patterns("teacher-*"))
    output = distil(runs[0], tmp_path / "two", f"--data_dir={tmp_path}/data", "--teacher_cache=384", *COMPILED, ranks=2)
    assert "56 are missing" in output
    close(runs[1] / "cached", tmp_path / "two", abs=1e-5)
    one, two = (list(load(folder)["optimizer"]["state"].values())[-1] for folder in (runs[1] / "cached", tmp_path / "two"))
    assert one["exp_avg"].dim() == 0 and one["exp_avg"].item() == pytest.approx(two["exp_avg"].item(), rel=1e-4)  # the temperature's
    assert set(read_log(tmp_path / "two", "recompiles").values()) == {0}


def test_a_sharded_teacher_is_the_teacher_and_nothing_is_recompiled(runs, tmp_path):
    args = [*runs[0], "--learn_temperature=False"]
    distil(args, tmp_path / "whole", *COMPILED)
    distil(args, tmp_path / "sharded", "--fsdp=True", ranks=2)
    close(tmp_path / "whole", tmp_path / "sharded", abs=1e-4)
    assert set(read_log(tmp_path / "whole", "recompiles").values()) == {0}


def test_chat_rows_are_taught_packed(teacher, tmp_path):
    torch.manual_seed(0)
    student = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, max_seq_len=64, vocab_size=384))
    torch.save({**load(teacher), "model": student.state_dict(), "model_args": vars(student.config)}, tmp_path / "base.pt")
    data = jsonl(tmp_path / "chats.jsonl", [turns(f"say {i % 7}", f"{i % 7}" * 9) for i in range(120)])
    args = [*SFT, f"--init_from={tmp_path}/base.pt", f"--data={data}", f"--chat_dir={tmp_path}/rows", f"--teacher={teacher}",
            "--learn_temperature=True", "--teacher_temperature=2"]
    run("chat_sft.py", *args, f"--out_dir={tmp_path}/live")
    run("chat_sft.py", *args, f"--out_dir={tmp_path}/cached", "--teacher_cache=384", "--max_iters=2")
    output = run("chat_sft.py", "--init_from=resume", f"--out_dir={tmp_path}/cached", "--max_iters=4", f"--chat_dir={tmp_path}/rows")
    assert "8 are missing" in output  # of two steps more
    live, cached = (read_log(tmp_path / name, *LOGGED) for name in ("live", "cached"))
    assert live.keys() == cached.keys() and all(live[key] == pytest.approx(cached[key], rel=2e-3) for key in live)

    rows, _, _ = chat_rows(tmp_path / "rows", str(data), None, "bytes", 64, True, 1337, False)
    x, y = torch.from_numpy(rows[rows_to_windows(range(4), len(rows), 1337)].astype(np.int64)).unbind(1)
    y, packing = torch.where(y == E, IGNORE, y), packed(x, E)
    with torch.no_grad():
        loss, _ = formula(student.hidden_states(x, *packing).flatten(0, 1), student.lm_head.weight, y.flatten(), 0.5, 2.0,
                          model_in(teacher)(x, None, *packing).flatten(0, 1))
    assert live["train_loss", 1] == pytest.approx(loss.item() / (y != IGNORE).sum().item(), rel=1e-5)


def test_what_does_not_match_is_refused(runs, teacher, tmp_path, capsys):
    args, folder = runs
    other = load(teacher)
    for name, tokenizer, max_seq_len, words in (("other.pt", "bytes", 65, "max_seq_len=65"),
                                                ("gpt2.pt", "gpt2", 32, "gpt2's, 384 ids, but the student's are bytes's")):
        other["model"]["lm_head.weight"] = other["model"]["lm_head.weight"] + 1e-3
        torch.save({**other, "tokenizer": tokenizer}, tmp_path / name)
        with pytest.raises(SystemExit):
            runtime.load_teacher(f"{tmp_path}/{name}", "bytes", 384, max_seq_len, None, None, False, None)
        assert words in capsys.readouterr().err
    assert "from 0 to 384" in refused("train_gpt2.py", *args, "--teacher_cache=385", f"--out_dir={tmp_path}/o")
    resume = ["--init_from=resume", f"--out_dir={folder}/live", "--max_iters=8"]
    assert "has another" in refused("train_gpt2.py", *resume, f"--teacher={tmp_path}/other.pt")
    output = distil(args, tmp_path / "o", f"--teacher={tmp_path}/other.pt", "--teacher_cache=384", "--max_iters=0", "--warmup_iters=0")
    assert "is not used: another teacher\n" in output and "4 are missing" in output


def test_a_cache_is_written_row_by_row_and_a_foreign_or_damaged_one_is_refused(tmp_path, capsys):
    made_from = {"teacher": "a", "data": "d", "max_seq_len": 4, "k": 2}
    cache = TeacherCache(tmp_path, made_from, 10, create=True)
    log_probs, ids = np.random.default_rng(0).normal(size=(3, 4, 3)).astype(np.float16), np.arange(24).reshape(3, 4, 2)
    cache.write([7, 1, 4], log_probs, ids)
    cache = TeacherCache(tmp_path, made_from, 10, create=True)  # it goes on
    assert cache.missing(np.arange(10)).tolist() == [0, 2, 3, 5, 6, 8, 9]
    for mine, theirs in zip(cache[np.array([4, 7])], (log_probs[[2, 0]], ids[[2, 0]])):
        assert np.array_equal(mine, theirs)

    def says(words, action):
        with pytest.raises(SystemExit):
            action()
        assert words in capsys.readouterr().err

    says("row 2 is not there yet", lambda: cache[np.array([1, 2])])
    with open(cache.folder / "rows.bin", "r+b") as f:
        f.seek(4 * cache.row.itemsize + 3)
        f.write(b"x")
    says("row 4 is damaged", lambda: cache[np.array([4])])
    TeacherCache(tmp_path, {**made_from, "teacher": "b", "k": 3}, 10, create=True)
    assert f"{cache.folder} is not used: another teacher, another k" in capsys.readouterr().out
    told = cache.folder / "made_from.json"
    told.write_text(json.dumps({**json.loads(told.read_text()), "tokenizer": "gpt2", "data": "e"}))
    says("made from another data; remove it", lambda: TeacherCache(tmp_path, made_from, 10, create=True))
    told.write_text("")
    says("cannot be kept there", lambda: TeacherCache(tmp_path, made_from, 10, create=True))
