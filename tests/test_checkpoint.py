"""Checkpoints: one is always whole; which are kept, resumed, refused, or give way to the one before."""
import copy
import functools
import json
import math
import operator
import os
import resource
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from checkpoint import Checkpointer, describe_model, load_checkpoint, load_model
from conftest import (ROOT, Entry, damage, error_line, fail_writes, load, one_line_or_works, optimizer_config, refused,
                      run, same, save_model, small_gpt)
from model import GPT, GPTConfig
from optim import configure_optimizer
from start import check_out_dir, lock_out_dir

GONE = object()


def new_checkpointer(folder, **entries):
    gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, max_seq_len=8, vocab_size=384))
    facts = {"model_args": asdict(gpt.config), "config": {}, "tokenizer": "bytes", "stage": "base", "data": "digest"}
    state = {"model": gpt, "optimizer": torch.optim.AdamW(gpt.parameters()), **entries}
    return Checkpointer(folder, state, facts)


def saved(folder, *losses, **entries):
    """A folder with a run's checkpoints of step 0, 1, ..., that were evaluated or not (None)."""
    checkpointer = new_checkpointer(folder, **entries)
    for iter_num, val_loss in enumerate(losses):
        checkpointer.save(iter_num, val_loss)
    return folder


def contents(folder):
    """{name: bytes} of the checkpoints, whole or not, in a folder."""
    return {path.name: path.read_bytes() for path in folder.glob("ckpt*")}


# -----------------------------------------------------------------------------
# what is written, and what is kept

@pytest.mark.parametrize("links", [True, False])
def test_the_best_is_a_link_or_a_copy_with_its_own_val_loss(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.stat("no such file"))
    saved(tmp_path, 3.0, 1.5)
    assert os.path.samefile(tmp_path / "ckpt_best.pt", tmp_path / "ckpt.pt") == links
    (tmp_path / "ckpt_best.pt").unlink()  # as if killed before the link: the resumed run evaluates again
    checkpointer = new_checkpointer(tmp_path)
    assert checkpointer.resume(load_checkpoint(tmp_path), 9) == 1
    checkpointer.save(1, 1.5)
    assert load(tmp_path, "ckpt_best.pt")["iter_num"] == 1 and load(tmp_path, "ckpt_prev.pt")["iter_num"] == 0
    for iter_num, val_loss in ((2, None), (3, 1.7), (4, math.nan)):
        checkpointer.save(iter_num, val_loss)
    found = {name: [load(tmp_path, name)[key] for key in ("iter_num", "val_iter", "best_val_loss", "val_loss")]
             for name in contents(tmp_path)}
    assert found.pop("ckpt.pt")[:3] == [4, 4, 1.5]  # its val_loss is not equal to itself
    assert found == {"ckpt_prev.pt": [3, 3, 1.5, 1.7], "ckpt_best.pt": [1, 1, 1.5, 1.5]}


def test_a_loss_that_is_lower_on_resume_is_that_of_the_best(tmp_path):
    """As with other --eval_iters: ckpt_best.pt must not be a file with the loss before."""
    checkpointer = new_checkpointer(saved(tmp_path, 3.0))
    checkpointer.resume(load_checkpoint(tmp_path), 9)
    checkpointer.save(0, 2.0)
    for name in ("ckpt.pt", "ckpt_best.pt"):
        assert [load(tmp_path, name)[key] for key in ("val_loss", "best_val_loss")] == [2.0, 2.0]


def kill_after(calls):
    """From here on, the process is killed before or after one of the calls that touch the disk."""
    def die():
        nonlocal calls
        calls -= 1
        if calls < 0:
            os._exit(9)

    def dying(function):
        def call(*args, **kwargs):
            die()
            result = function(*args, **kwargs)
            die()
            return result
        return call

    for module, name in ((os, "fsync"), (os, "replace"), (os, "link"), (os, "makedirs"), (torch, "save"),
                         (Path, "unlink")):
        setattr(module, name, dying(getattr(module, name)))


def test_killed_while_saving_there_is_always_a_whole_checkpoint(tmp_path):
    ends = []
    while not ends or ends[-1][0]:
        folder = saved(tmp_path / str(len(ends)), 2.0, 1.9)
        checkpointer = new_checkpointer(folder)
        checkpointer.resume(load_checkpoint(folder), 9)
        pid = os.fork()
        if pid == 0:
            try:
                kill_after(len(ends))
                checkpointer.save(2, 1.0)
            finally:
                os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ends.append((code, load_checkpoint(folder)["iter_num"], load(folder, "ckpt_best.pt")["iter_num"]))
    assert set(ends[:-1]) == {(9, 1, 1), (9, 2, 1), (9, 2, 2)} and ends[-1] == (0, 2, 2) and len(ends) > 15


@pytest.mark.parametrize("resuming", [True, False])
def test_a_full_disk_is_a_warning_and_never_the_old_checkpoint(tmp_path, capsys, resuming):
    """That of this run, or of one that it overwrites."""
    saved(tmp_path, 2.0, None, 1.9, None)
    (tmp_path / "ckpt_mine.pt").write_bytes(b"kept")
    before = contents(tmp_path)
    checkpointer = new_checkpointer(tmp_path)
    if resuming:
        checkpointer.resume(load_checkpoint(tmp_path), 9)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before["ckpt.pt"]) // 2, hard))  # no file can grow beyond that
    try:
        checkpointer.save(7, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"WARNING: --out_dir={tmp_path}: step 7 could not be saved" in capsys.readouterr().out
    assert contents(tmp_path) == before and checkpointer.saved_iter == (3 if resuming else None)
    if resuming:
        shutil.rmtree(tmp_path)  # during the run: it is made again
    checkpointer.save(8)
    assert load(tmp_path)["iter_num"] == checkpointer.saved_iter == 8
    assert contents(tmp_path).keys() == ({"ckpt.pt"} if resuming else {"ckpt.pt", "ckpt_mine.pt"})


def test_a_checkpoint_is_read_on_the_cpu(tmp_path, monkeypatch):
    """Else one from a GPU would fill the GPU again."""
    load = torch.load

    def load_on_cpu(*args, map_location, **kwargs):
        assert map_location == "cpu"
        return load(*args, map_location=map_location, **kwargs)

    monkeypatch.setattr(torch, "load", load_on_cpu)
    assert load_checkpoint(saved(tmp_path, 2.0))["iter_num"] == 0


def test_half_a_copy_of_the_best_does_not_stay_on_a_full_disk(tmp_path, monkeypatch, capsys):
    def copy(source, target):
        target.write_bytes(b"half")
        raise OSError("no space")

    monkeypatch.setattr(os, "link", lambda *_: os.stat("no such file"))
    monkeypatch.setattr(shutil, "copyfile", copy)
    assert contents(saved(tmp_path, 2.0)).keys() == {"ckpt.pt"}
    assert "step 0 could not be saved (OSError: no space)" in capsys.readouterr().out


def test_saves_that_fail_are_warnings_and_exit_code_2_if_the_last_one_does(train, trained, tmp_path):
    out_dir = tmp_path / "o"
    output = train(out_dir, patch=fail_writes([10, 20]), code=2)
    for step in (10, 20):
        assert f"step {step} could not be saved (OSError: no space); the last checkpoint is step 0" in output
    assert output.count("error: ") == 1 and "step 20 could not be saved; resume with python " in output
    assert load(out_dir)["iter_num"] == 0 and contents(out_dir).keys() == {"ckpt.pt", "ckpt_best.pt"}
    output = train(out_dir, "--overwrite=True", patch=fail_writes([0, 10, 20]), code=2)
    assert "step 20 could not be saved; nothing of this run is saved" in output
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={out_dir}")
    assert same(load(out_dir)["model"], load(trained)["model"])


def test_saves_between_evaluations_resume_and_a_save_comes_before_hooks_that_fail(train, tmp_path):
    crash = "import features\nfeatures.evaluation_hooks = lambda *_: [lambda i, done: 1 / 0 if i == 8 else {}]"
    a, names = tmp_path / "a", ("ckpt.pt", "ckpt_prev.pt", "ckpt_best.pt")
    train(a, "--sample_tokens=0", "--max_iters=8", "--eval_interval=4", "--save_interval=3", patch=crash, code=1)
    assert [load(a, name)["iter_num"] for name in names] == [8, 6, 8]
    assert [load(a, name)["val_iter"] for name in names] == [8, 4, 8]
    (tmp_path / "b").mkdir()
    shutil.copy(a / "ckpt_prev.pt", tmp_path / "b" / "ckpt.pt")
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/b")
    last, resumed = load(a), load(tmp_path / "b")
    assert all(same(last[key], resumed[key]) for key in ("model", "optimizer", "val_loss", "best_val_loss"))


def test_a_resumed_run_that_validates_on_other_rows_says_so(tmp_path, capsys):
    saved(tmp_path, 3.0)
    for batch_size, eval_iters, said in (4, 1, False), (2, 2, False), (2, 1, True):
        checkpointer = new_checkpointer(tmp_path)
        checkpointer.facts["config"] = {"batch_size": batch_size, "eval_iters": eval_iters}
        checkpointer.resume({**load_checkpoint(tmp_path), "config": {"batch_size": 4, "eval_iters": 1}}, 9)
        warning = "WARNING: validation now reads up to 2 rows, before it read up to 4: if val has more than 2 rows"
        assert (warning in capsys.readouterr().out) == said and checkpointer.facts["best_val_loss"] == 3.0


# -----------------------------------------------------------------------------
# what is read

def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_never_takes_its_place(tmp_path, capsys):
    saved(tmp_path, 3.0, 2.0)
    (tmp_path / "ckpt.pt").write_bytes((tmp_path / "ckpt.pt").read_bytes()[:1000])
    checkpointer = new_checkpointer(tmp_path)
    assert checkpointer.resume(load_checkpoint(tmp_path), 9) == 0
    assert "WARNING: no readable ckpt.pt" in capsys.readouterr().out
    for now, before in ((0, 0), (1, 0), (2, 1)):
        checkpointer.save(now, 3.0)
        assert [load(tmp_path, name)["iter_num"] for name in ("ckpt.pt", "ckpt_prev.pt")] == [now, before]
    (tmp_path / "ckpt.pt").write_bytes(b"")
    (tmp_path / "ckpt_prev.pt").write_bytes(b"PK")
    assert f"{tmp_path}/ckpt.pt: not a readable checkpoint" in error_line(load_checkpoint, tmp_path)


def test_a_size_may_be_zero_if_that_is_its_default(shards, tmp_path, monkeypatch):
    """A new field of a fork, such as a number of experts."""
    path, checkpoint = saved(tmp_path, 1.0) / "ckpt.pt", load(tmp_path)
    torch.save({**checkpoint, "model_args": {**checkpoint["model_args"], "max_seq_len": 0}}, path)
    assert "max_seq_len=0: expected an int of at least 1" in error_line(load_checkpoint, path)
    monkeypatch.setattr(GPTConfig, "max_seq_len", 0)
    assert load_checkpoint(path)["model_args"]["max_seq_len"] == 0


def test_a_checkpoint_of_something_else_or_damaged_inside_is_refused(shards, tmp_path):
    path = saved(tmp_path, 1.0) / "ckpt.pt"
    whole, checkpoint = bytearray(path.read_bytes()), load(tmp_path)
    nanogpt = {"model": {}, "model_args": {"n_layer": 1, "block_size": 32}, "iter_num": 5, "config": {}}
    for other in (nanogpt, [1], {**checkpoint, "model_args": {**checkpoint["model_args"], "heads": 3}}):
        torch.save(other, path)
        assert f"{path}: not a readable checkpoint" in (line := error_line(load_checkpoint, path))
    assert "(it has heads=3, which GPTConfig lacks here)" in line
    whole[len(whole) // 2] ^= 1  # one bit of a weight
    path.write_bytes(whole)
    assert "the checksum of " in error_line(load_checkpoint, path)
    torch.save({**checkpoint, "model_args": {**checkpoint["model_args"], "n_layer": 3}}, path)
    assert str(path) in error_line(load_model, path, "cpu")
    assert str(path) in refused("train_gpt2.py", f"--data_dir={shards}", f"--init_from={path}", "--device=cpu",
                                f"--out_dir={tmp_path}/o")
    torch.save({**checkpoint, "model_args": {**checkpoint["model_args"], "intermediate_size": -1}}, path)
    assert "intermediate_size=-1: expected an int of at least 0" in refused(
        "chat_sft.py", f"--init_from={path}", "--device=cpu", f"--out_dir={tmp_path}/o")


def test_what_a_loss_function_learned_is_left_out_but_on_resume(tmp_path):
    checkpoint = load(saved(tmp_path, 1.0))
    checkpoint["model"]["loss_fn.proj.weight"] = torch.ones(1)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    load_model(tmp_path, "cpu")
    assert "loss_fn.proj.weight" in load_checkpoint(tmp_path, merge=False)["model"]


WEIGHT = "transformer.h.0.mlp.c_fc.weight"
CRAFTED = {  # what is changed -> what it is changed to; GONE: taken out
    "model": [[], {}, {1: torch.zeros(1)}, GONE],
    f"model/{WEIGHT}": ["x", {}, torch.zeros(1), torch.ones(32, 8).to_sparse(), GONE], "model/more": [torch.zeros(1)],
    "config": [[], GONE], "model_args": [[], {}, GONE], "model_args/more": [1],
    "model_args/n_layer": ["1", 1.0, 0, 2, None, True], "model_args/n_head": ["1", 0, 3], "model_args/n_embd": [0, 16],
    "model_args/vocab_size": [384.0, 256], "model_args/max_seq_len": ["8", 4], "model_args/intermediate_size": [-1],
    "model_args/arch": ["x", ["gpt2"], "llama"], "model_args/attention": ["x", "mla"],
    "model_args/dropout": [True, 2.0], "model_args/qk_norm": ["yes"], "model_args/rope_theta": [math.nan],
    "model_args/norm_eps": ["x"], "model_args/gelu": [None],
    "tokenizer": [3, GONE], "stage": [3, GONE], "iter_num": [-1, "3", 10 ** 30, GONE],
    "val_loss": ["3.0", GONE], "val_iter": ["x", GONE], "best_val_loss": ["x", GONE],
    "data": [3, GONE], "rows_seen": ["x", -1],
    "optimizer": [[], None, {"state": {}, "param_groups": []}, {"state": {}}],
    "optimizer/state": [[], None, {0: 3}, {0: []}, GONE], "optimizer/param_groups": [None, "x", [3], [{}]],
    "optimizer/state/0/exp_avg": ["x", None, [], torch.zeros(1), torch.zeros(())],
    "lora": [3, {}, {"alpha": "x", "path": 3, "absolute": None, "fingerprint": 1}]}


def crafted(checkpoint):
    """Yields a description of each, and the changed checkpoint."""
    for path, values in CRAFTED.items():
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        for value in values:
            changed = copy.deepcopy(checkpoint)
            entry = functools.reduce(operator.getitem, parents, changed)
            entry[last] = value
            if value is GONE:
                del entry[last]
            yield f"{path} = {value}", changed


def test_a_crafted_checkpoint_is_refused_in_one_line(tmp_path):
    """All its checksums are right. A script opens it, or a run resumes from it; neither may end in a traceback."""
    checkpointer = new_checkpointer(tmp_path, rows_seen=Entry(8))
    gpt = checkpointer.state["model"]
    checkpointer.state["optimizer"] = optimizer = configure_optimizer(gpt, optimizer_config())
    gpt(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)).backward()
    optimizer.step()
    checkpointer.save(0, 3.0)

    def open_and_resume():
        describe_model(load_model(tmp_path, "cpu")[1])
        checkpointer.resume(load_checkpoint(tmp_path), 9)

    open_and_resume()
    for i, (change, checkpoint) in enumerate(crafted(load(tmp_path))):
        torch.save(checkpoint, tmp_path / "ckpt.pt")
        try:
            line = error_line(open_and_resume)
        except Exception as error:
            pytest.fail(f"{change}: {type(error).__name__}: {error}")
        print(f"{change}: {line}")
    assert i > 80


@pytest.mark.parametrize("name, value, words", [
    ("batch_size", -3, "ckpt.pt: batch_size=-3: expected"), ("dtype", "int8", "ckpt.pt: dtype='int8': expected"),
    ("max_seq_len", "8", "'>' not supported")])
def test_settings_in_a_crafted_checkpoint_are_checked_like_a_flags(trained, tmp_path, name, value, words):
    checkpoint = load(trained)
    checkpoint["config"][name] = value
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert words in refused("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}")


def test_a_checkpoint_sends_no_escape_sequence_to_the_terminal(tmp_path):
    save_model(tmp_path, small_gpt("gpt2"), stage="\x1b[2J", tokenizer="\x9b2J")
    assert "\ufffd[2J model" in describe_model(load_model(tmp_path, "cpu")[1])
    save_model(tmp_path, small_gpt("gpt2"), iter_num="\x1b[2J", model_args={"\x1b[2J": 1})
    assert "\x1b" not in error_line(load_checkpoint, tmp_path)


@given(st.data())
def test_random_damage_is_refused_in_one_line_or_does_no_harm(tmp_path_factory, data):
    """A checkpoint that opens all the same holds the very weights that were saved."""
    whole = tmp_path_factory.getbasetemp() / "whole"
    if not whole.exists():
        saved(whole, 1.0)
    path = whole.with_name("damaged.pt")
    path.write_bytes(damage(data, (whole / "ckpt.pt").read_bytes()))
    opened = one_line_or_works(lambda: load_checkpoint(path))
    assert opened is None or same(opened["model"], load(whole)["model"])


@pytest.mark.parametrize("value", [0, 0.0, [], {}, torch.zeros(3), {"n": 1}])
def test_an_entry_is_restored_whatever_its_value_and_a_missing_one_is_named(tmp_path, capsys, value):
    saved(tmp_path, None, entry=Entry(value), gone=Entry(1), scaler=Entry({}))
    checkpointer = new_checkpointer(tmp_path, entry=Entry("initial"), other=Entry("initial"), scaler=Entry("initial"))
    checkpointer.resume(load_checkpoint(tmp_path), 9)
    assert same(checkpointer.state["entry"].value, value)
    assert [checkpointer.state[name].value for name in ("other", "scaler")] == ["initial"] * 2
    output = capsys.readouterr().out
    assert "has no other: it keeps its initial state" in output and "WARNING: nothing here uses gone of" in output
    checkpointer.restore({**load_checkpoint(tmp_path), "other": 1}, skip=("other",))
    assert checkpointer.state["other"].value == "initial"


def test_frozen_parameters_are_saved_and_a_checkpoint_without_them_is_refused(tmp_path):
    checkpointer = new_checkpointer(tmp_path)
    names = checkpointer.state["model"].requires_grad_(False).state_dict().keys()
    checkpointer.save(0)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint["model"].keys() == names
    del checkpoint["model"]["transformer.h.0.ln_1.bias"]
    line = error_line(checkpointer.resume, checkpoint, 9)
    assert f"{tmp_path}/ckpt.pt" in line and '"transformer.h.0.ln_1.bias"' in line


def test_a_run_resumes_with_its_data_and_no_fewer_steps(tmp_path):
    saved(tmp_path, 1.0, None, None)
    checkpointer, checkpoint = new_checkpointer(tmp_path), load_checkpoint(tmp_path)
    line = error_line(checkpointer.resume, checkpoint, 1)
    assert "--max_iters=1: " in line and "has taken 2 steps" in line
    assert "other data" in error_line(checkpointer.resume, {**checkpoint, "data": "another digest"}, 2)
    assert checkpointer.resume(checkpoint, 2) == 2


def test_a_checkpoint_of_the_second_edition_resumes(trained, tmp_path):
    """Its model has local_heads, it has settings that are gone, and looked for spikes by default."""
    old, runs = load(trained), []
    old["model_args"]["local_heads"] = False
    del old["config"]["local_heads"]
    old["config"] |= {"gelu": "tanh", "keep_interval": 0, "max_faults": 5}
    if (ROOT / "extras" / "rollback.py").exists():
        old["config"] |= {"spike_loss": 3.0, "spike_norm": 100.0}
    old["health"] = {"loss": 5.5, "norm": 2.4, "steps": 20, "faults": 0, "fault_at": -1, "calm_until": 0}
    for name, checkpoint in (("new", load(trained)), ("old", old)):
        (tmp_path / name).mkdir()
        torch.save(checkpoint, tmp_path / name / "ckpt.pt")
        run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path / name}", "--max_iters=23")
        runs.append(load(tmp_path / name))
    new, old = runs
    assert all(same(new[key], old[key]) for key in new.keys() - {"config"})
    assert new["config"].keys() == old["config"].keys()


# -----------------------------------------------------------------------------
# whose folder it is

def test_two_runs_cannot_write_to_one_out_dir(tmp_path):
    def lock(folder):
        return lock_out_dir({"out_dir": str(folder), "init_from": "scratch"})

    first = lock(tmp_path)
    for folder in (tmp_path, tmp_path / "lock" / "a file is no folder"):
        assert "no other run is writing to" in error_line(lock, folder)
    first.lock.release()
    lock(tmp_path)


def test_what_is_in_a_folder_is_overwritten_only_on_request(tmp_path):
    def check(checkpoint=None, **changes):
        check_out_dir({"out_dir": str(tmp_path), "init_from": "scratch", "overwrite": False, "teacher": None,
                       **changes}, resuming=False, checkpoint=checkpoint)

    check()
    for name, word in (("ckpt_best.pt", "replace it"), ("ckpt.pt", "resume it with --init_from=resume, replace it")):
        (tmp_path / name).touch()
        assert f"holds a checkpoint, {name}: {word} with --overwrite=True" in error_line(check)
    check(overwrite=True)
    for read in (tmp_path, f"{tmp_path}/ckpt.pt", f"auto:{tmp_path}/../{tmp_path.name}/ckpt_best.pt"):
        for setting in ("init_from", "teacher"):
            line = error_line(lambda: check(overwrite=True, **{setting: str(read)}))
            assert f"--out_dir={tmp_path} --overwrite=True: holds {read}, which this run reads" in line
    for name in ("absolute", "path"):
        checkpoint = {"lora": {name: f"{tmp_path}/ckpt.pt"}}
        line = error_line(lambda: check(checkpoint, overwrite=True, init_from="adapters/ckpt.pt"))
        assert f"holds {tmp_path}/ckpt.pt, which this run reads" in line


@pytest.mark.parametrize("resuming", [True, False])
def test_a_file_that_no_run_wrote_is_neither_replaced_nor_removed(tmp_path, resuming):
    """What is in a file of a run's names decides: settings, lines of a log, or nothing (the disk was full)."""
    config = {"out_dir": str(tmp_path), "init_from": "resume", "overwrite": True}
    for name, foreign, ours in (
            ("config.json", '{"hidden_size": 768}', json.dumps({"out_dir": "o", "init_from": "scratch"}, indent=1)),
            ("log.jsonl", '{"loss": 3.0, "iter": 1}\n', '{"iter": 0, "tokens": 0, "event": "start"}\n')):
        (tmp_path / name).write_text(foreign)
        line = error_line(check_out_dir, config, resuming, None)
        assert f"--out_dir={tmp_path}: holds a {name} that is not from a training run" in line
        for content in ("", ours):
            (tmp_path / name).write_text(content)
            check_out_dir(config, resuming, None)
    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "loss.png").touch()
    line = error_line(check_out_dir, config, resuming, None)
    assert "its loss.png, with no log.jsonl beside it, would be replaced" in line
    (tmp_path / "ckpt.pt").touch()  # a run's, and so is the picture
    check_out_dir(config, resuming, None)
    (tmp_path / "ckpt.pt").unlink()
    mine = {name: b"mine" for name in ("ckpt.pt.bak", "ckpt.pt.old", "ckpt_20_paper.pt", "lock", "ckpt_prev.txt")}
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    checkpointer = new_checkpointer(tmp_path)
    for iter_num, val_loss in enumerate((3.0, 2.0, 4.0)):
        checkpointer.save(iter_num, val_loss)
    assert {name: (tmp_path / name).read_bytes() for name in mine} == mine
