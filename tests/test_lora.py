"""LoRA: adapters against their formula, merged against unmerged, and runs whose checkpoints hold adapters alone."""
import io
import shutil
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch.func import functional_call

from chat_data import build_datasets, packed_mask_and_positions
from checkpoint import get_state, has_checkpoint, load_checkpoint, load_model, load_state, write_checkpoint
from configurator import load_extra
from conftest import chats, check_compiled, load, read_log, refused, run, same
from extras import lora
from model import GPT, GPTConfig, IGNORE
from optim import configure_optimizer
from sample import generate
from test_chat import SFT, check_resumed
from test_chat_data import BYTES, jsonl, turns
from test_cuda import COMPILED, check_losses_of_a_cpu, needs_gpu
from test_model import new_gpt, tokens
from test_optim import optimizer_config

NAMES = ["gpt2", "gpt2_mla", "llama_gqa", "qwen3", "llama_mla", "llama_mla_q"]
ALPHA = 6.0


@contextmanager
def settings(**changed):
    """extras/lora.py's settings, for a while."""
    before = {name: getattr(lora, name) for name in changed}
    vars(lora).update(changed)
    try:
        yield
    finally:
        vars(lora).update(before)


def with_adapters(variant, targets="all", dropout=0.0, trained=True):
    """A small GPT, and the same with adapters of rank 3; trained: B is no longer zero."""
    gpt = new_gpt(variant).eval()
    adapted = GPT(gpt.config)
    adapted.load_state_dict(gpt.state_dict())
    torch.manual_seed(3)
    with settings(lora_alpha=ALPHA, lora_dropout=dropout, lora_targets=targets):
        lora.add_adapters(adapted, 3)
    for name, p in adapted.named_parameters():
        if trained and name.endswith("lora_B"):
            p.data.normal_(std=0.1)
    return gpt, adapted.eval()


def by_formula(gpt, adapters):
    """The weights of a GPT with W + alpha / rank B A in place of W."""
    weights = dict(gpt.state_dict())
    for A in [name for name in adapters if name.endswith("lora_A")]:
        name, B = A.replace("lora_A", "weight"), A.replace("lora_A", "lora_B")
        weights[name] = weights[name] + ALPHA / 3 * adapters[B] @ adapters[A]
    return weights


# ---------------------------------------------------------------------------------------------------
# the adapters

@pytest.mark.parametrize("variant", NAMES)
def test_at_the_start_it_is_the_base_bit_for_bit(variant):
    gpt, adapted = with_adapters(variant, trained=False)
    assert torch.equal(gpt(tokens()), adapted(tokens()))
    assert all(p.requires_grad == (".lora_" in name) for name, p in adapted.named_parameters())
    linears = [m for m in gpt.transformer.h.modules() if isinstance(m, torch.nn.Linear)]
    n_trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert n_trained == sum(3 * (m.in_features + m.out_features) for m in linears)


@pytest.mark.parametrize("variant", NAMES)
def test_gradients_are_those_of_the_formula(variant):
    """By autograd, through a plain GPT with the merged weights; frozen ones have none."""
    gpt, adapted = with_adapters(variant)
    adapted(tokens(seed=1), tokens(seed=2)).backward()
    adapters = {name: p.detach().clone().requires_grad_() for name, p in adapted.named_parameters()
                if ".lora_" in name}
    functional_call(gpt, by_formula(gpt, adapters), (tokens(seed=1), tokens(seed=2)), tie_weights=False).backward()
    for name, p in adapted.named_parameters():
        if name in adapters:
            assert (p.grad - adapters[name].grad).abs().max() < 1e-5 * p.grad.abs().max(), name
        else:
            assert p.grad is None, name


@pytest.mark.parametrize("variant", NAMES)
def test_merged_equals_unmerged(variant):
    """In a forward pass, and in decoding from a cache, where mla absorbs kv_b_proj into the query."""
    gpt, adapted = with_adapters(variant)
    merged, idx = GPT(gpt.config).eval(), tokens()
    merged.load_state_dict(by_formula(gpt, dict(adapted.named_parameters())))
    assert (adapted(idx) - gpt(idx)).abs().max() > 0.1  # the adapters matter
    assert (adapted(idx) - merged(idx)).abs().max() < 1e-5 * max(1, merged(idx).abs().max())
    positions = torch.arange(48).expand_as(idx)
    a, b = (model(idx, positions=positions, cache=model.new_cache(2, 48)) for model in (adapted, merged))
    assert (a - b).abs().max() < 1e-5 * max(1, b.abs().max())
    a, b = (list(generate(model, [[1, 2, 3], [7]], 30, temperature=0)) for model in (adapted, merged))
    assert a == b


def test_targets_name_the_matrices_that_get_an_adapter(capsys):
    def adapted(variant, targets):
        state = with_adapters(variant, targets)[1].state_dict()
        return {name.split(".", 3)[3].removesuffix(".lora_A") for name in state if name.endswith("lora_A")}

    assert adapted("gpt2", "attn") == {"attn.c_attn", "attn.c_proj"}
    assert adapted("gpt2", "c_proj") == {"attn.c_proj", "mlp.c_proj"}
    assert adapted("llama", "q_proj,mlp.up_proj") == {"attn.q_proj", "mlp.up_proj"}
    assert len(adapted("llama_mla", "all")) == 7
    for targets, unknown in (("q_proj", "q_proj"), ("c_attn,", ""), ("mlp,lm_head", "lm_head"), ("c", "c")):
        with pytest.raises(SystemExit):
            with_adapters("gpt2", targets)
        line = capsys.readouterr().err
        assert f"--lora_targets={targets}: no matrix {unknown!r}" in line
        assert "expected some of all, attn, attn.c_attn, attn.c_proj, c_attn, c_fc, c_proj, mlp, mlp.c_fc" in line


def test_dropout_is_on_the_adapters_input_and_in_training_alone():
    gpt, adapted = with_adapters("llama", dropout=0.999999)
    merged = functional_call(gpt, by_formula(gpt, dict(adapted.named_parameters())), tokens())
    assert (adapted(tokens()) - merged).abs().max() < 1e-4
    assert torch.equal(adapted.train()(tokens()), gpt(tokens()))  # all of their input is dropped


def test_a_step_changes_adapters_alone_and_a_rollback_restores_them():
    _, adapted = with_adapters("gpt2", trained=False)
    optimizer = configure_optimizer(adapted, optimizer_config(learning_rate=1e-2))
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}

    def step():
        adapted(tokens(seed=1), tokens(seed=2)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    after = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    assert all(torch.equal(before[name], after[name]) == (".lora_" not in name) for name in before)
    weights, state = get_state(adapted, optimizer)
    assert weights and all(".lora_" in name for name in weights) and len(state["state"]) == len(weights)
    file = io.BytesIO()
    torch.save({"model": weights, "optimizer": state}, file)
    step()
    assert not same(dict(adapted.state_dict()), after)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    load_state(adapted, optimizer, saved)
    assert same(dict(adapted.state_dict()), after) and same(optimizer.state_dict(), saved["optimizer"])


# ---------------------------------------------------------------------------------------------------
# runs

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a base model, as train_gpt2.py would leave it, and conversations."""
    folder = tmp_path_factory.mktemp("lora")
    words = ["the", "cat", "sat", "on", "a", "mat"]
    text = torch.tensor(list((" ".join(words) + ".\n").encode() * 99))
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(arch="llama", attention="mla", n_layer=2, n_head=2, n_embd=32, kv_lora_rank=8, max_seq_len=64,
                        vocab_size=384))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    for step in range(40):
        idx = torch.stack([text[i:i + 65] for i in range(4 * step, 4 * step + 4)])
        (gpt(idx[:, :-1].contiguous(), idx[:, 1:]) / 256).backward()
        optimizer.step()
        optimizer.zero_grad()
    facts = {"config": {}, "tokenizer": "bytes", "stage": "base", "iter_num": 40, "val_loss": 1.0, "val_iter": 40}
    assert write_checkpoint(folder / "base", {"model": gpt.state_dict(), "model_args": asdict(gpt.config), **facts})
    jsonl(folder / "chats.jsonl", [turns(f"say {word}", word) for word in words * 25])
    return folder


def args(folder, out, *more):
    return [*SFT, "--max_iters=10", "--eval_interval=5", "--eval_iters=2", "--learning_rate=5e-3", "--sample_tokens=0",
            "--lora_rank=4", f"--init_from={folder}/base", f"--data={folder}/chats.jsonl", f"--chat_dir={folder}/rows",
            f"--out_dir={folder / out}", *more]


@pytest.fixture(scope="module")
def tuned(folder):
    """The out_dir of a run, and its output."""
    return folder / "tuned", run("chat_sft.py", *args(folder, "tuned", "--keep_interval=5", "--sample_tokens=8"))


def test_a_run_learns_and_its_checkpoint_holds_adapters_alone(folder, tuned):
    out_dir, output = tuned
    checkpoint, base, log = load(out_dir), load(folder / "base"), read_log(out_dir, "val_loss")
    assert log["val_loss", 10] < 0.8 * log["val_loss", 0]
    assert checkpoint["model"] and all(".lora_" in name for name in checkpoint["model"])
    n = sum(tensor.numel() for tensor in checkpoint["model"].values())
    n_base = sum(tensor.numel() for tensor in base["model"].values())
    assert f"LoRA: {n:,} of {n + n_base:,} parameters train" in output
    assert len(checkpoint["model"]) == 2 * 14  # A and B of each matrix
    moments = [tensor for state in checkpoint["optimizer"]["state"].values() for tensor in state.values()]
    assert 12 * n <= sum(tensor.nbytes for tensor in [*checkpoint["model"].values(), *moments]) < 12.1 * n
    for name in ("ckpt.pt", "ckpt_prev.pt", "ckpt_best.pt", "ckpt_5.pt"):
        assert load(out_dir, name)["model"].keys() == checkpoint["model"].keys()
    merged = load_checkpoint(out_dir)["model"]  # the base, but for the matrices of the blocks
    assert merged.keys() == base["model"].keys()
    for name, tensor in merged.items():
        unchanged = ".h." not in name or "norm" in name or ".ln_" in name
        assert torch.equal(tensor, base["model"][name]) == unchanged, name


def test_the_other_scripts_open_it(folder, tuned, tmp_path):
    out_dir, _ = tuned
    text = run("sample.py", f"--checkpoint={out_dir}", "--prompt=say cat", "--chat=True", "--max_new_tokens=9",
               "--dtype=float32", "--temperature=0")
    assert "chat model, llama, mla, 2 layers" in text and f"LoRA on {folder}/base/ckpt.pt" in text
    run("export_hf.py", f"--checkpoint={out_dir}", f"--out_dir={tmp_path}/hf", "--dtype=float32")
    merged, exported = (load_model(path, "cpu")[0] for path in (out_dir, tmp_path / "hf"))
    assert torch.equal(merged(tokens()), exported(tokens()))
    # the run's validation loss, with adapters, is that of the merged weights
    _, data, _ = build_datasets(folder / "rows", f"{folder}/chats.jsonl", None, BYTES, 64, True, 1337, True)
    rows = torch.from_numpy(data.rows[:4].astype(np.int64))
    idx, targets = rows[:, 0].contiguous(), rows[:, 1].masked_fill(rows[:, 1] == 256, IGNORE)
    mask, positions = packed_mask_and_positions(idx, 256)
    with torch.no_grad():
        val_loss = merged(idx, targets, positions, mask).item() / (targets != IGNORE).sum().item()
    assert val_loss == pytest.approx(read_log(out_dir, "val_loss")["val_loss", 10], abs=1e-5)
    # a run of all parameters starts from them
    run("chat_sft.py", *args(folder, "second", f"--init_from={out_dir}", "--lora_rank=0", "--max_iters=0",
                             "--warmup_iters=0"))
    assert read_log(folder / "second", "val_loss")["val_loss", 0] == pytest.approx(val_loss, abs=1e-5)
    assert load(folder / "second").keys().isdisjoint({"lora"})


def test_interrupted_twice_on_a_hugging_face_folder_equals_uninterrupted(folder, tmp_path):
    run("export_hf.py", f"--checkpoint={folder}/base", f"--out_dir={folder}/hf", "--dtype=float32")
    settings = ["--lora_dropout=0.1", "--weight_decay=0.1", "--lora_targets=q_proj,kv_b_proj,mlp"]
    check_resumed("chat_sft.py", args(folder, "none", f"--init_from={folder}/hf", *settings), tmp_path)
    assert load(tmp_path / "parts")["lora"]["path"] == f"{folder}/hf"
    line = refused("export_hf.py", f"--checkpoint={tmp_path}/parts", f"--out_dir={folder}/hf", "--overwrite=True")
    assert f"--out_dir={folder}/hf: holds the base" in line


def test_two_ranks_train_the_adapters_of_one(folder, tuned):
    run("chat_sft.py", *args(folder, "two"), ranks=2)
    one, two = (read_log(out_dir, "train_loss", "val_loss", "grad_norm") for out_dir in (tuned[0], folder / "two"))
    assert one.keys() == two.keys() and all(one[key] == pytest.approx(two[key], abs=1e-5) for key in one)


def test_compiled_equals_eager_without_a_recompile(folder, tuned):
    output = run("chat_sft.py", *args(folder, "compiled", "--compile=True", "--sample_tokens=8"))
    assert "recompiled" not in output and "compiled in" in output
    shutil.copytree(tuned[0], folder / "eager")
    check_compiled(folder)


@pytest.mark.parametrize("targets, n_params", [("all", 28), ("attn", 16)])
def test_the_sanity_check_looks_at_adapters(folder, targets, n_params, capsys):
    sanity = load_extra("sanity", {})
    if sanity is None:  # then asking for it ends in one line
        with pytest.raises(SystemExit):
            load_extra("sanity", {"sanity_check": True}, "sanity_check")
        assert "extras/sanity.py, which is not here" in capsys.readouterr().err
        return
    gpt, _ = load_model(folder / "base", "cpu")
    with settings(lora_targets=targets):
        lora.add_adapters(gpt, 4)
    idx = torch.randint(97, 123, (2, 16), generator=torch.Generator().manual_seed(0))
    optimizer = configure_optimizer(gpt, optimizer_config(learning_rate=1e-2, weight_decay=0.0))
    with pytest.raises(SystemExit) as end:
        sanity.check(gpt, {"idx": idx, "targets": idx}, optimizer, torch.autocast("cpu", enabled=False), False, 1)
    output = capsys.readouterr().out
    assert end.value.code == 0 and f"{n_params} of {n_params} parameters get a gradient" in output
    assert output.count("ok   ") == 3, output


# ---------------------------------------------------------------------------------------------------
# the base

def test_a_base_that_is_moved_gone_or_another_one(folder, tuned, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder / "base", tmp_path / "first" / "base")
    monkeypatch.chdir(tmp_path / "first")
    checkpoint = load(tuned[0])
    checkpoint["lora"] |= {"path": "base/ckpt.pt", "absolute": str(tmp_path / "first" / "base" / "ckpt.pt")}
    assert write_checkpoint("tuned", checkpoint)
    merged = load_checkpoint("tuned")["model"]
    shutil.move(tmp_path / "first", tmp_path / "moved")  # together: the relative path is still right
    monkeypatch.chdir(tmp_path / "moved")
    assert same(load_checkpoint("tuned")["model"], merged)

    def refused_in_one_line():
        with pytest.raises(SystemExit):
            load_checkpoint("tuned")
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and "tuned/ckpt.pt" in lines[0], lines
        assert f"{tmp_path}/first/base/ckpt.pt or base/ckpt.pt" in lines[0] and "other weights" in lines[0]

    other = load("base")
    other["model"]["transformer.ln_f.weight"][5] += 1e-6
    torch.save(other, "base/ckpt.pt")
    refused_in_one_line()
    shutil.rmtree("base")
    refused_in_one_line()
    # a rollback does not need it
    assert load_checkpoint("tuned", merge=False)["model"].keys() == checkpoint["model"].keys()


def test_mistakes_are_refused_in_one_line(folder, tuned):
    start = args(folder, "none")
    resume = ["--init_from=resume", f"--out_dir={tuned[0]}", "--max_iters=12"]
    for given, words in [
        ([*start, "--lora_targets=c_attn"], ["'c_attn'", "q_proj", "kv_b_proj", "up_proj"]),
        ([*start, "--optimizer=muon"], ["--optimizer=muon", "lora_rank", "adamw"]),
        ([*start, "--lora_alpha=0"], ["lora_alpha=0"]),
        ([*start, f"--out_dir={folder}/base", "--overwrite=True"], [f"--out_dir={folder}/base", "another folder"]),
        ([*start, f"--init_from={tuned[0]}"], [f"--init_from={tuned[0]}", "export_hf.py"]),
        ([*resume, "--lora_rank=8"], ["lora_rank=8", "trained with 4"]),
    ]:
        line = refused("chat_sft.py", *given)
        assert all(word in line for word in words), line
    assert has_checkpoint(folder / "base")
    output = run("chat_sft.py", *args(folder, "full", "--lora_rank=0", "--lora_alpha=8", "--max_iters=0",
                                      "--warmup_iters=0"))
    assert "lora_alpha=8.0 has no effect" in output


@needs_gpu
def test_a_run_on_a_gpu_has_the_losses_of_a_cpu(trained, tmp_path):
    args = [*SFT, "--lora_rank=4", f"--init_from={trained}", f"--data={chats(tmp_path / 'chats.jsonl')}"]
    check_losses_of_a_cpu("chat_sft.py", args, [*COMPILED, "--dtype=bfloat16"], 2e-2, tmp_path)
