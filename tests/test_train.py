"""The base path as a user starts it: train, resume, several ranks, compiled, sample."""
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock

import dataloader
import machine
from checkpoint import load_model, pick_max_seq_len
from compiling import compile_options
from configurator import read_config_file
from conftest import (LLAMA, MLA, ROOT, TINY, check_close, check_compiled, check_resumed, check_same_run, defaults,
                      error_line, extra_flags, load, read_lines, read_log, refused, run, save_model, small_gpt,
                      write_shards)
from dataloader import BatchLoader, TokenDataset, validation_loss
from distributed import init_process, local_grad_accum_steps, make_autocast, step_seed
from log import Logger, find_nonfinite
from model import GPT, GPTConfig
from start import load_init_from, lock_out_dir, make_temporary_folder, take_settings

CPU = torch.device("cpu")


def test_a_run_learns_logs_and_leaves_a_checkpoint(trained):
    log = read_log(trained, "train_loss", "val_loss", "tokens", "val_ppl", "recompiles", "lr", "grad_norm", "val_bpb",
                   "clipped", "eval_seconds")
    assert all((key, i) in log for key in ("train_loss", "lr", "grad_norm") for i in range(1, 21))
    assert log["train_loss", 1] == pytest.approx(math.log(384), rel=0.03)
    assert log["val_loss", 20] < log["val_loss", 10] < log["val_loss", 0]
    assert log["val_ppl", 20] == pytest.approx(math.exp(log["val_loss", 20]), rel=1e-4)
    assert log["tokens", 20] == 20 * 4 * 2 * 32
    assert all(log["clipped", i] == (log["grad_norm", i] > 1) for i in range(1, 21))
    assert log["eval_seconds", 20] > 0

    checkpoint, config = load(trained), json.loads((trained / "config.json").read_text())
    assert {"model", "optimizer", "model_args", "config", "best_val_loss"} <= checkpoint.keys()  # nanoGPT's
    assert checkpoint["iter_num"] == 20 and checkpoint["rows_seen"] == 160
    assert config.pop("machine")["torch"] == torch.__version__ and config == checkpoint["config"]


def test_the_loss_curve_is_that_of_a_plain_loop_over_transformers(shards, trained):
    """The order of the data, the mean over a step, clipping, schedule, groups and AdamW, written out once more."""
    transformers = pytest.importorskip("transformers")
    twin = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=384, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    torch.manual_seed(1337)
    weights = GPT(GPTConfig(**load(trained)["model_args"])).state_dict()
    twin.load_state_dict({name: tensor.t() if re.search(r"c_\w+\.weight", name) else tensor  # GPT-2's are (in, out)
                          for name, tensor in weights.items()})
    groups = [{"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0} for p in twin.parameters()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False, fused=False)
    tokens = np.fromfile(shards / "train_000000.bin", dtype=np.uint16)[512:].astype(np.int64)
    order = np.random.default_rng((1337, 0)).permutation((len(tokens) - 1) // 32)
    log = read_log(trained, "train_loss", "grad_norm")
    for step in range(20):
        rows = torch.stack([torch.from_numpy(tokens[32 * i:32 * i + 33]) for i in order[8 * step:8 * step + 8]])
        loss = F.cross_entropy(twin(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (step + 1) / 2 if step < 2 else \
                6e-5 + (3e-3 - 6e-5) * 0.5 * (1 + math.cos(math.pi * (step - 2) / 18))
        optimizer.step()
        optimizer.zero_grad()
        assert log["train_loss", step + 1] == pytest.approx(loss.item(), abs=1e-5)
        assert log["grad_norm", step + 1] == pytest.approx(norm.item(), rel=1e-3)


def test_a_checkpoint_holds_its_own_val_loss(shards, trained):
    (gpt, checkpoint), log = load_model(trained, CPU), read_log(trained, "val_loss", "val_bpb")
    loss, bpb = validation_loss(gpt, TokenDataset(shards, "val", 32), 4, 4, CPU)
    assert checkpoint["val_loss"] == log["val_loss", 20] == pytest.approx(loss) and checkpoint["val_iter"] == 20
    assert log["val_bpb", 20] == pytest.approx(bpb)


@pytest.mark.parametrize("ranks, batch_size, eval_iters, rows", [(1, 4, 4, 16), (3, 5, 1000, 124), (2, 1, 1, 1)])
def test_validation_is_the_mean_over_its_tokens(shards, monkeypatch, ranks, batch_size, eval_iters, rows):
    """
    With a last batch that is not full, and with more ranks than rows. In nats per token, and in bits per byte: a token
    of the bytes tokenizer is a byte, but <|endoftext|> is none.
    """
    parts = []
    monkeypatch.setattr(dataloader, "all_reduce", lambda *totals: parts.append(torch.stack(totals)) or sum(parts))
    gpt, data = small_gpt("gpt2", vocab_size=384, max_seq_len=32), TokenDataset(shards, "val", 32)
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        loss, bpb = validation_loss(gpt, data, batch_size, eval_iters, CPU)
    x, y = map(torch.from_numpy, data[range(rows)])
    expected = F.cross_entropy(gpt(x).flatten(0, 1), y.flatten()).item()
    assert loss == pytest.approx(expected, rel=1e-6)
    assert bpb == pytest.approx(expected * y.numel() / math.log(2) / (y < 256).sum().item(), rel=1e-6)


def test_a_resumed_run_equals_one_that_was_not_interrupted(train, trained, tmp_path):
    output = train(tmp_path, "--max_iters=10", "--lr_decay_iters=20")
    for words in ("settings given: n_layer=2, n_head=2, ", "machine: device ", "not compiled", "done after 10 steps"):
        assert words in output
    output = run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=20")
    assert "changed on resume: max_iters 10 -> 20" in output and "resumed at step 10" in output
    assert "WARNING" not in output
    assert output.count("----- sample") == 2  # at 10 again
    check_same_run(trained, tmp_path)
    assert [line for line in read_lines(tmp_path / "log.jsonl") if "event" in line] == [
        {"iter": 0, "tokens": 0, "event": "start", "compile_seconds": 0.0},
        {"iter": 10, "tokens": 2560, "event": "resume", "compile_seconds": 0.0}]


@pytest.mark.parametrize("flags", [
    [*LLAMA, "--embed_norm=True", "--dropout=0.1", *extra_flags(local_heads=["--local_heads=True"])],
    pytest.param(["--arch=llama", "--n_layer=1", "--compile=True", "--compile_backend=aot_eager"],
                 marks=pytest.mark.slow)], ids=["dropout", "compiled"])
def test_with_three_ranks_and_muon_too(shards, tmp_path, flags):
    """Of two ranks a sum is the same in any order; of three it is that in which DDP has laid out the gradients."""
    check_resumed("train_gpt2.py", [*TINY, *flags, "--optimizer=muon", "--gradient_accumulation_steps=3",
                                    f"--data_dir={shards}"], tmp_path, ranks=3)


@pytest.mark.slow
def test_without_an_out_dir_nothing_is_kept(shards, tmp_path):
    command = [sys.executable, f"{ROOT}/train_gpt2.py", *TINY, f"--data_dir={shards}", "--max_iters=3",
               "--out_dir=None"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert "done after 3 steps" in done.stdout and not list(tmp_path.glob("run-*")), done.stdout + done.stderr
    folder = re.search("--out_dir=None: (.*) is removed", done.stdout)[1]
    assert f"checkpoint: {folder}/ckpt.pt" in done.stdout and not list(Path.cwd().glob("None*"))


def test_a_temporary_folder_of_another_run_is_neither_used_nor_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("atexit.register", lambda function: pytest.fail("it would be removed"))
    for environment, name in (({}, f"run-{os.getpid()}"), ({"RANK": "0"}, f"run-{os.getppid()}-None")):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value)
            assert f"{name}" in error_line(make_temporary_folder)


def test_each_step_drops_other_units(train, tmp_path):
    """One row of data and a rate of zero: only dropout makes the losses of two steps differ."""
    data = write_shards(tmp_path / "data", train=33, val=33)
    train(tmp_path, f"--data_dir={data}", "--batch_size=1", "--max_iters=3", "--gradient_accumulation_steps=1",
          "--learning_rate=0", "--min_lr=0", "--dropout=0.5", "--sample_tokens=0")
    assert len(set(read_log(tmp_path, "train_loss").values())) == 3
    assert len({step_seed(1337, step, rank) for step in range(50) for rank in range(8)}) == 400  # nor two ranks


def test_training_lines_come_at_the_first_step_each_interval_and_the_end(train, tmp_path):
    """Without clipping no step counts as clipped."""
    train(tmp_path, "--max_iters=7", "--log_interval=3", "--grad_clip=0", "--sample_tokens=0")
    assert read_log(tmp_path, "clipped") == {("clipped", i): 0 for i in (1, 3, 6, 7)}


def test_seconds_flops_and_tokens_go_on_after_a_resume_with_another_batch_size(train, tmp_path):
    train(tmp_path, "--sample_tokens=0", "--max_iters=3")
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=5", "--batch_size=8")
    log = read_log(tmp_path, "seconds", "flops", "ms", "tokens")
    assert log["tokens", 3] == 3 * 256 and log["tokens", 5] == 3 * 256 + 2 * 512
    assert log["seconds", 5] == pytest.approx(sum(log["ms", i] for i in range(1, 6)) / 1000)
    assert log["flops", 5] == load_model(tmp_path, CPU)[0].flops_per_token(32) * log["tokens", 5]


def read_preset(name):
    return read_config_file(f"{ROOT}/config/{name}.py")


@pytest.mark.parametrize("preset", ["gpt2_baseline", "gpt2_mla", "gpt2_spam", "speedrun"])
def test_a_preset_trains_on_the_same_rows_with_1_2_4_and_8_ranks(preset):
    settings = {**defaults("train_gpt2.py"), **read_preset(preset)}
    batch_size, accumulation = settings["batch_size"], settings["gradient_accumulation_steps"]
    for ranks in (1, 2, 4, 8):
        assert ranks * batch_size * local_grad_accum_steps(accumulation, ranks) == 128
    assert settings["max_iters"] == (50_000 if preset == "speedrun" else 10_000)


def test_the_quick_start_takes_every_setting_of_the_recipe():
    assert read_preset("speedrun").items() <= read_preset("quickstart").items()


def test_a_preset_is_found_where_another_project_has_a_package_of_its_name(tmp_path):
    """A folder without __init__.py comes after every package, even an installed one."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "__init__.py").touch()
    preset = f"{ROOT}/config/quickstart.py"
    assert "data_dir=" in run("train_gpt2.py", preset, f"--data_dir={tmp_path}", f"--out_dir={tmp_path}/o", code=2,
                              env={"PYTHONPATH": str(tmp_path)})


SPAM_PRESET = [("gpt2_spam", "--prune_begin=0", ["mha", "adamw_spam", 6e-4])]


@pytest.mark.parametrize("preset, flag, expected", [
    ("quickstart", "--dropout=0", ["mha", "muon", 0.01]), ("gpt2_mla", "--kv_lora_rank=8", ["mla", "adamw", 6e-4]),
    *(SPAM_PRESET if len(extra_flags(spam=["here"], prune=["here"])) == 2 else [])])  # it needs both files of extras/
def test_a_preset_starts_as_what_it_says(shards, tmp_path, preset, flag, expected):
    small = [flag for flag in TINY if not flag.startswith(("--learning_rate", "--warmup", "--gradient"))]
    run("train_gpt2.py", f"{ROOT}/config/{preset}.py", *small, flag, f"--data_dir={shards}", f"--out_dir={tmp_path}",
        "--max_iters=1", "--warmup_iters=0")
    assert [load(tmp_path)["config"][name] for name in ("attention", "optimizer", "learning_rate")] == expected


@pytest.mark.parametrize("ranks, batch_size, accumulation", [
    (2, 4, 2), pytest.param(4, 1, 8, marks=pytest.mark.slow)])
def test_any_number_of_ranks_and_micro_batches_trains_the_same_model(train, trained, tmp_path, ranks, batch_size,
                                                                     accumulation):
    train(tmp_path, f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}",
          f"--eval_iters={16 // batch_size}", ranks=ranks)
    check_close(trained, tmp_path, "train_loss", "val_loss", "grad_norm", abs=1e-5)


# -----------------------------------------------------------------------------
# compiled

@pytest.mark.parametrize("ranks, flags", [
    (1, [*MLA, "--batch_size=7", "--compile_backend=aot_eager"]),
    pytest.param(1, ["--compile_mode=reduce-overhead"], marks=pytest.mark.slow),
    pytest.param(1, [*LLAMA, "--recompute=True", "--batch_size=1", "--compile_mode=max-autotune"],
                 marks=pytest.mark.slow),
    pytest.param(2, ["--arch=llama", *MLA, "--q_lora_rank=12"], marks=pytest.mark.slow)],
    ids=["gpt2_mla", "gpt2", "llama_recompute", "llama_mla_two_ranks"])
def test_compiled_equals_eager_without_a_recompile(train, tmp_path, ranks, flags):
    """Over training, validation, sampling and saving; fullgraph=True makes a graph break an error."""
    for name, compile in (("eager", False), ("compiled", True)):
        output = train(tmp_path / name, *flags, "--n_layer=1", f"--compile={compile}", ranks=ranks)
        assert "WARNING" not in output and ("compiled in" in output) == compile
    backend, mode = load(tmp_path / "compiled")["config"]["compile_backend"], flags[-1].partition("_mode=")[2]
    assert f"compiling, backend {backend}, mode {mode or 'default'} ..." in output
    check_compiled(tmp_path)


SMALL_BUCKETS = """
from functools import partial
import compiling, torch
from torch._dynamo.backends.distributed import DDPOptimizer
torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 8000
def compile_fn(self, *args, original=DDPOptimizer.compile_fn):
    compiled = original(self, *args)
    print(len(self.buckets), "buckets")
    return compiled
DDPOptimizer.compile_fn, compiling.DDP = compile_fn, partial(compiling.DDP, bucket_cap_mb=0.02)
"""


def test_graphs_that_torch_splits_at_ddps_buckets_train_the_same_model(train, trained, tmp_path):
    """As in GPT-2 124M on several GPUs. The other tests' models fit into one bucket."""
    output = train(tmp_path / "o", "--compile=True", "--compile_backend=aot_eager", patch=SMALL_BUCKETS, ranks=2)
    assert max(map(int, re.findall(r"(\d+) buckets", output))) > 2 and "recompiled" not in output
    check_close(trained, tmp_path / "o", "train_loss", "val_loss", "grad_norm", abs=1e-4)


@pytest.mark.slow
def test_without_a_compiler_it_runs_uncompiled_with_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config = {"compile": True, "compile_mode": None, "compile_backend": "inductor"}
    # not monkeypatch, which would delete the setting afterwards instead of restoring it
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert compile_options(config, CPU) is None
    assert re.search(r"WARNING: torch.compile cannot work here \(.*No working C\+\+ compiler", capsys.readouterr().out)
    for backend in ("fastest", "cudagraphs"):
        line = error_line(compile_options, {**config, "compile_backend": backend}, CPU)
        assert f"--compile_backend={backend}: " in line and "inductor" in line and "cudagraphs" not in line[40:]


# -----------------------------------------------------------------------------
# precision, steps that are not finite, schedule, other weights, other data

def test_float16_scales_its_loss_and_bfloat16_trains(train, trained, tmp_path):
    """float16 from a scale at which it overflows: those steps are skipped without a warning."""
    scale = """
import functools, torch
torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=2.**18)
"""
    reference = read_log(trained, "val_loss")["val_loss", 20]
    for dtype, patch in (("float16", scale), ("bfloat16", "")):
        output = train(tmp_path / dtype, f"--dtype={dtype}", patch=patch)
        log = read_log(tmp_path / dtype, "val_loss", "loss_scale", "skipped")
        assert log["val_loss", 20] == pytest.approx(reference, rel=0.05)
        assert (("loss_scale", 20) in log) == (log["skipped", 20] > 0) == (dtype == "float16")
        assert "WARNING" not in output


def test_a_step_that_is_not_finite_is_skipped_by_all_ranks(train, tmp_path):
    output = train(tmp_path, "--learning_rate=1e30", "--warmup_iters=0", "--grad_clip=0", "--max_iters=4",
                   "--sample_tokens=0", ranks=2)
    assert output.count("is not finite; 1 skipped so far") == 1
    assert read_log(tmp_path, "skipped")["skipped", 4] >= 1
    assert all(tensor.isfinite().all() for tensor in load(tmp_path)["model"].values())


def test_a_run_with_a_broken_weight_names_it_and_exits_after_50_steps(trained, tmp_path):
    checkpoint = load(trained)
    checkpoint["model"]["transformer.h.1.mlp.c_fc.weight"][0, 0] = math.nan
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        torch.save(checkpoint, folder / "ckpt.pt")
    resume = ["train_gpt2.py", "--init_from=resume", "--max_iters=100"]
    output = run(*resume, f"--out_dir={tmp_path}/a", code=2)
    assert "step 20 is skipped: the output of transformer.h.1.mlp.c_fc is not finite; 1 skipped so far" in output
    assert "(none: the model's logits are not finite" in output
    assert output.count("error: ") == 1 and "error: step 69: 50 steps in a row were skipped" in output
    run(*resume, f"--out_dir={tmp_path}/b", "--eval_interval=1000", "--save_interval=10", code=2)
    for folder in "a", "b":  # nothing was learned since, so nothing is saved over what was
        assert load(tmp_path / folder)["iter_num"] == 20


def raise_out_of_memory(*_):
    raise torch.OutOfMemoryError


def test_why_a_step_is_not_finite(trained):
    """Each with the gradients of its own backward pass."""
    def why(gpt, hook=None):
        if hook:
            gpt.transformer.h[0].mlp.c_proj.register_full_backward_pre_hook(hook)
        batch = {"idx": torch.arange(8)[None], "targets": torch.arange(8)[None]}
        gpt(**batch).backward()
        return find_nonfinite(gpt, batch, make_autocast(CPU, "float32"))

    gpt = small_gpt("gpt2")
    gpt.transformer.wpe.weight.data[3] = math.inf
    assert why(gpt) == "the output of transformer.wpe is not finite"
    gpt = small_gpt("llama")
    gpt.lm_head.weight.data[3] = math.nan
    assert why(gpt) == "its loss is not finite"
    assert why(small_gpt("gpt2"), lambda module, grads: (grads[0] * math.nan,)) == \
        "the gradient of transformer.h.0.mlp.c_proj.bias is not finite"
    assert why(small_gpt("gpt2")) == "it is not finite in another micro-batch"
    gpt = small_gpt("gpt2")
    gpt.transformer.h[0].register_forward_pre_hook(raise_out_of_memory)
    cause = find_nonfinite(gpt, {"idx": torch.arange(8)[None]}, make_autocast(CPU, "float32"))
    assert cause.endswith("find out where")
    assert not torch.nn.modules.module._global_forward_hooks


def test_wsd_and_another_runs_weights(shards, trained, tmp_path):
    """With the largest seed."""
    output = run("train_gpt2.py", f"--init_from={trained}/ckpt.pt", f"--data_dir={shards}", f"--out_dir={tmp_path}",
                 "--max_seq_len=16", "--batch_size=4", "--max_iters=10", "--lr_schedule=wsd", "--wsd_decay_frac=0.5",
                 "--warmup_iters=0", "--learning_rate=1e-3", "--min_lr=0", "--log_interval=1", "--eval_iters=4",
                 "--compile=False", "--dtype=float32", "--device=cpu", f"--seed={2 ** 63 - 1}", "--dropout=0.1")
    log = read_log(tmp_path, "lr", "val_loss")
    assert log["val_loss", 0] < 4.5 and load(tmp_path)["config"]["n_layer"] == 2 and "rows of 16" in output
    assert [log["lr", i] for i in (1, 5, 6, 7, 10)] == pytest.approx([1e-3, 1e-3, 1e-3, 8e-4, 2e-4])


# -----------------------------------------------------------------------------
# mistakes, each refused in one line

def test_mistakes_are_refused_before_a_run_is_overwritten(shards, trained, tmp_path):
    out_dir = shutil.copytree(trained, tmp_path / "o")
    args = [*TINY, f"--data_dir={shards}", f"--out_dir={out_dir}"]
    assert f"--out_dir={out_dir}: holds a checkpoint" in refused("train_gpt2.py", *args)
    for flag in ("--n_head=3", "--warmup_iters=30", "--init_from=resume --seed=1", "--init_from=auto"):
        line = refused("train_gpt2.py", *args, "--overwrite=True", *flag.split())
        assert flag.split("--")[-1] in line, line
    assert load(out_dir)["iter_num"] == 20 and len(read_log(out_dir, "train_loss")) == 20
    (out_dir / "ckpt_mine.pt").touch()
    run("train_gpt2.py", *args, "--overwrite=True", "--max_iters=3")
    assert len(read_log(out_dir, "train_loss")) == 3
    assert [load(out_dir, name)["iter_num"] for name in ("ckpt.pt", "ckpt_prev.pt")] == [3, 0]
    assert (out_dir / "ckpt_mine.pt").exists()


def test_a_run_neither_resumes_nor_overwrites_what_another_one_is_writing(train, trained, tmp_path):
    out_dir = shutil.copytree(trained, tmp_path / "o")
    with FileLock(out_dir / "lock"):
        for flag in ("--init_from=resume", "--overwrite=True"):
            assert "no other run is writing to" in train(out_dir, flag, code=2)
    for name in ("ckpt.pt", "log.jsonl", "config.json"):
        assert (out_dir / name).read_bytes() == (trained / name).read_bytes()


def test_what_a_run_starts_from_decides_its_settings(trained, tmp_path, capsys):
    def start(stage="base", **overrides):
        config = {**defaults("train_gpt2.py"), **overrides}
        with lock_out_dir(config) or nullcontext():
            return config, *load_init_from(config, overrides, stage)

    resume = functools.partial(start, init_from="resume", out_dir=str(trained))
    begin = functools.partial(start, init_from=str(trained), out_dir=str(tmp_path))
    assert start(init_from="auto", out_dir=str(tmp_path))[1:] == (None, False)
    config, checkpoint, resuming = resume(learning_rate=0.1)
    assert [pick_max_seq_len(None, n) for n in (100, 5000)] == [100, 4096]  # of sample.py and evaluate.py
    assert resuming and checkpoint["iter_num"] == 20 and (config["n_layer"], config["learning_rate"]) == (2, 0.1)
    assert (config["out_dir"], config["init_from"], config["max_iters"]) == (str(trained), "scratch", 20)
    assert capsys.readouterr().out == "changed on resume: learning_rate 0.003 -> 0.1\n"
    take_settings({"n_layer": 2}, {}, {"config": {"n_layer": 2, "z_loss": 0.1, "window": None}})
    warning, = capsys.readouterr().out.splitlines()  # a copy of the script trained it, and not with a window
    assert warning.startswith("WARNING: the run was trained with z_loss=0.1, a setting that ")
    config, _, resuming = begin(max_seq_len=16, intermediate_size=None)
    assert not resuming and [config[name] for name in ("n_layer", "max_seq_len", "max_iters")] == [2, 16, 50_000]
    (tmp_path / "again").mkdir()  # a run that was resumed once has the derived values in its settings
    torch.save({**load(trained), "config": config}, tmp_path / "again/ckpt.pt")
    config, *_ = resume(out_dir=str(tmp_path / "again"), intermediate_size=None)
    assert config["intermediate_size"] == load(trained)["model_args"]["intermediate_size"]
    for function, overrides, words in (
            (start, {"init_from": "resume", "out_dir": str(tmp_path)}, "--init_from=resume: --out_dir="),
            (begin, {"init_from": "Scratch"}, "--init_from=Scratch: neither scratch, resume, auto nor a file"),
            (start, {"out_dir": "o\udcff"}, "whose name is not UTF-8"),
            (begin, {"init_from": "auto", "stage": "chat"}, "--init_from=auto: chat tuning starts from a model"),
            (resume, {"stage": "chat"}, "holds a base model"),
            *((resume, {name: value}, f"--{name}={value}: the checkpoint was trained with") for name, value in (
                ("seed", 1), ("optimizer", "muon"), ("sparsity", 0.5), ("local_heads", True), ("teacher_cache", 8),
                ("learn_temperature", True))),
            (resume, {"n_layer": 3}, "--n_layer=3: the model in"), (resume, {"arch": "llama"}, "--arch=llama: "),
            (resume, {"max_seq_len": 16}, "--max_seq_len=16: "), (begin, {"max_seq_len": 64}, "has 32 positions"),
            (begin, {"n_head": 4}, "--n_head=4: the model in"), (resume, {"teacher": "gpt2"}, "--teacher=gpt2: ")):
        assert words in error_line(lambda: function(**overrides))
    weights = save_model(tmp_path, small_gpt("gpt2"), stage="base")
    assert "a model without its optimizer" in error_line(lambda: resume(out_dir=str(weights.parent)))


def test_data_of_another_tokenizer_is_refused(shards, trained, tmp_path):
    torch.save({**load(trained), "tokenizer": "gpt2"}, tmp_path / "ckpt.pt")
    line = refused("train_gpt2.py", f"--init_from={tmp_path}/ckpt.pt", f"--data_dir={shards}",
                   f"--out_dir={tmp_path}/o")
    assert f"--data_dir={shards}: has bytes tokens, but the model" in line and "gpt2 tokens" in line


def test_a_token_outside_the_vocabulary_is_refused_on_any_rank(train, tmp_path):
    data = write_shards(tmp_path / "data")
    shard = np.fromfile(data / "train_000000.bin", dtype="<u2")
    shard[512:][5::32 * 7] = 60000  # in every seventh row
    shard.tofile(data / "train_000000.bin")
    output = train(tmp_path / "o", f"--data_dir={data}", ranks=2, code=2)
    assert "holds the token 60000" in output and "ends at 383" in output


def test_ranks_that_find_different_checkpoints_are_refused(train, trained, tmp_path):
    """As on two machines that each have a folder of that name on a disk of their own."""
    shutil.copytree(trained, tmp_path / "0" / "out")
    (tmp_path / "1").mkdir()
    patch = f"import os\nos.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])"
    output = train(tmp_path / "x", "--out_dir=out", "--init_from=auto", patch=patch, ranks=2, code=2)
    assert "rank 0 starts with {'step': 20" in output and "rank 1 with {'step': None" in output


def test_ranks_that_do_not_divide_the_micro_batches_are_refused():
    line = error_line(local_grad_accum_steps, 3, 2)
    assert "--gradient_accumulation_steps=3: expected a multiple of 2, the number of ranks" in line


# -----------------------------------------------------------------------------
# the log

def new_logger(shards, out_dir, resuming=False, **metric):
    loader = BatchLoader(TokenDataset(shards, "train", 32), 4, 0, 0, 1, CPU)
    return Logger(out_dir, 9, 3, loader, 1, 1, [lambda: metric], [], resuming)


def log_step(log, loss_sum=1.0, targets=1, tokens=1, seconds=1.0):
    log.step(loss_sum=loss_sum, targets=targets, tokens=tokens, rows=1, clipped=1, seconds=seconds)


@pytest.mark.parametrize("values, warned", [([3.0, 2.0, 2.1, 2.2, 2.3, 2.4, 2.2, 2.3], [4, 5]),
                                            ([1.0, math.nan, 2.0, 3.0], [])])
def test_a_loss_that_rises_three_times_in_a_row_is_a_warning(shards, tmp_path, capsys, values, warned):
    log = new_logger(shards, tmp_path)
    for i, value in enumerate(values):
        log(i, val_loss=value)
        assert ("WARNING" in capsys.readouterr().out) == (i in warned), i


def test_a_loss_that_stays_high_is_a_warning_once(shards, tmp_path, capsys):
    """As in a run whose loss rose from 3.2 to 5.9 in 300 steps. A spike of one step is none, nor is noise."""
    def losses(values):
        log = new_logger(shards, tmp_path)
        for i, value in enumerate(values):
            log_step(log, value)
            log.train(i)
        return re.findall("step (.*): the loss is rising: .* is (.*), up from (.*);", capsys.readouterr().out)

    falling = [3.2 + 7 * 0.98 ** i for i in range(300)]
    assert losses([1.0, *[5.0] * 300]) == []  # an easy first batch
    assert losses([*falling, 30.0, *[3.2 + i % 2 for i in range(200)]]) == []
    [(step, mean, before)] = losses([*falling, *[3.2 + 2.7 * i / 300 for i in range(300)], *[5.9] * 100])
    assert 400 < int(step) < 600 and float(mean) > 1.2 * float(before) > 3.8


def test_the_duration_of_evaluations_counts_in_the_eta(shards, tmp_path):
    """9 steps, an evaluation each 3: after 3 steps of a second each, 6 are left and 2 evaluations."""
    log = new_logger(shards, tmp_path)
    log(0, eval_seconds=10.0)
    for _ in range(3):
        log_step(log)
    log.train(3)
    assert read_log(tmp_path, "eta_seconds")["eta_seconds", 3] == pytest.approx(6 * 1 + 2 * 10)
    assert new_logger(shards, tmp_path, resuming=True).eval_seconds == 10.0


def test_a_skipped_step_counts_in_the_utilization_and_not_in_the_mean_loss(shards, tmp_path):
    """
    Three steps of two seconds, of which they waited for one, and of 32 positions, 24 of them no padding; one FLOP per
    position on a device that reaches two per second.
    """
    log = new_logger(shards, tmp_path)
    log.peak_flops = 2
    for loss_sum, targets in (8.0, 4), (math.nan, 4), (40.0, 8):
        log_step(log, loss_sum, targets, tokens=24, seconds=2.0)
    log.loader.wait_seconds = 3.0
    log.train(3)
    expected = {"train_loss": 4.0, "mfu": 8.0, "ms": 2000, "tok_per_sec": 12, "useful": 0.75, "wait": 0.5, "clipped": 1}
    assert read_log(tmp_path, *expected) == {(key, 3): value for key, value in expected.items()}


def test_50_skipped_steps_end_the_run_only_in_a_row(shards, tmp_path, capsys):
    log = new_logger(shards, tmp_path)
    for i in [*range(49), *range(50, 99)]:
        log.skip(i, "")
    assert capsys.readouterr().out == "" and len(log.skipped) == 98  # without a cause, as of float16, it says nothing
    assert "step 99: 50 steps in a row were skipped" in error_line(log.skip, 99, "")


def test_a_recompile_is_loud(shards, tmp_path, capsys):
    log = new_logger(shards, tmp_path)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    log.step(loss_sum=1.0)
    assert "WARNING: rank 0 recompiled the model, 1 times so far" in capsys.readouterr().out
    log.step(loss_sum=1.0)
    assert capsys.readouterr().out == "" and log.recompiles == 1


def test_the_log_goes_on_after_half_a_line_and_without_a_disk(shards, tmp_path, capsys):
    for resuming, seconds, kept in (True, 2.5, '{"seconds": 2.5, "flops": 1}\n'), (False, 0.0, ""):
        (tmp_path / "log.jsonl").write_text('{"seconds": 2.5, "flops": 1}\n{"seconds": 3')
        log = new_logger(shards, tmp_path, resuming)
        assert log.seconds == seconds and (tmp_path / "log.jsonl").read_text() == kept
    shutil.rmtree(tmp_path)
    log(1, val_loss=2.0)
    assert "log.jsonl could not be written: " in capsys.readouterr().out


def test_a_metric_may_read_gradients_and_takes_no_other_name(train, shards, tmp_path):
    patch = """
import features, torch
def change_training(model, optimizer, max_iters, config, checkpoint, state, metrics):
    metrics.append(lambda: {"another": torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()})
    return [], None, []
features.change_training = change_training
"""
    train(tmp_path / "o", "--max_iters=2", "--grad_clip=0", patch=patch)
    log = read_log(tmp_path / "o", "another", "grad_norm")
    assert log["another", 2] == pytest.approx(log["grad_norm", 2]) and log["another", 2] > 0
    with pytest.raises(TypeError, match="multiple values for keyword argument 'lr'"):
        new_logger(shards, tmp_path, lr=1).train(1, lr=2)


# -----------------------------------------------------------------------------
# the machine


def test_a_process_begins_on_a_device_that_is_here(monkeypatch):
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    for device in ("tpu", "cuda:7", "meta"):
        assert f"--device={device}: " in error_line(init_process, device)
    assert init_process("cpu") == CPU


def test_a_peak_is_that_of_the_card(monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *_, **__: None)
    monkeypatch.setattr("timeit.repeat", lambda *_, **__: [2 * 4096 ** 3])  # measured: 1 FLOP/s
    for name, flops in (("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
                        ("NVIDIA H200 NVL", 835e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L4", 121e12),
                        ("NVIDIA L40", 1.0), ("NVIDIA RTX A4000", 1.0), ("NVIDIA GeForce RTX 4090 Laptop GPU", 1.0)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        peaks = [machine.peak_flops(torch.device("cuda:0"), dtype) for dtype in ("bfloat16", "float32")]
        assert peaks == [flops, 1.0], name


@pytest.mark.slow
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no Linux with huge pages")
def test_large_tensors_ask_for_huge_pages(monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)  # set since distributed was imported
    code = """
import re, distributed, torch
x, maps = torch.ones(2 ** 22), open("/proc/self/smaps").read()  # 16 MB
for first, last, flags in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", maps, re.M | re.S):
    if int(first, 16) <= x.data_ptr() < int(last, 16):
        print(" hg " in flags)
"""
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "True\n"
