"""
The base path and the extras on a GPU against the same on a CPU; skipped where there is none. python -m pytest -n 8
-k cuda adds decoding and packed rows, takes some minutes there and needs no network; -s prints the differences.
"""
from itertools import cycle

import pytest
import torch

from conftest import (COMPILED, GPU, LLAMA, MLA, SFT, TINY, VARIANTS, chats, check_losses_of_a_cpu, check_same_run,
                      extra_flags, load, needs_gpu, new_gpt, packed, run_on_gpu, same, tokens)
from distributed import make_autocast

pytestmark = needs_gpu
FSDP = extra_flags(fsdp=["--fsdp=True"])
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 5e-3}
ROWS = {"causal": {},
        "packed": {name: value.expand(2, *value.shape[1:]) for name, value in packed([20, 1, 27]).items()}}


# -----------------------------------------------------------------------------
# the model

def outputs(gpt, device, dtype, rows, compile=False, recompute=False):
    """The logits, the loss and all gradients, as one vector each, on the CPU."""
    gpt, gpt.recompute = gpt.to(device), recompute
    gpt.zero_grad()
    model = torch.compile(gpt, dynamic=False, fullgraph=True) if compile else gpt
    idx, targets = tokens(seed=1).to(device), tokens(seed=2).to(device)
    rows = {name: value.to(device) for name, value in rows.items()}
    with make_autocast(torch.device(device), dtype):
        loss = model(idx, targets, **rows)
        loss.backward()
        with torch.no_grad():
            logits = gpt(idx, **rows)
    gradients = torch.cat([p.grad.flatten() for p in gpt.parameters()])
    return [x.detach().float().cpu().flatten() for x in (logits, loss, gradients)]


def check_outputs(variant, rows, dtypes, **settings):
    gpt = new_gpt(variant)
    expected = outputs(gpt, "cpu", "float32", rows)
    for dtype in dtypes:
        for name, a, b in zip(("logits", "loss", "gradients"), outputs(gpt, GPU, dtype, rows, **settings), expected):
            error = ((a - b).norm() / b.norm()).item()
            print(f"{dtype}, {name}: {error:.1e} of {b.norm():.4g}, at most {TOLERANCE[dtype]:.0e}")
            assert error < TOLERANCE[dtype], name


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_gradients_are_those_of_a_cpu(variant, rows):
    check_outputs(variant, ROWS[rows], TOLERANCE)
    check_outputs(variant, ROWS[rows], ["float32"], recompute=True)


@pytest.mark.parametrize("variant, rows", list(zip(VARIANTS, cycle(ROWS))))
def test_compiled_equals_eager(variant, rows):
    torch.compiler.reset()
    check_outputs(variant, ROWS[rows], ["float32", "bfloat16"], compile=True)


# -----------------------------------------------------------------------------
# the loops

@pytest.mark.parametrize("model, flags, tolerance", [
    ([], [], 2e-3),  # TF32
    ([], COMPILED, 2e-3),
    ([*LLAMA, "--embed_norm=True", *extra_flags(local_heads=["--local_heads=True"])], [*COMPILED, "--dtype=bfloat16"],
     2e-2),
    ([], [*COMPILED, "--dtype=float16"], 5e-3),
    ([*LLAMA, "--optimizer=muon"], [*COMPILED, "--dtype=float16"], 3e-2),
    (MLA, [*COMPILED, "--compile_mode=reduce-overhead"], 2e-3),
    ([*LLAMA, "--optimizer=muon"], [*COMPILED, "--compile_mode=max-autotune"], 3e-2),
    ([], [*COMPILED, "--recompute=True"], 2e-3),
    (extra_flags(prune=["--sparsity=0.7", "--prune_begin=2", "--prune_end=13"]), COMPILED, 2e-3),
    (extra_flags(spam=["--optimizer=adamw_spam", "--spam_interval=7"]), COMPILED, 2e-3),  # two resets in 20 steps
], ids=["eager", "compiled", "llama_bfloat16", "float16", "muon_float16", "mla_reduce_overhead", "muon_max_autotune",
        "recompute", "prune", "spam"])
def test_a_run_has_the_losses_of_a_cpu(shards, tmp_path, model, flags, tolerance):
    check_losses_of_a_cpu("train_gpt2.py", [*TINY, *model, f"--data_dir={shards}"], flags, tolerance, tmp_path)


@pytest.mark.parametrize("model, flags, tolerance", [
    ([], [], 2e-3), ([], FSDP, 2e-3), ([*LLAMA, "--optimizer=muon"], [*FSDP, "--dtype=bfloat16"], 3e-2)],
    ids=["ddp", "fsdp", "fsdp_muon_bfloat16"])
def test_a_rank_has_the_losses_of_a_cpu(shards, tmp_path, model, flags, tolerance):
    check_losses_of_a_cpu("train_gpt2.py", [*TINY, *model, f"--data_dir={shards}"], [*COMPILED, *flags], tolerance,
                          tmp_path, nccl=True)


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
    weights = [torch.cat([p.flatten().float() for p in run["model"].values()]) for run in (one, other, parts)]
    repeated, resumed = ((vector - weights[0]).norm() / weights[0].norm() for vector in weights[1:])
    print(f"weights differ by {repeated:.1e} in a repeated run, by {resumed:.1e} in a resumed one")
    assert resumed < 10 * repeated


@pytest.mark.parametrize("flags", [[], ["--pack=False"], extra_flags(lora=["--lora_rank=4"])],
                         ids=["packed", "padded", "lora"])
def test_chat_tuning_has_the_losses_of_a_cpu(trained, tmp_path, flags):
    args = [*SFT, *flags, f"--init_from={trained}", f"--data={chats(tmp_path / 'chats.jsonl')}"]
    check_losses_of_a_cpu("chat_sft.py", args, [*COMPILED, "--dtype=bfloat16"], 2e-2, tmp_path)
