"""LoRA: the adapters against their formula, merged against unmerged, and runs whose checkpoints hold the adapters alone."""
import io
import shutil
from dataclasses import asdict

import pytest
import torch
from torch.func import functional_call

import runtime
from export_hf import export
from conftest import read_log, refused, run
from model import GPT, GPTConfig, add_lora, merge_lora
from test_chat import jsonl, turns
from test_model import new_gpt, tokens
from test_train import check_compiled, load, same

NAMES = ["gpt2", "gpt2_mla", "llama_gqa", "qwen3", "llama_mla", "llama_mla_q"]
ALPHA = 6.0


def with_lora(variant, targets="all", dropout=0.0, trained=True):
    """A small GPT and the same with adapters; trained: B is not zero any more."""
    gpt = new_gpt(variant).eval()
    lora = GPT(gpt.config)
    lora.load_state_dict(gpt.state_dict())
    torch.manual_seed(3)
    add_lora(lora, 3, ALPHA, dropout, targets)
    lora.eval()
    for name, p in lora.named_parameters():
        if trained and name.endswith("lora_B"):
            p.data.normal_(std=0.1)
    return gpt, lora


def merged(lora):
    gpt = GPT(lora.config).eval()
    gpt.load_state_dict(merge_lora(lora.state_dict(), ALPHA))
    return gpt


# ---------------------------------------------------------------------------------------------------
# the adapters

@pytest.mark.parametrize("variant", NAMES)
def test_at_the_start_it_is_the_base_to_the_bit(variant):
    gpt, lora = with_lora(variant, trained=False)
    assert torch.equal(gpt(tokens()), lora(tokens()))
    assert all(p.requires_grad == (".lora_" in name) for name, p in lora.named_parameters())
    linears = [m for m in gpt.transformer.h.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(p.numel() for p in lora.parameters() if p.requires_grad) == sum(3 * (m.in_features + m.out_features) for m in linears)


@pytest.mark.parametrize("variant", NAMES)
def test_gradients_are_those_of_the_formula(variant):
    """W + alpha / rank B A put in the place of W in a plain GPT, with autograd through it; frozen weights have none."""
    gpt, lora = with_lora(variant)
    lora(tokens(seed=1), tokens(seed=2)).backward()
    adapters = {name: p.detach().clone().requires_grad_() for name, p in lora.named_parameters() if ".lora_" in name}
    plain = dict(gpt.state_dict())
    for A in [name for name in adapters if name.endswith("lora_A")]:
        weight, B = A.replace("lora_A", "weight"), A.replace("lora_A", "lora_B")
        plain[weight] = plain[weight] + ALPHA / 3 * adapters[B] @ adapters[A]
    functional_call(gpt, plain, (tokens(seed=1), tokens(seed=2)), tie_weights=False).backward()
    for name, p in lora.named_parameters():
        if name in adapters:
            assert (p.grad - adapters[name].grad).abs().max() < 1e-5 * p.grad.abs().max(), name
        else:
            assert p.grad is None, name


@pytest.mark.parametrize("variant", NAMES)
def test_merged_equals_unmerged(variant):
    """In a forward pass, and in generation from a cache, where mla absorbs kv_b_proj into the query."""
    gpt, lora = with_lora(variant)
    plain, idx = merged(lora), tokens()
    assert (lora(idx) - gpt(idx)).abs().max() > 0.1  # the adapters say something
    assert (lora(idx) - plain(idx)).abs().max() < 1e-5 * max(1, plain(idx).abs().max())
    positions = torch.arange(48).expand_as(idx)
    a, b = (model(idx, positions=positions, cache=model.new_cache(2, 48)) for model in (lora, plain))
    assert (a - b).abs().max() < 1e-5 * max(1, b.abs().max())
    a, b = (list(model.generate([[1, 2, 3], [7]], 30, temperature=0)) for model in (lora, plain))
    assert a == b


def test_only_what_targets_names_has_an_adapter():
    def adapted(variant, targets):
        return {name.split(".", 3)[3].removesuffix(".lora_A") for name in with_lora(variant, targets)[1].state_dict() if name.endswith("lora_A")}

    assert adapted("gpt2", "attn") == {"attn.c_attn", "attn.c_proj"} and adapted("gpt2", "c_proj") == {"attn.c_proj", "mlp.c_proj"}
    assert adapted("llama", "q_proj, mlp.up_proj") == {"attn.q_proj", "mlp.up_proj"} and len(adapted("llama_mla", "all")) == 7
    for targets in ("q_proj", "c_attn,", "lm_head", "c", ""):
        with pytest.raises(ValueError, match="none of this model's matrices: expected all, or some of attn, c_attn, c_proj, mlp, c_fc"):
            with_lora("gpt2", targets)


def test_dropout_acts_in_training_alone_and_not_on_the_base():
    gpt, lora = with_lora("llama", dropout=0.999999)
    assert (lora(tokens()) - merged(lora)(tokens())).abs().max() < 1e-4
    assert torch.equal(lora.train()(tokens()), gpt(tokens()))  # all that the adapters see is dropped


def test_a_step_changes_adapters_alone_and_a_rollback_takes_them_back():
    from optim import new_optimizer
    _, lora = with_lora("gpt2", trained=False)
    optimizer = new_optimizer(lora, "adamw", 1e-2, 0.9, 0.95, 0.1)
    before = {name: tensor.clone() for name, tensor in lora.state_dict().items()}

    def step():
        lora(tokens(seed=1), tokens(seed=2)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    after = {name: tensor.clone() for name, tensor in lora.state_dict().items()}
    assert all(torch.equal(before[name], after[name]) == (".lora_" not in name) for name in before)
    weights, state = runtime.get_state(lora, optimizer, False)
    assert weights and all(".lora_" in name for name in weights) and len(state["state"]) == len(weights)
    saved = torch.load(write({"model": weights, "optimizer": state}), weights_only=True)
    step()
    assert not same(dict(lora.state_dict()), after)
    runtime.load_state(lora, optimizer, torch.amp.GradScaler("cpu", enabled=False), saved, False)
    assert same(dict(lora.state_dict()), after) and same(optimizer.state_dict(), saved["optimizer"])


def write(checkpoint):
    f = io.BytesIO()
    torch.save(checkpoint, f)
    f.seek(0)
    return f


# ---------------------------------------------------------------------------------------------------
# runs

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base model, as train_gpt2.py would leave it, and conversations."""
    folder = tmp_path_factory.mktemp("lora")
    words = ["the", "cat", "sat", "on", "a", "mat"]
    text = torch.tensor(list((" ".join(words) + ".\n").encode() * 99))
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(arch="llama", attention="mla", n_layer=2, n_head=2, n_embd=32, kv_lora_rank=8, max_seq_len=64, vocab_size=384))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    for step in range(40):
        idx = torch.stack([text[i:i + 65] for i in range(4 * step, 4 * step + 4)])
        (gpt(idx[:, :-1].contiguous(), idx[:, 1:]) / 256).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert runtime.save_checkpoint(folder / "base", {
        "model": gpt.state_dict(), "model_args": asdict(gpt.config), "config": {}, "tokenizer": "bytes", "stage": "base", "iter_num": 40,
        "val_loss": 1.0, "val_iter": 40})
    jsonl(folder / "chats.jsonl", [turns(f"say {word}", word) for word in words * 25])
    return folder


def args(folder, out, *more):
    return ["--batch_size=2", "--gradient_accumulation_steps=2", "--eval_iters=2", "--log_interval=1", "--learning_rate=5e-3", "--max_iters=10",
            "--warmup_iters=2", "--eval_interval=5", "--sample_tokens=0", "--device=cpu", "--dtype=float32", "--compile=False", "--lora_rank=4",
            f"--init_from={folder}/base", f"--data={folder}/chats.jsonl", f"--chat_dir={folder}/rows", f"--out_dir={folder / out}", *more]


@pytest.fixture(scope="module")
def tuned(folder):
    return folder / "tuned", run("chat_sft.py", *args(folder, "tuned", "--keep_interval=5", "--sample_tokens=8"))


def test_a_run_learns_and_its_checkpoint_holds_adapters_alone(folder, tuned):
    out_dir, output = tuned
    checkpoint, base = load(out_dir), load(folder / "base")
    log = read_log(out_dir, "val_loss", "train_loss")
    assert log["val_loss", 10] < 0.8 * log["val_loss", 0]
    assert checkpoint["model"] and all(".lora_" in name for name in checkpoint["model"])
    n = sum(tensor.numel() for tensor in checkpoint["model"].values())
    n_base = sum(tensor.numel() for tensor in base["model"].values())
    assert f"LoRA: {n:,} parameters train, beside 14 matrices of the model's {n_base:,}; a checkpoint takes" in output
    assert sum(tensor.nbytes for tensor in runtime.tensors_in(checkpoint)) < 12.1 * n  # float32: themselves and AdamW's two means
    for name in ("ckpt.pt", "ckpt_prev.pt", "ckpt_best.pt", "ckpt_5.pt"):
        assert set(torch.load(out_dir / name, weights_only=True)["model"]) == set(checkpoint["model"])
    whole = runtime.load_checkpoint(out_dir)["model"]  # and opened, it is the base but for the blocks' matrices
    assert whole.keys() == base["model"].keys()
    assert all(torch.equal(whole[name], base["model"][name]) == (".h." not in name or "norm" in name or ".ln_" in name) for name in whole)


def test_the_other_scripts_open_it(folder, tuned, tmp_path):
    out_dir, output = tuned
    text = run("sample.py", f"--checkpoint={out_dir}", "--prompt=say cat", "--chat=True", "--max_new_tokens=9", "--dtype=float32", "--temperature=0")
    assert "chat model, llama, mla, 2 layers" in text and f"LoRA on {folder}/base/ckpt.pt" in text
    export(out_dir, tmp_path / "hf", "float32", 10 ** 9, False)
    ours, _ = runtime.load_model(out_dir, "cpu")
    exported, _ = runtime.load_model(tmp_path / "hf", "cpu")
    assert torch.equal(ours(tokens()), exported(tokens()))
    # what the run computed from its adapters unmerged is what the merged weights give
    log, val_loss = read_log(out_dir, "val_loss"), validation_loss(folder, ours)
    assert val_loss == pytest.approx(log["val_loss", 10], abs=1e-5)
    # and another run starts from it: what it trains are adapters on the merged weights, chained
    run("chat_sft.py", *args(folder, "second", f"--init_from={out_dir}/ckpt.pt", "--max_iters=2"))
    assert read_log(folder / "second", "val_loss")["val_loss", 0] == pytest.approx(log["val_loss", 10], abs=1e-5)
    first, second = (runtime.load_checkpoint(path)["model"] for path in (out_dir, folder / "second"))
    deltas = load(folder / "second")["model"]
    name = "transformer.h.1.mlp.up_proj."
    torch.testing.assert_close(second[name + "weight"] - first[name + "weight"], 8 * deltas[name + "lora_B"] @ deltas[name + "lora_A"],
                               atol=1e-6, rtol=0)


def validation_loss(folder, gpt):
    import numpy as np
    from model import IGNORE, packed
    rows = torch.from_numpy(np.load(next((folder / "rows").glob("*/val.npy")))[:4].astype(np.int64))
    y = torch.where(rows[:, 1] == 256, IGNORE, rows[:, 1])
    with torch.no_grad():
        return gpt(rows[:, 0].contiguous(), y, *packed(rows[:, 0], 256)).item() / int((y != IGNORE).sum())


def test_on_a_hugging_face_folder_interrupted_twice_equals_uninterrupted(folder):
    export(folder / "base", folder / "hf", "float32", 10 ** 9, False)
    more = [f"--init_from={folder}/hf", "--lora_dropout=0.1", "--lr_decay_iters=10", "--weight_decay=0.1", "--lora_targets=q_proj,kv_b_proj,mlp"]
    run("chat_sft.py", *args(folder, "whole", *more))
    run("chat_sft.py", *args(folder, "parts", *more, "--max_iters=3"))
    for stop in (7, 10):
        run("chat_sft.py", "--init_from=resume", f"--out_dir={folder}/parts", f"--max_iters={stop}", f"--chat_dir={folder}/rows")
    whole, parts = load(folder / "whole"), load(folder / "parts")
    for key in ("model", "optimizer", "rows_seen", "iter_num", "val_loss", "lora"):
        assert same(whole[key], parts[key]), key
    one, two = (read_log(folder / name, "train_loss") for name in ("whole", "parts"))
    assert one == two and parts["lora"]["path"] == f"{folder}/hf"


def test_two_ranks_train_the_adapters_of_one(folder, tuned):
    run("chat_sft.py", *args(folder, "two"), ranks=2)
    one, two = (read_log(out_dir, "train_loss", "val_loss", "grad_norm") for out_dir in (tuned[0], folder / "two"))
    assert one.keys() == two.keys() and all(one[key] == pytest.approx(two[key], abs=1e-5) for key in one)


def test_compiled_equals_eager_without_a_recompile(folder, tuned):
    output = run("chat_sft.py", *args(folder, "compiled", "--compile=True", "--compile_backend=aot_eager", "--sample_tokens=8"))
    assert "recompiled" not in output and "compiled in" in output
    shutil.copytree(tuned[0], folder / "eager")
    check_compiled(folder)


@pytest.mark.parametrize("targets, lines", [("all", 4), ("attn", 3)])
def test_check_health_looks_at_the_adapters(folder, targets, lines, capsys):
    from optim import new_optimizer
    gpt, _ = runtime.load_model(folder / "base", "cpu")
    add_lora(gpt, 4, 32, 0.0, targets)
    batch = torch.randint(97, 123, (2, 16), generator=torch.Generator().manual_seed(0))
    good = runtime.check_model(gpt, (batch, batch), new_optimizer(gpt, "adamw", 1e-2, 0.9, 0.95, 0.0), from_scratch=False)
    said = capsys.readouterr().out
    assert good and said.count("ok   ") == lines and f"{28 if targets == 'all' else 16} of" in said, said


# ---------------------------------------------------------------------------------------------------
# the base

def test_a_base_that_is_gone_moved_or_another_one(folder, tuned, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder / "base", tmp_path / "first" / "base")
    monkeypatch.chdir(tmp_path / "first")
    checkpoint = torch.load(tuned[0] / "ckpt.pt", weights_only=True)
    checkpoint["lora"] |= {"path": "base/ckpt.pt", "absolute": str(tmp_path / "first" / "base" / "ckpt.pt")}
    assert runtime.save_checkpoint("tuned", checkpoint)
    whole = runtime.load_checkpoint("tuned")["model"]
    shutil.move(tmp_path / "first", tmp_path / "moved")  # all together: the path as given holds
    monkeypatch.chdir(tmp_path / "moved")
    assert same(runtime.load_checkpoint("tuned")["model"], whole)

    def says():
        with pytest.raises(SystemExit):
            runtime.load_checkpoint("tuned")
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and "tuned/ckpt.pt" in lines[0] and f"{tmp_path}/first/base/ckpt.pt or base/ckpt.pt" in lines[0], lines
        return lines[0]

    base = torch.load("base/ckpt.pt", weights_only=True)
    other = {**base, "model": {**base["model"], "transformer.ln_f.weight": base["model"]["transformer.ln_f.weight"].clone()}}
    other["model"]["transformer.ln_f.weight"][5] += 1e-6
    torch.save(other, "base/ckpt.pt")
    assert "other weights are there now" in says()
    shutil.rmtree("base")
    assert "there is nothing" in says()
    # a rollback does not need it
    assert runtime.load_checkpoint("tuned", merge=False)["model"].keys() == checkpoint["model"].keys()


def test_mistakes_are_refused_in_one_line(folder, tuned):
    start, resume = args(folder, "none"), ["--init_from=resume", f"--out_dir={tuned[0]}", "--max_iters=12"]
    for given, words in [
        ([*start, "--lora_targets=c_attn"], ["'c_attn' is none", "q_proj", "kv_b_proj", "up_proj"]),
        ([*start, "--optimizer=muon"], ["lora_rank=4", "optimizer=adamw"]),
        ([*start, "--lora_rank=0", "--lora_alpha=8"], ["lora_alpha=8.0", "lora_rank=16"]),
        ([*start, f"--out_dir={folder}/base", "--overwrite=True"], ["base/ckpt.pt", "another folder"]),
        ([*resume, "--lora_rank=8"], ["lora_rank=8", "trained with 4"]),
    ]:
        line = refused("chat_sft.py", *given)
        assert all(word in line for word in words), line
    assert runtime.found_checkpoint(folder / "base")
