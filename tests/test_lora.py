"""LoRA: adapters against their formula, merged against unmerged, and runs whose checkpoints hold adapters alone."""
import copy
import os
import shutil
from dataclasses import asdict

import pytest
import torch
from torch.func import functional_call

from checkpoint import Checkpointer, fingerprint, load_base, load_checkpoint, load_model, write_checkpoint
from conftest import (COMPILED, SFT, check_close, check_compiled, check_error, check_resumed, error_line, extra_flags,
                      jsonl, load, new_gpt, optimizer_config, read_log, refused, run, same, save_model, tokens, turns)
from extras.lora import Adapters, Lora, add_adapters
from families import write_family
from import_hf import load_hf
from model import GPT, GPTConfig
from optim import configure_optimizer
from sample import generate

NAMES = ["gpt2", "gpt2_mla", "qwen3", "llama_mla_q"]
ALPHA = 6.0


def with_adapters(variant, targets="all", dropout=0.0, trained=True):
    """A small GPT, and the same with adapters of rank 3; trained: B is no longer zero."""
    gpt = new_gpt(variant).eval()
    adapted = GPT(gpt.config)
    adapted.load_state_dict(gpt.state_dict())
    torch.manual_seed(3)
    add_adapters(adapted, targets, 3, ALPHA, dropout)
    for name, p in adapted.named_parameters():
        if trained and name.endswith("lora_B"):
            p.data.normal_(std=0.1)
    return gpt, adapted.eval()


def by_formula(gpt, adapters):
    """The weights of a GPT with W + alpha / rank B A instead of W."""
    weights = dict(gpt.state_dict())
    for A in [name for name in adapters if name.endswith("lora_A")]:
        name, B = A.replace("lora_A", "weight"), A.replace("lora_A", "lora_B")
        weights[name] = weights[name] + ALPHA / 3 * adapters[B] @ adapters[A]
    return weights


# ---------------------------------------------------------------------------------------------------
# the adapters

@pytest.mark.parametrize("variant", NAMES)
def test_it_starts_as_the_base_and_its_gradients_are_those_of_the_formula(variant):
    """By autograd, through a plain GPT with the merged weights; frozen ones have none."""
    gpt, adapted = with_adapters(variant, trained=False)
    assert torch.equal(gpt(tokens()), adapted(tokens()))
    linears = [m for m in gpt.transformer.h.modules() if isinstance(m, torch.nn.Linear)]
    n_trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert n_trained == sum(3 * (m.in_features + m.out_features) for m in linears)
    for A in [p for name, p in adapted.named_parameters() if name.endswith("lora_A")]:
        assert 0.8 < A.abs().max() * A.size(1) ** 0.5 < 1  # uniform up to 1 / sqrt(in), as in the paper's code
    gpt, adapted = with_adapters(variant)
    adapted(tokens(seed=1), tokens(seed=2)).backward()
    adapters = {name: p.detach().clone().requires_grad_() for name, p in adapted.named_parameters()
                if ".lora_" in name}
    functional_call(gpt, by_formula(gpt, adapters), (tokens(seed=1), tokens(seed=2)), tie_weights=False).backward()
    for name, p in adapted.named_parameters():
        assert p.requires_grad == (name in adapters), name
        assert name not in adapters or (p.grad - adapters[name].grad).abs().max() < 1e-5 * p.grad.abs().max(), name


@pytest.mark.parametrize("variant", NAMES)
def test_merged_equals_unmerged(variant):
    """In a forward pass, and in decoding, where mla absorbs kv_b_proj into the query."""
    gpt, adapted = with_adapters(variant)
    merged, idx = GPT(gpt.config).eval(), tokens()
    merged.load_state_dict(by_formula(gpt, dict(adapted.named_parameters())))
    assert (adapted(idx) - gpt(idx)).abs().max() > 0.1  # the adapters matter
    assert (adapted(idx) - merged(idx)).abs().max() < 1e-5 * max(1, merged(idx).abs().max())
    a, b = (list(generate(model, [[1, 2, 3], [7]], 12, temperature=0)) for model in (adapted, merged))
    assert a == b


def test_targets_name_the_matrices_that_get_an_adapter():
    for variant, targets, expected in (("gpt2", "attn", {"attn.c_attn", "attn.c_proj"}),
                                       ("gpt2", "c_proj", {"attn.c_proj", "mlp.c_proj"}),
                                       ("llama", "q_proj, mlp.up_proj", {"attn.q_proj", "mlp.up_proj"})):
        state = with_adapters(variant, targets)[1].state_dict()
        assert {name.split(".", 3)[3].removesuffix(".lora_A") for name in state if name.endswith("lora_A")} == expected
    for targets, unknown in (("q_proj", "q_proj"), ("c_attn,", ""), ("mlp,lm_head", "lm_head"), ("c", "c")):
        line = error_line(with_adapters, "gpt2", targets)
        assert f"--lora_targets={targets}: no matrix {unknown!r}" in line
        assert "expected some of all, attn, attn.c_attn, attn.c_proj, c_attn, c_fc, c_proj, mlp, mlp.c_fc" in line


def test_dropout_is_on_the_adapters_input_and_in_training_alone():
    gpt, adapted = with_adapters("llama", dropout=0.999999)
    merged = functional_call(gpt, by_formula(gpt, dict(adapted.named_parameters())), tokens())
    assert (adapted(tokens()) - merged).abs().max() < 1e-4
    assert torch.equal(adapted.train()(tokens()), gpt(tokens()))  # all of their input is dropped


def test_a_frozen_adapter_is_saved_too_and_so_is_what_trains_besides():
    _, adapted = with_adapters("llama")
    for name, p in adapted.named_parameters():
        p.requires_grad_(name.endswith(("lora_B", "ln_f.weight")))
    kept = Adapters(adapted).state_dict().keys()
    assert kept == {name for name in adapted.state_dict() if ".lora_" in name or name == "transformer.ln_f.weight"}


@pytest.mark.parametrize("targets", ["all", "attn"])
def test_the_sanity_check_looks_at_adapters(targets, capsys):
    sanity = pytest.importorskip("extras.sanity")
    _, adapted = with_adapters("llama_mla", targets, trained=False)
    idx = torch.randint(97, 123, (2, 16), generator=torch.Generator().manual_seed(0))
    optimizer = configure_optimizer(adapted, optimizer_config(learning_rate=1e-2, weight_decay=0.0))
    with pytest.raises(SystemExit) as end:
        sanity.check(adapted, {"idx": idx, "targets": idx}, optimizer, torch.autocast("cpu", enabled=False), False, 1)
    output, n = capsys.readouterr().out, len(Adapters(adapted).state_dict())
    assert end.value.code == 0 and f"{n} of {n} parameters get a gradient" in output
    assert output.count("ok   ") == 5, output


# ---------------------------------------------------------------------------------------------------
# runs

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a base model and conversations."""
    folder = tmp_path_factory.mktemp("lora")
    save_model(folder / "base", new_gpt("llama_mla", max_seq_len=64, n_layer=2), stage="base")
    words = ["the", "cat", "sat", "on", "a", "mat"] * 25
    jsonl(folder / "chats.jsonl", [turns(f"say {word}", word) for word in words])
    return folder


def args(folder, out, *more):
    return [*SFT, "--max_iters=10", "--eval_interval=5", "--eval_iters=2", "--learning_rate=5e-3", "--sample_tokens=0",
            "--lora_rank=4", f"--init_from={folder}/base", f"--data={folder}/chats.jsonl", f"--chat_dir={folder}/rows",
            f"--out_dir={folder / out}", *more]


@pytest.fixture(scope="module")
def tuned(folder):
    """The out_dir of a run, and its output."""
    return folder / "tuned", run("chat_sft.py", *args(folder, "tuned", "--sample_tokens=8"))


def test_a_run_learns_and_its_checkpoint_holds_adapters_alone(folder, tuned):
    out_dir, output = tuned
    checkpoint, base, log = load(out_dir), load(folder / "base"), read_log(out_dir, "val_loss")
    assert log["val_loss", 10] < 0.9 * log["val_loss", 0]
    assert len(checkpoint["model"]) == 2 * 14 and all(".lora_" in name for name in checkpoint["model"])
    n = sum(tensor.numel() for tensor in checkpoint["model"].values())
    n_base = sum(tensor.numel() for tensor in base["model"].values())
    assert f"LoRA: {n:,} of {n + n_base:,} parameters train" in output
    assert "WARNING: a base model has not learned the chat tokens" in output
    assert len(checkpoint["optimizer"]["state"]) == 2 * 14
    merged = load_checkpoint(out_dir)["model"]  # the base, but for the matrices of the blocks
    assert merged.keys() == base["model"].keys()
    for name, tensor in merged.items():
        unchanged = ".h." not in name or "norm" in name or ".ln_" in name
        assert torch.equal(tensor, base["model"][name]) == unchanged, name
    with pytest.raises(ValueError, match="its adapters are on other matrices"):
        Adapters(with_adapters("llama_mla", "attn")[1]).load_state_dict(checkpoint["model"])


def test_the_other_scripts_open_it(folder, tuned, tmp_path):
    out_dir, _ = tuned
    text = run("sample.py", f"--checkpoint={out_dir}", "--prompt=say cat", "--chat=True", "--max_new_tokens=9",
               "--dtype=float32", "--temperature=0")
    assert "chat model, llama, mla, 2 layers" in text and f"LoRA on {folder}/base/ckpt.pt" in text
    # a run of all parameters starts from it: the validation loss of the merged weights is that of the adapters
    run("chat_sft.py", *args(folder, "second", f"--init_from={out_dir}", "--lora_rank=0", "--max_iters=0",
                             "--warmup_iters=0"))
    adapted, merged = (read_log(path, "val_loss") for path in (out_dir, folder / "second"))
    assert merged["val_loss", 0] == pytest.approx(adapted["val_loss", 10], abs=1e-5)
    assert "lora" not in load(folder / "second")


@pytest.mark.slow
def test_interrupted_on_a_hugging_face_folder_equals_uninterrupted(folder, tmp_path):
    run("export_hf.py", f"--checkpoint={folder}/base", f"--out_dir={folder}/hf", "--dtype=float32")
    settings = ["--lora_dropout=0.1", "--weight_decay=0.1", "--lora_targets=q_proj,kv_b_proj,mlp"]
    check_resumed("chat_sft.py", args(folder, "none", f"--init_from={folder}/hf", *settings), tmp_path, stops=(5, 10))
    assert load(tmp_path / "parts")["lora"]["path"] == f"{folder}/hf"
    merged = load_model(tmp_path / "parts", "cpu")[0]
    run("export_hf.py", f"--checkpoint={tmp_path}/parts", f"--out_dir={tmp_path}/hf", "--dtype=float32")
    assert torch.equal(merged(tokens()), load_model(tmp_path / "hf", "cpu")[0](tokens()))
    line = refused("export_hf.py", f"--checkpoint={tmp_path}/parts", f"--out_dir={folder}/hf", "--overwrite=True")
    assert f"--out_dir={folder}/hf: holds the base" in line


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], extra_flags(fsdp=["--fsdp=True"])], ids=["ddp", "fsdp"])
def test_two_ranks_interrupted_train_the_adapters_of_one(folder, tuned, tmp_path, flags):
    for steps in (5, 10):
        run("chat_sft.py", *args(folder, "none", *flags, f"--out_dir={tmp_path}", f"--max_iters={steps}", "--min_lr=0",
                                 "--lr_decay_iters=10", f"--init_from=auto:{folder}/base"), ranks=2)
    check_close(tuned[0], tmp_path, "train_loss", "val_loss", "grad_norm", abs=1e-4)
    assert load(tuned[0])["optimizer"]["state"].keys() == load(tmp_path)["optimizer"]["state"].keys()


@pytest.mark.slow
def test_compiled_equals_eager_without_a_recompile(folder, tuned):
    output = run("chat_sft.py", *args(folder, "compiled", *COMPILED, "--compile_backend=aot_eager",
                                      "--sample_tokens=8"))
    assert "recompiled" not in output and "compiled in" in output
    shutil.copytree(tuned[0], folder / "eager")
    check_compiled(folder)


# ---------------------------------------------------------------------------------------------------
# the base

def test_a_base_that_is_moved_gone_or_another_one(folder, tuned, tmp_path, monkeypatch):
    shutil.copytree(folder / "base", tmp_path / "first" / "base")
    monkeypatch.chdir(tmp_path / "first")
    checkpoint = load(tuned[0])
    checkpoint["lora"] |= {"path": "base/ckpt.pt", "absolute": str(tmp_path / "first" / "base" / "ckpt.pt")}
    write_checkpoint("tuned", checkpoint)
    merged = load_checkpoint("tuned")["model"]
    shutil.move(tmp_path / "first", tmp_path / "moved")  # together: the relative path is still right
    monkeypatch.chdir(tmp_path / "moved")
    assert same(load_checkpoint("tuned")["model"], merged)
    shutil.copy("tuned/ckpt.pt", "tuned/ckpt_base.pt")  # adapters where the base is looked for first
    assert same(load_checkpoint("tuned")["model"], merged)

    other = load("base")
    other["model"]["transformer.ln_f.weight"][5] += 1e-6
    torch.save(other, "base/ckpt.pt")
    for _ in range(2):
        line = error_line(load_checkpoint, "tuned")
        assert "error: tuned/ckpt.pt" in line and f"{tmp_path}/first/base/ckpt.pt or base/ckpt.pt" in line, line
        assert "other weights" in line
        shutil.rmtree("base", ignore_errors=True)
    # a rollback does not need it
    assert load_checkpoint("tuned", merge=False)["model"].keys() == checkpoint["model"].keys()


def tuning(folder, seed):
    """A base model in folder/base, and the Checkpointer of a LoRA run on it in folder/tuned."""
    gpt = new_gpt("llama", seed, n_layer=1)
    base = load_checkpoint(save_model(folder / "scratch", gpt, stage="base"))
    base["model"]["loss_fn.proj.weight"] = torch.ones(1)  # what its loss function learned
    write_checkpoint(folder / "base", base)
    config = {"optimizer": "adamw", "lora_rank": 2, "lora_alpha": 4.0, "lora_targets": "all", "lora_dropout": 0.25,
              "seed": 1, "out_dir": str(folder / "tuned")}
    lora = Lora(gpt, config, "float32", load_checkpoint(folder / "base"), resuming=False)
    facts = {"model_args": asdict(gpt.config), "config": config, "tokenizer": "bytes", "stage": "chat", "data": ""}
    return Checkpointer(folder / "tuned", {"model": Adapters(gpt), "lora": lora}, facts)


def test_what_trains_besides_the_adapters_is_loaded_with_them(tmp_path):
    checkpointer = tuning(tmp_path, 0)
    transformer = checkpointer.state["model"].model.transformer
    assert transformer.h[0].mlp.up_proj.drop.p == 0.25
    torch.nn.init.constant_(transformer.ln_f.weight.requires_grad_(True), 7.0)
    checkpointer.save(0)
    assert (load_checkpoint(tmp_path / "tuned")["model"]["transformer.ln_f.weight"] == 7).all()


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_base_that_is_trained_on_or_removed_stays_with_its_adapters(tmp_path, symbolic):
    checkpointer = tuning(tmp_path, 0)
    if symbolic:
        (tmp_path / "base" / "ckpt.pt").rename(tmp_path / "elsewhere.pt")
        (tmp_path / "base" / "ckpt.pt").symlink_to(tmp_path / "elsewhere.pt")
    checkpointer.save(0)
    assert os.path.samefile(tmp_path / "base" / "ckpt.pt", tmp_path / "tuned" / "ckpt_base.pt")
    (tmp_path / "elsewhere.pt").unlink(missing_ok=True)
    merged = load_checkpoint(tmp_path / "tuned")["model"]
    for _ in range(2):
        write_checkpoint(tmp_path / "base", load_checkpoint(save_model(tmp_path / "other", new_gpt("llama", 2))))
    assert same(load_checkpoint(tmp_path / "tuned")["model"], merged)
    (tmp_path / "base" / "ckpt.pt").write_bytes(b"damaged")
    assert same(load_checkpoint(tmp_path / "tuned")["model"], merged)
    (tmp_path / "base" / "ckpt.pt").unlink()
    shutil.move(tmp_path / "tuned", tmp_path / "moved")
    assert same(load_checkpoint(tmp_path / "moved")["model"], merged)


def test_a_base_that_changes_before_the_first_save_ends_the_run_and_an_overwritten_ones_is_replaced(tmp_path):
    first = tuning(tmp_path, 0)
    first.save(0)
    second = tuning(tmp_path, 1)
    second.save(0)
    assert os.path.samefile(tmp_path / "base" / "ckpt.pt", tmp_path / "tuned" / "ckpt_base.pt")
    load_checkpoint(tmp_path / "tuned")
    shutil.rmtree(tmp_path / "tuned")
    third = tuning(tmp_path, 2)
    write_checkpoint(tmp_path / "base", load_checkpoint(save_model(tmp_path / "other", new_gpt("llama", 3))))
    assert "their base is expected in ckpt_base.pt beside it" in error_line(third.save, 0)


def test_a_damaged_entry_ends_a_resumed_run_in_one_line(tmp_path):
    gpt, checkpoint = new_gpt("llama"), {"path": "tuned", "lora": {}}
    assert "error: tuned: KeyError" in error_line(Lora, gpt, {"optimizer": "adamw"}, "float32", checkpoint, True)


def test_without_room_for_a_copy_of_the_base_the_adapters_are_saved(tmp_path, monkeypatch, capsys):
    """On another disk. The run must not say that nothing is saved, nor replace its previous checkpoint each time."""
    checkpointer = tuning(tmp_path, 0)

    def copy(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", lambda *_: os.stat("no such file"))
    monkeypatch.setattr(shutil, "copyfile", copy)
    for iter_num in (0, 1, 2):
        checkpointer.save(iter_num)
        output = capsys.readouterr().out
        assert f"ckpt_base.pt of step {iter_num} could not be saved (OSError" in output and "nothing" not in output
        assert checkpointer.saved_iter == iter_num == load(tmp_path / "tuned")["iter_num"]
    assert load(tmp_path / "tuned", "ckpt_prev.pt")["iter_num"] == 1


def test_what_adapters_cannot_be_trained_with_is_refused():
    for optimizer, checkpoint, words in (
            ("muon", {"path": "base"}, "--optimizer=muon.*lora_rank.*adamw"),
            ("adamw", {"path": "tuned", "lora": {}}, "--init_from=tuned.*export_hf.py")):
        check_error(words, Lora, None, {"optimizer": optimizer}, "float32", checkpoint, False)


# -----------------------------------------------------------------------------
# on models that were trained elsewhere

LORA = dict(optimizer="adamw", lora_alpha=8, lora_targets="all", lora_rank=4, lora_dropout=0.0, seed=1)


def test_matrices_that_came_in_bfloat16_stay_so_while_frozen_with_the_same_gradients(tmp_path):
    write_family("qwen3", tmp_path / "hf", torch.bfloat16)
    checkpoint = load_hf(tmp_path / "hf")
    assert {weights.dtype for weights in checkpoint["model"].values()} == {torch.bfloat16}
    model, idx, losses = GPT(GPTConfig(**checkpoint["model_args"])), torch.arange(600).view(6, 100), []
    model.load_state_dict(checkpoint["model"])
    for dtype in "float32", "bfloat16":
        tuned = copy.deepcopy(model)
        Lora(tuned, LORA, dtype, checkpoint, resuming=False)
        with torch.autocast("cpu", torch.bfloat16):
            loss = tuned(idx, idx)
        loss.backward()
        losses.append((loss, [p.grad for p in tuned.parameters() if p.requires_grad]))
        assert {p.dtype for p in tuned.parameters() if p.dim() > 1 and not p.requires_grad} == {getattr(torch, dtype)}
    assert same(*losses)  # autocast would have rounded them


def test_a_name_on_the_hub_is_a_model_and_a_base_of_adapters(tmp_path, monkeypatch):
    write_family("qwen3", tmp_path / "hf")
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    checkpoint = load_checkpoint("Qwen/Qwen3-0.6B")
    Lora(GPT(GPTConfig(**checkpoint["model_args"])), LORA, "float32", checkpoint, resuming=False)
    assert load_base({"path": "out/ckpt.pt", "lora": {
        "absolute": str(tmp_path / "Qwen/Qwen3-0.6B"), "path": "Qwen/Qwen3-0.6B",
        "fingerprint": fingerprint(checkpoint)}}).keys() == checkpoint["model"].keys()
    assert asked == ["Qwen/Qwen3-0.6B"] * 2
    with pytest.raises(SystemExit):
        load_checkpoint("out/ckpt.pt")
    assert len(asked) == 2  # a missing file of ours is not searched for there
