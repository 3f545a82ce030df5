"""Anything in extras/ can be deleted, and a script copied and renamed: each tree is a copy with its own modules."""
import os
import re
import shutil
import sys
import tempfile

import pytest

from conftest import ROOT, SFT, TINY, chats, extra_flags, forked, run, run_forked

# what asks for each file; plot and block_attention are on by default, compare is a script: nothing asks for them
ASKED = {"distill": "--teacher=gpt2", "prune": "--sparsity=0.5", "spam": "--optimizer=adamw_spam",
         "fsdp": "--fsdp=True", "rollback": "--spike_loss=2", "sanity": "--sanity_check=True",
         "trackers": "--tensorboard=True", "lora": "--lora_rank=2", "local_heads": "--local_heads=True", "plot": None,
         "compare": None, "block_attention": None}
EXTRAS = sorted(path.stem for path in (ROOT / "extras").glob("*.py") if path.stem != "__init__")


def copy_tree(folder, without=()):
    """A copy of what is needed to run, without some files of extras/."""
    folder.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    with open(folder / "configurator.py", "a") as f:
        f.write("print('imported', __file__)\n")
    ignore = shutil.ignore_patterns("__pycache__", *(f"{extra}.py" for extra in without))
    shutil.copytree(ROOT / "extras", folder / "extras", ignore=ignore)
    return folder


def forget_checkout(folder, *args):
    """In a fork: what was imported from the checkout is imported from a copy of it."""
    ours = {str(ROOT), str(ROOT / "extras"), str(ROOT / "tests")}  # and not an environment in .venv
    for name, module in list(sys.modules.items()):
        if os.path.dirname(getattr(module, "__file__", None) or "") in ours:
            del sys.modules[name]
    sys.path[:] = [folder, *(path for path in sys.path if path not in ours)]
    run_forked(*args)


def run_in(folder, script, *args):
    """Runs a script in a copy of the tree. Returns its exit code and what it printed."""
    with tempfile.NamedTemporaryFile("r") as file:
        process = forked.Process(target=forget_checkout, args=(str(folder), f"{folder}/{script}", args, folder, {},
                                                               [file.name] * 2))
        process.start()
        process.join(120)
        output = file.read()
    assert f"imported {folder}/configurator.py" in output, output[-3000:]
    return process.exitcode, output


@pytest.mark.slow
def test_without_any_extras_the_loops_run_and_adapters_are_read(shards, trained, tmp_path):
    tree = copy_tree(tmp_path / "tree")
    train = ["train_gpt2.py", *TINY, f"--data_dir={shards}", "--eval_interval=1", "--warmup_iters=0"]
    chat = ["chat_sft.py", *SFT, f"--init_from={trained}", f"--data={chats(tmp_path / 'chats.jsonl', 60)}",
            "--max_iters=1", "--warmup_iters=0"]
    lora = extra_flags(lora=["--lora_rank=2", "--out_dir=lora"])
    if lora:
        code, output = run_in(tree, *chat, *lora)
        assert code == 0, output[-3000:]
    shutil.rmtree(tree / "extras")
    for argv, word in [
            ([*train, "--max_iters=1"], "done after 1 steps"),
            ([*train, "--max_iters=2", "--init_from=resume", "--compile=True", "--compile_backend=aot_eager"],
             "extras/block_attention.py is not here: attention is slower on a CPU"),
            (chat, "loss.png is not drawn: No module named 'extras'"),
            ([*chat, "--max_iters=2", "--init_from=resume"], "done after 2 steps"),
            (["sample.py", f"--checkpoint={'lora' if lora else 'out-chat'}", "--chat=True", "--prompt=q1",
              "--max_new_tokens=4"], f"LoRA on {trained}" if lora else "chat model")]:
        code, output = run_in(tree, *argv)
        assert code == 0 and word in output, output[-3000:]
    code, output = run_in(tree, *train, "--sparsity=0.5", "--overwrite=True")
    assert code == 2 and "\nerror: ModuleNotFoundError: No module named 'extras'; a setting asks for it" in output


@pytest.mark.parametrize("extra", EXTRAS)
def test_without_one_file_asking_for_it_ends_in_one_line(extra, shards, trained, tmp_path):
    tree = copy_tree(tmp_path / "tree", without=[extra])
    argv = ["train_gpt2.py", *TINY, f"--data_dir={shards}", "--max_iters=1", "--warmup_iters=0"]
    if extra == "lora":  # of chat tuning alone
        argv = ["chat_sft.py", *SFT, f"--init_from={trained}", f"--data={chats(tmp_path / 'chats.jsonl', 60)}"]
    code, output = run_in(tree, *argv, *([ASKED[extra]] if ASKED[extra] else []))
    if ASKED[extra]:
        errors = [line for line in output.splitlines() if line.startswith("error:")]
        assert code == 2 and len(errors) == 1 and "Traceback" not in output, output[-3000:]
        assert f"No module named 'extras.{extra}'" in errors[0]
    else:
        assert code == 0 and "done after 1 steps" in output, output[-3000:]


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
