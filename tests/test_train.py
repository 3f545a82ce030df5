"""The base path as a user starts it: prepare, train, resume, several ranks, compiled, sample."""
import json
import math
import re
import runpy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import runtime
from configurator import read_config_file
from conftest import ROOT, TINY, read_log, refused, run, write_shards
from model import GPT, GPTConfig
from prepare_data import count_cpus
from test_model import transformers_twin


LLAMA = ["--arch=llama", "--n_kv_head=1", "--qk_norm=True"]
MUON = [*LLAMA, "--embed_norm=True", "--optimizer=muon", "--compile=True"]
MLA = ["--attention=mla", "--kv_lora_rank=8"]
SPAM = ["--optimizer=adamw_spam", "--spam_interval=7"]  # two resets in 20 steps
PRUNED = ["--sparsity=0.7", "--prune_begin=2", "--prune_end=13", "--prune_interval=4"]  # at 6, 10 and 13


def load(out_dir):
    return torch.load(out_dir / "ckpt.pt", weights_only=True)


def same(a, b):
    """Equal to the last bit, for nested dicts and lists of tensors and plain values."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def check_compiled(folder):
    """The runs folder/eager and folder/compiled have the same losses, nothing was recompiled, and the checkpoint is a plain model's."""
    eager, compiled = (read_log(folder / name, "train_loss", "val_loss", "recompiles") for name in ("eager", "compiled"))
    assert eager.keys() == compiled.keys()
    for key, value in compiled.items():
        assert value == 0 if key[0] == "recompiles" else value == pytest.approx(eager[key], rel=1e-3), key
    assert not [name for name in load(folder / "compiled")["model"] if name.startswith(("module.", "_orig_mod."))]


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    """One run of 20 steps that several tests look at, and what it printed."""
    out_dir = tmp_path_factory.mktemp("run") / "out"
    return out_dir, run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={out_dir}")


def test_a_run_learns_logs_and_leaves_a_checkpoint_that_samples(trained):
    out_dir, output = trained
    log = read_log(out_dir, "train_loss", "val_loss", "lr", "grad_norm", "recompiles", "tokens", "val_bpb", "val_ppl")
    assert all(("train_loss", i) in log for i in range(1, 21)) and all(("val_loss", i) in log for i in (0, 10, 20))
    assert log["train_loss", 1] == pytest.approx(math.log(384), rel=0.03)
    assert log["val_loss", 20] < log["val_loss", 10] < log["val_loss", 0]
    assert log["val_ppl", 20] == pytest.approx(math.exp(log["val_loss", 20]), rel=1e-4)
    assert log["tokens", 20] == 20 * 4 * 2 * 32
    assert "sample" in output and "settings given: n_layer=2" in output and "loss curve:" in output
    assert (out_dir / "loss.png").read_bytes()[:4] == b"\x89PNG"

    checkpoint = load(out_dir)
    assert {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config", "rows_seen"} <= checkpoint.keys()
    assert checkpoint["iter_num"] == 20 and checkpoint["rows_seen"] == 160
    assert checkpoint["config"] == json.loads((out_dir / "config.json").read_text())
    GPT(GPTConfig(**checkpoint["model_args"])).load_state_dict(checkpoint["model"])

    text = run("sample.py", f"--checkpoint={out_dir}/ckpt.pt", "--prompt=the cat", "--num_samples=2", "--max_new_tokens=20", "--dtype=float32")
    assert f"step 20, val loss {log['val_loss', 20]:.4f}" in text and text.count("the cat") == 2
    prompt = out_dir / "prompt.txt"
    prompt.write_text("then it ran")
    assert "then it ran" in run("sample.py", f"--checkpoint={out_dir}", f"--prompt=FILE:{prompt}", "--max_new_tokens=3", "--temperature=0")


def test_the_loss_curve_is_that_of_a_plain_loop_over_transformers(shards, trained):
    """The order of the data, the mean over a step, clipping, schedule, groups and AdamW, written out once more."""
    torch.manual_seed(1337)
    twin = transformers_twin(GPT(GPTConfig(**load(trained[0])["model_args"])))
    matrices = [p for p in twin.parameters() if p.dim() > 1]
    vectors = [p for p in twin.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  betas=(0.9, 0.95), foreach=False, fused=False)
    tokens = np.fromfile(shards / "train_000000.bin", dtype=np.uint16)[512:].astype(np.int64)
    order = np.random.default_rng((1337, 0)).permutation((len(tokens) - 1) // 32)
    log = read_log(trained[0], "train_loss", "grad_norm")
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


def test_bits_per_byte_are_those_of_the_scored_tokens(shards, trained):
    """bytes tokenizer: each token is a byte but <|endoftext|>, which is none."""
    from prepare_data import Windows
    log = read_log(trained[0], "val_loss", "val_bpb")
    _, y = Windows(str(shards), "val", 32)[range(16)]  # eval_iters * batch_size rows
    assert log["val_bpb", 20] == pytest.approx(log["val_loss", 20] * y.size / math.log(2) / (y < 256).sum(), rel=1e-4)


def test_validation_loss_is_the_mean_over_its_tokens(shards, trained):
    from prepare_data import Windows
    checkpoint = load(trained[0])
    gpt = GPT(GPTConfig(**checkpoint["model_args"])).eval()
    gpt.load_state_dict(checkpoint["model"])
    x, y = map(torch.from_numpy, Windows(str(shards), "val", 32)[range(16)])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(gpt(x.contiguous()).flatten(0, 1), y.flatten())
    assert checkpoint["val_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_last_batch_that_is_not_full_counts_each_row_once(shards, tmp_path):
    """124 rows of val in batches of 5, and no step taken: the loss of the initial weights over all of val."""
    from prepare_data import Windows
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--batch_size=5", "--eval_iters=1000", "--max_iters=0",
        "--warmup_iters=0")
    torch.manual_seed(1337)
    gpt = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, max_seq_len=32, vocab_size=384))
    x, y = map(torch.from_numpy, Windows(str(shards), "val", 32)[range(124)])
    with torch.no_grad():
        loss = F.cross_entropy(gpt(x.contiguous()).flatten(0, 1), y.flatten())
    assert read_log(tmp_path / "o", "val_loss")["val_loss", 0] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("extra, ranks", [([], 1), ([*LLAMA, "--dropout=0.1"], 1), (MUON, 2), (SPAM, 1),
                                          ([*LLAMA, *PRUNED, "--prune_by=state", "--prune_scope=global"], 2)],
                         ids=["gpt2", "llama_dropout", "muon_two_ranks", "spam", "pruned_two_ranks"])
def test_interrupted_twice_equals_uninterrupted(shards, tmp_path, extra, ranks):
    args = [*TINY, *extra, f"--data_dir={shards}", "--eval_interval=5", "--lr_decay_iters=20", "--sample_tokens=0"]
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/whole", ranks=ranks)
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/parts", "--max_iters=5", ranks=ranks)
    for stop in (15, 20):  # no setting but these is repeated: the others come from the checkpoint
        output = run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/parts", f"--max_iters={stop}", ranks=ranks)
        assert "changed on resume: max_iters" in output
    whole, parts = load(tmp_path / "whole"), load(tmp_path / "parts")
    assert whole.keys() == parts.keys() and ("masks" in whole) == ("--sparsity=0.7" in extra)
    for key in ("model", "optimizer", "rows_seen", "iter_num", "best_val_loss", "val_loss", *(["masks"] if "masks" in whole else [])):
        assert same(whole[key], parts[key]), key
    assert read_log(tmp_path / "whole", "train_loss", "val_loss") == read_log(tmp_path / "parts", "train_loss", "val_loss")


@pytest.mark.parametrize("preset", ["quickstart", "gpt2_baseline", "gpt2_mla", "speedrun"])
def test_a_preset_is_what_it_says_and_starts(shards, tmp_path, preset):
    small = [setting for setting in TINY if not setting.startswith(("--learning_rate", "--warmup", "--gradient"))]
    run("train_gpt2.py", f"{ROOT}/config/{preset}.py", *small, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_iters=1",
        "--warmup_iters=0", *(["--kv_lora_rank=8"] if preset == "gpt2_mla" else []))
    config = load(tmp_path / "o")["config"]
    if preset in ("gpt2_baseline", "gpt2_mla"):  # 128 rows a step, 10,000 steps
        stated = runpy.run_path(f"{ROOT}/config/{preset}.py")
        assert stated["batch_size"] * stated["gradient_accumulation_steps"] == 128 and stated["max_iters"] == 10_000
        assert (config["arch"], config["optimizer"], config["learning_rate"]) == ("gpt2", "adamw", 6e-4)
    if preset == "quickstart":  # takes every setting of the recipe
        recipe, stated = (read_config_file(f"{ROOT}/config/{name}.py", "train_gpt2.py") for name in ("speedrun", "quickstart"))
        assert recipe and recipe.items() <= stated.items()
    assert config["attention"] == ("mla" if preset == "gpt2_mla" else "mha")
    assert config["optimizer"] == ("muon" if preset in ("quickstart", "speedrun") else "adamw")


def test_two_ranks_train_the_model_of_one(shards, trained, tmp_path):
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/two", ranks=2)
    one, two = (read_log(out_dir, "train_loss", "val_loss", "grad_norm") for out_dir in (trained[0], tmp_path / "two"))
    assert one.keys() == two.keys() and len(one) == 2 * 20 + 3
    for key in one:
        assert one[key] == pytest.approx(two[key], abs=1e-5), key
    assert not [name for name in load(tmp_path / "two")["model"] if name.startswith(("module.", "_orig_mod."))]


def test_more_ranks_than_rows_to_validate_on(shards, trained, tmp_path):
    for ranks in (1, 2):
        run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/{ranks}", "--batch_size=1", "--eval_iters=1", "--max_iters=2", ranks=ranks)
    one, two = (read_log(tmp_path / str(ranks), "val_loss", "val_bpb") for ranks in (1, 2))
    assert one.keys() == two.keys() and all(one[key] == pytest.approx(two[key], abs=1e-5) for key in one)


def test_accumulation_does_not_change_the_model(shards, trained, tmp_path):
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--batch_size=1", "--gradient_accumulation_steps=8")
    one, other = (read_log(out_dir, "train_loss") for out_dir in (trained[0], tmp_path / "o"))
    assert all(one[key] == pytest.approx(other[key], abs=1e-5) for key in one)


@pytest.mark.parametrize("extra, ranks", [([], 1), (LLAMA, 2), (MLA, 2), (["--arch=llama", *MLA, "--q_lora_rank=12"], 1)],
                         ids=["gpt2", "llama_two_ranks", "gpt2_mla_two_ranks", "llama_mla"])
def test_compiled_equals_eager_without_a_recompile(shards, tmp_path, extra, ranks):
    """Inductor itself, over training, validation, sampling and saving; fullgraph=True makes a graph break an error."""
    for name, compile in (("eager", False), ("compiled", True)):
        output = run("train_gpt2.py", *TINY, *extra, f"--data_dir={shards}", f"--out_dir={tmp_path / name}", f"--compile={compile}",
                     ranks=ranks)
        assert "recompiled" not in output and ("compiled in" in output) == compile
    check_compiled(tmp_path)
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/compiled", "--compile=False", "--max_iters=22")


def test_a_recompile_is_seen():
    double = torch.compile(lambda x: 2 * x, dynamic=False, backend="eager")
    before = runtime.graphs_compiled()
    for shape, expected in (((2, 3), 1), ((2, 3), 1), ((2, 4), 2)):
        double(torch.ones(shape))
        assert runtime.graphs_compiled() - before == expected


def test_without_a_compiler_it_goes_on_uncompiled_and_says_so(shards, tmp_path):
    output = run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--compile=True", "--max_iters=2",
                 env={"CXX": "no-such-compiler"})
    assert "WARNING: torch.compile cannot work here" in output and "done:" in output


def test_float16_scales_its_loss_and_bfloat16_trains(shards, trained, tmp_path):
    reference = read_log(trained[0], "val_loss")["val_loss", 20]
    for dtype in ("float16", "bfloat16"):
        run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path / dtype}", f"--dtype={dtype}")
        log = read_log(tmp_path / dtype, "val_loss", "loss_scale")
        assert log["val_loss", 20] == pytest.approx(reference, rel=0.05)
        assert (("loss_scale", 20) in log) == (dtype == "float16")


def test_a_step_that_is_not_finite_is_skipped(shards, tmp_path):
    output = run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--learning_rate=1e30", "--warmup_iters=0",
                 "--grad_clip=0", "--max_iters=4", "--sample_tokens=0")
    assert "is not finite: it is skipped, 1 so far" in output
    assert read_log(tmp_path / "o", "skipped")["skipped", 4] >= 1
    assert all(tensor.isfinite().all() for tensor in load(tmp_path / "o")["model"].values())


def test_wsd_and_another_runs_weights(shards, trained, tmp_path):
    output = run("train_gpt2.py", f"--init_from={trained[0]}/ckpt.pt", f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_seq_len=16",
                 "--batch_size=4", "--max_iters=10", "--lr_schedule=wsd", "--wsd_decay_frac=0.5", "--warmup_iters=0", "--learning_rate=1e-3",
                 "--min_lr=0", "--log_interval=1", "--eval_iters=4", "--compile=False", "--dtype=float32", "--device=cpu")
    log = read_log(tmp_path / "o", "lr", "val_loss")
    assert log["val_loss", 0] < 4.5 and "2 layers" in output
    assert [log["lr", i] for i in (1, 5, 6, 7, 10)] == pytest.approx([1e-3, 1e-3, 1e-3, 8e-4, 2e-4])


def test_ready_made_shards_train_without_conversion(gpt2_vocabulary, tmp_path):
    """The field's own names, and no meta.json: the tokens are gpt2's."""
    data = write_shards(tmp_path / "data", "gpt2", train=5000, val=1000)
    (data / "meta.json").unlink()
    (data / "train_000000.bin").rename(data / "fineweb_train_000001.bin")
    (data / "val_000000.bin").rename(data / "fineweb_val_000000.bin")
    output = run("train_gpt2.py", *TINY, f"--data_dir={data}", f"--out_dir={tmp_path}/o", "--max_iters=3")
    assert "vocabulary 50304 (gpt2)" in output
    assert read_log(tmp_path / "o", "train_loss")["train_loss", 1] == pytest.approx(math.log(50304), rel=0.02)


# ---------------------------------------------------------------------------------------------------
# what is refused, each in one line

@pytest.mark.parametrize("args, words", [
    (["--data_dir=nowhere"], ["data_dir=nowhere", "prepare_data.py"]),
    (["--max_seq_len=100000"], ["max_seq_len=100000"]),
    (["--device=cuda:7"], ["device=cuda:7"]), (["--device=tpu"], ["device=tpu", "auto, cpu"]),
    (["--n_head=3"], ["n_embd=32", "n_head=3"]), (["--qk_norm=True"], ["qk_norm", "llama"]),
    (["--batch_size=0"], ["batch_size=0"]), (["--beta2=1.0"], ["beta2=1.0"]), (["--warmup_iters=30"], ["warmup_iters=30"]),
    (["--init_from=nowhere.pt"], ["nowhere.pt", "no checkpoint"]), (["--init_from=resume"], ["no checkpoint"]),
    (["--n_layers=3"], ["n_layers", "did you mean --n_layer"]), (["--seed=-1"], ["seed=-1"]), (["--min_lr=1"], ["min_lr=1.0", "0.003"]),
    (["--lr_schedule=wsd", "--warmup_iters=17"], ["warmup_iters=17", "16 steps"]), (["--spam_interval=0"], ["spam_interval=0", "at least 1"]),
    (["--sparsity=1"], ["sparsity=1.0"]), (["--sparsity=0.5", "--prune_end=1"], ["prune_begin=2", "prune_end=1"]),
    (["--sparsity=0.5", "--fsdp=True"], ["sparsity=0.5", "fsdp=True"]), (["--lr_schedule=constant", "--warmup_iters=30"], ["warmup_iters=30"]),
    (["--compile=True", "--compile_backend=fastest"], ["compile_backend=fastest", "inductor"]),
])
def test_mistakes_are_refused_in_one_line(shards, tmp_path, args, words):
    line = refused("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", *args)
    assert all(word in line for word in words), line
    assert not (tmp_path / "o" / "ckpt.pt").exists()


def test_settings_without_effect_are_named(shards, tmp_path):
    idle = ["--muon_lr=9", "--spam_interval=3", "--head_lr=0.5", "--rope_theta=77", "--wsd_decay_frac=0.01", "--prune_end=3", "--teacher_weight=1",
            "--compile_mode=default", "--eval_problems=5"]
    args = [*TINY, f"--data_dir={shards}", "--max_iters=3"]
    output = run("train_gpt2.py", *args, *idle, f"--out_dir={tmp_path}/idle")
    for setting in idle:
        assert re.search(rf"^WARNING: {setting}(\.0)? has no effect without ", output, re.MULTILINE), setting
    assert "has no effect" not in run("train_gpt2.py", *args, f"--out_dir={tmp_path}/plain")
    assert same(load(tmp_path / "idle")["model"], load(tmp_path / "plain")["model"])
    output = run("train_gpt2.py", *args, f"--out_dir={tmp_path}/pruned", "--sparsity=0.5", "--prune_end=600")
    assert "the run ends before that, at step 3" in output


def test_an_out_dir_that_cannot_be_written_is_found_before_training(shards, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "out_dir=" in refused("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/file/o")


def test_ranks_that_do_not_divide_are_refused_with_the_values_that_do(shards, tmp_path):
    output = run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--gradient_accumulation_steps=3", ranks=2, code=1)
    assert "error: --gradient_accumulation_steps=3: does not divide by 2 ranks; 2 or 4 would" in output


def test_another_runs_checkpoint_is_not_overwritten_unless_told(shards, trained, tmp_path):
    before = (trained[0] / "ckpt.pt").read_bytes()
    line = refused("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={trained[0]}")
    assert "resume" in line and "overwrite" in line and (trained[0] / "ckpt.pt").read_bytes() == before
    refused("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={trained[0]}", "--overwrite=True", "--n_head=3")
    assert (trained[0] / "ckpt.pt").read_bytes() == before  # another mistake comes first
    for overwrite in (False, True):
        run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_iters=3", f"--overwrite={overwrite}")
    assert len(read_log(tmp_path / "o", "train_loss")) == 3 and not (tmp_path / "o" / "log.jsonl").read_text().count('"iter": 10,')


def test_a_resumed_run_keeps_its_model_and_data(shards, trained, tmp_path):
    resume = ["--init_from=resume", f"--out_dir={trained[0]}", "--max_iters=30"]
    for setting in ("n_layer=3", "max_seq_len=16", "seed=1", "arch=llama"):
        line = refused("train_gpt2.py", *resume, f"--{setting}")
        assert setting in line, line
    other = write_shards(tmp_path / "other", seed=1)
    assert "train shards are not those" in refused("train_gpt2.py", *resume, f"--data_dir={other}")
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps({**meta, "vocab_size": 50304}))
    assert "vocab_size" in refused("train_gpt2.py", *resume, f"--data_dir={other}")


def test_data_of_another_tokenizer_is_refused(gpt2_vocabulary, trained, tmp_path):
    data = write_shards(tmp_path / "data", "gpt2", train=5000, val=1000)
    line = refused("train_gpt2.py", f"--init_from={trained[0]}/ckpt.pt", f"--data_dir={data}", f"--out_dir={tmp_path}/o", "--max_seq_len=16")
    assert "gpt2" in line and "bytes" in line


def test_a_damaged_checkpoint_gives_way_to_the_one_before(shards, tmp_path):
    args = [*TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}"]
    run("train_gpt2.py", *args)
    (tmp_path / "ckpt.pt").write_bytes((tmp_path / "ckpt.pt").read_bytes()[:1000])
    output = run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=21")
    assert "ckpt.pt cannot be read" in output and "going on from the checkpoint before it" in output and "done:" in output
    (tmp_path / "ckpt.pt").write_bytes(b"")
    (tmp_path / "ckpt_prev.pt").write_bytes(b"PK")
    assert "no checkpoint that can be read" in refused("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}")


@pytest.mark.parametrize("args, words", [
    (["--checkpoint=nowhere"], ["nowhere"]), (["--prompt=FILE:nowhere.txt"], ["nowhere.txt"]), (["--temperature=-1"], ["temperature"]),
    (["--top_p=0"], ["top_p"]), (["--num_samples=0"], ["num_samples"]),
])
def test_sample_refuses_in_one_line(trained, args, words):
    line = refused("sample.py", f"--checkpoint={trained[0]}", *args)
    assert all(word in line for word in words)


def test_sample_says_what_it_does_with_a_long_prompt(trained):
    output = run("sample.py", f"--checkpoint={trained[0]}", "--prompt=" + 20 * "the cat ", "--max_new_tokens=5")
    assert "the prompt has 161 tokens, the model 32 positions" in output
    assert "forget the beginning" in run("sample.py", f"--checkpoint={trained[0]}", "--prompt=the", "--max_new_tokens=60", "--temperature=0", "--top_k=0")


def test_a_token_beyond_the_vocabulary_is_refused_on_any_rank(tmp_path):
    for split, ranks in (("train", 1), ("train", 2), ("val", 1)):
        data = write_shards(tmp_path / f"{split}{ranks}")
        shard = np.fromfile(data / f"{split}_000000.bin", dtype="<u2")
        shard[512:][5::32 * 7] = 60000  # in every seventh row
        shard.tofile(data / f"{split}_000000.bin")
        output = run("train_gpt2.py", *TINY, f"--data_dir={data}", f"--out_dir={tmp_path}/o{split}{ranks}", ranks=ranks, code=2 if ranks == 1 else 1)
        assert "holds the token 60000" in output and "ends at 383" in output
        assert ranks == 2 or "Traceback" not in output


def test_a_checkpoint_that_is_none_of_ours_or_is_damaged_inside_is_refused(trained, tmp_path):
    checkpoint = load(trained[0])
    nanogpt = {"model": checkpoint["model"], "optimizer": {}, "model_args": {"n_layer": 2, "block_size": 32}, "iter_num": 5, "config": {}}
    wrong_size = {**checkpoint, "model_args": {**checkpoint["model_args"], "n_layer": 3}}
    for other in (nanogpt, wrong_size, [1]):
        torch.save(other, tmp_path / "ckpt.pt")
        assert "no checkpoint that can be read" in refused("sample.py", f"--checkpoint={tmp_path}/ckpt.pt")
        assert "no checkpoint that can be read" in refused("train_gpt2.py", f"--init_from={tmp_path}/ckpt.pt", f"--out_dir={tmp_path}/o")
    whole = bytearray((trained[0] / "ckpt.pt").read_bytes())
    whole[len(whole) // 2] ^= 1  # one bit of a weight
    (tmp_path / "ckpt.pt").write_bytes(whole)
    assert "no checkpoint that can be read" in refused("sample.py", f"--checkpoint={tmp_path}/ckpt.pt")


def test_weights_that_are_not_finite_give_no_text_and_no_traceback(shards, trained, tmp_path):
    checkpoint = load(trained[0])
    for tensor in checkpoint["model"].values():
        tensor.fill_(math.nan)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert "not finite" in refused("sample.py", f"--checkpoint={tmp_path}/ckpt.pt")
    output = run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=21")
    assert "(none: the model's logits are not finite" in output and "is not finite: it is skipped, 1 so far" in output


def test_tokens_in_the_log_are_those_seen_after_another_batch_size(shards, tmp_path):
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_iters=4")
    run("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/o", "--max_iters=6", "--batch_size=8")
    tokens = read_log(tmp_path / "o", "tokens")
    assert tokens["tokens", 4] == 4 * 256 and tokens["tokens", 6] == 4 * 256 + 2 * 512
    line = refused("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/o", "--max_iters=3")
    assert "max_iters=3" in line and "6 steps" in line


def test_a_checkpoint_that_cannot_be_written_says_so_and_leaves_the_one_before(trained, tmp_path):
    """A full disk, as far as torch.save can tell: an object of the checkpoint that fails half way."""
    runtime.save_checkpoint(tmp_path, {"weights": torch.zeros(3)})
    assert not runtime.save_checkpoint(tmp_path, {"weights": torch.ones(3), "broken": NoSpace()})
    assert torch.load(tmp_path / "ckpt.pt")["weights"].sum() == 0 and not (tmp_path / "ckpt.pt.tmp").exists()


class NoSpace:
    def __reduce__(self):
        raise OSError(28, "No space left on device")


def test_a_terminal_that_cannot_show_a_character_stops_nothing(shards, trained, tmp_path):
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/\u00fc", "--max_iters=2", env={"PYTHONIOENCODING": "ascii"})
    run("sample.py", f"--checkpoint={trained[0]}", "--prompt=\u00e9", "--max_new_tokens=3", env={"PYTHONIOENCODING": "ascii"})


def test_any_seed_and_extreme_sampling_settings_work(shards, trained, tmp_path):
    run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_iters=2", f"--seed={2 ** 63 - 1}", "--dropout=0.1")
    for extreme in ("--temperature=1e-42", "--temperature=1e300", "--top_p=1e-300", "--min_p=1"):
        run("sample.py", f"--checkpoint={trained[0]}", extreme, "--max_new_tokens=3")
    assert "seed" in refused("sample.py", f"--checkpoint={trained[0]}", f"--seed={2 ** 64}")


# ---------------------------------------------------------------------------------------------------
# the scripts beside the path

def test_runs_are_drawn_together(trained, tmp_path):
    assert "runs.png" in run("runtime.py", trained[0], trained[0] / "log.jsonl", cwd=tmp_path)
    assert (tmp_path / "runs.png").read_bytes()[:4] == b"\x89PNG"
    assert "nowhere: no such file" in refused("runtime.py", "nowhere")
    (tmp_path / "runs.png").unlink()
    (tmp_path / "runs.png").mkdir()
    assert "runs.png: not drawn: " in run("runtime.py", trained[0], cwd=tmp_path, code=2)


def test_a_tracker_gets_the_figures_and_cannot_stop_a_run(tmp_path, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(runtime, "trackers", [seen.append, lambda figures: 1 / 0])
    for i in (1, 2):
        runtime.write_log(tmp_path, iter=i, train_loss=3.0)
    assert [figures["iter"] for figures in seen] == [1, 2] and capsys.readouterr().out.count("WARNING: a tracker failed") == 1
    runtime.start_trackers(tmp_path, {}, wandb_log=False, wandb_project="", tensorboard=False)
    assert runtime.trackers == [seen.append]


def test_a_tracker_that_is_not_installed_is_said_and_the_run_goes_on(shards, tmp_path):
    (tmp_path / "wandb.py").write_text("raise ImportError('no wandb here')")
    output = run("train_gpt2.py", *TINY, f"--data_dir={shards}", f"--out_dir={tmp_path}/o", "--max_iters=2", "--wandb_log=True", "--sample_tokens=0",
                 env={"PYTHONPATH": str(tmp_path)})
    assert "WARNING: no Weights & Biases (ImportError: no wandb here)" in output and "done:" in output


def test_the_log_is_read_as_curves_without_what_a_resumed_run_left_behind(tmp_path):
    lines = [dict(iter=i, tokens=100 * i, train_loss=5.0 - i, skipped=int(i >= 3), recompiles=0) for i in (1, 2, 3, 4)]
    lines += [dict(event="resume", iter=2, tokens=200), dict(iter=3, tokens=300, train_loss=2.5, skipped=0, recompiles=0)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iter": 4, "tok')
    curves, events = runtime.read_log(tmp_path / "log.jsonl")
    assert curves["train_loss"] == {100: 4.0, 200: 3.0, 300: 2.5} and events == {"resume": [200], "rollback": [], "skipped": [], "recompiled": []}
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:4]))
    assert runtime.read_log(tmp_path / "log.jsonl")[1]["skipped"] == [300]


def test_bench_prints_its_tables(gpt2_vocabulary, tmp_path):
    (tmp_path / "train.py").write_text(
        "import model\nfor i in range(3): print(f'iter {i}: loss 9.0, time {100 if i else 5000:.2f}ms, mfu -100.00%')\n")
    (tmp_path / "model.py").write_text("import torch\nGPTConfig = dict\nclass GPT(torch.nn.Module):\n"
                                       "    def __init__(self, config): super().__init__()\n"
                                       "    def generate(self, idx, *_, **__): return idx\n")
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 1000)
    output = run("bench.py", "--rounds=1", "--variants=gpt2,gpt2+mla", "--context=16", "--new_tokens=3", "--compile=False", "--train_iters=3",
                 "--device=cpu", "--train_args=--n_layer=1 --n_head=2 --n_embd=32 --max_seq_len=32 --batch_size=2", f"--nanogpt={tmp_path}",
                 "--chat_args=--max_seq_len=64 --batch_size=1", f"--prep_files={tmp_path}/a.txt")
    rows = {table.partition(":")[0]: [re.split("  +", line) for line in table.splitlines()] for table in output.split("\n\n")}
    train, chat, loss, prep, decode = rows["training"][3:6], rows["chat tuning"][2], rows["loss of the head, forward and backward"][2:-1], \
        rows["data preparation"][2:5], rows["decoding"][2:5]
    assert [row[0] for row in train] == [row[0] for row in decode] == ["nanoGPT", "gpt2", "gpt2+mla"]
    assert train[0][1:3] == ["640", "1.00"]  # 64 tokens in 0.1 s: its first iteration is not counted
    for row in train[1:]:
        assert float(row[1].replace(",", "")) > 0 and row[6:8] == ["-", "-"] and 0 <= float(row[8].rstrip("%")) <= 100 and row[9] == "0"
    assert chat[0] == "not compiled" and float(chat[1].replace(",", "")) > 0
    assert len(loss) >= 3 and all(float(off) < 0.02 for row in loss for off in row[-3:])
    assert count_cpus() == 1 or float(rows["data parallel"][3][2]) > 0
    assert prep[1][1] == prep[2][1] and prep[2][3] == "1.00"  # both count the same tokens
    assert float(decode[2][4]) == pytest.approx(128 / (2 * 768), abs=1e-3)  # cache bytes, against multi-head attention's


def test_bench_refuses_what_it_cannot_time(tmp_path):
    assert "variants=gpt3" in refused("bench.py", "--variants=gpt3")
    assert "holds no train.py" in refused("bench.py", f"--nanogpt={tmp_path}")
    assert "expected all, or some of train" in refused("bench.py", "--what=training")
    assert "expected flags of train_gpt2.py" in refused("bench.py", "--train_args=n_layer=2")
    for wrong in ("--batch_size=0", "--max_seq_len=²"):
        assert "expected a whole number above 0" in refused("bench.py", f"--train_args={wrong}")
    assert "no setting n_layers" in refused("bench.py", "--what=loss", "--train_args=--n_layers=3")
    for wrong in ("--train_args=--arch=llama", "--train_args=--dtype=float32", "--chat_args=--max_iters=7", "--chat_args=--data=a.jsonl"):
        assert f"{wrong}: bench.py gives" in refused("bench.py", wrong)


def test_a_peak_is_that_of_the_card(monkeypatch):
    for name, flops in (("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12),
                        ("NVIDIA L4", 121e12), ("NVIDIA L40", None), ("NVIDIA RTX A4000", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert runtime.data_sheet_flops(torch.device("cuda:0"), "bfloat16") == flops, name
    assert runtime.data_sheet_flops(torch.device("cuda:0"), "float32") is None
    assert "--prep_files=nothing/*.txt: no such file" in refused("bench.py", "--prep_files=nothing/*.txt")
