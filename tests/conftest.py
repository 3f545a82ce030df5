"""Shared by all tests: the scripts on the path, started as a user starts them, and small data to start them on."""
import ast
import gc
import io
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
from contextlib import redirect_stderr, suppress
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup, and a shell's &, have programs ignore these
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ["OMP_NUM_THREADS"] = "1"  # for the programs that tests start
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # each would try what this CPU has, for a second and more
# no deadline: other programs may want the cores
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("here")
torch.set_num_threads(1)  # models this small gain nothing from more, and lose much where other programs want the cores
from model import GPT, GPTConfig  # noqa: E402
from tokenizer import get_tokenizer  # noqa: E402


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


def write_shards(folder, tokenizer="bytes", train=40_000, val=4_000):
    """A folder of shards with a learnable text: words of few letters, in an order with structure."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran"]
    enc = get_tokenizer(tokenizer)
    for split, length in (("train", train), ("val", val)):
        tokens = []
        while len(tokens) < length:
            start = int(rng.integers(10))
            text = " ".join(words[(start + i) % 10] for i in range(12)) + ".\n"
            tokens += [enc.eot_token] + enc.encode_ordinary(text)
        write_shard(folder / f"{split}_000000.bin", tokens[:length])
    (folder / "meta.json").write_text(json.dumps({"tokenizer": tokenizer}))
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


def run_forked(script, args, cwd, env, output):
    """In the fork: what python SCRIPT ARGS does, its two streams into the file `output`."""
    gc.freeze()  # what was imported before is not searched for garbage
    os.environ.update(env)
    import machine
    machine.peak_flops = lambda *_: 1e12  # measuring takes as long as four steps, with float16 20 s
    with suppress(ImportError):  # a picture takes longer than the 20 steps it is of: test_plot.py has them drawn
        from matplotlib.figure import Figure
        Figure.savefig = lambda *_: None
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
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


class Program:
    """A script running in a fork, to be read from and interrupted. env: changes of the environment."""

    def __init__(self, script, *args, **env):
        self.file, self.output = tempfile.NamedTemporaryFile("r", errors="replace"), ""
        self.process = forked.Process(target=run_forked, args=(str(ROOT / script), [*map(str, args)], os.getcwd(), env,
                                                               self.file.name))
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):  # kept by the forks' server; CUDA survives no fork
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


def run_ranks(args, ranks):
    """A fork per rank; one that fails ends the others. Returns what they printed and the first exit code but 0."""
    env, port = [{}], free_port()
    if ranks > 1:
        env = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port} for rank in range(ranks)]
    programs = [Program(*args, **settings) for settings in env]
    running, give_up = programs, time.monotonic() + 600
    while running and not any(program.process.exitcode for program in programs) and time.monotonic() < give_up:
        multiprocessing.connection.wait([program.process.sentinel for program in running], 1)
        running = [program for program in running if program.process.exitcode is None]
    code = next((program.process.exitcode for program in programs if program.process.exitcode), None if running else 0)
    for program in running:
        program.process.join(5)  # all ranks fail alike, and only the first prints
        program.process.kill()
    return "".join(program.end()[1] for program in programs), code


def run(script, *args, ranks=1, code=0, env=None):
    """
    Runs a script as a user would start it, with several ranks as torchrun would. Returns both its streams.
    env: changes of the environment; with it, also an empty one, the script gets a process of its own.
    """
    args = [str(ROOT / script), *map(str, args)]
    if env is not None or script == "prepare_data.py":
        done = subprocess.run([sys.executable, *args], capture_output=True, text=True, errors="replace",
                              env={**os.environ, **(env or {})}, timeout=600)
        output, returned = done.stdout + done.stderr, done.returncode
    else:
        output, returned = run_ranks(args, ranks)
    assert returned == code, f"exit code {returned}, expected {code}\n{output[-4000:]}"
    return output


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


def read_lines(path):
    """The lines of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_log(out_dir, *keys):
    """{(key, iter): value} of a run's log.jsonl."""
    return {(key, entry["iter"]): entry[key] for entry in read_lines(Path(out_dir) / "log.jsonl") for key in keys
            if key in entry}


def load(out_dir, name="ckpt.pt"):
    return torch.load(Path(out_dir) / name, map_location="cpu", weights_only=True)


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


def check_close(one, other, *keys, **within):
    """
    Two runs have the same of these numbers in their logs, at the same steps, up to abs=... or rel=..., and weights of
    the same names in their checkpoints.
    """
    a, b = (read_log(out_dir, *keys) for out_dir in (one, other))
    print(f"largest difference: {max(abs(a[key] - b[key]) for key in a.keys() & b.keys()):.1e}")
    assert a == pytest.approx(b, **within)
    assert load(one)["model"].keys() == load(other)["model"].keys()


def check_compiled(folder, names=("eager", "compiled"), rel=1e-3):
    """Two runs, folder/eager and folder/compiled, have the same losses up to `rel`, and nothing was recompiled."""
    eager, compiled = (folder / name for name in names)
    check_close(eager, compiled, "train_loss", "val_loss", rel=rel)
    assert not any(read_log(compiled, "recompiles").values())


@pytest.fixture(scope="session")
def train(shards):
    """train(out_dir, *flags): a run of 20 steps, unless flags say otherwise. Returns what it prints."""
    def train_tiny(out_dir, *flags, patch="", **settings):
        script = patched(out_dir.parent, "train_gpt2.py", patch) if patch else "train_gpt2.py"
        return run(script, *TINY, f"--data_dir={shards}", f"--out_dir={out_dir}", *flags, **settings)
    return train_tiny


@pytest.fixture(scope="session")
def trained(train, tmp_path_factory):
    """One run that several tests look at."""
    out_dir = tmp_path_factory.mktemp("run") / "out"
    train(out_dir)
    return out_dir


def damage(data, content):
    """A few random edits of bytes, drawn from hypothesis: overwritten, cut out, inserted, or the end cut off."""
    content = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at, new = data.draw(st.integers(0, len(content))), data.draw(st.binary(max_size=8))
        replaced = data.draw(st.sampled_from([len(new), 0, data.draw(st.integers(1, 40)), len(content)]))
        content[at:at + replaced] = new
    return bytes(content)


def one_line_or_works(function):
    """Calls function() and returns its result; None if it ended the program in one line."""
    with redirect_stderr(io.StringIO()) as stream:
        try:
            return function()
        except SystemExit as end:
            error = stream.getvalue()
            assert end.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error


class Entry:
    """One more thing in a checkpoint."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def poisoned(folder, step):
    """Shards in which the rows of this step of TINY's run are noise."""
    data = write_shards(folder)
    shard = np.fromfile(data / "train_000000.bin", dtype="<u2")
    order = np.random.default_rng((1337, 0)).permutation((len(shard) - 513) // 32)
    for row in order[8 * step:8 * step + 8]:
        shard[512 + 32 * row:512 + 32 * row + 32] = np.random.default_rng(step).integers(0, 256, 32)
    shard.tofile(data / "train_000000.bin")
    return data


def chats(path, n=200):
    """Conversations that a tiny model learns."""
    return jsonl(path, [turns(f"q{i % 7}", "a" * (i % 5 + 1)) for i in range(n)])


# -----------------------------------------------------------------------------
# settings and models that several files test with

LLAMA = ["--arch=llama", "--n_kv_head=1", "--qk_norm=True"]
MLA = ["--attention=mla", "--kv_lora_rank=8"]
SFT = [*TINY[5:], "--batch_size=2"]  # the model's settings come with it
COMPILED = ["--compile=True"]
SMALL = dict(max_seq_len=48, vocab_size=384, n_layer=3, n_head=4, n_embd=64)
VARIANTS = {
    "gpt2": dict(arch="gpt2"),
    "llama": dict(arch="llama"),
    "llama_gqa": dict(arch="llama", n_kv_head=2),
    "qwen2": dict(arch="llama", n_kv_head=2, qkv_bias=True),
    "qwen3": dict(arch="llama", n_kv_head=2, qk_norm=True),
    "llama3": dict(arch="llama", n_kv_head=2, tied_head=True, rope_theta=5e5, rope_factor=8.0, norm_eps=1e-6),
    "qwen3_wide": dict(arch="llama", n_kv_head=2, head_dim=24, qk_norm=True, tied_head=True),
    "gpt2_mla": dict(arch="gpt2", attention="mla", kv_lora_rank=24),
    "llama_mla": dict(arch="llama", attention="mla", kv_lora_rank=24),
    "llama_mla_q": dict(arch="llama", attention="mla", kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=10,
                        qk_rope_head_dim=6, v_head_dim=12),
}


# transformers' class of each; one that has none is left out of the comparisons with transformers
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "llama_gqa": "LlamaForCausalLM",
           "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama3": "LlamaForCausalLM",
           "qwen3_wide": "Qwen3ForCausalLM", "gpt2_mla": "GPT2LMHeadModel", "llama_mla": "DeepseekV3ForCausalLM",
           "llama_mla_q": "DeepseekV3ForCausalLM"}


def new_gpt(variant, seed=0, **changes):
    """A small GPT with random parameters, norms and biases too, so that leaving one out shows."""
    torch.manual_seed(seed)
    gpt = GPT(GPTConfig(**{**SMALL, **VARIANTS[variant], **changes}))
    for p in gpt.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return gpt


def small_gpt(arch, **changes):
    """A smaller one with its initial weights."""
    torch.manual_seed(0)
    config = dict(arch=arch, n_layer=2, n_head=2, n_embd=16, vocab_size=32, max_seq_len=8)
    return GPT(GPTConfig(**{**config, **changes}))


def optimizer_config(optimizer="adamw", **changes):
    return {**dict(optimizer=optimizer, learning_rate=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, muon_lr=0.02,
                   embedding_lr=None, head_lr=None, vector_lr=None), **changes}


def tokens(batch=2, length=48, seed=1):
    return torch.randint(0, 384, (batch, length), generator=torch.Generator().manual_seed(seed))


def packed(lengths):
    """positions (1, T) and mask (1, 1, T, T) of texts of these lengths in one row."""
    text = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (text[:, None] == text) & torch.ones(len(text), len(text), dtype=torch.bool).tril()
    return {"positions": torch.cat([torch.arange(n) for n in lengths])[None], "mask": mask[None, None]}


def save_model(folder, gpt, tokenizer="bytes", stage="chat", **facts):
    """Writes a checkpoint of ours around a model. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"model": gpt.state_dict(), "model_args": asdict(gpt.config), "tokenizer": tokenizer, "stage": stage,
                "config": {}, "iter_num": 20, "val_loss": 2.5, "val_iter": 10, **facts}, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def write_shard(path, ids):
    """A shard by the letter of its format."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(ids)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype="<u2").tobytes())


# -----------------------------------------------------------------------------
# on a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = "cuda"


def run_on_gpu(script, *args, nccl=False):
    """nccl: under torch.distributed, as its only rank. `env` makes it a process of its own: CUDA survives no fork."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return run(script, *args, f"--device={GPU}", env=env if nccl else {})


def check_losses_of_a_cpu(script, args, flags, tolerance, tmp_path, nccl=False):
    """
    Runs the script on a CPU, and with `flags` on the GPU: the losses differ by less than `tolerance`, relatively, and
    nothing is compiled twice.
    """
    run(script, *args, f"--out_dir={tmp_path}/cpu")
    output = run_on_gpu(script, *args, *flags, f"--out_dir={tmp_path}/gpu", nccl=nccl)
    assert ("compiled in" in output) == ("--compile=True" in flags) and "recompiled" not in output
    check_compiled(tmp_path, ("cpu", "gpu"), tolerance)
    assert not any(read_log(tmp_path / "gpu", "skipped").values())
    run("sample.py", f"--checkpoint={tmp_path}/gpu/ckpt.pt", "--device=cpu", "--max_new_tokens=4", "--prompt=the cat")


# -----------------------------------------------------------------------------
# resumed runs, conversations, extras that may be deleted

def check_resumed(script, args, folder, ranks=1, stops=(5, 15, 20)):
    """A run that is interrupted at these steps, except for the last, equals one that is not, bit for bit."""
    rows = [f"--chat_dir={folder}/rows"] if script == "chat_sft.py" else []
    args = [*args, *rows, "--eval_interval=5", f"--lr_decay_iters={stops[-1]}", "--sample_tokens=0"]
    run(script, *args, f"--out_dir={folder}/whole", f"--max_iters={stops[-1]}", ranks=ranks)
    run(script, *args, f"--out_dir={folder}/parts", f"--max_iters={stops[0]}", ranks=ranks)
    for stop in stops[1:]:  # the other settings come from the checkpoint; the rows are made again
        run(script, "--init_from=resume", f"--out_dir={folder}/parts", f"--max_iters={stop}",
            *[f"{row}{stop}" for row in rows], ranks=ranks)
    check_same_run(folder / "whole", folder / "parts")
    begun = [load(folder / name)["config"]["init_from"] for name in ("whole", "parts")]
    assert begun[0] == begun[1] != "resume"  # an export's card names the model that it was tuned from


def random_texts(rng, n):
    """Of letters, spaces, quotes, characters of two to four bytes, and what spells a special token."""
    pieces = [*"abcdefgh  \n\t\"\\,é漢🙂\0", "the ", "<|endoftext|>", "<|user|>"]
    return ["".join(rng.choices(pieces, k=rng.randint(1, 400))) for _ in range(n)]


def turns(*contents, system=None):
    """Messages of user and assistant in turn."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return first + [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def write_lines(path, rows):
    """A .jsonl file, in a folder that is made if it is not there. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def jsonl(path, conversations):
    return write_lines(path, [{"messages": messages} for messages in conversations])


def hellaswag(folder, n):
    """Flags for that task with n examples."""
    write_lines(folder / "hellaswag/test.jsonl", [
        {"ctx": "the cat", "endings": ["sat", "ran", "on", f"{i}"], "label": str(i % 4)} for i in range(n)])
    return ["--eval_tasks=hellaswag", f"--task_dir={folder}"]


NEW_TEXT, NO_LOSS = 65534, 65535  # targets that are no ids; they are uint16


def conversations_of(rows, start_id=256):
    """The (inputs, targets) of each conversation in rows (n, 2, T), and the number of padding positions."""
    found, padding = [], 0
    for idx, targets in rows.tolist():
        starts = [i for i in range(len(idx)) if idx[i] == start_id] + [len(idx)]
        assert starts[:-1] == [i for i in range(len(idx)) if targets[i] == NEW_TEXT]
        for start, end in zip(starts, starts[1:]):
            if end == start + 1:
                padding += 1
            else:
                found.append((tuple(idx[start:end]), tuple(targets[start:end])))
    return found, padding


def extra_flags(**flags):
    """extra_flags(spam=["--optimizer=adamw_spam"], ...): the flags of those files of extras/ that are not deleted."""
    return [flag for name, given in flags.items() if (ROOT / "extras" / f"{name}.py").exists() for flag in given]


def error_line(function, *args, **settings):
    """Calls a function that must exit because of a user's mistake, with code 2 and one line. Returns that line."""
    with redirect_stderr(io.StringIO()) as stream, pytest.raises(SystemExit) as end:
        function(*args, **settings)
    line = stream.getvalue()
    assert end.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1, line
    return line


def check_error(words, function, *args, **settings):
    """The same, and the line matches the words, a regular expression."""
    line = error_line(function, *args, **settings)
    assert re.search(words, line), line
