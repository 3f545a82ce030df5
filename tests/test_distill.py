"""Distillation: the loss against its plain formula, the cache against the online teacher, both loops with either."""
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model as model_module
from chat_data import build_datasets, packed_mask_and_positions
from conftest import TINY, load, read_log, refused, run, same
from dataloader import TokenDataset, sample_indices
from extras import distill
from model import GPT, GPTConfig, IGNORE, linear_cross_entropy
from test_chat import SFT
from test_chat_data import BYTES, E, jsonl, turns
from tokenizer import get_tokenizer

N, C, V = 21, 12, 40  # in chunks of 8, the last one not full


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    for module in (model_module, distill):
        monkeypatch.setattr(module, "LOSS_CHUNK", 8)
    monkeypatch.setattr(distill, "teacher_cache", 0)


# ---------------------------------------------------------------------------------------------------
# the loss

def inputs(T=2.0, teacher_width=20):
    """x, weight, targets, temperature, and a teacher's hidden states and head."""
    torch.manual_seed(0)
    x, weight = torch.randn(N, C), torch.randn(V, C)
    hidden, head = torch.randn(N, teacher_width), torch.randn(V, teacher_width)
    targets = torch.randint(0, V, (N,))
    targets[::3] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets, torch.tensor(T, requires_grad=True), hidden, head


def distillation(x, weight, targets, w, T, teacher, teacher_head=None):
    distill.teacher_cache = 0 if teacher_head is not None else (teacher.size(1) - 1) // 2
    return distill.DistillLoss.apply(x, weight, T, targets, w, teacher, teacher_head)


def formula(x, weight, targets, w, T, teacher_logits):
    logits = x @ weight.t()
    ce = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    log_q, log_p = (logits / T).log_softmax(-1), (teacher_logits / T).log_softmax(-1)
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)[targets != IGNORE].sum()
    agree = (log_q.argmax(-1) == log_p.argmax(-1))[targets != IGNORE].sum()
    return (1 - w) * ce + w * T ** 2 * kl, torch.stack((ce, kl, agree, (targets != IGNORE).sum()))


def top_k(logits, k):
    """What a cache holds: log-probabilities, float16, of the k likeliest ids and of each other id, and the k ids."""
    log_probs, ids = logits.log_softmax(-1).sort(descending=True)
    others = log_probs[:, k:].logsumexp(-1, keepdim=True) - math.log(V - k)
    return torch.cat((log_probs[:, :k], others), -1).half(), ids[:, :k]


def packed(log_probs, ids):
    """A row of the cache: k ids, then the bits of k + 1 float16."""
    return torch.cat((ids.short(), log_probs.view(torch.int16)), -1)


def check(ours, expected, inputs):
    """Each is a loss and its terms; compares them, and the gradients with respect to `inputs`."""
    assert ours[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
    assert torch.allclose(ours[1], expected[1], rtol=1e-5)
    gradients, wanted = (torch.autograd.grad(loss * 0.37, inputs) for loss, _ in (ours, expected))
    for a, b in zip(gradients, wanted):
        assert (a - b).abs().max() < 1e-5 * max(1, b.abs().max())


@pytest.mark.parametrize("T, w, compiled", [(1.0, 0.5, False), (2.0, 0.9, False), (0.5, 1.0, False), (4.0, 0.3, False),
                                            (2.0, 0.5, True)])
def test_chunks_equal_the_formula_with_all_gradients(T, w, compiled):
    x, weight, targets, T, hidden, head = inputs(T)
    n = 8 if compiled else N  # each chunk is compiled by itself
    x, targets, hidden = x[:n], targets[:n], hidden[:n]
    loss = torch.compile(distillation, fullgraph=True, dynamic=False) if compiled else distillation
    logits = hidden @ head.t()
    check(loss(x, weight, targets, w, T, hidden, head), formula(x, weight, targets, w, T, logits), (x, weight, T))
    for k in (5,) if compiled else (1, 5, V - 1):  # against the formula on the row that a cached one stands for
        cached, ids = top_k(logits, k)
        row = cached[:, -1:].expand(n, V).scatter(-1, ids, cached[:, :-1]).float()
        assert row.exp().sum(-1).sub(1).abs().max() < 2e-3
        check(loss(x, weight, targets, w, T, packed(cached, ids)), formula(x, weight, targets, w, T, row),
              (x, weight, T))


def test_a_cache_of_all_ids_but_one_is_the_online_teacher():
    x, weight, targets, T, hidden, head = inputs()
    cached, online = (distillation(x, weight, targets, 0.5, T, *teacher) for teacher in (
        (packed(*top_k(hidden @ head.t(), V - 1)),), (hidden, head)))
    assert cached[0].item() == pytest.approx(online[0].item(), rel=1e-3)  # float16
    for a, b in zip(torch.autograd.grad(cached[0], (x, weight)), torch.autograd.grad(online[0], (x, weight))):
        assert (a - b).abs().max() < 5e-3 * b.abs().max()


def test_weight_zero_is_plain_cross_entropy_and_a_teacher_like_the_student_teaches_nothing():
    x, weight, targets, T, hidden, head = inputs()
    for teacher in ((hidden, head), (packed(*top_k(hidden @ head.t(), 5)),)):
        loss, _ = distillation(x, weight, targets, 0.0, T, *teacher)
        expected = linear_cross_entropy(x, weight, targets)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for a, b in zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, (x, weight))):
            assert (a - b).abs().max() < 1e-5
    loss, terms = distillation(x, weight, targets, 1.0, T, x.detach(), weight.detach())
    assert abs(loss.item()) < 1e-4 and abs(terms[1].item()) < 1e-4
    assert all(gradient.abs().max() < 1e-4 for gradient in torch.autograd.grad(loss, (x, weight, T)))


def test_a_frozen_head_and_a_fixed_temperature_get_no_gradient_and_the_rest_gets_the_same():
    x, weight, targets, T, hidden, head = inputs()
    whole = torch.autograd.grad(distillation(x, weight, targets, 0.5, T, hidden, head)[0] * 0.37, (x, weight, T))
    frozen = distillation(x, weight.detach(), targets, 0.5, T, hidden, head)[0]
    assert same(torch.autograd.grad(frozen * 0.37, (x, T)), (whole[0], whole[2]))
    fixed = distillation(x, weight, targets, 0.5, T.detach(), hidden, head)[0]
    assert same(torch.autograd.grad(fixed * 0.37, (x, weight)), whole[:2])


# ---------------------------------------------------------------------------------------------------
# its place in a model

@pytest.fixture
def student(monkeypatch, tmp_path):
    """Makes a small GPT, and a Distillation from another one that is its loss function."""
    def new(dtype="float32", max_seq_len=16, tokenizer="bytes", fsdp=False, **settings):
        for name, value in settings.items():
            monkeypatch.setattr(distill, name, value)
        torch.manual_seed(0)
        teacher, gpt = (GPT(GPTConfig(n_layer=1, n_head=2, n_embd=width, max_seq_len=16, vocab_size=384))
                        for width in (24, 16))
        for p in teacher.parameters():
            p.data *= 3  # it is sure of itself
        facts = {"config": {}, "stage": "base", "iter_num": 0, "val_loss": math.nan, "val_iter": 0}
        torch.save({"model": teacher.state_dict(), "model_args": vars(teacher.config), "tokenizer": tokenizer,
                    **facts}, tmp_path / "t.pt")
        dataset = SimpleNamespace(tokenizer=get_tokenizer("bytes"), max_seq_len=max_seq_len)
        config = {"teacher": f"{tmp_path}/t.pt", "fsdp": fsdp}
        return gpt, teacher, distill.Distillation(gpt, dataset, torch.device("cpu"), dtype, None, config)
    return new


def random_batch():
    torch.manual_seed(1)
    idx, targets = torch.randint(0, 384, (2, 3, 16))
    targets[:, ::4] = IGNORE
    return {"idx": idx, "targets": targets}


def test_it_is_the_loss_of_training_alone_and_in_no_state_dict(student):
    gpt, teacher, distillation = student(learn_temperature=True, teacher_temperature=2.0, teacher_weight=0.7)
    batch = random_batch()
    names = gpt.state_dict().keys()
    assert names == GPT(gpt.config).state_dict().keys()
    assert dict(gpt.named_parameters()).keys() - names == {"loss_fn.log_temperature"}
    loss = gpt(**batch, **distillation.teacher_forward(batch))
    x, logits = gpt.hidden_states(batch["idx"]), teacher(batch["idx"])
    expected, terms = formula(x.flatten(0, 1), gpt.lm_head.weight, batch["targets"].flatten(), 0.7, 2.0,
                              logits.flatten(0, 1))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    n = (batch["targets"] != IGNORE).sum().item()
    agree = (gpt(batch["idx"]).argmax(-1) == logits.argmax(-1))[batch["targets"] != IGNORE]
    logged = {"ce_loss": terms[0].item() / n, "kl_loss": terms[1].item() / n, "temperature": 2.0,
              "agreement": agree.float().mean().item()}
    assert distillation.metrics() == pytest.approx(logged, rel=1e-5)
    gpt(**batch, **distillation.teacher_forward(batch))
    assert distillation.metrics() == pytest.approx(logged, rel=1e-5)  # of the steps since the last call
    assert gpt.eval()(**batch).item() == pytest.approx(terms[0].item(), rel=1e-5)


def test_bfloat16_is_near(student):
    losses = []
    for dtype in ("float32", "bfloat16"):
        gpt, _, distillation = student(dtype)
        batch = random_batch()
        batch |= distillation.teacher_forward(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            losses.append(gpt(**batch).item())
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("settings, words", [
    (dict(max_seq_len=17), ["--max_seq_len=17", "16 positions"]),
    (dict(tokenizer="gpt2"), ["t.pt", "gpt2 tokens", "bytes"]),
    (dict(teacher_cache=384), ["--teacher_cache=384", "less than", "384"]),
    (dict(learn_temperature=True, fsdp=True), ["--learn_temperature=True"]),
])
def test_a_teacher_that_does_not_fit_is_refused(student, capsys, settings, words):
    with pytest.raises(SystemExit) as end:
        student(**settings)
    message = capsys.readouterr().err
    assert end.value.code == 2 and all(word in message for word in words), message


# ---------------------------------------------------------------------------------------------------
# the cache

def fill(cache, indices, hidden, head, fail_after=99):
    """Labels rows by a teacher with hidden states (rows, T, C), in batches of 2. Returns the rows it was asked for."""
    asked = []

    def teacher_forward(batch):
        if len(asked) == fail_after:
            raise InterruptedError
        asked.append(batch["idx"].tolist())
        return {"teacher": hidden[batch["idx"]], "teacher_head": head}

    distillation = SimpleNamespace(teacher_forward=teacher_forward, sums=torch.zeros(4))
    dataset = SimpleNamespace(get_batch=lambda indices, device: {"idx": torch.from_numpy(indices)})
    loader = SimpleNamespace(world_size=1, rank=0, batch_size=2, dataset=dataset, device="cpu")
    cache.fill(np.array(indices), distillation, loader)
    return asked


@pytest.fixture
def open_cache(tmp_path, monkeypatch):
    """Opens a cache of 10 rows of 4 positions and the 5 likeliest ids."""
    class Rows:
        max_seq_len = 4

        def __len__(self):
            return 10

    monkeypatch.setattr(distill, "teacher_cache", 5)
    return lambda: distill.TeacherCache(tmp_path / "teacher.cache", Rows())


def test_a_cache_holds_the_likeliest_ids_and_continues_where_it_was_interrupted(open_cache, monkeypatch):
    torch.manual_seed(0)
    hidden, head = torch.randn(10, 4, 20), torch.randn(V, 20)
    with pytest.raises(InterruptedError):
        fill(open_cache(), [1, 4, 7, 8], hidden, head, fail_after=1)
    cache = open_cache()
    assert fill(cache, [1, 4, 5, 7, 8], hidden, head) == [[5, 7], [8, 5]]  # the last batch is filled up
    assert fill(cache, [1, 4, 5, 7, 8], hidden, head) == []
    rows = cache[np.array([8, 1])]["teacher"]
    assert rows.dtype == np.int16 and type(rows) is np.ndarray
    expected = packed(*top_k((hidden[[8, 1]] @ head.t()).flatten(0, 1), 5))
    assert torch.equal(torch.from_numpy(rows).flatten(0, 1), expected)


def test_a_cache_without_room_is_refused_before_it_is_written(open_cache, monkeypatch, capsys):
    """Writing to a mapped file on a full disk would kill the process."""
    usage = distill.shutil.disk_usage("/")
    monkeypatch.setattr(distill.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(SystemExit):
        fill(open_cache(), [1, 4], torch.randn(10, 4, 20), torch.randn(V, 20))
    assert "--teacher_cache=5" in capsys.readouterr().err


def test_ids_above_the_largest_int16_and_a_teacher_that_is_sure(monkeypatch):
    """50,304 ids, whose cached form wraps around; the likeliest has all of the probability, and a row is still one."""
    n_ids, head = 50_304, torch.zeros(50_304, 2)
    head[50_000], head[40_000] = torch.tensor([300.0, 0.0]), torch.tensor([200.0, 0.0])
    log_probs = (torch.ones(1, 2) @ head.t()).log_softmax(-1)
    top, ids = log_probs.topk(2)
    assert ids.tolist() == [[50_000, 40_000]]
    others = log_probs.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True) - math.log(n_ids - 2)
    monkeypatch.setattr(distill, "teacher_cache", 2)
    x, weight = torch.ones(1, 3), 0.01 * torch.randn(n_ids, 3)
    row = packed(torch.cat((top, others), -1).half(), ids)
    assert row[0, -1] != 0
    loss, terms = distill.DistillLoss.apply(x, weight, torch.tensor(1.0), ids[0, :1], 1.0, row, None)
    assert loss.item() == pytest.approx(F.cross_entropy(x @ weight.t(), ids[0, :1]).item(), rel=1e-5)


def test_a_missing_row_is_named_and_a_damaged_file_is_filled_again(open_cache, tmp_path, capsys):
    hidden, head = torch.randn(10, 4, 20), torch.randn(V, 20)
    cache = open_cache()
    fill(cache, [1, 9], hidden, head)
    with pytest.raises(SystemExit) as end:
        cache[np.array([1, 2])]
    message = capsys.readouterr().err
    assert end.value.code == 2 and message.count("\n") == 1 and "teacher.cache: a row is missing" in message
    path = tmp_path / "teacher.cache"
    whole = path.read_bytes()
    for length, missing in ((len(whole) - 2, [[9, 9]]), (100, [[1, 9]]), (0, [[1, 9]])):
        path.write_bytes(whole[:length])
        assert fill(open_cache(), [1, 9], hidden, head) == missing and path.read_bytes() == whole


# ---------------------------------------------------------------------------------------------------
# the loops

SHORT = [*TINY, "--max_iters=6", "--lr_decay_iters=6", "--eval_interval=2", "--sample_tokens=0"]
SHORT_SFT = [*SFT, "--max_iters=4", "--lr_decay_iters=4", "--eval_interval=2", "--sample_tokens=0"]
COMPILED = ["--compile=True", "--compile_backend=aot_eager"]  # the graphs of training, without minutes for their code
LOGGED = "train_loss", "ce_loss", "kl_loss", "temperature", "val_loss", "grad_norm"


def train(args, out_dir, *more, **how):
    return run("train_gpt2.py", *args, f"--out_dir={out_dir}", *more, **how)


@pytest.fixture(scope="module")
def teacher(shards, tmp_path_factory):
    """A run of another architecture, another width and more positions than its student."""
    out_dir = tmp_path_factory.mktemp("teacher") / "out"
    train([*TINY, f"--data_dir={shards}", "--sample_tokens=0"], out_dir, "--arch=llama", "--n_embd=48",
          "--max_seq_len=64")
    return out_dir


@pytest.fixture(scope="module")
def runs(teacher, shards, tmp_path_factory):
    """
    Two runs with a learned temperature, from the online teacher and from a cache of all but one of its probabilities;
    their settings and their folder.
    """
    folder = tmp_path_factory.mktemp("runs")
    args = [*SHORT, f"--data_dir={shards}", f"--teacher={teacher}", "--learn_temperature=True",
            "--teacher_temperature=2"]
    assert "Warning" not in train(args, folder / "online")
    output = train(args, folder / "cached", "--teacher_cache=383")
    assert "labelling 52 of 52 rows" in output  # 6 steps of 8 rows, and a batch that is read ahead
    return args, folder


def model_in(out_dir):
    checkpoint = load(out_dir)
    gpt = GPT(GPTConfig(**checkpoint["model_args"])).eval()
    gpt.load_state_dict(checkpoint["model"])
    return gpt


def check_close(one, other, **within):
    one, other = (read_log(out_dir, *LOGGED) for out_dir in (one, other))
    assert one.keys() == other.keys() and len(one) == 6 * 5 + 4
    for key in one:
        assert one[key] == pytest.approx(other[key], **within), key


def test_the_first_step_is_the_formula_and_the_temperature_moves(runs, teacher, shards):
    _, folder = runs
    log = read_log(folder / "online", *LOGGED)
    rows = TokenDataset(str(shards), "train", 32)
    idx, targets = map(torch.from_numpy, rows[sample_indices(range(8), len(rows), 1337)])
    torch.manual_seed(1337)
    student = GPT(GPTConfig(**load(folder / "online")["model_args"]))
    with torch.no_grad():
        x, logits = student.hidden_states(idx), model_in(teacher)(idx)
        loss, terms = formula(x.flatten(0, 1), student.lm_head.weight, targets.flatten(), 0.5, 2.0,
                              logits.flatten(0, 1))
    for key, value in zip(LOGGED, (loss, *terms[:2])):
        assert log[key, 1] == pytest.approx(value.item() / 256, rel=1e-5), key
    assert log["kl_loss", 6] < 0.9 * log["kl_loss", 1] and log["val_loss", 6] < log["val_loss", 0]
    temperatures = [log["temperature", i] for i in range(1, 7)]
    saved = load(folder / "online")["teacher"]["log_temperature"]
    assert len(set(temperatures)) == 6 and math.log(temperatures[5]) == pytest.approx(saved, rel=1e-4)


def test_a_cached_teacher_is_the_online_one(runs):
    online, cached = runs[1] / "online", runs[1] / "cached"
    check_close(online, cached, rel=2e-3)  # float16
    assert read_log(online, "kl_loss") != read_log(cached, "kl_loss")  # so it was read from there


@pytest.mark.parametrize("kind", ["online", "cached"])
def test_interrupted_twice_equals_uninterrupted(runs, tmp_path, kind):
    args, folder = runs
    train(args, tmp_path, f"--teacher_cache={383 * (kind == 'cached')}", "--max_iters=2")
    for stop in (4, 6):
        run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", f"--max_iters={stop}")
    whole, parts = load(folder / kind), load(tmp_path)
    assert whole.keys() == parts.keys()
    for key in whole.keys() - {"config"}:
        assert same(whole[key], parts[key]), key
    assert not [name for name in whole["model"] if "loss_fn" in name]
    assert read_log(folder / kind, *LOGGED) == read_log(tmp_path, *LOGGED)


def test_two_ranks_share_out_the_cache_and_train_the_model_of_one(runs, shards, tmp_path):
    shutil.copytree(shards, tmp_path / "data", ignore=shutil.ignore_patterns("teacher-*"))
    output = train(runs[0], tmp_path / "two", f"--data_dir={tmp_path}/data", "--teacher_cache=383", *COMPILED, ranks=2)
    assert "labelling 56 of 56 rows" in output
    check_close(runs[1] / "cached", tmp_path / "two", abs=1e-5)
    one, two = (list(load(out_dir)["optimizer"]["state"].values())[-1]["exp_avg"]  # of the temperature
                for out_dir in (runs[1] / "cached", tmp_path / "two"))
    assert one.numel() == 1 and one.item() == pytest.approx(two.item(), rel=1e-4)
    assert set(read_log(tmp_path / "two", "recompiles").values()) == {0}


def test_nothing_is_recompiled_with_an_online_teacher(runs, tmp_path):
    train(runs[0], tmp_path / "compiled", *COMPILED)
    check_close(runs[1] / "online", tmp_path / "compiled", abs=1e-4)
    assert set(read_log(tmp_path / "compiled", "recompiles").values()) == {0}


def test_chat_rows_are_taught_packed(teacher, tmp_path):
    torch.manual_seed(0)
    student = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, max_seq_len=64, vocab_size=384))
    torch.save({**load(teacher), "model": student.state_dict(), "model_args": vars(student.config)},
               tmp_path / "base.pt")
    data = jsonl(tmp_path / "chats.jsonl", [turns(f"say {i % 7}", f"{i % 7}" * 9) for i in range(120)])
    args = [*SHORT_SFT, f"--init_from={tmp_path}/base.pt", f"--data={data}", f"--chat_dir={tmp_path}/rows",
            f"--teacher={teacher}", "--learn_temperature=True", "--teacher_temperature=2"]
    run("chat_sft.py", *args, f"--out_dir={tmp_path}/online")
    run("chat_sft.py", *args, f"--out_dir={tmp_path}/cached", "--teacher_cache=383", "--max_iters=2")
    output = run("chat_sft.py", "--init_from=resume", f"--out_dir={tmp_path}/cached", "--max_iters=4",
                 f"--chat_dir={tmp_path}/rows")
    assert "labelling 8 of 18 rows" in output  # of two steps more
    online, cached = (read_log(tmp_path / name, *LOGGED) for name in ("online", "cached"))
    assert online.keys() == cached.keys()
    assert all(online[key] == pytest.approx(cached[key], rel=2e-3) for key in online)

    rows = build_datasets(tmp_path / "rows", str(data), None, BYTES, 64, True, 1337, False)[0].rows
    rows = torch.from_numpy(rows[sample_indices(range(4), len(rows), 1337)].astype(np.int64))
    idx, targets = rows[:, 0], rows[:, 1].masked_fill(rows[:, 1] == E, IGNORE)
    mask, positions = packed_mask_and_positions(idx, E)
    with torch.no_grad():
        x, logits = student.hidden_states(idx, positions, mask), model_in(teacher)(idx, None, positions, mask)
        loss, _ = formula(x.flatten(0, 1), student.lm_head.weight, targets.flatten(), 0.5, 2.0, logits.flatten(0, 1))
    assert online["train_loss", 1] == pytest.approx(loss.item() / (targets != IGNORE).sum().item(), rel=1e-5)


def test_another_teacher_is_refused_on_resume_and_has_a_cache_of_its_own(runs, teacher, trained, tmp_path):
    args, folder = runs
    other = load(teacher)
    other["model"]["lm_head.weight"] += 1e-3
    torch.save(other, tmp_path / "other.pt")
    resume = ["--init_from=resume", f"--out_dir={folder}/online", "--max_iters=8"]
    line = refused("train_gpt2.py", *resume, f"--teacher={tmp_path}/other.pt")
    assert "--teacher: the run was started with another" in line
    assert "--teacher=None" in refused("train_gpt2.py", *resume, "--teacher=None")
    resume = ["--init_from=resume", f"--out_dir={trained}", "--max_iters=22"]
    assert f"--teacher={teacher}" in refused("train_gpt2.py", *resume, f"--teacher={teacher}")
    output = train(args, tmp_path / "o", f"--teacher={tmp_path}/other.pt", "--teacher_cache=383", "--max_iters=0",
                   "--warmup_iters=0", "--lr_decay_iters=0")
    assert "labelling 4 of 4 rows" in output
    for flag in ("--teacher_cache=384", "--teacher_weight=1.5", "--teacher_temperature=0.0"):
        assert flag in refused("train_gpt2.py", *args, flag, f"--out_dir={tmp_path}/p")
    assert "nowhere" in refused("train_gpt2.py", *args, "--teacher=nowhere", f"--out_dir={tmp_path}/p")
