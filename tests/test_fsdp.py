"""A sharded model is the model: its losses, samples, scores and checkpoints."""
import pytest
import torch

from conftest import (MLA, SFT, TINY, chats, check_close, check_resumed, error_line, extra_flags, fail_writes,
                      hellaswag, load, optimizer_config, patched, run, small_gpt)
from extras.fsdp import ShardedModel, ShardedOptimizer, apply_fsdp
from optim import configure_optimizer

ARGS = [*TINY, "--sample_tokens=0"]


def compare(script, args, tmp_path, keys, tolerance):
    """Two ranks against one that has all of it."""
    samples = []
    for name, flags, ranks in (("whole", [], 1), ("sharded", ["--fsdp=True"], 2)):
        output = run(script, *args, *flags, f"--out_dir={tmp_path / name}", ranks=ranks)
        samples.append(output.split("----- sample")[1].split("-----")[0])
    assert samples[0] == samples[1]
    check_close(tmp_path / "whole", tmp_path / "sharded", "train_loss", "val_loss", "grad_norm", "recompiles", *keys,
                abs=tolerance)
    a, b = load(tmp_path / "whole"), load(tmp_path / "sharded")
    assert a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys()
    assert all(torch.allclose(a["model"][name], b["model"][name], atol=10 * tolerance) for name in a["model"])


@pytest.mark.slow
@pytest.mark.parametrize("extra", [
    [], ["--arch=llama", *MLA, "--recompute=True", "--compile=True", "--compile_backend=aot_eager",
         *extra_flags(spam=["--optimizer=adamw_spam", "--spam_interval=10"])]], ids=["gpt2", "mla_compiled_spam"])
def test_a_sharded_model_is_the_model(shards, tmp_path, extra):
    args = [*TINY, *extra, f"--data_dir={shards}", *hellaswag(tmp_path, 7), "--eval_iters=3"]
    compare("train_gpt2.py", args, tmp_path, ["hellaswag_acc"], 1e-4)
    if not extra:  # what was sharded is continued whole, and the reverse
        resume = ["--init_from=resume", "--max_iters=24"]
        run("train_gpt2.py", *resume, f"--out_dir={tmp_path}/sharded", "--fsdp=False")
        run("train_gpt2.py", *resume, f"--out_dir={tmp_path}/whole", "--fsdp=True", ranks=2)
        check_close(tmp_path / "whole", tmp_path / "sharded", "train_loss", "val_loss", abs=1e-3)


@pytest.mark.slow
def test_a_sharded_model_is_tuned_like_a_whole_one(trained, tmp_path):
    """Muon rounds to bfloat16: 5e-3."""
    compare("chat_sft.py", [*SFT, "--optimizer=muon", f"--init_from={trained}", f"--chat_dir={tmp_path}/rows",
                            f"--data={chats(tmp_path / 'chats.jsonl')}"], tmp_path, ["targets"], 5e-3)


@pytest.mark.slow
def test_three_ranks_with_a_frozen_layer_interrupted_equal_uninterrupted_ones(shards, trained, tmp_path):
    """It comes from another run, so a resumed run that did not restore it would have another one."""
    freeze = """
import features
change_model = features.change_model
def freeze_and_change(model, *rest):
    model.transformer.h[0].requires_grad_(False)
    change_model(model, *rest)
features.change_model = freeze_and_change
"""
    args = [*ARGS, "--optimizer=muon", "--fsdp=True", f"--data_dir={shards}", f"--init_from={trained}",
            "--gradient_accumulation_steps=3"]
    check_resumed(patched(tmp_path, "train_gpt2.py", freeze), args, tmp_path, ranks=3, stops=(5, 10))


def test_all_ranks_end_when_the_last_save_fails(train, tmp_path):
    """In bfloat16, which a CPU's LayerNorm does not take as the weights' dtype."""
    output = train(tmp_path / "o", "--sample_tokens=0", "--fsdp=True", "--max_iters=3", "--dtype=bfloat16",
                   patch=fail_writes([3]), ranks=2, code=2)
    assert f"WARNING: --out_dir={tmp_path}/o: step 3 could not be saved (OSError: no space)" in output
    assert output.count("error: ") == 1 and "step 3 could not be saved; resume with" in output


def test_frozen_weights_are_saved_except_those_that_adapters_take_from_their_base(monkeypatch):
    lora = pytest.importorskip("extras.lora")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    for gpt in (small_gpt("gpt2"), small_gpt("llama")):
        gpt.transformer.wte.requires_grad_(False)
        gpt.transformer.h[0].requires_grad_(False)
        assert ShardedModel(gpt).state_dict().keys() == gpt.state_dict().keys()
        lora.add_adapters(gpt, "attn", 2, 1.0, 0.0)
        adapters = ShardedModel(lora.Adapters(gpt)).state_dict()
        assert adapters and all(".lora_" in name for name in adapters)


def test_a_checkpoint_that_lacks_weights_is_refused():
    """torch's set_model_state_dict would leave them as they are: random."""
    gpt, weights = small_gpt("gpt2"), small_gpt("gpt2").state_dict()
    del weights["transformer.h.1.ln_2.bias"]
    with pytest.raises(ValueError, match="it lacks transformer.h.1.ln_2.bias"):
        ShardedModel(gpt).load_state_dict(weights)


def test_a_rollback_to_the_first_step_forgets_the_moments():
    gpt = small_gpt("gpt2")
    optimizer = configure_optimizer(gpt, optimizer_config())
    gpt(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)).backward()
    optimizer.step()
    ShardedOptimizer(optimizer).load_state_dict({"state": {}, "param_groups": []})
    assert not optimizer.state


@pytest.mark.parametrize("dtype, ranks, error", [
    ("float32", 1, "--fsdp=True: expected several ranks; start with torchrun"),
    ("float16", 2, "--fsdp=True: expected --dtype=bfloat16 or float32")])
def test_one_rank_and_float16_are_refused(monkeypatch, dtype, ranks, error):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks > 1)
    assert error in error_line(apply_fsdp, None, torch.device("cpu"), dtype, None)


@pytest.mark.slow
@pytest.mark.skipif(not extra_flags(distill=["here"]), reason="extras/distill.py is not here")
def test_a_sharded_teacher_is_the_teacher(shards, trained, tmp_path):
    """Of another width than its student, which is sharded too, or whole on each rank."""
    args = [*ARGS, f"--data_dir={shards}", "--n_embd=16", f"--teacher={trained}", "--teacher_temperature=2",
            "--max_iters=6", "--eval_interval=3"]
    run("train_gpt2.py", *args, f"--out_dir={tmp_path}/whole")
    for i, flag in enumerate(("--fsdp=True", "--shard_teacher=True")):
        run("train_gpt2.py", *args, flag, f"--out_dir={tmp_path}/{i}", ranks=2)
        check_close(tmp_path / "whole", tmp_path / str(i), "train_loss", "ce_loss", "kl_loss", "agreement",
                    "temperature", "val_loss", "grad_norm", abs=1e-4)
