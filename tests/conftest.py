"""Shared by all tests: the scripts on the path, started as a user starts them, and small data to start them on."""
import json
import multiprocessing.connection
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

os.environ["OMP_NUM_THREADS"] = "1"  # for the programs that tests start
torch.set_num_threads(1)  # models this small gain nothing from more, and lose much where other programs want the cores
from prepare_data import get_tokenizer, padded_vocab_size, shard_header  # noqa: E402


@pytest.fixture(scope="session")
def gpt2_vocabulary():
    """Skips where tiktoken's gpt2 vocabulary can neither be found in TIKTOKEN_CACHE_DIR nor be fetched."""
    try:
        return get_tokenizer("gpt2")
    except SystemExit:
        pytest.skip("tiktoken's gpt2 vocabulary is not in TIKTOKEN_CACHE_DIR and cannot be fetched")


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
    meta = {"tokenizer": tokenizer, "vocab_size": padded_vocab_size(enc), "documents": 0, "tokens": train + val, "bytes": 0}
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


TINY = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--max_seq_len=32", "--batch_size=4", "--gradient_accumulation_steps=2",
        "--eval_iters=4", "--log_interval=1", "--warmup_iters=2", "--learning_rate=3e-3", "--max_iters=20", "--eval_interval=10",
        "--sample_tokens=8", "--device=cpu", "--dtype=float32", "--compile=False"]


# Python takes 5 seconds to import torch and its compiler, which most of these tests would spend most of their time on. So one
# process imports them and does nothing else, and each script is run in a fork of it; two ranks are two forks, in the environment
# that torchrun makes. torchrun itself is started where a test is of what it does.
forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["torch._dynamo", "torch._inductor.compile_fx", "matplotlib.pyplot"])


def run_forked(script, args, cwd, env, outputs):
    """In the fork: what python SCRIPT ARGS does, its two streams into the files `outputs`."""
    os.environ.update(env)
    for stream, path in zip((1, 2), outputs):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, errors="replace", closefd=False) for stream in (1, 2))
    os.chdir(cwd)
    sys.argv = [script, *args]
    code = 0
    try:
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception:
            code = 1
            sys.excepthook(*sys.exc_info())
    except SystemExit as end:  # from the script, or from its excepthook
        code = end.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_ranks(args, ranks, cwd):
    """A fork for each rank. -> what they printed, and the first exit code that is not 0; a rank that fails ends the others."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    places = [{}] if ranks == 1 else [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                                       "MASTER_PORT": port} for rank in range(ranks)]
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.NamedTemporaryFile("r", errors="replace")) for _ in range(2 * ranks)]
        processes = [forked.Process(target=run_forked, args=(args[0], args[1:], cwd, place, [file.name for file in files[2 * i:2 * i + 2]]))
                     for i, place in enumerate(places)]
        for process in processes:
            process.start()
        running, give_up = processes, time.monotonic() + 600
        while running and not any(process.exitcode for process in processes) and time.monotonic() < give_up:
            multiprocessing.connection.wait([process.sentinel for process in running], 1)
            running = [process for process in running if process.exitcode is None]
        for process in running:
            process.kill()
        return "".join(file.read() for file in files), next((process.exitcode for process in processes if process.exitcode != 0), 0)


def run(script, *args, ranks=1, code=0, env=None, cwd=None):
    """Runs a script as a user would start it, with several ranks as torchrun would. -> what it printed, both streams."""
    args = [str(ROOT / script), *map(str, args)]
    if env or script == "prepare_data.py" or ranks > 1 and code:  # torchrun has an exit code of its own
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        done = subprocess.run([sys.executable, *torchrun, *args], capture_output=True, text=True, errors="replace", cwd=cwd,
                              env={**os.environ, **(env or {})}, timeout=600)
        output, returned = done.stdout + done.stderr, done.returncode
    else:
        output, returned = run_ranks(args, ranks, str(cwd or os.getcwd()))
    assert returned == code, f"exit code {returned}, expected {code}\n{output[-4000:]}"
    return output


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
