"""Anything in extras/ can be deleted, and settings of a copied script, too."""
import re

import pytest

from conftest import ROOT, SFT, TINY, chats, extra_flags, patched, refused, run

# what asks for each file; plot and block_attention are on by default, compare is a script: nothing asks for them
ASKED = {"distill": "--teacher=gpt2", "prune": "--sparsity=0.5", "spam": "--optimizer=adamw_spam",
         "fsdp": "--fsdp=True", "rollback": "--spike_loss=2", "sanity": "--sanity_check=True",
         "trackers": "--tensorboard=True", "lora": "--lora_rank=2", "local_heads": "--local_heads=True", "plot": None,
         "compare": None, "block_attention": None}
EXTRAS = sorted(path.stem for path in (ROOT / "extras").glob("*.py") if path.stem != "__init__")


def without(module, folder, script):
    """The script, but importing the module fails as if its file were deleted."""
    return patched(folder, script, f"sys.modules[{module!r}] = None")


@pytest.mark.slow
def test_without_any_extras_the_loops_run_and_adapters_are_read(shards, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = ["train_gpt2.py", *TINY, f"--data_dir={shards}", "--eval_interval=1", "--warmup_iters=0"]
    chat = ["chat_sft.py", *SFT, f"--init_from={trained}", f"--data={chats(tmp_path / 'chats.jsonl', 60)}",
            "--max_iters=1", "--warmup_iters=0"]
    lora = extra_flags(lora=["--lora_rank=2", "--out_dir=lora"])
    if lora:
        run(*chat, *lora)
    for (script, *args), word in [
            ([*train, "--max_iters=1"], "done after 1 steps"),
            ([*train, "--max_iters=2", "--init_from=resume", "--compile=True", "--compile_backend=aot_eager"],
             "extras/block_attention.py is not here: attention is slower on a CPU"),
            (chat, "loss.png is not drawn: No module named 'extras.plot'"),
            ([*chat, "--max_iters=2", "--init_from=resume"], "done after 2 steps"),
            (["sample.py", f"--checkpoint={'lora' if lora else 'out-chat'}", "--chat=True", "--prompt=q1",
              "--max_new_tokens=4"], f"LoRA on {trained}" if lora else "chat model")]:
        assert word in run(without("extras", tmp_path, script), *args)
    line = refused(without("extras", tmp_path, "train_gpt2.py"), *train[1:], "--sparsity=0.5", "--overwrite=True")
    assert "No module named 'extras.prune'" in line and "; a setting needs this module" in line


@pytest.mark.parametrize("extra", EXTRAS)
def test_without_one_file_asking_for_it_ends_in_one_line(extra, shards, trained, tmp_path):
    script, *args = ["train_gpt2.py", *TINY, f"--data_dir={shards}", "--max_iters=1", "--warmup_iters=0"]
    if extra == "lora":  # of chat tuning alone
        script, *args = ["chat_sft.py", *SFT, f"--init_from={trained}", f"--data={chats(tmp_path / 'chats.jsonl', 60)}",
                         f"--chat_dir={tmp_path}"]
    args = [without(f"extras.{extra}", tmp_path, script), *args, f"--out_dir={tmp_path}/o"]
    if ASKED[extra]:
        assert f"import of extras.{extra} halted" in refused(*args, ASKED[extra])
    else:
        assert "done after 1 steps" in run(*args)


def test_only_features_imports_extras_and_none_of_them_another_at_its_top():
    """So what runs without all of them also runs without one."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("extras/*.py")]:
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"^(from|import) extras", source, re.MULTILINE), path
        assert path.name == "features.py" or path.parent.name == "extras" or not re.search(
            r"(from|import) extras", source), path


def test_each_extra_is_tested_in_its_own_file_or_where_its_absence_is_looked_for():
    """So deleting extras/X.py together with tests/test_X.py leaves the rest of the tests as they are."""
    assert set(EXTRAS) <= set(ASKED)
    for extra in EXTRAS:
        assert (ROOT / "tests" / f"test_{extra}.py").exists()
        asks = rf"extras\.{extra}\b|from extras import .*\b{extra}\b"
        if ASKED[extra]:
            name, value = ASKED[extra].split("=")
            asks += f"|{name}={value if extra == 'spam' else '(?!1|False)'}[^:\"]*\""  # muon is an optimizer, too
        for path in (ROOT / "tests").glob("test_*.py"):  # what is run by hand asks for what you ask for
            source = path.read_text(encoding="utf-8")
            guarded = f'importorskip("extras.{extra}")' in source or re.search(rf"\b{extra}=\[", source)
            if path.name not in (f"test_{extra}.py", "test_deletion.py", "test_configurator.py") and not guarded:
                assert not re.search(asks, source), (path, re.search(asks, source))


OPTIONAL = {"eval_tasks", "task_dir", "sample_tokens", "wandb_log", "wandb_project", "tensorboard", "spam_interval",
            "spam_warmup", "spam_theta", "sparsity", "prune_by", "prune_begin", "prune_end", "teacher",
            "teacher_weight", "teacher_temperature", "learn_temperature", "teacher_cache", "shard_teacher",
            "spike_loss", "spike_norm", "rollback_lr", "local_heads", "fsdp"}


@pytest.mark.parametrize("kept", ["", "sparsity|prune_|spike_loss|rollback_lr|tensorboard|teacher|learn_temperature"],
                         ids=["none", "four"])
def test_a_copied_script_does_without_the_settings_it_has_lost(shards, trained, tmp_path, kept):
    """All of the optional ones, or some of a feature that is in use."""
    lost = [name for name in OPTIONAL if not kept or not re.match(kept, name)]
    source, n = re.subn(rf"^({'|'.join(lost)}): .*\n", "", (ROOT / "train_gpt2.py").read_text(), flags=re.MULTILINE)
    (tmp_path / "mine.py").write_text(source)
    flags = extra_flags(prune=["--sparsity=0.5"], rollback=["--spike_loss=3"], trackers=["--tensorboard=True"],
                        distill=[f"--teacher={trained}"])
    args = [flag for flag in TINY if "sample_tokens" not in flag] + (flags if kept else [])
    output = run(tmp_path / "mine.py", *args, f"--data_dir={shards}", f"--out_dir={tmp_path}/out", "--max_iters=3")
    assert n > 0 and "done after 3 steps" in output
    output = run(tmp_path / "mine.py", "--init_from=resume", f"--out_dir={tmp_path}/out", "--max_iters=4")
    assert "done after 4 steps" in output
