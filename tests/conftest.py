"""Shared by all tests: the scripts on the path, started as a user starts them, and small data to start them on."""
import ast
import gc
import json
import multiprocessing.connection
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup, and a shell's &, have programs ignore it
os.environ["OMP_NUM_THREADS"] = "1"  # for the programs that tests start
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # each would try what this CPU has, for a second and more
torch.set_num_threads(1)  # models this small gain nothing from more, and lose much where other programs want the cores
from shards import shard_header  # noqa: E402
from tokenizer import get_tokenizer, padded_vocab_size  # noqa: E402


def defaults(script):
    """{setting: default} of a script, which is not run."""
    body = ast.parse((ROOT / script).read_text(encoding="utf-8")).body
    return {node.target.id: ast.literal_eval(node.value) for node in body if isinstance(node, ast.AnnAssign)}


def literals(script):
    """{setting: choices} of those of a script's settings that are annotated as a Literal."""
    found = re.findall(r"^(\w+): Literal(\[.*?\])", (ROOT / script).read_text(encoding="utf-8"), re.MULTILINE)
    return {name: ast.literal_eval(choices) for name, choices in found}


@pytest.fixture(scope="session")
def gpt2_vocabulary():
    """Fetched, or from TIKTOKEN_CACHE_DIR. With neither, what needs it fails with the line that a user sees."""
    return get_tokenizer("gpt2")


def write_shards(folder, tokenizer="bytes", train=40_000, val=4_000, seed=0):
    """A folder of shards with a learnable text: words of few letters, in an order with structure."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran"]
    enc = get_tokenizer(tokenizer)
    for split, length in (("train", train), ("val", val)):
        tokens = []
        while len(tokens) < length:
            start = int(rng.integers(10))
            text = " ".join(words[(start + i) % 10] for i in range(12)) + ".\n"
            tokens += [enc.eot_token] + enc.encode_ordinary(text)
        tokens = np.array(tokens[:length], dtype="<u2")
        (folder / f"{split}_000000.bin").write_bytes(shard_header(length) + tokens.tobytes())
    meta = {"tokenizer": tokenizer, "vocab_size": padded_vocab_size(enc), "documents": 0, "tokens": train + val,
            "bytes": 0}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=3, help="SIGKILLs in each test marked faults")


@pytest.fixture
def kills(request):
    return request.config.getoption("--kills")


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("data") / "bytes")


TINY = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--max_seq_len=32", "--batch_size=4",
        "--gradient_accumulation_steps=2", "--eval_iters=4", "--log_interval=1", "--warmup_iters=2",
        "--learning_rate=3e-3", "--max_iters=20", "--eval_interval=10", "--sample_tokens=8", "--device=cpu",
        "--dtype=float32", "--compile=False"]


# Python takes 5 seconds to import torch and its compiler, where most of these tests would spend their time. So
# one process imports them and does nothing else, and each script runs in a fork of it; two ranks are two forks, in the
# environment that torchrun makes. torchrun itself is started where a test is about it.
forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["torch._dynamo", "torch._inductor.compile_fx", "matplotlib.pyplot", "pytest",
                               "hypothesis.strategies"])  # the last two: of this file, which a fork imports


def run_forked(script, args, cwd, env, outputs):
    """In the fork: what python SCRIPT ARGS does, its two streams into the files `outputs`."""
    gc.freeze()  # what was imported before is not searched for garbage
    os.environ.update(env)
    import machine
    machine.peak_flops = lambda *_: 1e12  # measuring takes as long as four steps, with float16 20 s
    with suppress(ImportError):  # a picture takes longer than the 20 steps it is of: test_plot.py has them drawn
        from matplotlib.figure import Figure
        Figure.savefig = lambda *_: None
    for stream, path in zip((1, 2), outputs):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, errors="replace", closefd=False) for stream in (1, 2))
    os.chdir(cwd)
    sys.argv = [script, *args]
    code, kept = 0, None  # kept: freeing what the script leaves would be half of Python's finalization
    try:
        try:
            kept = runpy.run_path(script, run_name="__main__")
        except SystemExit:
            raise
        except BaseException:  # Ctrl-C too
            code = 1
            sys.excepthook(*sys.exc_info())
    except SystemExit as end:  # from the script, or from its excepthook
        code, kept = end.code or 0, end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def run_ranks(args, ranks, cwd):
    """A fork per rank; one that fails ends the others. Returns what they printed and the first exit code but 0."""
    env = [{}]
    if ranks > 1:
        port = free_port()
        env = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port} for rank in range(ranks)]
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.NamedTemporaryFile("r", errors="replace")) for _ in range(2 * ranks)]
        outputs = [file.name for file in files]
        processes = [forked.Process(target=run_forked, args=(args[0], args[1:], cwd, env[i], outputs[2 * i:2 * i + 2]))
                     for i in range(ranks)]
        for process in processes:
            process.start()
        running, give_up = processes, time.monotonic() + 600
        while running and not any(process.exitcode for process in processes) and time.monotonic() < give_up:
            multiprocessing.connection.wait([process.sentinel for process in running], 1)
            running = [process for process in running if process.exitcode is None]
        code = next((process.exitcode for process in processes if process.exitcode), None if running else 0)
        for process in running:
            process.join(5)  # all ranks fail alike, and only the first prints
            process.kill()
        return "".join(file.read() for file in files), code


def run(script, *args, ranks=1, code=0, env=None, cwd=None):
    """
    Runs a script as a user would start it, with several ranks as torchrun would. Returns both its streams.
    env: changes of the environment; with it, also an empty one, the script gets a process of its own.
    """
    args = [str(ROOT / script), *map(str, args)]
    if env is not None or script == "prepare_data.py":
        done = subprocess.run([sys.executable, *args], capture_output=True, text=True, errors="replace", cwd=cwd,
                              env={**os.environ, **(env or {})}, timeout=600)
        output, returned = done.stdout + done.stderr, done.returncode
    else:
        output, returned = run_ranks(args, ranks, str(cwd or os.getcwd()))
    assert returned == code, f"exit code {returned}, expected {code}\n{output[-4000:]}"
    return output


class Program:
    """A script running in a fork, to be read from and interrupted."""

    def __init__(self, script, *args):
        self.file, self.output = tempfile.NamedTemporaryFile("r", errors="replace"), ""
        self.process = forked.Process(target=run_forked, args=(str(ROOT / script), [*map(str, args)], os.getcwd(), {},
                                                               [self.file.name] * 2))
        self.process.start()

    def read_until(self, word):
        """Waits for it to print a word. Returns whether it did before it ended."""
        while word not in self.output and self.process.is_alive():
            time.sleep(0.01)
            self.output += self.file.read()
        return word in self.output

    def send(self, name):
        os.kill(self.process.pid, getattr(signal, name))

    def end(self):
        """Waits for its end. Returns its exit code, and all that it printed."""
        self.process.join(120)
        self.output += self.file.read()
        return self.process.exitcode, self.output


def patched(folder, script, patch):
    """A script that runs another with something replaced: what goes wrong there."""
    (folder / "patched.py").write_text(f"import runpy, checkpoint, sys, time\n{patch}\n"
                                       f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')\n")
    return folder / "patched.py"


def fail_writes(steps):
    """A patch: write_checkpoint fails at these steps, once for each mention."""
    return (f"write, steps = checkpoint.write_checkpoint, {steps}\n"
            f"def failing(out_dir, contents, *rest):\n"
            f"    if contents['iter_num'] not in steps:\n        return write(out_dir, contents, *rest)\n"
            f"    steps.remove(contents['iter_num'])\n    raise OSError('no space')\n"
            f"checkpoint.write_checkpoint = failing\n")


def refused(script, *args):
    """Starts a script with a user's mistake: exit code 2 and one line, which is returned."""
    output = run(script, *args, code=2)
    assert "Traceback" not in output, output[-4000:]
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, output[-4000:]
    return errors[0]


def read_log(out_dir, *keys):
    """{(key, iter): value} of a run's log.jsonl."""
    entries = map(json.loads, (Path(out_dir) / "log.jsonl").read_text().splitlines())
    return {(key, entry["iter"]): entry[key] for entry in entries for key in keys if "iter" in entry and key in entry}


def load(out_dir, name="ckpt.pt"):
    return torch.load(Path(out_dir) / name, weights_only=True)


def same(a, b):
    """Equal to the last bit, for nested dicts and lists of tensors and plain values."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def check_same_run(one, other):
    """Two runs end with the same bits, and their logs have the same losses at each step."""
    a, b = load(one), load(other)
    assert a.keys() == b.keys()
    for key in a.keys() - {"config"}:
        assert same(a[key], b[key]), key
    assert read_log(one, "train_loss", "val_loss") == read_log(other, "train_loss", "val_loss")


def check_compiled(folder, names=("eager", "compiled"), rel=1e-3):
    """
    Two runs, folder/eager and folder/compiled, have the same losses up to `rel`, nothing was recompiled, and the
    checkpoint of the second is that of a plain model.
    """
    eager, compiled = (read_log(folder / name, "train_loss", "val_loss", "recompiles") for name in names)
    assert eager.keys() == compiled.keys()
    losses = [key for key in eager if key[0] != "recompiles"]
    print(f"largest difference of a loss: {max(abs(compiled[key] / eager[key] - 1) for key in losses):.1e}")
    for key, value in compiled.items():
        assert value == 0 if key[0] == "recompiles" else value == pytest.approx(eager[key], rel=rel), key
    assert not [name for name in load(folder / names[1])["model"] if name.startswith(("module.", "_orig_mod."))]


@pytest.fixture(scope="session")
def trained(shards, tmp_path_factory):
    """One run of 20 steps that several tests look at."""
    out_dir = tmp_path_factory.mktemp("run") / "out"
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={out_dir}")
    return out_dir


def damage(data, content):
    """A few random edits of bytes, drawn from hypothesis: overwritten, cut out, inserted, or the end cut off."""
    content = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        new = data.draw(st.binary(min_size=1, max_size=8))
        kind = data.draw(st.sampled_from(["overwrite", "cut", "insert", "truncate"]))
        if kind == "overwrite":
            content[at:at + len(new)] = new
        elif kind == "cut":
            del content[at:at + data.draw(st.integers(1, 40))]
        elif kind == "insert":
            content[at:at] = new
        else:
            del content[at:]
    return bytes(content)


def one_line_or_works(capsys, function):
    """Calls function() and returns its result; None if it ended the program in one line."""
    capsys.readouterr()
    try:
        return function()
    except SystemExit as end:
        error = capsys.readouterr().err
        assert end.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error


def poisoned(folder, steps, seed=1337):
    """Shards in which the rows of these steps of TINY's run are noise."""
    data = write_shards(folder)
    shard = np.fromfile(data / "train_000000.bin", dtype="<u2")
    order = np.random.default_rng((seed, 0)).permutation((len(shard) - 513) // 32)
    for step in steps:
        for row in order[8 * step:8 * step + 8]:
            shard[512 + 32 * row:512 + 32 * row + 32] = np.random.default_rng(step).integers(0, 256, 32)
    shard.tofile(data / "train_000000.bin")
    return data


def chats(path, n=200):
    """Conversations that a tiny model learns."""
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"q{i % 7}"},
                                                     {"role": "assistant", "content": "a" * (i % 5 + 1)}]}) + "\n"
                            for i in range(n)))
    return path
