"""
The base path on a GPU against the same on a CPU; skipped where there is none. python -m pytest -n 4 -k "cuda or gpu"
adds the extras', takes some minutes there and needs neither a network nor datasets; -s prints the differences.
"""
import pytest
import torch

import runtime
from conftest import TINY, chats, check_compiled, check_same_run, free_port, load, read_log, run, same
from sample import compile_step
from test_chat import SFT
from test_generate import PROMPTS, check_a_compiled_row_in_bfloat16, greedy, new_lively_gpt
from test_model import VARIANTS, new_gpt, packed, tokens
from test_train import LLAMA, MLA

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = needs_gpu
GPU = "cuda"


def run_on_gpu(script, *args, nccl=False):
    """nccl: under torch.distributed, as its only rank. `env` makes it a process of its own: CUDA survives no fork."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return run(script, *args, f"--device={GPU}", env=env if nccl else {})


# -----------------------------------------------------------------------------
# the model

def outputs(gpt, device, dtype="float32", compile=False, rows=None, recompute=False):
    """The logits, the loss and all gradients, as one vector each, on the CPU."""
    gpt = gpt.to(device)
    gpt.zero_grad(set_to_none=True)
    gpt.recompute = recompute
    model = torch.compile(gpt, dynamic=False, fullgraph=True) if compile else gpt
    idx, targets = tokens(seed=1).to(device), tokens(seed=2).to(device)
    rows = {name: value.expand(2, *value.shape[1:]).to(device) for name, value in (rows or {}).items()}
    with runtime.autocast(torch.device(device), dtype):
        loss = model(idx, targets, **rows)
        loss.backward()
        with torch.no_grad():
            logits = gpt(idx, **rows)
    gradients = torch.cat([p.grad.flatten() for p in gpt.parameters()])
    return [x.detach().float().cpu().flatten() for x in (logits, loss, gradients)]


def check_close(found, expected, tolerance):
    for name, a, b in zip(("logits", "loss", "gradients"), found, expected):
        error = ((a - b).norm() / b.norm()).item()
        print(f"{name}: {error:.1e} of {b.norm():.4g}, at most {tolerance:.0e}")
        assert error < tolerance, name


@pytest.mark.parametrize("rows", [None, packed([20, 1, 27])], ids=["causal", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_gradients_are_those_of_a_cpu(variant, rows):
    gpt = new_gpt(variant)
    expected = outputs(gpt, "cpu", rows=rows)
    check_close(outputs(gpt, GPU, rows=rows), expected, 1e-5)
    check_close(outputs(gpt, GPU, rows=rows, recompute=True), expected, 1e-5)
    check_close(outputs(gpt, GPU, "bfloat16", rows=rows), expected, 3e-2)
    check_close(outputs(gpt, GPU, "float16", rows=rows), expected, 5e-3)


@pytest.mark.parametrize("rows", [None, packed([20, 1, 27])], ids=["causal", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_equals_eager(variant, rows):
    torch.compiler.reset()
    gpt = new_gpt(variant)
    expected = outputs(gpt, "cpu", rows=rows)
    check_close(outputs(gpt, GPU, compile=True, rows=rows), expected, 1e-5)
    check_close(outputs(gpt, GPU, "bfloat16", compile=True, rows=rows), expected, 3e-2)


@pytest.mark.parametrize("variant", ["gpt2", "gpt2_mla", "qwen3", "llama_mla"])
def test_decoding_cached_and_compiled_gives_the_ids_of_a_cpu(variant):
    torch.compiler.reset()
    gpt = new_lively_gpt(variant)
    expected, beyond = greedy(gpt, PROMPTS, 30), greedy(gpt, PROMPTS, 60)
    gpt.to(GPU)
    assert greedy(gpt, PROMPTS, 30) == expected
    before = runtime.graphs_compiled()
    compiled = compile_step(gpt, 3)
    assert greedy(compiled, PROMPTS, 30) == expected
    assert greedy(compiled, PROMPTS, 60) == beyond
    assert runtime.graphs_compiled() == before + 1


@pytest.mark.parametrize("variant", ["gpt2", "qwen3", "llama_mla"])
def test_two_compiled_rows_in_bfloat16_have_the_logits_of_their_models(variant):
    for seed in (0, 1):  # the second must not have the graphs or the cache of the first
        check_a_compiled_row_in_bfloat16(new_gpt(variant, seed).eval().to(GPU), GPU)


# -----------------------------------------------------------------------------
# the loops

COMPILED = ["--compile=True"]


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
    assert not any(tensor.is_cuda for tensor in load(tmp_path / "gpu")["model"].values())
    run("sample.py", f"--checkpoint={tmp_path}/gpu/ckpt.pt", "--device=cpu", "--max_new_tokens=4", "--prompt=the cat")


@pytest.mark.parametrize("model, flags, tolerance", [
    ([], [], 2e-3),  # TF32
    ([], COMPILED, 2e-3),
    ([*LLAMA, "--embed_norm=True"], [*COMPILED, "--dtype=bfloat16"], 2e-2),
    ([], [*COMPILED, "--dtype=float16"], 5e-3),
    ([*LLAMA, "--optimizer=muon"], [*COMPILED, "--dtype=float16"], 3e-2),
    (MLA, [*COMPILED, "--compile_mode=reduce-overhead"], 2e-3),
    ([*LLAMA, "--optimizer=muon"], [*COMPILED, "--compile_mode=max-autotune"], 3e-2),
    ([], [*COMPILED, "--recompute=True"], 2e-3),
], ids=["eager", "compiled", "llama_bfloat16", "float16", "muon_float16", "mla_reduce_overhead", "muon_max_autotune",
        "recompute"])
def test_a_run_has_the_losses_of_a_cpu(shards, tmp_path, model, flags, tolerance):
    check_losses_of_a_cpu("train_gpt2.py", [*TINY, *model, f"--data_dir={shards}"], flags, tolerance, tmp_path)


def test_a_rank_has_the_losses_of_a_cpu(shards, tmp_path):
    check_losses_of_a_cpu("train_gpt2.py", [*TINY, f"--data_dir={shards}"], COMPILED, 2e-3, tmp_path, nccl=True)


@pytest.mark.parametrize("flags", [["--dropout=0.1"], [*COMPILED, "--dtype=float16"], [*COMPILED, "--optimizer=muon"]],
                         ids=["dropout", "float16", "muon"])
def test_resumed_equals_uninterrupted_as_far_as_a_repeated_run_does(shards, tmp_path, flags):
    """A GPU may sum in another order each time. Where two runs have the same bits, the resumed one has them too."""
    args = [*TINY, *flags, f"--data_dir={shards}", "--lr_decay_iters=20", "--sample_tokens=0"]
    for name, steps in (("one", 20), ("other", 20), ("parts", 10)):
        run_on_gpu("train_gpt2.py", *args, f"--out_dir={tmp_path / name}", f"--max_iters={steps}")
    run_on_gpu("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/parts", "--max_iters=20")
    one, other, parts = (load(tmp_path / name) for name in ("one", "other", "parts"))
    assert parts["rows_seen"] == one["rows_seen"]
    if same(one["model"], other["model"]):
        print("two runs are equal to the bit")
        return check_same_run(tmp_path / "one", tmp_path / "parts")
    vector = {name: torch.cat([p.flatten().float() for p in run["model"].values()])
              for name, run in (("one", one), ("other", other), ("parts", parts))}
    repeated, resumed = ((vector[name] - vector["one"]).norm() / vector["one"].norm() for name in ("other", "parts"))
    print(f"weights differ by {repeated:.1e} in a repeated run, by {resumed:.1e} in a resumed one")
    assert resumed < 10 * repeated


@pytest.mark.parametrize("flags", [[], ["--pack=False"]], ids=["packed", "padded"])
def test_chat_tuning_has_the_losses_of_a_cpu(trained, tmp_path, flags):
    args = [*SFT, *flags, f"--init_from={trained}", f"--data={chats(tmp_path / 'chats.jsonl')}"]
    check_losses_of_a_cpu("chat_sft.py", args, [*COMPILED, "--dtype=bfloat16"], 2e-2, tmp_path)
