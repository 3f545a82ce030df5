"""What the documentation has people type: flags that exist, values that are accepted, links that lead somewhere."""
import ast
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import configurator
from conftest import ROOT

PAGES = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")), "speedrun.sh",
         *(f"config/{path.name}" for path in (ROOT / "config").glob("*.py"))]


@functools.cache
def settings(script):
    """{name: annotation} of a script."""
    return {node.target.id: eval(ast.unparse(node.annotation), {**vars(typing), **vars(configurator)})
            for node in ast.walk(ast.parse((ROOT / script).read_text(encoding="utf-8")))
            if isinstance(node, ast.AnnAssign) and node.value is not None}


def commands(page):
    """(script, arguments) of each `python SCRIPT.py ...` and `torchrun ... SCRIPT.py ...` on a page."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    text = re.sub(r"='[^'`]*'", lambda found: found[0].replace("\n", " "), text)  # a flag on several lines
    for part in re.split(r"\n|`|&&|\|", text):
        found = re.search(r"(?:python |torchrun |\$run )(?:\S+ )*?((?:(?:docs|extras|tests)/)?\w+\.py)\b([^#>]*)", part)
        if found and (ROOT / found[1]).exists():
            yield found[1], shlex.split(found[2])


@pytest.mark.parametrize("page", PAGES)
def test_each_command_has_flags_that_are_accepted(page):
    for script, args in commands(page):
        known = settings(script)
        for arg in args:
            name, equals, text = arg.removeprefix("--").partition("=")
            if equals and "$" not in text and text not in ("N", "..."):
                assert name in known, f"{page}: {script} --{name}"
                configurator.check(f"{page}: --{name}", configurator.parse(text, known[name]), known[name])
            elif arg.endswith(".py"):
                assert (ROOT / arg).exists(), f"{page}: {arg}"


def test_there_are_commands():
    """So the test above reads something."""
    found = [script for page in PAGES for script, _ in commands(page)]
    assert {"train_gpt2.py", "chat_sft.py", "prepare_data.py", "sample.py", "evaluate.py", "export_hf.py",
            "bench.py", "docs/race.py", "extras/compare.py", "tests/bench_peers.py"} <= set(found) and len(found) > 40


def test_commands_of_the_readme_can_be_pasted_into_zsh_and_cmd():
    """zsh, a Mac's shell, passes comments on to the script, and Windows's cmd.exe single quotes."""
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL):
        assert not re.search(r"(^|\s)#|[= ]'", block), block


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), f"{page}: {target}"
        titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, f"{page}: {target}"


@pytest.mark.slow
def test_speedrun_runs_and_resumes(tmp_path):
    """With one process and tiny settings; started again it trains nothing twice."""
    for name in ("*.py", "config/*.py", "extras/*.py", "speedrun.sh", "requirements.txt"):
        for path in ROOT.glob(name):
            (tmp_path / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, tmp_path / path.relative_to(ROOT))
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/ready").touch()
    (tmp_path / ".venv/bin/activate").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    mmlu = {"question": "1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1}
    (tmp_path / "mmlu").mkdir()
    (tmp_path / "mmlu/test.jsonl").write_text(json.dumps(mmlu))
    small = "--compile=False --eval_iters=1 --sample_tokens=0 --batch_size=8 --gradient_accumulation_steps=1"
    env = {**os.environ, "GPUS": "1", "TOKENS": "1310720",
           "PREPARE": "--dataset=python --val_tokens=50000",
           "TRAIN": f"{small} --n_layer=1 --n_head=2 --n_embd=16 --max_seq_len=64",
           "CHAT": f"{small} --data=data/speedrun-1310720/chat.jsonl --max_iters=3",
           "EVALUATE": "--tasks=mmlu --task_dir=."}
    refused = subprocess.run(["sh", "speedrun.sh"], cwd=tmp_path, env={**env, "TOKENS": "2e9"}, capture_output=True)
    assert refused.returncode == 2 and b"error: TOKENS=2e9: expected an integer" in refused.stderr
    for start in range(2):
        done = subprocess.run(["sh", "speedrun.sh"], cwd=tmp_path, env=env, capture_output=True, text=True)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output[-4000:]
        assert ("step 10/10: loss" in output, "step 3/3: loss" in output) == (start == 0, start == 0), output[-4000:]
        assert "mmlu" in output and "model: " in output
