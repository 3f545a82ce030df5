"""Distillation: the loss against its plain formula, the cache against the live teacher, both loops with either."""
import io
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model as model_module
from chat_data import packed_mask_and_positions
from conftest import (TINY, chats, check_close, check_error, check_same_run, error_line, load, new_gpt, read_log,
                      refused, run, same, save_model)
from dataloader import BatchLoader, TokenDataset
from distributed import clip_grad_norm
from extras import distill
from extras.distill import Distillation, TeacherCache, distill_loss, encode_top_k
from model import GPT, IGNORE

N, C, V = 21, 12, 40  # in chunks of 8, the last one not full


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    for module in (model_module, distill):
        monkeypatch.setattr(module, "LOSS_CHUNK", 8)


# -----------------------------------------------------------------------------
# the loss

def inputs(T, n=N):
    """x, weight and T, which get gradients; targets; a teacher's hidden states and head."""
    torch.manual_seed(0)
    params = torch.randn(n, C), torch.randn(V, C), torch.tensor(T)
    targets = torch.randint(0, V, (n,))
    targets[::3] = IGNORE
    return [p.requires_grad_() for p in params], targets, (torch.randn(n, 20), torch.randn(V, 20))


def formula(x, weight, T, targets, w, t):
    """The loss against a teacher with logits t; the sums of CE, KL, agreements and targets."""
    valid, s = targets != IGNORE, x @ weight.t()
    ce = F.cross_entropy(s, targets, ignore_index=IGNORE, reduction="sum")
    log_q, log_p = (s / T).log_softmax(-1), (t / T).log_softmax(-1)
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)[valid].sum()
    agreements = (s.argmax(-1) == t.argmax(-1))[valid].sum()
    return (1 - w) * ce + w * T ** 2 * kl, torch.stack((ce, kl, agreements, valid.sum()))


def cached_logits(t, k):
    """What a cache of k ids knows of the logits t: the ids that it leaves out share the rest evenly, in float16."""
    log_probs, ids = t.log_softmax(-1).sort(descending=True)
    log_probs[:, k:] = log_probs[:, k:].logsumexp(-1, keepdim=True) - math.log(V - k)
    return torch.zeros_like(t).scatter(-1, ids, log_probs.half().float())


def check(ours, expected, params):
    """Compares two losses, each with its sums, and their gradients with respect to `params`."""
    for a, b in zip(ours, expected):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(loss * 0.37, params) for loss, _ in (ours, expected))):
        assert (a - b).abs().max() < 1e-5 * max(1, b.abs().max())


@pytest.mark.parametrize("T, w", [(1.0, 0.5), (2.0, 0.9), (0.5, 1.0), (4.0, 0.0)])
def test_chunks_equal_the_formula_with_all_gradients(T, w):
    params, targets, (hidden, head) = inputs(T)
    t = hidden @ head.t()
    check(distill_loss(*params, targets, w, hidden, head), formula(*params, targets, w, t), params)
    for k in (1, 5, V - 1):
        row = encode_top_k(t.log_softmax(-1), k)
        check(distill_loss(*params, targets, w, row, None), formula(*params, targets, w, cached_logits(t, k)),
              params)


def test_compiled_with_a_cached_teacher_it_equals_the_formula():
    """Live teachers are compiled in the runs below; each chunk is compiled by itself, so one is enough."""
    params, targets, (hidden, head) = inputs(2.0, n=8)
    t = hidden @ head.t()
    loss = torch.compile(lambda *args: distill_loss(*args), fullgraph=True, dynamic=False)
    check(loss(*params, targets, 0.5, encode_top_k(t.log_softmax(-1), 5), None),
          formula(*params, targets, 0.5, cached_logits(t, 5)), params)


def test_a_frozen_head_and_a_fixed_temperature_get_no_gradient_and_the_rest_gets_the_same():
    params, targets, teacher = inputs(2.0)
    whole = torch.autograd.grad(distill_loss(*params, targets, 0.5, *teacher)[0], params)
    for fixed in (1, 2):
        some = [p.detach() if i == fixed else p for i, p in enumerate(params)]
        loss, _ = distill_loss(*some, targets, 0.5, *teacher)
        assert same(torch.autograd.grad(loss, [params[0], params[3 - fixed]]), [whole[0], whole[3 - fixed]])


@pytest.mark.parametrize("vocab_size", [50_304, 2 ** 16, 2 ** 16 + 1, 151_936])
def test_large_ids_and_a_teacher_that_is_sure(vocab_size):
    """As int16, 50,304 ids wrap around. The likeliest has all of the probability, and still its row is not zero."""
    t, likeliest = torch.zeros(1, vocab_size), vocab_size - 300
    t[0, likeliest] = 300
    row = encode_top_k(t.log_softmax(-1), 2)
    assert row[0, -1] != 0 and row.dtype == (torch.int16 if vocab_size <= 2 ** 16 else torch.int32)
    x, weight, target = torch.ones(1, 3), 0.01 * torch.randn(vocab_size, 3), torch.tensor([likeliest])
    loss, _ = distill_loss(x, weight, torch.tensor(1.0), target, 1.0, row, None)
    assert loss.item() == pytest.approx(F.cross_entropy(x @ weight.t(), target).item(), rel=1e-5)


# -----------------------------------------------------------------------------
# its place in a model and a loader

@pytest.fixture
def distill_into(shards, tmp_path):
    """Makes a small GPT, its loader, another GPT that is its teacher, and the Distillation."""
    def new(dtype="float32", max_iters=2, checkpoint=None, max_seq_len=16, tokenizer="bytes", seed=0, data=shards,
            teacher_ids=512, **settings):
        teacher, gpt = (new_gpt("gpt2", seed, n_layer=1, n_head=2, n_embd=width, max_seq_len=16, vocab_size=ids)
                        for width, ids in ((24, teacher_ids), (16, 384)))
        config = {"teacher": str(save_model(tmp_path, teacher, tokenizer)), "data_dir": tmp_path,
                  "teacher_weight": 0.7, "teacher_temperature": 2.0, "learn_temperature": False, "teacher_cache": 0,
                  "batch_size": 2, "gradient_accumulation_steps": 2, **settings}
        loader = BatchLoader(TokenDataset(data, "train", max_seq_len), 2, 1337, 0, 1, torch.device("cpu"))
        return gpt, loader, teacher, Distillation(gpt, loader, max_iters, config, dtype, None, checkpoint)
    return new


def test_it_is_the_loss_of_training_alone_and_in_no_state_dict(distill_into):
    gpt, loader, teacher, distillation = distill_into(learn_temperature=True)
    batch = loader.dataset.get_batch([0, 1], loader.device)
    batch["idx"][:, 7], batch["targets"][:, ::4] = 256, IGNORE
    batch["mask"], batch["positions"] = mask, positions = packed_mask_and_positions(batch["idx"] == 256)
    batch |= loader.transforms[0](batch)
    x, t = gpt.hidden_states(batch["idx"], positions, mask), teacher(batch["idx"], None, positions, mask)[..., :384]
    expected, sums = formula(x.flatten(0, 1), gpt.lm_head.weight, 2.0, batch["targets"].flatten(), 0.7,
                             t.flatten(0, 1))
    ce, kl, agreements, n = sums.tolist()
    logged = {"ce_loss": ce / n, "kl_loss": kl / n, "agreement": agreements / n, "temperature": 2.0}
    for _ in range(2):  # metrics are of the steps since their last call
        assert gpt(**batch).item() == pytest.approx(expected.item(), rel=1e-5)
        assert distillation.metrics() == pytest.approx(logged, rel=1e-5)
    broken = {**batch, "teacher": batch["teacher"] * math.nan}
    assert gpt(**batch).isfinite() and gpt(**broken).isnan()  # the second step is skipped
    assert distillation.metrics() == pytest.approx(logged, rel=1e-5)
    gpt(**broken)
    assert math.isnan(distillation.metrics()["ce_loss"])  # all steps were skipped
    gpt(**batch).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for name, p in gpt.named_parameters() if "loss_fn" not in name])
    gradient = distillation.log_temperature.grad.clone()
    assert clip_grad_norm(gpt, 1e-3) == norm and distillation.log_temperature.grad == gradient  # T is not clipped
    assert gpt.eval()(**batch).item() == pytest.approx(ce, rel=1e-5)

    state = gpt.state_dict()
    assert state.keys() == GPT(gpt.config).state_dict().keys()
    assert dict(gpt.named_parameters()).keys() - state.keys() == {"loss_fn.log_temperature"}
    gpt.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Missing key.*: "transformer.ln_f.bias"\.'):
        gpt.load_state_dict({name: p for name, p in state.items() if name != "transformer.ln_f.bias"})
    assert distillation.sums.any()
    distillation.load_state_dict({**distillation.state_dict(), "log_temperature": 1.5})
    assert distillation.state_dict()["log_temperature"] == 1.5
    assert not distillation.sums.any()  # a rollback took back what they hold
    fixed = distill_into(teacher_temperature=3.0)[-1]
    fixed.load_state_dict(distillation.state_dict())  # a setting, which may change on resume
    assert fixed.metrics()["temperature"] == pytest.approx(3.0)


def check_batch(loader, teacher):
    """The next batch comes with what the teacher says of it."""
    batch = next(loader)
    log_probs = teacher(batch["idx"])[..., :384].log_softmax(-1)  # the rest of its ids is padding
    assert same([*batch["teacher"]], [encode_top_k(row, 5) for row in log_probs])


@pytest.mark.parametrize("cache", [0, 5])
def test_half_precision_is_near(distill_into, cache):
    losses = []
    for dtype in ("float32", "bfloat16", "float16"):
        gpt, loader, *_ = distill_into(dtype, teacher_cache=cache)
        with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
            losses.append(gpt(**next(loader)).item())
    assert len(set(losses)) == 3 and losses[1:] == pytest.approx([losses[0]] * 2, rel=0.02)


def test_the_rows_of_the_whole_run_are_labelled_once(distill_into, capsys, shards, tmp_path):
    def labelled(max_iters, **more):
        made = distill_into(max_iters=max_iters, **{"teacher_cache": 5, **more})
        return capsys.readouterr().out.split(" rows")[0].split("labelling ")[1], *made

    text, _, loader, teacher, distillation = labelled(2)
    assert text == "12 of 12"  # and two batches
    for _ in range(5):  # with the sixth read ahead
        check_batch(loader, teacher)
    assert not capsys.readouterr().out
    checkpoint = {"teacher": distillation.state_dict(), "path": "out/ckpt.pt", "iter_num": 1, "rows_seen": 4}
    assert labelled(2, checkpoint=checkpoint)[0] == "0 of 12"
    assert labelled(3, checkpoint={**checkpoint, "rows_seen": 8})[0] == "8 of 20"  # its first step was rolled back
    assert labelled(2, seed=1)[0] == "12 of 12"  # another teacher has another cache
    for other in {"dtype": "bfloat16"}, {"teacher_cache": 6}, {"max_seq_len": 8}:
        assert labelled(2, **other)[0] == "12 of 12"
    assert len([*tmp_path.glob("teacher-*.cache")]) == 5  # one for each of these, and not a shared one
    path = shutil.copytree(shards, tmp_path / "copy") / "train_000000.bin"
    assert labelled(2, data=path.parent)[0] == "0 of 12"
    content = bytearray(path.read_bytes())
    content[40_000:40_002] = b"a\0"  # in the middle, where the fingerprint does not look
    path.write_bytes(content)
    assert labelled(2, data=path.parent)[0] == "12 of 12"


@pytest.mark.parametrize("settings, words", [
    (dict(max_seq_len=17), "--max_seq_len=17.*16 positions"),
    (dict(tokenizer="gpt2"), "has bytes tokens.*ckpt.pt has gpt2 tokens"),
    (dict(teacher_cache=384), "--teacher_cache=384.*less than.*384"),
    (dict(teacher_ids=300), "has 300 ids, the student 384"),
    (dict(learn_temperature=True, fsdp=True), "--learn_temperature=True"),
    (dict(checkpoint={"teacher": {"digest": "x"}, "path": "o/ckpt.pt"}), "--teacher=.*another.*=o/ckpt.pt"),
])
def test_a_teacher_that_does_not_fit_is_refused(distill_into, settings, words):
    check_error(words, distill_into, **settings)


# -----------------------------------------------------------------------------
# the cache

class Rows:
    """A data set of 10 rows, whose batches are their numbers."""
    max_seq_len = 4

    def __len__(self):
        return 10

    def get_batch(self, indices, device):
        return {"idx": indices.tolist()}


@pytest.fixture
def fill(tmp_path):
    """Labels rows in a cache of the 5 likeliest ids, in batches of 2. Returns the rows that the teacher was run on."""
    torch.manual_seed(0)
    hidden, head = torch.randn(10, 4, 20), torch.randn(V, 20)

    def call(indices, fail_after=99):
        asked = []

        def teacher_forward(batch):
            if len(asked) == fail_after:
                raise InterruptedError
            asked.append(batch["idx"])
            return {"teacher": hidden[batch["idx"]], "teacher_head": head}

        loader = SimpleNamespace(world_size=1, rank=0, batch_size=2, dataset=Rows(), device="cpu")
        call.cache = TeacherCache(tmp_path / "c", Rows(), 5, 384)
        call.cache.fill(np.array(indices), teacher_forward, loader)
        return asked

    call.log_probs = (hidden @ head.t()).log_softmax(-1)
    return call


def test_a_cache_is_continued_where_it_was_interrupted_and_filled_again_where_it_is_damaged(fill, tmp_path):
    with pytest.raises(InterruptedError):
        fill([1, 4, 7, 8], fail_after=1)
    assert fill([1, 4, 5, 7, 8]) == [[5, 7], [8, 5]]  # the last batch repeats a row
    assert fill([1, 4, 5, 7, 8]) == []
    rows = fill.cache[np.array([8, 1])]["teacher"]
    assert type(rows) is np.ndarray
    assert same([*torch.from_numpy(rows)], [encode_top_k(fill.log_probs[i], 5) for i in (8, 1)])
    whole = (tmp_path / "c").read_bytes()
    for length, missing in ((0, [[1, 8]]), (len(whole) // 2, [[8, 8]])):
        (tmp_path / "c").write_bytes(whole[:length])
        assert fill([1, 8]) == missing and (tmp_path / "c").read_bytes()[:length] == whole[:length]


def test_a_full_disk_names_the_cache_and_its_setting(fill, tmp_path, monkeypatch):
    class Full(io.FileIO):
        """A disk with room for half a row: such a file takes what it can, and only the next write is an error."""

        def write(self, row):
            return super().write(bytes(row)[:row.nbytes // 2])

    with monkeypatch.context() as patch:
        patch.setattr(distill, "open", lambda path, mode, buffering=-1: Full(path, mode) if buffering == 0 else
                      open(path, mode), raising=False)
        line = error_line(fill, [0, 1])
    assert f"--teacher_cache=5: {tmp_path}/c: OSError: the disk is full; make room" in line
    assert fill([0, 1]) == [[0, 1]]


def test_a_row_that_is_missing_or_damaged_ends_in_one_line(fill):
    fill([1])
    assert "a row is missing" in error_line(fill.cache.__getitem__, np.array([1, 2]))
    fill.cache.rows[1, 2, 0] = 384  # damaged: not an id of bytes
    assert "holds an id that is not in the vocabulary" in error_line(fill.cache.__getitem__, np.array([1]))


# -----------------------------------------------------------------------------
# the loops

LOGGED = "train_loss", "ce_loss", "kl_loss", "temperature", "val_loss", "grad_norm"


def train(args, out_dir, *more, **how):
    return run("train_gpt2.py", *args, f"--out_dir={out_dir}", *more, **how)


@pytest.fixture(scope="module")
def teacher(shards, tmp_path_factory):
    """A run of another architecture, another width and more positions than its student."""
    out_dir = tmp_path_factory.mktemp("teacher") / "out"
    train([*TINY, f"--data_dir={shards}", "--sample_tokens=0"], out_dir, "--arch=llama", "--n_layer=1", "--n_embd=48",
          "--max_seq_len=64")
    return out_dir


@pytest.fixture(scope="module")
def runs(teacher, shards, tmp_path_factory):
    """The settings and the folder of two runs, from the live teacher and from all but one of its probabilities."""
    folder = tmp_path_factory.mktemp("runs")
    args = [*TINY, "--n_layer=1", "--max_iters=6", "--lr_decay_iters=6", "--eval_interval=2", "--sample_tokens=0",
            f"--data_dir={shards}", f"--teacher={teacher}", "--learn_temperature=True", "--teacher_temperature=2"]
    assert "Warning" not in train(args, folder / "live")
    assert "labelling 56 of 56 rows" in train(args, folder / "cached", "--teacher_cache=383")
    return args, folder


def test_a_student_learns_from_both_losses_and_a_cached_teacher_is_the_live_one(runs):
    log = read_log(runs[1] / "live", *LOGGED)
    assert log["train_loss", 1] == pytest.approx(0.5 * log["ce_loss", 1] + 0.5 * 2 ** 2 * log["kl_loss", 1], rel=1e-5)
    assert log["kl_loss", 6] < 0.9 * log["kl_loss", 1] and log["val_loss", 6] < log["val_loss", 0]
    assert len({log["temperature", i] for i in range(1, 7)}) == 6
    check_close(runs[1] / "live", runs[1] / "cached", *LOGGED, rel=2e-3)  # float16
    assert log != read_log(runs[1] / "cached", *LOGGED)


@pytest.mark.parametrize("kind", ["live", "cached"])
def test_interrupted_equals_uninterrupted(runs, tmp_path, kind):
    args, folder = runs
    train(args, tmp_path, f"--teacher_cache={383 * (kind == 'cached')}", "--max_iters=2")
    train(["--init_from=resume", "--max_iters=6"], tmp_path)
    check_same_run(folder / kind, tmp_path)
    assert read_log(folder / kind, *LOGGED) == read_log(tmp_path, *LOGGED)


def test_two_ranks_compiled_train_the_model_of_one(runs, tmp_path):
    """With graphs as in training, but without minutes for their code."""
    train(runs[0], tmp_path, "--compile=True", "--compile_backend=aot_eager", ranks=2)
    check_close(runs[1] / "live", tmp_path, *LOGGED, abs=1e-4)
    one, two = (list(load(out_dir)["optimizer"]["state"].values())[-1]["exp_avg"]  # of the temperature
                for out_dir in (runs[1] / "live", tmp_path))
    assert one.numel() == 1 and one.item() == pytest.approx(two.item(), rel=1e-4)
    assert set(read_log(tmp_path, "recompiles").values()) == {0}


def test_two_ranks_share_the_labelling(runs, shards, tmp_path):
    shutil.copytree(shards, tmp_path / "data", ignore=shutil.ignore_patterns("teacher-*"))
    output = train(runs[0], tmp_path / "two", f"--data_dir={tmp_path}/data", "--teacher_cache=383", ranks=2)
    assert "labelling 64 of 64 rows" in output
    check_close(runs[1] / "cached", tmp_path / "two", *LOGGED, abs=1e-5)


def test_chat_rows_are_taught_packed(teacher, trained, tmp_path):
    data = chats(tmp_path / "chats.jsonl")
    args = [f"--init_from={trained}", f"--data={data}", f"--chat_dir={tmp_path}/rows", f"--teacher={teacher}",
            "--teacher_temperature=2", "--batch_size=2", "--gradient_accumulation_steps=2", "--eval_iters=4",
            "--log_interval=1", "--max_iters=4", "--warmup_iters=2", "--eval_interval=2", "--sample_tokens=0",
            "--device=cpu", "--dtype=float32", "--compile=False"]
    run("chat_sft.py", *args, f"--out_dir={tmp_path}/live")
    run("chat_sft.py", *args, f"--out_dir={tmp_path}/cached", "--teacher_cache=383", "--max_iters=2")
    output = run("chat_sft.py", "--init_from=resume", f"--out_dir={tmp_path}/cached", "--max_iters=4",
                 f"--chat_dir={tmp_path}/rows")
    assert "labelling 8 of 20 rows" in output  # of two steps more
    check_close(tmp_path / "live", tmp_path / "cached", *LOGGED, rel=2e-3)


def test_a_teacher_cannot_come_or_go_on_resume(runs, teacher, trained):
    live = runs[1] / "live"
    for out_dir, flag in ((live, "--teacher=None"), (trained, f"--teacher={teacher}")):
        assert flag in refused("train_gpt2.py", "--init_from=resume", f"--out_dir={out_dir}", "--max_iters=22", flag)
