"""Checkpoints: written so that one is always whole, kept, refused or replaced by the one before when damaged."""
import os
import resource
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import checkpoint as checkpoints
from conftest import ROOT, TINY, Program, damage, fail_writes, load, one_line_or_works, patched, refused, run, same
from model import GPT, GPTConfig

ARGS = [*TINY, "--sample_tokens=0"]


def small_checkpoint(iter_num=1):
    torch.manual_seed(iter_num)
    gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, max_seq_len=8, vocab_size=384))
    return {"model": gpt.state_dict(), "model_args": asdict(gpt.config), "config": {}, "tokenizer": "bytes",
            "stage": "base", "iter_num": iter_num, "val_loss": 1.0, "val_iter": iter_num}


@pytest.fixture
def copied(trained, tmp_path):
    """A run's folder, to be damaged. The last two checkpoints are of step 20: before its evaluation and after it."""
    return shutil.copytree(trained, tmp_path / "copied")


# -----------------------------------------------------------------------------
# what is written, and what is kept

def test_snapshots_and_the_best_are_kept_without_a_copy(shards, tmp_path):
    run("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--eval_interval=5",
        "--keep_interval=10")
    names = "ckpt_10.pt", "ckpt_20.pt", "ckpt_best.pt", "ckpt.pt", "ckpt_prev.pt"
    assert [load(tmp_path, name)["iter_num"] for name in names] == [10, 20, 20, 20, 20]
    assert not (tmp_path / "ckpt_5.pt").exists() and not list(tmp_path.glob("*.tmp"))
    assert os.path.samefile(tmp_path / "ckpt_best.pt", tmp_path / "ckpt.pt")
    # as if killed during the evaluation of step 20, the best, which a resumed run does again
    (tmp_path / "ckpt_best.pt").unlink()
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=22", "--learning_rate=1",
        "--lr_decay_iters=100")
    assert [load(tmp_path, name)["iter_num"] for name in ("ckpt_best.pt", "ckpt.pt")] == [20, 22]


@pytest.mark.parametrize("flags", [["--save_interval=3", "--keep_interval=3"], ["--keep_interval=3"]], ids=len)
def test_saves_between_evaluations_resume_and_the_best_stays_that_of_an_evaluation(shards, tmp_path, flags):
    run("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}/a", "--max_iters=8",
        "--lr_decay_iters=8", "--eval_interval=4", *flags)
    names = "ckpt_3.pt", "ckpt_6.pt", "ckpt_best.pt", "ckpt.pt"
    assert [load(tmp_path / "a", name)["iter_num"] for name in names] == [3, 6, 8, 8]
    assert [load(tmp_path / "a", name)["val_iter"] for name in names] == [0, 4, 8, 8]
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / "ckpt_6.pt", tmp_path / "b" / "ckpt.pt")
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/b")
    assert same(load(tmp_path / "a")["model"], load(tmp_path / "b")["model"])


def test_killed_while_writing_there_is_always_a_whole_checkpoint(tmp_path):
    """At each moment between the calls that touch the disk."""
    (tmp_path / "script.py").write_text(f"""
import os, sys; sys.path.insert(0, {str(ROOT / "tests")!r})
import torch, checkpoint, test_checkpoint

def dying(function):
    def call(*args, **kwargs):
        die()
        result = function(*args, **kwargs)
        die()
        return result
    return call

def die():
    global moment
    moment -= 1
    if moment < 0:
        os._exit(9)

for i in range(100):
    folder, moment = {str(tmp_path)!r} + f"/{{i}}", i
    checkpoint.write_checkpoint(folder, test_checkpoint.small_checkpoint(1))
    if os.fork() == 0:
        for module, name in ((os, "fsync"), (os, "replace"), (os, "link"), (os, "makedirs"), (torch, "save")):
            setattr(module, name, dying(getattr(module, name)))
        checkpoint.write_checkpoint(folder, test_checkpoint.small_checkpoint(2), "ckpt_2.pt")
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print("died" if code == 9 else "lived", checkpoint.load_checkpoint(folder)["iter_num"])
    if code == 0:
        break
""")
    lines = [line for line in run(tmp_path / "script.py").splitlines() if line.startswith(("died", "lived"))]
    assert len(lines) > 12 and lines[-1] == "lived 2"
    assert {"died 1", "died 2"} == set(lines[:-1])


def test_a_full_disk_is_a_warning_and_never_the_old_checkpoint(tmp_path, capsys):
    checkpoints.write_checkpoint(tmp_path, small_checkpoint(1))
    before = (tmp_path / "ckpt.pt").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))  # a file cannot grow beyond that
    try:
        assert not checkpoints.write_checkpoint(tmp_path, small_checkpoint(7))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the checkpoint of step 7 could not be written" in capsys.readouterr().out
    assert (tmp_path / "ckpt.pt").read_bytes() == before and not (tmp_path / "ckpt.pt.tmp").exists()
    assert checkpoints.write_checkpoint(tmp_path, small_checkpoint(8)) and load(tmp_path)["iter_num"] == 8


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_last_save_that_fails_is_tried_again_by_all_ranks(shards, tmp_path, ranks):
    program = patched(tmp_path, "train_gpt2.py", fail_writes([3, 3]))
    output = run(program, *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_iters=3", ranks=ranks)
    assert output.count("trying again in 30 seconds") == 1 and load(tmp_path / "o")["iter_num"] == 3


def test_the_last_evaluation_is_in_the_last_checkpoint_whatever_happened(shards, tmp_path):
    """It fails once its step is saved, and the resumed run does it again; or the save before it fails."""
    args = [*ARGS, f"--data_dir={shards}"]
    crash = ("evaluated = checkpoint.Checkpointer.evaluated\n"
             "def crashing(self, iter_num, val_loss):\n    if iter_num == 20:\n        self.wait()\n        1 / 0\n"
             "    evaluated(self, iter_num, val_loss)\n"
             "checkpoint.Checkpointer.evaluated = crashing")
    run(patched(tmp_path, "train_gpt2.py", crash), *args, f"--out_dir={tmp_path}/crashed", code=1)
    assert load(tmp_path / "crashed")["iter_num"] == 20 and load(tmp_path / "crashed")["val_iter"] == 10
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/crashed")
    run(patched(tmp_path, "train_gpt2.py", fail_writes([20])), *args, f"--out_dir={tmp_path}/unsaved")
    assert same(load(tmp_path / "crashed")["model"], load(tmp_path / "unsaved")["model"])
    for name in ("crashed", "unsaved"):
        last = load(tmp_path / name)
        assert last["val_iter"] == 20 and last["val_loss"] == last["best_val_loss"] < 4.3
        assert load(tmp_path / name, "ckpt_best.pt")["iter_num"] == 20


def test_a_folder_removed_during_the_run_is_made_again(shards, tmp_path):
    program = Program("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_iters=400",
                      "--eval_interval=100")
    assert program.read_until("step 3/")
    shutil.rmtree(tmp_path / "o")
    assert program.end()[0] == 0 and load(tmp_path / "o")["iter_num"] == 400


# -----------------------------------------------------------------------------
# what is read

def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_never_takes_its_place(copied):
    (copied / "ckpt.pt").write_bytes((copied / "ckpt.pt").read_bytes()[:1000])
    damaged = (copied / "ckpt.pt").read_bytes()
    resume = ["--init_from=auto", f"--out_dir={copied}"]
    output = run("train_gpt2.py", *resume, "--max_iters=20")
    assert "WARNING: no readable ckpt.pt" in output and "using the checkpoint before it" in output
    assert load(copied)["iter_num"] == 20 and (copied / "ckpt_damaged.pt").read_bytes() == damaged
    assert "WARNING" not in run("train_gpt2.py", *resume, "--max_iters=21")
    assert load(copied)["iter_num"] == 21 and load(copied, "ckpt_prev.pt")["iter_num"] == 21
    (copied / "ckpt.pt").write_bytes(b"")
    (copied / "ckpt_prev.pt").write_bytes(b"PK")
    assert "not a readable checkpoint" in refused("train_gpt2.py", *resume)


def test_a_checkpoint_of_something_else_or_damaged_inside_is_refused(shards, trained, tmp_path):
    checkpoint, path = load(trained), tmp_path / "ckpt.pt"
    nanogpt = {"model": checkpoint["model"], "optimizer": {}, "model_args": {"n_layer": 2, "block_size": 32},
               "iter_num": 5, "config": {}}
    too_small = {**checkpoint, "model_args": {**checkpoint["model_args"], "n_layer": 3}}
    for other in (nanogpt, too_small, [1]):
        torch.save(other, path)
        assert str(path) in refused("sample.py", f"--checkpoint={path}")
        assert str(path) in refused("train_gpt2.py", f"--data_dir={shards}", f"--init_from={path}", "--device=cpu",
                                    f"--out_dir={tmp_path}/o")
    whole = bytearray((trained / "ckpt.pt").read_bytes())
    whole[len(whole) // 2] ^= 1  # one bit of a weight
    path.write_bytes(whole)
    assert "not a readable checkpoint" in refused("sample.py", f"--checkpoint={path}")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_damage_is_refused_in_one_line_or_does_no_harm(tmp_path, capsys, data):
    """A checkpoint that opens all the same holds the very weights that were saved."""
    checkpoint = small_checkpoint()
    checkpoints.write_checkpoint(tmp_path / "whole", checkpoint)
    path = tmp_path / "ckpt.pt"
    path.write_bytes(damage(data, (tmp_path / "whole" / "ckpt.pt").read_bytes()))
    opened = one_line_or_works(capsys, lambda: checkpoints.load_checkpoint(path))
    assert opened is None or same(opened["model"], checkpoint["model"])


# -----------------------------------------------------------------------------
# whose folder it is

def test_two_runs_cannot_write_to_one_out_dir(shards, tmp_path):
    args = [*ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--max_iters=3000"]
    program = Program("train_gpt2.py", *args)
    assert program.read_until("step 2/")
    assert "no other run is writing to" in refused("train_gpt2.py", *args, "--overwrite=True")
    program.send("SIGTERM")
    assert program.end()[0] == 0


def test_kept_checkpoints_and_models_of_others_are_not_overwritten(shards, tmp_path):
    args = [*ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}"]
    (tmp_path / "ckpt_best.pt").write_bytes(b"kept")
    for init_from in ("scratch", "auto"):
        assert "ckpt_best.pt" in refused("train_gpt2.py", *args, f"--init_from={init_from}")
    (tmp_path / "ckpt_best.pt").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "Hugging Face" in refused("train_gpt2.py", *args, "--overwrite=True")


def test_an_overwritten_run_leaves_other_files_and_is_not_what_the_new_one_reads(shards, trained, tmp_path):
    out_dir = shutil.copytree(trained, tmp_path / "o")
    shutil.copy(out_dir / "ckpt.pt", out_dir / "ckpt_mine.pt")
    args = [*TINY, f"--data_dir={shards}", f"--out_dir={out_dir}", "--overwrite=True", "--max_iters=2"]
    for given in (f"--init_from={out_dir}/ckpt_mine.pt", f"--init_from={out_dir}"):
        line = refused("train_gpt2.py", *args, given)
        assert f"--out_dir={out_dir}" in line and "which this run reads" in line
    assert same(load(out_dir)["model"], load(trained)["model"])
    run("train_gpt2.py", *args)
    assert load(out_dir)["iter_num"] == 2 and (out_dir / "ckpt_mine.pt").exists()
    assert load(out_dir, "ckpt_prev.pt")["iter_num"] == 2


def test_a_hook_that_swaps_the_weights_does_not_swap_those_that_are_saved(shards, trained, tmp_path):
    """On a slow disk, where the checkpoint of the step would still be under way."""
    swap = """
import sample, torch

def sample_hook(model, *_, **__):
    @torch.no_grad()
    def hook(iter_num, done):
        weights = [p.clone() for p in model.parameters()]
        for p in model.parameters():
            p.zero_()
        time.sleep(0.5)
        for p, kept in zip(model.parameters(), weights):
            p.copy_(kept)
        return {}
    return hook

sample.sample_hook, write = sample_hook, checkpoint.write_checkpoint
checkpoint.write_checkpoint = lambda *args: time.sleep(0.3) or write(*args)
"""
    run(patched(tmp_path, "train_gpt2.py", swap), *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o")
    for name in ("ckpt_prev.pt", "ckpt.pt"):
        assert same(load(tmp_path / "o", name)["model"], load(trained, name)["model"])


# -----------------------------------------------------------------------------
# one more thing in a checkpoint

class Entry:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def new_checkpointer(folder, **entries):
    gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, max_seq_len=8, vocab_size=384))
    state = {"model": gpt, "optimizer": torch.optim.AdamW(gpt.parameters()), **entries}
    facts = {**small_checkpoint(), "config": dict(keep_interval=0, overwrite=True,
                                                   init_from="scratch", teacher=None)}
    for key in ("model", "iter_num", "val_loss", "val_iter"):
        del facts[key]
    return checkpoints.Checkpointer(folder, state, facts, resuming=False)


@pytest.mark.parametrize("value", [0, 0.0, [], torch.zeros(3), {"n": 1}])
def test_an_entry_is_restored_whatever_its_value_and_a_missing_one_is_named(tmp_path, capsys, value):
    first = new_checkpointer(tmp_path, entry=Entry(value))
    first.save(1)
    first.wait()
    first.lock.release()
    second = new_checkpointer(tmp_path, entry=Entry("initial"), other=Entry("initial"))
    second.restore()
    assert same(second.state["entry"].value, value) and second.state["other"].value == "initial"
    assert "has no other: it keeps its initial state" in capsys.readouterr().out


def test_an_entry_that_could_not_be_read_again_or_has_a_facts_name_ends_the_first_save(tmp_path):
    checkpointer = new_checkpointer(tmp_path / "value", entry=Entry(np.float64(0.5)))
    checkpointer.save(1)
    with pytest.raises(Exception, match="numpy"):
        checkpointer.wait()
    assert not (tmp_path / "value" / "ckpt.pt").exists()
    with pytest.raises(TypeError, match="stage"):
        new_checkpointer(tmp_path / "name", stage=Entry(1)).save(1)
