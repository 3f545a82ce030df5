"""What a run survives: signals, kills, lost ranks, damaged files."""
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout

import pytest
import torch
from hypothesis import given, settings, strategies as st

from chat_data import load_conversations
from checkpoint import has_checkpoint, load_checkpoint
from conftest import (ROOT, SFT, TINY, Program, chats, check_close, check_same_run, damage, load, one_line_or_works,
                      patched, read_log, run)
from dataloader import TokenDataset
from distributed import excepthook
from interrupt import StopSignal, drop_failed_writes, resume_hint
from tokenizer import get_tokenizer

ARGS = [*TINY, "--sample_tokens=0"]


def read_until(program, word):
    """What a program prints up to a line with `word`."""
    lines = []
    for line in program.stdout:
        lines.append(line)
        if word in line:
            return "".join(lines)
    pytest.fail(f"ended without {word!r}: {''.join(lines)[-3000:]}")


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """An uninterrupted run of 60 steps."""
    out_dir = tmp_path_factory.mktemp("whole") / "out"
    train(out_dir, "--sample_tokens=0", "--max_iters=60")
    return out_dir


# -----------------------------------------------------------------------------
# signals

def test_signals_within_five_seconds_count_as_one_and_a_later_one_says_how_to_resume(monkeypatch, capfd):
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)  # nohup: SIGHUP stays ignored
    StopSignal("my out")
    assert handlers.keys() == {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    stop = StopSignal("my out")
    assert handlers.keys() == {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP} and not stop.requested
    for number, handler in handlers.items():
        handler(number, None)
    assert stop.requested and capfd.readouterr().err.count("stopping after this step") == 1
    later = time.monotonic() + 6
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(KeyboardInterrupt) as end:
        handlers[signal.SIGINT](signal.SIGINT, None)
    excepthook(KeyboardInterrupt, end.value, None)
    error = capfd.readouterr().err
    assert error.startswith("\ninterrupted: resume with python ") and "--init_from=resume --out_dir='my out'\n" in error
    for rank, code, start in (None, 130, "python"), ("0", 0, "torchrun ..."):
        if rank:
            monkeypatch.setenv("RANK", rank)
        stop = StopSignal("o")
        handlers[signal.SIGINT](signal.SIGINT, None)
        assert stop.exit_code == code and resume_hint("o").startswith(f"resume with {start} ")


def test_a_signal_saves_the_step_and_ends_with_code_0(shards, whole, tmp_path):
    """Of a copy of the script, whose last line names it."""
    mine = shutil.copy(ROOT / "train_gpt2.py", tmp_path / "mine.py")
    args = [*ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--max_iters=60", "--init_from=auto"]
    program = Program(mine, *args)
    assert program.read_until("step 3/60")
    program.send("SIGTERM")
    program.send("SIGTERM")  # forwarded twice, as schedulers do
    code, output = program.end()
    assert code == 0 and "SIGTERM: stopping after this step" in output, output
    step = load(tmp_path)["iter_num"]
    assert f"stopped after step {step}, which is saved; resume with python {mine} --init_from=resume " \
           f"--out_dir={tmp_path}" in output and 3 <= step < 60
    assert f"resumed at step {step}\n" in run(mine, *args)  # the same command: auto resumes
    run(mine, *args)  # there is nothing left to do, or to write
    check_same_run(whole, tmp_path)
    assert load(tmp_path, "ckpt_prev.pt")["iter_num"] == 50


def test_ctrl_c_saves_the_step_and_ends_with_code_130(shards, tmp_path):
    """After it, `train && tune` must not tune half a model."""
    program = Program("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--max_iters=60")
    assert program.read_until("step 3/60")
    program.send("SIGINT")
    code, output = program.end()
    assert code == 130 and f"stopped after step {load(tmp_path)['iter_num']}, which is saved" in output, output


def test_a_closed_terminal_saves_the_step(train, tmp_path):
    """It sends SIGHUP, and takes no more output, not even that of the signal."""
    close = """
import os, signal, distributed
step_seed = distributed.step_seed
def seed_and_close(seed, step, rank):
    if step == 3:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        os.kill(os.getpid(), signal.SIGHUP)
    return step_seed(seed, step, rank)
distributed.step_seed = seed_and_close
"""
    output = train(tmp_path / "o", "--sample_tokens=0", patch=close)
    assert "stopped after step 4, which is saved" in output and load(tmp_path / "o")["iter_num"] == 4


def test_ctrl_c_before_the_process_is_set_up_is_one_line(tmp_path):
    interrupt = "import signal, start\nstart.load_init_from = lambda *_: signal.raise_signal(signal.SIGINT)"
    output = run(patched(tmp_path, "train_gpt2.py", interrupt), f"--out_dir={tmp_path}/o", code=1)
    assert output == "\ninterrupted\n"


@pytest.mark.parametrize("script", ["train_gpt2", "chat_sft", "sample", "evaluate", "export_hf", "bench"])
def test_ctrl_c_while_torch_is_imported_is_one_line(script, tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run([sys.executable, ROOT / f"{script}.py"], env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "\ninterrupted\n")


def test_a_signal_to_one_rank_stops_all_after_the_same_step(train, tmp_path):
    signal_rank_1 = """
import os, signal, distributed
step_seed = distributed.step_seed
def seed_and_signal(seed, step, rank):
    if (step, rank) == (3, 1):
        os.kill(os.getpid(), signal.SIGUSR1)
    return step_seed(seed, step, rank)
distributed.step_seed = seed_and_signal
"""
    output = train(tmp_path / "o", "--sample_tokens=0", patch=signal_rank_1, ranks=2)
    assert "stopped after step 4, which is saved" in output and load(tmp_path / "o")["iter_num"] == 4


# -----------------------------------------------------------------------------
# output that cannot be written

@pytest.mark.parametrize("unbuffered", [False, True])
def test_what_a_full_disk_or_a_closed_pipe_does_not_take_is_dropped(unbuffered):
    """A print neither raises nor stays in a buffer, where it would fail again at exit; python -u has no buffer."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    for number in (os.open("/dev/full", os.O_WRONLY), write_end):
        file = open(number, "wb", buffering=0 if unbuffered else -1)
        with io.TextIOWrapper(file, write_through=unbuffered) as stream:
            with pytest.raises(OSError):
                file.write(b"x")
                file.flush()
            with redirect_stdout(stream):
                drop_failed_writes()
            print("x", file=stream, flush=True)


def test_a_notebooks_stdout_has_no_buffer():
    with io.StringIO() as stream, redirect_stdout(stream):
        drop_failed_writes()
        print("x")
        assert stream.getvalue() == "x\n"


def test_results_that_a_full_disk_does_not_take_leave_no_file(trained, shards, tmp_path):
    full = """
from pathlib import Path
def write_text(path, text):
    path.touch()
    raise OSError(28, "No space left on device")
Path.write_text = write_text
"""
    output = run(patched(tmp_path, "evaluate.py", full), f"--checkpoint={trained}", "--tasks=",
                 f"--data_dir={shards}", "--eval_iters=1", "--device=cpu", f"--output={tmp_path}/results.json", code=2)
    assert f"error: --output={tmp_path}/results.json: OSError: [Errno 28] No space left on device" in output
    assert not (tmp_path / "results.json").exists()


def test_a_reader_that_stops_after_one_line_stops_no_run(shards, tmp_path):
    """As with `| head -1`: the first line of output finds nobody."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, ROOT / "train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o"]
    assert subprocess.run(command, stdout=write_end, stderr=write_end).returncode == 0
    os.close(write_end)
    assert load(tmp_path / "o")["iter_num"] == 20


@pytest.mark.parametrize("output", ["os.open('/dev/full', os.O_WRONLY)", "write_end"], ids=["full", "closed"])
def test_training_goes_on_without_its_output(shards, trained, tmp_path, output):
    """From the first evaluation on neither stream takes anything."""
    patch = f"""
import features, os
read_end, write_end = os.pipe()
os.close(read_end)
def redirect(iter_num, done):
    for stream in (1, 2):
        os.dup2({output}, stream)
    return {{}}
features.evaluation_hooks = lambda *_: [redirect]
"""
    output = run(patched(tmp_path, "train_gpt2.py", patch), *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o")
    assert "step 0/20" in output and "step 1/20" not in output
    check_same_run(trained, tmp_path / "o")


# -----------------------------------------------------------------------------
# kills: --kills=50 for more of them

def kill_and_resume(script, args, out_dir, kills, rng):
    """Kills a run at random moments, resumes it each time with the same command, and lets it end."""
    resumes = 0
    for _ in range(kills):
        program = Program(script, *args)
        program.read_until(rng.choice(["evaluating", "step ", "step 1/", "data: ", "/60: loss"]))
        time.sleep(rng.uniform(0, 0.6))
        program.process.kill()
        resumes += "resumed at step" in program.end()[1]
        if has_checkpoint(out_dir):
            load_checkpoint(out_dir)  # ends the test where none can be read
    print("resumes:", resumes + ("resumed at step" in run(script, *args)))


@pytest.mark.faults
def test_killed_at_random_moments_training_ends_as_if_uninterrupted(shards, whole, tmp_path, kills):
    args = [*ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--max_iters=60", "--init_from=auto"]
    kill_and_resume("train_gpt2.py", args, tmp_path, kills, random.Random(1))
    check_same_run(whole, tmp_path)


@pytest.mark.slow
@pytest.mark.faults
def test_killed_at_random_moments_chat_tuning_ends_as_if_uninterrupted(trained, tmp_path, kills):
    args = [*SFT, "--max_iters=60", "--sample_tokens=0", f"--data={chats(tmp_path / 'chats.jsonl')}",
            f"--init_from=auto:{trained}"]
    run("chat_sft.py", *args, f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/whole")
    args += [f"--chat_dir={tmp_path}/rows2", f"--out_dir={tmp_path}/killed"]
    kill_and_resume("chat_sft.py", args, tmp_path / "killed", kills, random.Random(2))
    check_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.faults
def test_killed_at_random_moments_preparation_ends_with_the_same_bytes(tmp_path, kills):
    with open(tmp_path / "texts.jsonl", "w") as f:
        for i in range(3000):
            f.write(json.dumps({"text": f"document {i} " * (i % 50 + 1)}) + "\n")
    args = [f"--files={tmp_path}/texts.jsonl", "--tokenizer=bytes", "--shard_size=50000", "--val_tokens=5000",
            "--num_threads=1"]
    run("prepare_data.py", *args, f"--data_dir={tmp_path}/whole")
    args.append(f"--data_dir={tmp_path}/killed")
    rng = random.Random(3)
    for _ in range(kills):
        shards = len(list(tmp_path.glob("killed/*.bin"))) + rng.randrange(6)
        program = subprocess.Popen([sys.executable, ROOT / "prepare_data.py", *args])
        while len(list(tmp_path.glob("killed/*.bin"))) < shards and program.poll() is None:
            time.sleep(0.001)
        program.kill()
        program.wait()
    run("prepare_data.py", *args)
    whole, killed = ({path.name: path.read_bytes() for path in sorted((tmp_path / name).glob("*.bin"))}
                     for name in ("whole", "killed"))
    assert whole == killed and len(whole) > 10


# -----------------------------------------------------------------------------
# ranks

def test_from_two_ranks_to_one_and_back_the_rows_are_the_same(train, whole, tmp_path):
    train(tmp_path, "--sample_tokens=0", "--max_iters=20", "--lr_decay_iters=60", ranks=2)
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=40")
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=60", ranks=2)
    check_close(whole, tmp_path, "train_loss", "val_loss", abs=1e-4)
    one, other = (read_log(folder, "train_loss", "val_loss") for folder in (whole, tmp_path))
    for (key, step), value in one.items():
        assert step > 20 or value == pytest.approx(other[key, step], abs=1e-5), (key, step)
    assert load(whole)["rows_seen"] == load(tmp_path)["rows_seen"]


def test_a_rank_that_runs_out_of_memory_says_so(tmp_path):
    script = tmp_path / "a.py"
    script.write_text("import torch\nfrom distributed import init_process\ninit_process('cpu')\n"
                      "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')")
    assert "error: out of memory (CUDA out of memory): lower --batch_size" in run(script, ranks=2, code=2)


def test_a_lost_rank_is_told_from_a_fault_of_this_machine(monkeypatch, capsys):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for fault, lost in ("remote process exited", True), ("unhandled cuda error", False):
        excepthook(RuntimeError, RuntimeError(f"NCCL error: {fault}"), None)
        error = capsys.readouterr().err
        assert fault in error and ("another rank is gone" in error) == lost


@pytest.mark.slow
def test_torchrun_restarts_ranks_where_they_were_and_saves_on_all_together(shards, tmp_path):
    """One rank is killed: the other exits, too, and torchrun starts both again. Then torchrun itself gets a signal."""
    args = [ROOT / "train_gpt2.py", *ARGS, f"--data_dir={shards}", "--max_iters=150", "--init_from=auto"]
    run(*args, f"--out_dir={tmp_path}/whole", ranks=2)
    args.append(f"--out_dir={tmp_path}/killed")
    program = subprocess.Popen([sys.executable, "-u", "-m", "torch.distributed.run", "--standalone",
                                "--nproc_per_node=2", "--max-restarts=1", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",
                                *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    read_until(program, "step 15/150")
    children = subprocess.run(["pgrep", "-P", str(program.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    output = read_until(program, "resumed at step")
    assert "error: another rank is gone" in output and re.search(r"resumed at step \d+0\n", output), output[-3000:]
    read_until(program, "tok/s")
    program.send_signal(signal.SIGUSR1)
    output = program.communicate(timeout=90)[0]
    assert f"stopped after step {load(tmp_path / 'killed')['iter_num']}, which is saved" in output, output
    run(*args, ranks=2)
    check_same_run(tmp_path / "whole", tmp_path / "killed")


# -----------------------------------------------------------------------------
# damaged files: whatever the damage, the program works or ends in one line. (Checkpoints: test_checkpoint.py; command
# lines: test_configurator.py)

@settings(max_examples=200)
@given(st.sampled_from(["train_000000.bin", "meta.json"]), st.data())
def test_damaged_shards_and_meta_json(shards, tmp_path, name, data):
    (tmp_path / "train_000000.bin").write_bytes((shards / "val_000000.bin").read_bytes()[:3000])
    shutil.copy(shards / "meta.json", tmp_path)
    (tmp_path / name).write_bytes(damage(data, (tmp_path / name).read_bytes()))
    one_line_or_works(lambda: TokenDataset(str(tmp_path), "train", 32)[[0]])


@settings(max_examples=20)
@given(st.data())
def test_damaged_conversations(tmp_path, data):
    path, tokenizer = chats(tmp_path / "chats.jsonl", 3), get_tokenizer("bytes")
    path.write_bytes(damage(data, path.read_bytes().replace(b"q1", "h\u00e9".encode())))
    one_line_or_works(lambda: list(load_conversations(str(path), tokenizer, 64, str(tmp_path / "rows"), {})))
