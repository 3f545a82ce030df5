"""What a run survives: signals, kills, spikes, damaged and missing files, full disks, a second run."""
import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import runtime
from configurator import configure
from conftest import ROOT, TINY, read_log, refused, run, write_shards
from model import GPT, GPTConfig
from prepare_data import Windows, get_tokenizer, load_conversations, read_meta
from test_train import load, same

ARGS = [*TINY, "--sample_tokens=0"]


def start(script, *args, ranks=1, torchrun=()):
    """Starts a script and leaves it running."""
    launcher = [sys.executable, "-u"]
    if ranks > 1 or torchrun:
        launcher = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *torchrun]
    return subprocess.Popen([*launcher, str(ROOT / script), *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            start_new_session=True)


def read_until(program, word):
    """What a program prints, up to a word in it."""
    output = b""
    while word.encode() not in output:
        line = program.stdout.readline()
        assert line, output.decode(errors="replace")[-3000:]
        output += line
    return output.decode(errors="replace")


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """An undisturbed run of 60 steps."""
    out_dir = tmp_path_factory.mktemp("whole") / "out"
    run("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={out_dir}", "--max_iters=60")
    return out_dir


def equals(whole, out_dir):
    """Ends where the undisturbed run ends, to the bit, and its log says the same of each step."""
    a, b = load(whole), load(out_dir)
    for key in ("model", "optimizer", "iter_num", "rows_seen", "val_loss", "health"):
        assert same(a[key], b[key]), key
    one, other = (read_log(folder, "train_loss", "val_loss") for folder in (whole, out_dir))
    assert one == other


# ---------------------------------------------------------------------------------------------------
# signals

@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_saves_the_step_and_ends_with_code_0(shards, whole, tmp_path, name):
    args = [*ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--max_iters=60", "--init_from=auto"]
    program = start("train_gpt2.py", *args)
    read_until(program, "step 3/60")
    program.send_signal(getattr(signal, name))
    program.send_signal(getattr(signal, name))  # forwarded twice, as schedulers do: counts as one
    rest = program.communicate(timeout=60)[0].decode()
    assert program.returncode == 0 and name in rest, rest
    step = load(tmp_path)["iter_num"]
    assert f"stopped after step {step}, which is saved; go on with python train_gpt2.py --init_from=resume" in rest and 3 <= step < 60
    output = run("train_gpt2.py", *args)  # the same command: auto goes on
    assert f"resumed at step {step}" in output
    equals(whole, tmp_path)


def test_a_second_signal_ends_at_once(tmp_path):
    code = ("import os, signal, sys, time; sys.path.insert(0, %r); import runtime; sys.excepthook = runtime.explain; runtime.catch_signals()\n"
            "os.kill(os.getpid(), signal.SIGTERM); runtime.stop_asked = (runtime.stop_asked[0], time.monotonic() - 6)\n"
            "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30); print('still here')") % str(ROOT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "interrupted" in done.stderr and "still here" not in done.stdout and done.returncode != 0


def test_a_signal_to_torchrun_saves_on_all_ranks_together(shards, tmp_path):
    signals = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"
    program = start("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--max_iters=2000", ranks=2, torchrun=[signals])
    read_until(program, "step 3/2000")
    program.send_signal(signal.SIGUSR1)
    rest = program.communicate(timeout=90)[0].decode()
    assert f"stopped after step {load(tmp_path)['iter_num']}, which is saved" in rest, rest


# ---------------------------------------------------------------------------------------------------
# kills

def kill_and_go_on(script, args, out_dir, kills, rng, ranks=1):
    """Kills a run `kills` times at random moments, goes on each time with the same command, and lets it end. -> resumes seen."""
    resumes = 0
    for _ in range(kills):
        program = start(script, *args, ranks=ranks)
        try:
            read_until(program, rng.choice(["evaluating", "step ", "step 1/", "data: ", "/60: loss"]))
            time.sleep(rng.uniform(0, 0.6))
        except AssertionError:  # it had ended already
            pass
        os.killpg(program.pid, signal.SIGKILL)
        resumes += b"resumed at step" in program.communicate()[0]
        if runtime.found_checkpoint(out_dir):
            runtime.load_checkpoint(out_dir)  # ends the test where none can be read
    output = run(script, *args)
    return resumes + ("resumed at step" in output)


@pytest.mark.faults
def test_killed_at_random_moments_training_ends_as_if_undisturbed(shards, whole, tmp_path, kills):
    args = [*ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--max_iters=60", "--init_from=auto", "--eval_interval=10"]
    print("resumes:", kill_and_go_on("train_gpt2.py", args, tmp_path, kills, random.Random(1)))
    equals(whole, tmp_path)


@pytest.mark.faults
def test_killed_at_random_moments_chat_tuning_ends_as_if_undisturbed(whole, tmp_path, kills):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"q{i % 7}"}, {"role": "assistant", "content": "a" * (i % 5 + 1)}]}) + "\n" for i in range(200)))
    args = ["--batch_size=2", "--gradient_accumulation_steps=2", "--eval_iters=4", "--log_interval=1", "--learning_rate=3e-3", "--max_iters=60",
            "--eval_interval=10", "--sample_tokens=0", "--device=cpu", "--dtype=float32", "--compile=False", f"--data={tmp_path}/chats.jsonl",
            f"--init_from=auto:{whole}"]
    run("chat_sft.py", *args, f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/whole")
    args += [f"--chat_dir={tmp_path}/rows2", f"--out_dir={tmp_path}/killed"]
    print("resumes:", kill_and_go_on("chat_sft.py", args, tmp_path / "killed", kills, random.Random(2)))
    equals(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.faults
def test_killed_at_random_moments_preparation_ends_with_the_same_bytes(tmp_path, kills):
    with open(tmp_path / "texts.jsonl", "w") as f:
        for i in range(3000):
            f.write(json.dumps({"text": f"document {i} " * (i % 50 + 1)}) + "\n")
    args = [f"--files={tmp_path}/texts.jsonl", "--tokenizer=bytes", "--shard_size=50000", "--val_tokens=5000", "--num_threads=1"]
    run("prepare_data.py", *args, f"--data_dir={tmp_path}/whole")
    rng = random.Random(3)
    for _ in range(kills):
        program = start("prepare_data.py", *args, f"--data_dir={tmp_path}/killed")
        time.sleep(rng.uniform(0.5, 4))
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
    run("prepare_data.py", *args, f"--data_dir={tmp_path}/killed")
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert all((tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes() for name in files)


def test_killed_while_saving_there_is_always_a_whole_checkpoint(tmp_path):
    """At each of the moments between the calls that touch the disk."""
    for moment in range(12):
        folder = tmp_path / str(moment)
        code = f"""
import os, sys; sys.path.insert(0, {str(ROOT)!r})
import torch, runtime
from dataclasses import asdict
from model import GPT, GPTConfig
gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, max_seq_len=8, vocab_size=384))
def checkpoint(i): return dict(model=gpt.state_dict(), model_args=asdict(gpt.config), config={{}}, tokenizer="bytes", stage="base", iter_num=i, val_loss=1.0, val_iter=i)
runtime.save_checkpoint({str(folder)!r}, checkpoint(1))
calls = [0]
def dying(function):
    def call(*args, **kwargs):
        for at in (0, 1):  # before it, and behind it
            if calls[0] == {moment}: os._exit(9)
            calls[0] += 1
            if at == 0: result = function(*args, **kwargs)
        return result
    return call
for module, name in ((os, "fsync"), (os, "replace"), (torch, "save"), (os, "makedirs")): setattr(module, name, dying(getattr(module, name)))
runtime.save_checkpoint({str(folder)!r}, checkpoint(2))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 9 or moment >= 10, (moment, done.stderr)
        assert runtime.load_checkpoint(folder)["iter_num"] in (1, 2), moment


# ---------------------------------------------------------------------------------------------------
# ranks

def test_from_two_ranks_to_one_and_back_the_rows_are_the_same(shards, whole, tmp_path):
    run("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--max_iters=20", "--lr_decay_iters=60", ranks=2)
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=40")
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=60", ranks=2)
    one, other = (read_log(folder, "train_loss", "val_loss") for folder in (whole, tmp_path))
    assert one.keys() == other.keys() and load(whole)["rows_seen"] == load(tmp_path)["rows_seen"]
    for (key, step), value in one.items():
        assert value == pytest.approx(other[key, step], abs=1e-5 if step <= 20 else 1e-4), (key, step)


@pytest.mark.parametrize("extra", [[], ["--arch=llama", "--attention=mla", "--kv_lora_rank=8", "--recompute=True"], ["--compile=True"],
                                   ["--optimizer=adamw_spam", "--spam_interval=10"]],
                         ids=["gpt2", "llama_mla_recompute", "compiled", "adamw_spam"])
def test_a_sharded_model_is_the_model(shards, tmp_path, extra):
    """fsdp against one rank: losses, samples, scores; its checkpoint goes on whole, and the whole one's sharded."""
    (tmp_path / "tasks" / "hellaswag").mkdir(parents=True)
    (tmp_path / "tasks" / "hellaswag" / "test.jsonl").write_text("".join(json.dumps(
        {"ind": i, "ctx": "the cat", "endings": ["sat", "ran", "on", f"{i}"], "label": str(i % 4)}) + "\n" for i in range(7)))
    args = [*TINY, *extra, f"--data_dir={shards}", "--eval_tasks=hellaswag", f"--task_dir={tmp_path}/tasks", "--eval_iters=3"]
    outputs = [run("train_gpt2.py", *args, f"--out_dir={tmp_path}/whole"),
               run("train_gpt2.py", *args, f"--out_dir={tmp_path}/sharded", "--fsdp=True", ranks=2)]
    keys = "train_loss", "val_loss", "grad_norm", "hellaswag_acc", "recompiles"
    whole, sharded = (read_log(tmp_path / name, *keys) for name in ("whole", "sharded"))
    assert whole.keys() == sharded.keys()
    for key, value in whole.items():
        assert sharded[key] == pytest.approx(value, abs=1e-4), key
    a, b = load(tmp_path / "whole"), load(tmp_path / "sharded")
    assert a["model"].keys() == b["model"].keys() and a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys()
    assert all(torch.allclose(a["model"][name], b["model"][name], atol=1e-3) for name in a["model"])
    assert [output.split("----- sample")[1].split("-----")[0] for output in outputs][0] == outputs[1].split("----- sample")[1].split("-----")[0]
    if extra:
        return
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/sharded", "--fsdp=False", "--max_iters=24")
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/whole", "--fsdp=True", "--max_iters=24", ranks=2)
    whole, sharded = (read_log(tmp_path / name, "train_loss", "val_loss") for name in ("whole", "sharded"))
    assert whole["train_loss", 24] == pytest.approx(sharded["train_loss", 24], abs=1e-3)


def test_compiled_and_interrupted_equals_compiled_and_uninterrupted(shards, tmp_path, ranks=2):
    args = [*ARGS, "--compile=True", f"--data_dir={shards}", "--eval_interval=5", "--max_iters=10", "--lr_decay_iters=10"]
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/whole", ranks=ranks)
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/parts", "--max_iters=5", ranks=ranks)
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/parts", "--max_iters=10", ranks=ranks)
    equals(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("extra", [[], ["--optimizer=muon"], ["--optimizer=muon", "--fsdp=True"]], ids=["adamw", "muon", "muon_sharded"])
def test_three_ranks_interrupted_equal_three_uninterrupted(shards, tmp_path, extra):
    """Of two ranks a sum is the same in any order; of three it is the order in which DDP has laid out the gradients."""
    args = [*ARGS, *extra, f"--data_dir={shards}", "--gradient_accumulation_steps=3", "--max_iters=8", "--lr_decay_iters=8", "--eval_interval=4"]
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/whole", ranks=3)
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/parts", "--max_iters=4", ranks=3)
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/parts", "--max_iters=8", ranks=3)
    equals(tmp_path / "whole", tmp_path / "parts")


def patched(folder, script, patch):
    """A script that runs another with something of runtime's replaced: what goes wrong there."""
    (folder / "patched.py").write_text(f"import runpy, runtime, sys, time\n{patch}\nrunpy.run_path({str(ROOT / script)!r}, run_name='__main__')\n")
    return folder / "patched.py"


def test_figures_are_those_of_the_last_evaluation_whatever_it_took(shards, tmp_path):
    """The last evaluation fails and is done again on resume; the save before it fails; a checkpoint is damaged before a spike."""
    args = [*ARGS, f"--data_dir={shards}"]
    fails = ("plot, save, left = runtime.plot_logs, runtime.save_checkpoint, [10, 20]\n"
             "runtime.save_checkpoint = lambda *args: save(*args) and left.remove(args[1]['iter_num']) is None\n"
             "def plot_or_fail(paths, picture):\n    if '\"iter\": 20' not in open(paths[0]).read():\n        return plot(paths, picture)\n"
             "    while left: time.sleep(0.01)\n    raise RuntimeError\nruntime.plot_logs = plot_or_fail")  # once step 20 is saved
    run(patched(tmp_path, "train_gpt2.py", fails), *args, f"--out_dir={tmp_path}/failed", code=1)
    assert load(tmp_path / "failed")["val_iter"] == 10
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/failed")
    second = "save, calls = runtime.save_checkpoint, []\nruntime.save_checkpoint = lambda *args: calls.append(0) or len(calls) != 2 and save(*args)"
    run(patched(tmp_path, "train_gpt2.py", second), *args, f"--out_dir={tmp_path}/unsaved")
    for name in ("failed", "unsaved"):
        last = load(tmp_path / name)
        assert last["val_iter"] == 20 and last["val_loss"] == last["best_val_loss"] < 4.3 and load_iter(tmp_path / name / "ckpt_best.pt") == 20


def test_a_spike_with_the_checkpoint_damaged_goes_back_to_the_one_before(tmp_path):
    damage = (f"find = runtime.find_fault\ndef damaged_before(health, step, *rest):\n    if step == 72 and not health['calm_until']:\n"
              f"        open({str(tmp_path / 'o' / 'ckpt.pt')!r}, 'wb').write(b'PK damaged')\n    return find(health, step, *rest)\n"
              f"runtime.find_fault = damaged_before")
    output = run(patched(tmp_path, "train_gpt2.py", damage), *ARGS, f"--data_dir={poisoned(tmp_path / 'data', [75])}", "--max_iters=79",
                 "--spike_loss=1.5", "--keep_interval=10", f"--out_dir={tmp_path}/o")
    assert "back to step 60, and on past these rows" in output and (tmp_path / "o" / "ckpt_damaged.pt").exists()
    assert [load_iter(tmp_path / "o" / name) for name in ("ckpt.pt", "ckpt_70.pt")] == [79, 70]  # 70 shared ckpt.pt's bytes, and is saved anew


@pytest.mark.parametrize("script, extra", [("train_gpt2.py", ["--optimizer=muon"]), ("train_gpt2.py", ["--fsdp=True"]), ("chat_sft.py", ["--fsdp=True"])])
def test_a_last_save_that_fails_is_tried_again_by_all_ranks(shards, whole, tmp_path, script, extra):
    program = patched(tmp_path, script, "save, sleep, left = runtime.save_checkpoint, time.sleep, [1, 1]\n"
                      "runtime.save_checkpoint = lambda *args: False if left and left.pop() else save(*args)\n"
                      "time.sleep = lambda seconds: sleep(min(seconds, 0.1))")
    if script == "chat_sft.py":
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": [
            {"role": "user", "content": f"a{i}"}, {"role": "assistant", "content": "b"}]}) + "\n" for i in range(9)))
        args = [f"--init_from={whole}", f"--data={tmp_path}/chats.jsonl", f"--chat_dir={tmp_path}/rows", "--batch_size=1", "--compile=False",
                "--gradient_accumulation_steps=2", "--dtype=float32", "--device=cpu", "--sample_tokens=0"]
    else:
        args = [*ARGS, f"--data_dir={shards}"]
    output = run(program, *args, *extra, f"--out_dir={tmp_path}/o", "--max_iters=3", ranks=2)
    assert output.count("trying again in 30 seconds") == 1 and load(tmp_path / "o")["iter_num"] == 3


def test_a_killed_rank_ends_all_and_torchrun_starts_them_again_where_they_were(shards, tmp_path):
    args = [*ARGS, f"--data_dir={shards}", "--max_iters=60", "--eval_interval=10"]
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/whole", ranks=2)
    program = start("train_gpt2.py", *args, f"--out_dir={tmp_path}/killed", "--init_from=auto", ranks=2, torchrun=["--max-restarts=1"])
    read_until(program, "step 15/60")
    children = subprocess.run(["pgrep", "-P", str(program.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    rest = program.communicate(timeout=120)[0].decode()
    assert program.returncode == 0 and "resumed at step" in rest and "error: another rank is gone" in rest, rest[-3000:]
    equals(tmp_path / "whole", tmp_path / "killed")


# ---------------------------------------------------------------------------------------------------
# health

def poisoned(folder, steps, seed=1337):
    """Shards in which the rows of these steps of TINY's run are noise."""
    data = write_shards(folder)
    shard = np.fromfile(data / "train_000000.bin", dtype="<u2")
    order = np.random.default_rng((seed, 0)).permutation((len(shard) - 513) // 32)
    for step in steps:
        for window in order[8 * step:8 * step + 8]:
            shard[512 + 32 * window:512 + 32 * window + 32] = np.random.default_rng(step).integers(0, 256, 32)
    shard.tofile(data / "train_000000.bin")
    return data


def test_a_spike_rolls_back_to_the_last_checkpoint_and_goes_on_past_it(tmp_path):
    data = poisoned(tmp_path / "data", [75])
    args = [*ARGS, f"--data_dir={data}", "--max_iters=90", "--spike_loss=1.5", "--rollback_lr=0.5", "--init_from=auto",
            "--sparsity=0.3", "--prune_begin=10", "--prune_end=80", "--prune_interval=3"]  # at 70 and 73: of these the rollback undoes one
    output = run("train_gpt2.py", *args, f"--out_dir={tmp_path}/o")
    assert "is a spike: over 1.5 times its average" in output and "back to step 70, and on past these rows" in output
    log = read_log(tmp_path / "o", "tokens", "lr", "rollbacks")
    assert log["tokens", 90] == (90 + 6) * 256 and log["rollbacks", 90] == 1  # five good steps and the bad one were for nothing
    assert log["lr", 90] == pytest.approx(0.5 * (6e-5 + (3e-3 - 6e-5) * 0.5 * (1 + math.cos(math.pi * 87 / 88))), rel=1e-4)
    assert not math.isnan(load(tmp_path / "o")["val_loss"]) and runtime.read_log(tmp_path / "o" / "log.jsonl")[1]["rollback"]
    entries = map(json.loads, (tmp_path / "o" / "log.jsonl").read_text().splitlines())
    pruned = [(entry["iter"], entry["sparsity"]) for entry in entries if "sparsity" in entry and entry["iter"] in (70, 71, 73)]
    assert pruned[:3] == pruned[3:] and [i for i, _ in pruned[:3]] == [70, 71, 73] and pruned[0][1] == pruned[1][1] < pruned[2][1]
    # interrupted behind the rollback, it goes the same way
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/p", "--max_iters=80", "--lr_decay_iters=90")
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/p", "--lr_decay_iters=90")
    assert all(same(load(tmp_path / "o")[key], load(tmp_path / "p")[key]) for key in ("model", "masks"))


def test_a_spike_rolls_back_to_a_checkpoint_of_another_precision(tmp_path):
    args = [*ARGS, f"--data_dir={poisoned(tmp_path / 'data', [65])}", f"--out_dir={tmp_path}/o", "--max_iters=67", "--spike_loss=1.5", "--eval_interval=60"]
    run("train_gpt2.py", *args, "--max_iters=60", "--lr_decay_iters=67")
    output = run("train_gpt2.py", *args, "--init_from=resume", "--dtype=float16")
    assert "back to step 60" in output and load(tmp_path / "o")["iter_num"] == 67


def test_adamw_spam_clips_what_noise_brings(tmp_path):
    """Letters that text has not hold tiny second moments; then come the rows of step 25. Until their gradient it is AdamW's run."""
    data = poisoned(tmp_path / "data", [25])
    logs = []
    for optimizer in ("adamw", "adamw_spam"):
        run("train_gpt2.py", *ARGS, f"--data_dir={data}", f"--out_dir={tmp_path / optimizer}", "--max_iters=26", f"--optimizer={optimizer}")
        logs.append(read_log(tmp_path / optimizer, "train_loss", "grad_norm"))
    adamw, spam = logs
    assert all(adamw[key] == spam[key] for key in adamw if key != ("grad_norm", 26)) and spam["grad_norm", 26] < 0.9 * adamw["grad_norm", 26]


def test_without_a_way_out_the_run_stops_with_its_last_checkpoint(tmp_path):
    data = poisoned(tmp_path / "data", range(75, 150))
    output = run("train_gpt2.py", *ARGS, f"--data_dir={data}", f"--out_dir={tmp_path}/o", "--max_iters=90", "--spike_loss=1.5", "--max_faults=3", code=2)
    assert "fault 3 without a good step beyond the first: stopped. The last good checkpoint, step 70, is in" in output
    assert load(tmp_path / "o")["iter_num"] == 70


@pytest.mark.parametrize("losses, norms, faults", [
    ([3.0] * 60 + [8.9, 9.5, 3.0, math.nan], [1.0] * 64, [61, 63]),
    ([3.0] * 60, [1.0] * 55 + [9.0, 120.0] + [1.0] * 3, [56]),
    ([3.0, 30.0, 3.0], [1.0, 1.0, math.inf], [2]),  # no average to speak of yet
])
def test_faults_of_a_step(losses, norms, faults):
    health = runtime.new_health()
    found = [i for i, (loss, norm) in enumerate(zip(losses, norms)) if runtime.find_fault(health, i, loss, norm, 3.0, 100.0)]
    assert found == faults


def test_check_health_finds_what_is_wrong_and_nothing_where_nothing_is(shards, tmp_path, capsys):
    args = [*ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--check_health=True"]
    output = run("train_gpt2.py", *args, "--arch=llama", "--embed_norm=True", "--optimizer=muon")
    assert "PROBLEM" not in output and output.count("ok ") == 5, output
    output = run("train_gpt2.py", *args)
    assert output.count("ok   ") == 5 and "PROBLEM" not in output and not runtime.found_checkpoint(tmp_path / "o")
    output = run("train_gpt2.py", *args, "--learning_rate=0", "--min_lr=0", code=1)
    assert "PROBLEM one micro-batch" in output
    gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, max_seq_len=8, vocab_size=384))
    gpt.transformer.h[0].mlp.c_proj.weight.data.zero_()  # nothing comes back to the layer before
    x = torch.arange(16).view(2, 8)
    assert not runtime.check_model(gpt, (x, x), torch.optim.AdamW(gpt.parameters()), steps=2)
    for dtype in (torch.float32, torch.bfloat16):
        gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=32, max_seq_len=8, vocab_size=384))
        gpt.transformer.wte.requires_grad_(False).weight.mul_(20)  # only what autocast casts can learn
        matrices = [p for p in gpt.transformer.h.parameters() if p.dim() == 2]
        runtime.check_model(gpt, (x, x), torch.optim.AdamW(matrices, lr=1e-2), torch.autocast("cpu", dtype, enabled=dtype != torch.float32))
        first, last = re.findall(r"its loss went from (.*) to (.*) in", capsys.readouterr().out)[-1]
        assert float(last) < 0.95 * float(first), dtype


# ---------------------------------------------------------------------------------------------------
# files

def test_milestones_and_the_best_are_kept(shards, tmp_path):
    run("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--eval_interval=5", "--keep_interval=10")
    assert [load_iter(tmp_path / name) for name in ("ckpt_10.pt", "ckpt_20.pt", "ckpt_best.pt", "ckpt.pt")] == [10, 20, 20, 20]
    assert not (tmp_path / "ckpt_5.pt").exists()
    (tmp_path / "ckpt_best.pt").unlink()  # as if killed in the evaluation of step 20, which is the best, and does it again
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=22", "--learning_rate=1", "--lr_decay_iters=100")
    assert [load_iter(tmp_path / name) for name in ("ckpt_best.pt", "ckpt.pt")] == [20, 22]
    assert "expected a multiple" in refused("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--keep_interval=7")


def load_iter(path):
    return torch.load(path, weights_only=True)["iter_num"]


def test_a_damaged_checkpoint_never_takes_the_place_of_a_whole_one(shards, tmp_path):
    args = [*ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}"]
    run("train_gpt2.py", *args)
    (tmp_path / "ckpt.pt").write_bytes(b"PK damaged")
    assert "nothing left to train" in run("train_gpt2.py", "--init_from=auto", f"--out_dir={tmp_path}", "--max_iters=20")
    assert load_iter(tmp_path / "ckpt.pt") == 20  # the one before has its name
    run("train_gpt2.py", "--init_from=auto", f"--out_dir={tmp_path}", "--max_iters=21")
    assert (tmp_path / "ckpt_damaged.pt").read_bytes() == b"PK damaged"
    assert load_iter(tmp_path / "ckpt.pt") == 21 and load_iter(tmp_path / "ckpt_prev.pt") in (20, 21)


def test_two_runs_cannot_write_to_one_out_dir(shards, tmp_path):
    args = [*ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--max_iters=3000"]
    program = start("train_gpt2.py", *args)
    read_until(program, "step 2/")
    assert "another run is writing to it now" in refused("train_gpt2.py", *args, "--overwrite=True")
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == 0


def test_a_folder_removed_under_the_run_is_made_again(shards, tmp_path):
    program = start("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_iters=400", "--eval_interval=100")
    read_until(program, "step 3/")
    shutil.rmtree(tmp_path / "o")
    program.communicate(timeout=120)
    assert program.returncode == 0 and load(tmp_path / "o")["iter_num"] == 400


def test_a_full_disk_is_a_warning_and_never_the_old_checkpoint(tmp_path, capsys, monkeypatch):
    runtime.save_checkpoint(tmp_path, {"weights": torch.zeros(1000)})
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3999))
    assert not runtime.save_checkpoint(tmp_path, {"weights": torch.ones(1000), "iter_num": 7})
    assert "the checkpoint of step 7 could not be written" in capsys.readouterr().out
    assert torch.load(tmp_path / "ckpt.pt")["weights"].sum() == 0 and not (tmp_path / "ckpt.pt.tmp").exists()


# ---------------------------------------------------------------------------------------------------
# bad bytes: whatever is damaged, it works or ends in one line; 500 of them in this process, 20 from the command line

def damage(data, content):
    """A few random edits of bytes: overwritten, cut out, inserted, or the end cut off."""
    content = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        kind, new = data.draw(st.sampled_from(["over", "out", "in", "end"])), data.draw(st.binary(min_size=1, max_size=8))
        if kind == "over":
            content[at:at + len(new)] = new
        elif kind == "out":
            del content[at:at + data.draw(st.integers(1, 40))]
        elif kind == "in":
            content[at:at] = new
        else:
            del content[at:]
    return bytes(content)


def works_or_fails_in_one_line(capsys, function):
    capsys.readouterr()
    try:
        function()
    except SystemExit as end:
        said = capsys.readouterr().err
        assert end.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said


bad_bytes = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@bad_bytes
@given(st.data())
def test_damaged_shards(shards, tmp_path, capsys, data):
    (tmp_path / "val_000000.bin").write_bytes((shards / "val_000000.bin").read_bytes())
    whole = (shards / "val_000000.bin").read_bytes()[:3000]
    (tmp_path / "train_000000.bin").write_bytes(damage(data, whole))
    works_or_fails_in_one_line(capsys, lambda: Windows(str(tmp_path), "train", 32)[[0]])


@bad_bytes
@given(st.data())
def test_damaged_meta_json(shards, tmp_path, capsys, data):
    (tmp_path / "meta.json").write_bytes(damage(data, (shards / "meta.json").read_bytes()))
    works_or_fails_in_one_line(capsys, lambda: read_meta(tmp_path))


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory):
    gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, max_seq_len=8, vocab_size=384))
    folder = tmp_path_factory.mktemp("small")
    runtime.save_checkpoint(folder, {"model": gpt.state_dict(), "model_args": asdict(gpt.config), "config": {}, "tokenizer": "bytes",
                                     "stage": "base", "iter_num": 1, "val_loss": 1.0, "val_iter": 1})
    return (folder / "ckpt.pt").read_bytes()


@bad_bytes
@given(st.data())
def test_damaged_checkpoints(small_checkpoint, tmp_path, capsys, data):
    """One that opens all the same holds the very weights that were saved."""
    (tmp_path / "ckpt.pt").write_bytes(damage(data, small_checkpoint))
    (tmp_path / "whole.pt").write_bytes(small_checkpoint)
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    works_or_fails_in_one_line(capsys, lambda: same(runtime.load_checkpoint(tmp_path / "ckpt.pt")["model"], whole) or pytest.fail("other weights"))


@bad_bytes
@given(st.data())
def test_damaged_conversations(tmp_path, capsys, data):
    line = json.dumps({"messages": [{"role": "user", "content": "h\u00e9"}, {"role": "assistant", "content": "yes"}]}, ensure_ascii=False).encode()
    (tmp_path / "a.jsonl").write_bytes(line + b"\n" + damage(data, line) + b"\n" + line)
    works_or_fails_in_one_line(capsys, lambda: load_conversations([(f"{tmp_path}/a.jsonl", 1.0)], get_tokenizer("bytes"), 64, {}))


@bad_bytes
@given(st.data())
def test_odd_command_lines(tmp_path, capsys, monkeypatch, data):
    source = "rate: float = 1.0  # a\nname: str = 'x'  # b\nkind: Literal['a', 'b'] = 'a'  # c\nn: Optional[int] = None  # d\nflag: bool = True  # e\n"
    (tmp_path / "script.py").write_text("from typing import Literal, Optional\n" + source)
    spec = importlib.util.spec_from_file_location("odd_script", tmp_path / "script.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "odd_script", script)
    spec.loader.exec_module(script)
    argv = data.draw(st.lists(st.one_of(st.text(max_size=12), st.builds("--{}={}".format, st.sampled_from(["rate", "name", "kind", "n", "flag", "rte"]),
                                                                       st.text(max_size=8)), st.sampled_from(["--help", "--n=3", "--kind=b"])), max_size=3))
    argv = [arg for arg in argv if arg not in ("--help", "-h") and not os.path.exists(arg)]
    works_or_fails_in_one_line(capsys, lambda: configure(vars(script), argv))


@pytest.mark.parametrize("seed", range(20))
def test_damaged_files_from_the_command_line(shards, small_checkpoint, tmp_path, seed):
    """A script of each kind in turn, on a file with one byte in fifty replaced or its end cut off."""
    rng = np.random.default_rng(seed)

    def damaged(content):
        content = np.frombuffer(content, dtype=np.uint8).copy()
        content[rng.random(len(content)) < 0.02] = rng.integers(0, 256)
        return content[:int(rng.integers(len(content) // 2, len(content) + 1))].tobytes()

    shutil.copytree(shards, tmp_path / "data")
    (tmp_path / "ckpt.pt").write_bytes(small_checkpoint)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}) * 1 + "\n")
    kind = ["data/train_000000.bin", "data/meta.json", "ckpt.pt", "chats.jsonl"][seed % 4]
    (tmp_path / kind).write_bytes(damaged((tmp_path / kind).read_bytes()))
    script, args = {"ckpt.pt": ("sample.py", [f"--checkpoint={tmp_path}/ckpt.pt", "--max_new_tokens=2"]),
                    "chats.jsonl": ("chat_sft.py", [f"--init_from={tmp_path}/ckpt.pt", f"--data={tmp_path}/chats.jsonl", f"--chat_dir={tmp_path}/rows",
                                                    f"--out_dir={tmp_path}/o", "--print_batch=True"])
                    }.get(kind, ("train_gpt2.py", [*ARGS, f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/o", "--max_iters=1", "--warmup_iters=0"]))
    done = subprocess.run([sys.executable, ROOT / script, *args], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0 or done.returncode == 2 and done.stderr.count("error: ") == 1, done.stderr


def test_what_was_kept_for_good_and_others_models_are_not_written_over(shards, tmp_path):
    args = [*ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}"]
    (tmp_path / "ckpt_best.pt").write_bytes(b"kept")
    assert "ckpt_best.pt" in refused("train_gpt2.py", *args) and "ckpt_best.pt" in refused("train_gpt2.py", *args, "--init_from=auto")
    (tmp_path / "ckpt_best.pt").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "Hugging Face" in refused("train_gpt2.py", *args, "--overwrite=True")


def test_a_log_with_damaged_lines_is_drawn_and_gone_on_with(shards, tmp_path):
    run("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--max_iters=4")
    with open(tmp_path / "log.jsonl", "ab") as f:
        f.write(b'null\n5\n{"tokens": "x"}\n{"event": ["x"], "tokens": 3}\n\xff\x00\n{"iter": 20, "tok')
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=6")
    curves, events = runtime.read_log(tmp_path / "log.jsonl")
    assert len(curves["train_loss"]) == 6 and events["resume"] == [4 * 256]
