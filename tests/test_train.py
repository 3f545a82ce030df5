"""The base path as a user starts it: train, resume, several ranks, compiled, sample."""
import json
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import runtime
from configurator import extra_settings, read_config_file
from conftest import (ROOT, TINY, check_compiled, check_same_run, defaults, load, patched, read_log, refused, run,
                      same, write_shards)
from dataloader import TokenDataset
from model import GPT, GPTConfig

LLAMA = ["--arch=llama", "--n_kv_head=1", "--qk_norm=True"]
MLA = ["--attention=mla", "--kv_lora_rank=8"]


def test_a_run_learns_logs_and_leaves_a_checkpoint(shards, tmp_path):
    output = run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}")
    log = read_log(tmp_path, "train_loss", "val_loss", "tokens", "val_ppl", "recompiles", "lr", "grad_norm", "val_bpb")
    assert all((key, i) in log for key in ("train_loss", "lr", "grad_norm") for i in range(1, 21))
    assert log["train_loss", 1] == pytest.approx(math.log(384), rel=0.03)
    assert log["val_loss", 20] < log["val_loss", 10] < log["val_loss", 0]
    assert log["val_ppl", 20] == pytest.approx(math.exp(log["val_loss", 20]), rel=1e-4)
    assert log["tokens", 20] == 20 * 4 * 2 * 32
    assert output.count("----- sample") == 2 and "n_layer=2, n_head=2" in output and "done after 20 steps" in output

    checkpoint = load(tmp_path)
    assert {"model", "optimizer", "model_args", "config", "best_val_loss"} <= checkpoint.keys()  # nanoGPT's
    assert checkpoint["iter_num"] == 20 and checkpoint["rows_seen"] == 160
    assert checkpoint["config"] == json.loads((tmp_path / "config.json").read_text())
    GPT(GPTConfig(**checkpoint["model_args"])).load_state_dict(checkpoint["model"])


def test_the_loss_curve_is_that_of_a_plain_loop_over_transformers(shards, trained):
    """The order of the data, the mean over a step, clipping, schedule, groups and AdamW, written out once more."""
    transformers = pytest.importorskip("transformers")
    twin = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=384, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    torch.manual_seed(1337)
    weights = GPT(GPTConfig(**load(trained)["model_args"])).state_dict()
    twin.load_state_dict({name: tensor.t() if re.search(r"c_\w+\.weight", name) else tensor  # GPT-2's are (in, out)
                          for name, tensor in weights.items()})
    matrices = [p for p in twin.parameters() if p.dim() > 1]
    vectors = [p for p in twin.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
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


def test_validation_is_the_mean_over_its_tokens(shards, trained):
    """In nats per token, and in bits per byte: a token of the bytes tokenizer is a byte, but <|endoftext|> is none."""
    checkpoint, log = load(trained), read_log(trained, "val_loss", "val_bpb")
    gpt = GPT(GPTConfig(**checkpoint["model_args"])).eval()
    gpt.load_state_dict(checkpoint["model"])
    x, y = map(torch.from_numpy, TokenDataset(str(shards), "val", 32)[range(16)])  # eval_iters * batch_size rows
    with torch.no_grad():
        loss = F.cross_entropy(gpt(x).flatten(0, 1), y.flatten()).item()
    assert checkpoint["val_loss"] == log["val_loss", 20] == pytest.approx(loss, rel=1e-5)
    assert log["val_bpb", 20] == pytest.approx(loss * y.numel() / math.log(2) / (y < 256).sum().item(), rel=1e-4)


def test_a_last_validation_batch_that_is_not_full_counts_each_row_once(shards, tmp_path):
    """124 rows of val in batches of 5, and no step taken: the loss of the initial weights over all of val."""
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--batch_size=5", "--eval_iters=1000",
        "--max_iters=0", "--warmup_iters=0")
    torch.manual_seed(1337)
    gpt = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, max_seq_len=32, vocab_size=384))
    x, y = map(torch.from_numpy, TokenDataset(str(shards), "val", 32)[range(124)])
    with torch.no_grad():
        loss = F.cross_entropy(gpt(x).flatten(0, 1), y.flatten())
    assert read_log(tmp_path, "val_loss")["val_loss", 0] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("extra, ranks", [
    ([], 1), ([*LLAMA, "--dropout=0.1"], 1),
    ([*LLAMA, "--embed_norm=True", "--optimizer=muon"], 2),
], ids=["gpt2", "llama_dropout", "muon_two_ranks"])
def test_interrupted_twice_equals_uninterrupted(shards, tmp_path, extra, ranks):
    args = [*TINY, *extra, f"--data_dir={shards}", "--eval_interval=5", "--lr_decay_iters=20", "--sample_tokens=0"]
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/whole", ranks=ranks)
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/parts", "--max_iters=5", ranks=ranks)
    resume = ["--init_from=resume", f"--out_dir={tmp_path}/parts"]
    for start, stop in ((5, 15), (15, 20)):  # no other setting is repeated: they come from the checkpoint
        output = run("train_gpt2.py", *resume, f"--max_iters={stop}", ranks=ranks)
        assert f"changed on resume: max_iters {start} -> {stop}" in output
        assert f"resumed at step {start}, {start * 8} rows seen" in output
    check_same_run(tmp_path / "whole", tmp_path / "parts")
    lines = (tmp_path / "parts" / "log.jsonl").read_text().splitlines()
    resumes = [(entry["iter"], entry["tokens"]) for entry in map(json.loads, lines) if entry.get("event") == "resume"]
    assert resumes == [(5, 5 * 256), (15, 15 * 256)]


PRESETS = ["gpt2_baseline", "gpt2_mla", "gpt2_spam", "speedrun"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_on_the_same_rows_with_1_2_4_and_8_ranks(preset):
    settings = {**defaults("train_gpt2.py"), **read_config_file(f"{ROOT}/config/{preset}.py")}
    batch_size, accumulation = settings["batch_size"], settings["gradient_accumulation_steps"]
    for ranks in (1, 2, 4, 8):
        assert ranks * batch_size * runtime.local_grad_accum_steps(accumulation, ranks, batch_size) == 128


@pytest.mark.parametrize("preset", [name for name in ["quickstart", *PRESETS] if name != "gpt2_spam"
                                    or extra_settings("spam") and extra_settings("prune")])
def test_a_preset_is_what_it_says_and_starts(shards, tmp_path, preset):
    small = [flag for flag in TINY if not flag.startswith(("--learning_rate", "--warmup", "--gradient"))]
    run("train_gpt2.py", f"{ROOT}/config/{preset}.py", *small, f"--data_dir={shards}", f"--out_dir={tmp_path}",
        "--max_iters=1", "--warmup_iters=0", *{"gpt2_mla": ["--kv_lora_rank=8"],
                                               "gpt2_spam": ["--prune_begin=0"]}.get(preset, []))
    config = load(tmp_path)["config"]
    if preset.startswith("gpt2"):  # 10,000 steps
        assert read_config_file(f"{ROOT}/config/{preset}.py")["max_iters"] == 10_000
        assert (config["arch"], config["learning_rate"]) == ("gpt2", 6e-4)
    if preset == "quickstart":  # takes every setting of the recipe
        recipe, stated = (read_config_file(f"{ROOT}/config/{name}.py") for name in ("speedrun", "quickstart"))
        assert recipe and recipe.items() <= stated.items()
    assert config["attention"] == ("mla" if preset == "gpt2_mla" else "mha")
    optimizers = {"quickstart": "muon", "speedrun": "muon", "gpt2_spam": "adamw_spam"}
    assert config["optimizer"] == optimizers.get(preset, "adamw")


@pytest.mark.parametrize("ranks, batch_size, accumulation", [(1, 1, 8), (2, 4, 2), (8, 1, 8)])
def test_any_number_of_ranks_and_micro_batches_trains_the_same_model(shards, trained, tmp_path, ranks, batch_size,
                                                                     accumulation):
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", f"--batch_size={batch_size}",
        f"--gradient_accumulation_steps={accumulation}", f"--eval_iters={16 // batch_size}", ranks=ranks)
    one, other = (read_log(out_dir, "train_loss", "val_loss", "grad_norm") for out_dir in (trained, tmp_path))
    assert one.keys() == other.keys() and len(one) == 2 * 20 + 3
    for key in one:
        assert one[key] == pytest.approx(other[key], abs=1e-5), key
    assert not [name for name in load(tmp_path)["model"] if name.startswith(("module.", "_orig_mod."))]


def test_more_ranks_than_rows_to_validate_on(shards, tmp_path):
    for ranks in (1, 2):
        run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/{ranks}", "--batch_size=1",
            "--eval_iters=1", "--max_iters=2", ranks=ranks)
    one, two = (read_log(tmp_path / str(ranks), "val_loss", "val_bpb") for ranks in (1, 2))
    assert one.keys() == two.keys() and all(one[key] == pytest.approx(two[key], abs=1e-5) for key in one)


# -----------------------------------------------------------------------------
# compiled

@pytest.mark.parametrize("extra, ranks", [([], 1), ([*LLAMA, "--recompute=True"], 1), (MLA, 2),
                                          (["--arch=llama", *MLA, "--q_lora_rank=12"], 1)],
                         ids=["gpt2", "llama_recompute", "gpt2_mla_two_ranks", "llama_mla"])
def test_compiled_equals_eager_without_a_recompile(shards, tmp_path, extra, ranks):
    """Inductor itself, over training, validation, sampling and saving; fullgraph=True makes a graph break an error."""
    for name, compile in (("eager", False), ("compiled", True)):
        output = run("train_gpt2.py", *TINY, *extra, f"--data_dir={shards}", f"--out_dir={tmp_path / name}",
                     "--n_layer=1", f"--compile={compile}", ranks=ranks)
        assert "recompiled" not in output and ("compiled in" in output) == compile
    check_compiled(tmp_path)
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/compiled", "--compile=False", "--max_iters=22")


@pytest.mark.parametrize("batch_size", [1, 7])
def test_nothing_is_recompiled_with_any_batch_size(shards, tmp_path, batch_size):
    output = run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", f"--batch_size={batch_size}",
                 "--max_iters=3", "--eval_interval=1", "--compile=True", "--compile_backend=aot_eager")
    assert read_log(tmp_path, "recompiles") == {("recompiles", i): 0 for i in (1, 2, 3)} and "WARNING" not in output


def test_a_recompile_is_loud(shards, tmp_path):
    """Without the warm-up each graph is one."""
    program = patched(tmp_path, "train_gpt2.py", "runtime.warm_up = lambda *args: 0.0")
    output = run(program, *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_iters=2", "--compile=True",
                 "--compile_backend=aot_eager")
    assert "WARNING: rank 0 recompiled the model, 2 times so far" in output
    assert read_log(tmp_path / "o", "recompiles")["recompiles", 2] == 2


def test_without_a_compiler_it_runs_uncompiled_with_a_warning(shards, tmp_path):
    output = run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--compile=True",
                 "--max_iters=2", env={"CXX": "no-such-compiler"})
    assert "WARNING: torch.compile cannot work here" in output and "done after" in output


# -----------------------------------------------------------------------------
# precision, schedule, other weights, other data

def test_float16_scales_its_loss_and_bfloat16_trains(shards, trained, tmp_path):
    reference = read_log(trained, "val_loss")["val_loss", 20]
    for dtype in ("float16", "bfloat16"):
        run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path / dtype}", f"--dtype={dtype}")
        log = read_log(tmp_path / dtype, "val_loss", "loss_scale")
        assert log["val_loss", 20] == pytest.approx(reference, rel=0.05)
        assert (("loss_scale", 20) in log) == (dtype == "float16")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_is_not_finite_is_skipped(shards, tmp_path, ranks):
    output = run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--learning_rate=1e30",
                 "--warmup_iters=0", "--grad_clip=0", "--max_iters=4", "--sample_tokens=0", ranks=ranks)
    assert len(re.findall(r"is not finite \(first among its gradients: \S+\); 1 skipped so far", output)) == 1
    assert read_log(tmp_path, "skipped")["skipped", 4] >= 1
    assert all(tensor.isfinite().all() for tensor in load(tmp_path)["model"].values())


def test_wsd_and_another_runs_weights(shards, trained, tmp_path):
    output = run("train_gpt2.py", f"--init_from={trained}/ckpt.pt", f"--data_dir={shards}", f"--out_dir={tmp_path}",
                 "--max_seq_len=16", "--batch_size=4", "--max_iters=10", "--lr_schedule=wsd", "--wsd_decay_frac=0.5",
                 "--warmup_iters=0", "--learning_rate=1e-3", "--min_lr=0", "--log_interval=1", "--eval_iters=4",
                 "--compile=False", "--dtype=float32", "--device=cpu")
    log = read_log(tmp_path, "lr", "val_loss")
    assert log["val_loss", 0] < 4.5 and load(tmp_path)["config"]["n_layer"] == 2 and "rows of 16" in output
    assert [log["lr", i] for i in (1, 5, 6, 7, 10)] == pytest.approx([1e-3, 1e-3, 1e-3, 8e-4, 2e-4])


def test_published_shards_train_without_conversion(gpt2_vocabulary, tmp_path):
    """Under the names they have, and without meta.json: the tokens are gpt2's."""
    data = write_shards(tmp_path / "data", "gpt2", train=5000, val=1000)
    (data / "meta.json").unlink()
    (data / "train_000000.bin").rename(data / "fineweb_train_000001.bin")
    (data / "val_000000.bin").rename(data / "fineweb_val_000000.bin")
    run("train_gpt2.py", *TINY, f"--data_dir={data}", f"--out_dir={tmp_path}/o", "--max_iters=3")
    assert (load(tmp_path / "o")["tokenizer"], load(tmp_path / "o")["model_args"]["vocab_size"]) == ("gpt2", 50304)
    assert read_log(tmp_path / "o", "train_loss")["train_loss", 1] == pytest.approx(math.log(50304), rel=0.02)


def test_tokens_in_the_log_are_those_seen_after_another_batch_size(shards, tmp_path):
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--max_iters=4")
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=6", "--batch_size=8")
    tokens = read_log(tmp_path, "tokens")
    assert tokens["tokens", 4] == 4 * 256 and tokens["tokens", 6] == 4 * 256 + 2 * 512
    line = refused("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=3")
    assert "max_iters=3" in line and "6 steps" in line


def test_a_large_seed_is_taken(shards, tmp_path):
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--max_iters=2",
        f"--seed={2 ** 63 - 1}", "--dropout=0.1")


# -----------------------------------------------------------------------------
# mistakes, each refused in one line

@pytest.mark.parametrize("args, words", [
    (["--data_dir=nowhere"], ["data_dir=nowhere", "prepare_data.py"]),
    (["--max_seq_len=100000"], ["max_seq_len=100000"]),
    (["--device=cuda:7"], ["device=cuda:7"]),
    (["--device=tpu"], ["device=tpu", "auto, cpu"]),
    (["--n_head=3"], ["n_embd=32", "n_head=3"]),
    (["--qk_norm=True"], ["qk_norm=True", "arch=gpt2"]),
    (["--batch_size=0"], ["batch_size=0"]),
    (["--n_layer=0"], ["n_layer=0"]),
    (["--attention=mla", "--v_head_dim=0"], ["v_head_dim=0"]),
    (["--arch=llama", "--rope_theta=-1"], ["rope_theta=-1"]),
    (["--beta2=1.0"], ["beta2=1.0"]),
    (["--sparsity=1"], ["sparsity=1"]),
    (["--seed=-1"], ["seed=-1"]),
    (["--n_layers=3"], ["n_layers", "did you mean --n_layer"]),
    (["--min_lr=1"], ["min_lr=1.0", "0.003"]),
    (["--warmup_iters=30"], ["warmup_iters=30"]),
    (["--lr_schedule=constant", "--warmup_iters=30"], ["warmup_iters=30"]),
    (["--lr_schedule=wsd", "--warmup_iters=17"], ["warmup_iters=17", "16 steps"]),
    (["--init_from=nowhere.pt"], ["nowhere.pt", "not a readable checkpoint"]),
    (["--init_from=resume"], ["--init_from=resume", "holds no run"]),
    (["--compile=True", "--compile_backend=fastest"], ["compile_backend=fastest", "inductor"]),
])
def test_mistakes_are_refused_in_one_line(shards, tmp_path, args, words):
    line = refused("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", *args)
    assert all(word in line for word in words), line
    assert not (tmp_path / "o" / "ckpt.pt").exists()


def test_settings_without_effect_are_named(shards, tmp_path):
    idle = ["--muon_lr=9", "--head_lr=0.5", "--rope_theta=77", "--wsd_decay_frac=0.01", "--compile_mode=default",
            "--eval_problems=5"]
    for extra, setting in (("spam", "spam_interval=3"), ("prune", "prune_end=3"), ("distill", "teacher_weight=1"),
                           ("trackers", "wandb_project=x")):
        if extra_settings(extra):
            idle.append(f"--{setting}")
    args = [*TINY, f"--data_dir={shards}", "--max_iters=3"]
    output = run("train_gpt2.py", *args, *idle, f"--out_dir={tmp_path}/idle")
    for setting in idle:
        assert re.search(rf"^WARNING: {setting}(\.0)? has no effect without ", output, re.MULTILINE), setting
    assert "has no effect" not in run("train_gpt2.py", *args, f"--out_dir={tmp_path}/plain")
    assert same(load(tmp_path / "idle")["model"], load(tmp_path / "plain")["model"])


def test_an_out_dir_that_cannot_be_written_is_found_before_training(shards, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "out_dir=" in refused("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/file/o")


def test_ranks_that_do_not_divide_are_refused_with_the_values_that_do(shards, tmp_path):
    for batch_size, words in ((6, "; give --gradient_accumulation_steps=6 --batch_size=3: the same 18 rows"),
                              (5, "; 15 rows cannot be shared equally")):
        output = run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", ranks=2, code=2,
                     *["--gradient_accumulation_steps=3", f"--batch_size={batch_size}"])
        assert ("error: --gradient_accumulation_steps=3: expected a multiple of 2, the number of ranks" + words
                in output and output.count("error:") == 1)


@pytest.mark.parametrize("name, values, warned", [
    ("val_loss", [3.0, 2.0, 2.1, 2.2, 2.3, 2.4, 2.2, 2.3], [4, 5]), ("val_loss", [1.0, math.nan, 2.0, 3.0], []),
    ("loss_scale", [64.0, 32.0, 32.0, 16.0, 8.0, 4.0, 8.0], [5])])
def test_what_gets_worse_three_times_in_a_row_is_a_warning(tmp_path, capsys, name, values, warned):
    gpt, loader = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8)), types.SimpleNamespace(
        dataset=types.SimpleNamespace(max_seq_len=8), device=torch.device("cpu"), world_size=1, tokens=0)
    log = runtime.Logger(tmp_path, {}, 9, loader, gpt, "float32", [], 0, False)
    for i, value in enumerate(values):
        capsys.readouterr()
        log(i, **{name: value})
        assert ("WARNING" in capsys.readouterr().out) == (i in warned), i


def test_seconds_and_flops_go_on_after_a_resume(shards, tmp_path):
    args = [*TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--sample_tokens=0"]
    run("train_gpt2.py", *args, "--max_iters=3")
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=5")
    log = read_log(tmp_path, "seconds", "flops", "ms", "tokens")
    assert log["seconds", 5] == pytest.approx(sum(log["ms", i] for i in range(1, 6)) / 1000)
    gpt = GPT(GPTConfig(**load(tmp_path)["model_args"]))
    assert log["flops", 5] == gpt.flops_per_token(32) * log["tokens", 5] == log["flops", 1] * 5


@pytest.mark.parametrize("flags", [["--compile_mode=reduce-overhead"], ["--compile_mode=max-autotune"],
                                   ["--compile_mode=default", "--compile_backend=inductor"],
                                   ["--compile_backend=aot_eager"], ["--compile_backend=eager"], ["--compile=False"]],
                         ids=lambda flags: flags[0].strip("-"))
def test_each_way_to_compile_runs_and_is_named(shards, tmp_path, flags):
    output = run("train_gpt2.py", *TINY, "--compile=True", *flags, f"--data_dir={shards}", f"--out_dir={tmp_path}",
                 "--max_iters=2", "--n_layer=1", "--sample_tokens=0")
    name, value = flags[0].strip("-").split("=")
    backend, mode = (value if name == key else usual
                     for key, usual in (("compile_backend", "inductor"), ("compile_mode", "default")))
    assert ("not compiled" if name == "compile" else f"compiling, backend {backend}, mode {mode}") in output
    assert set(read_log(tmp_path, "recompiles").values()) == {0}


def test_another_runs_checkpoint_is_overwritten_only_on_request(shards, tmp_path):
    args = [*TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}"]
    run("train_gpt2.py", *args, "--max_iters=10")
    before = (tmp_path / "ckpt.pt").read_bytes()
    line = refused("train_gpt2.py", *args)
    assert "resume" in line and "overwrite" in line and (tmp_path / "ckpt.pt").read_bytes() == before
    refused("train_gpt2.py", *args, "--overwrite=True", "--n_head=3")
    assert (tmp_path / "ckpt.pt").read_bytes() == before  # another mistake comes first
    (tmp_path / "ckpt_7.pt").write_bytes(b"a snapshot")
    run("train_gpt2.py", *args, "--overwrite=True", "--max_iters=3")
    assert len(read_log(tmp_path, "train_loss")) == 3 and load(tmp_path)["iter_num"] == 3
    assert not (tmp_path / "ckpt_7.pt").exists()


def test_a_resumed_run_keeps_its_model_and_data(shards, trained, tmp_path):
    resume = ["--init_from=resume", f"--out_dir={trained}", "--max_iters=30"]
    for setting in ("n_layer=3", "max_seq_len=16", "seed=1", "arch=llama"):
        line = refused("train_gpt2.py", *resume, f"--{setting}")
        assert setting in line, line
    other = write_shards(tmp_path / "other", seed=1)
    assert "other data" in refused("train_gpt2.py", *resume, f"--data_dir={other}")


def test_data_of_another_tokenizer_is_refused(gpt2_vocabulary, trained, tmp_path):
    data = write_shards(tmp_path / "data", "gpt2", train=5000, val=1000)
    line = refused("train_gpt2.py", f"--init_from={trained}/ckpt.pt", f"--data_dir={data}", f"--out_dir={tmp_path}/o",
                   "--max_seq_len=16")
    assert "gpt2" in line and "bytes" in line


def test_a_token_outside_the_vocabulary_is_refused_on_any_rank(tmp_path):
    for split, ranks in (("train", 1), ("train", 2), ("val", 1)):
        data = write_shards(tmp_path / f"{split}{ranks}")
        shard = np.fromfile(data / f"{split}_000000.bin", dtype="<u2")
        shard[512:][5::32 * 7] = 60000  # in every seventh row
        shard.tofile(data / f"{split}_000000.bin")
        output = run("train_gpt2.py", *TINY, f"--data_dir={data}", f"--out_dir={tmp_path}/o{split}{ranks}",
                     ranks=ranks, code=2)
        assert "holds the token 60000" in output and "ends at 383" in output
        assert ranks == 2 or "Traceback" not in output


# -----------------------------------------------------------------------------
# sampling

def test_a_checkpoint_samples(trained, tmp_path):
    log = read_log(trained, "val_loss")
    args = [f"--checkpoint={trained}", "--dtype=float32"]
    text = run("sample.py", *args, "--prompt=the cat", "--num_samples=2", "--max_new_tokens=20")
    assert f"step 20, val loss {log['val_loss', 20]:.4f}" in text and text.count("the cat") == 2
    (tmp_path / "prompt.txt").write_text("then it ran")
    text = run("sample.py", *args, f"--prompt=FILE:{tmp_path}/prompt.txt", "--max_new_tokens=60", "--temperature=0",
               "--top_k=0")
    assert "then it ran" in text and "forgotten the beginning" in text
    text = run("sample.py", *args, "--prompt=" + 20 * "the cat ", "--max_new_tokens=5")
    assert "longer than the model's 32 positions: it has forgotten the beginning" in text
    for extreme in ("--temperature=1e-42", "--temperature=1e300", "--top_p=1e-300", "--min_p=1"):
        run("sample.py", *args, extreme, "--max_new_tokens=3")


def test_weights_that_are_not_finite_give_no_text_and_no_traceback(trained, tmp_path):
    checkpoint = load(trained)
    for tensor in checkpoint["model"].values():
        tensor.fill_(math.nan)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert "not finite" in refused("sample.py", f"--checkpoint={tmp_path}/ckpt.pt")
    output = run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=21")
    assert "(none: the model's logits are not finite" in output and "; 1 skipped so far" in output


def test_a_terminal_that_cannot_show_a_character_stops_nothing(shards, trained, tmp_path):
    ascii = "sys.stdout.reconfigure(encoding='ascii', errors='strict')"
    output = run(patched(tmp_path, "train_gpt2.py", ascii), *TINY, f"--data_dir={shards}",
                 f"--out_dir={tmp_path}/\u00fc", "--max_iters=2")
    assert "/?" in output
    output = run(patched(tmp_path, "sample.py", ascii), f"--checkpoint={trained}", "--prompt=\u00e9",
                 "--max_new_tokens=3")
    assert "?" in output


def test_a_peak_is_that_of_the_card(monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *args, **kwargs: pytest.fail("measured"))
    for name, flops in (("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
                        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L4", 121e12), ("NVIDIA L40", None),
                        ("NVIDIA RTX A4000", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        for dtype, expected in (("bfloat16", flops), ("float32", None)):
            if expected:
                assert runtime.peak_flops(torch.device("cuda:0"), dtype) == expected, name
            else:
                with pytest.raises(pytest.fail.Exception, match="measured"):
                    runtime.peak_flops(torch.device("cuda:0"), dtype)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no Linux with huge pages")
@pytest.mark.parametrize("off", [False, True])
def test_large_tensors_ask_for_huge_pages(monkeypatch, off):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)  # set since runtime was imported
    if off:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    code = """
import re, sample, torch
x, maps = torch.ones(2 ** 22), open("/proc/self/smaps").read()  # 16 MB
for first, last, flags in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", maps, re.M | re.S):
    if int(first, 16) <= x.data_ptr() < int(last, 16):
        print(" hg " in flags)
"""
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split() == [str(not off)]


# -----------------------------------------------------------------------------
# one more metric

def test_a_metric_may_read_gradients_and_takes_no_other_name(shards, tmp_path):
    patch = """
import model, torch
def norm(self):
    return torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item()

def init(self, out_dir, config, max_iters, loader, model, *rest):
    self.model = model
    first_init(self, out_dir, config, max_iters, loader, model, *rest)
    self.metrics.append(lambda: {NAME: norm(self)})

first_init, runtime.Logger.__init__ = runtime.Logger.__init__, init
"""
    args = [*TINY, f"--data_dir={shards}", "--max_iters=2", "--grad_clip=0"]
    run(patched(tmp_path, "train_gpt2.py", patch.replace("NAME", "'another'")), *args, f"--out_dir={tmp_path}/o")
    log = read_log(tmp_path / "o", "another", "grad_norm")
    assert log["another", 2] == pytest.approx(log["grad_norm", 2]) and log["another", 2] > 0
    output = run(patched(tmp_path, "train_gpt2.py", patch.replace("NAME", "'grad_norm'")), *args, "--overwrite=True",
                 f"--out_dir={tmp_path}/o", code=1)
    assert "multiple values for keyword argument 'grad_norm'" in output
