"""Anything in extras/ can be deleted, and a script copied and renamed: each tree is a copy with its own processes."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from conftest import ROOT, TINY

SCRIPTS = ("train_gpt2.py", "chat_sft.py", "prepare_data.py", "sample.py", "evaluate.py", "export_hf.py", "bench.py")
# what asks for each file; plot and block_attention are on by default, compare is a script: nothing asks for them
ASKED = {"distill": "--teacher=out/ckpt.pt", "prune": "--sparsity=0.5", "spam": "--optimizer=adamw_spam",
         "fsdp": "--fsdp=True", "rollback": "--spike_loss=2", "sanity": "--sanity_check=True",
         "trackers": "--tensorboard=True", "lora": "--lora_rank=2", "plot": None, "compare": None,
         "block_attention": None}
EXTRAS = sorted(path.stem for path in (ROOT / "extras").glob("*.py") if path.stem != "__init__")

# runs each command that it reads in a process of its own: a fork that has imported torch, and nothing of ours
DRIVER = """
import json, os, runpy, signal, sys
import torch._dynamo, matplotlib.pyplot
matplotlib.pyplot.Figure.savefig = lambda *_: None  # see conftest.py
assert sys.path[0] == "" and not {checkout!r} in sys.path
for line in sys.stdin.buffer:
    folder, argv = json.loads(line)
    if os.fork() == 0:
        signal.alarm(600)
        os.chdir(folder)
        sys.stdin = open(os.devnull)
        sys.argv, code = argv, 0
        try:
            runpy.run_path(argv[0], run_name="__main__")
            runtime = sys.modules.get("runtime")
            assert runtime is None or os.path.dirname(os.path.abspath(runtime.__file__)) == os.getcwd(), runtime
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    print("\\n=", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def driver():
    """Runs the commands of all tests in this file: torch takes it five seconds to import."""
    code = DRIVER.replace("{checkout!r}", repr(str(ROOT)))
    with subprocess.Popen([sys.executable, "-c", code], env=clean_env(), stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        yield process
        process.stdin.close()


def copy_tree(folder, without=()):
    """A copy of what is needed to run, but for some files of extras/."""
    folder.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    ignore = shutil.ignore_patterns("__pycache__", *(f"{extra}.py" for extra in without))
    shutil.copytree(ROOT / "extras", folder / "extras", ignore=ignore)
    return folder


def clean_env():
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def run_in(driver, folder, *commands):
    """Runs commands in a copy of the tree. Returns [(exit code, output), ...]."""
    results = []
    for argv in commands:
        print(json.dumps([str(folder), argv]), file=driver.stdin, flush=True)
        output = ""
        while not (end := re.search(r"\n= (-?\d+)\n$", output)):
            line = driver.stdout.readline()
            assert line, output
            output += line
        results.append((int(end[1]), output[:end.start()]))
    return results


def train(shards, *more):
    return ["train_gpt2.py", *TINY, f"--data_dir={shards}", "--eval_interval=1", "--warmup_iters=0", *more]


def write_chats(path):
    chats = [[{"role": "user", "content": f"cat {i}"}, {"role": "assistant", "content": "ran"}] for i in range(18)]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))


def test_without_any_extras_everything_else_runs(shards, tmp_path, driver):
    tree = copy_tree(tmp_path / "tree")
    shutil.rmtree(tree / "extras")
    write_chats(tree / "chats.jsonl")
    (tree / "texts.txt").write_text("the cat sat on a mat\n" * 400)
    problem = {"ctx": "the cat", "endings": ["sat on a mat", "ran"], "label": 0, "ind": 0}
    (tree / "tasks" / "hellaswag").mkdir(parents=True)
    (tree / "tasks" / "hellaswag" / "test.jsonl").write_text(json.dumps(problem) + "\n")
    results = run_in(
        driver, tree,
        ["prepare_data.py", "--files=texts.txt", "--tokenizer=bytes", "--data_dir=data"],
        train("data", "--max_iters=1"),
        train("data", "--init_from=resume", "--max_iters=2"),
        ["chat_sft.py", "--data=chats.jsonl", "--max_iters=1", "--max_seq_len=32", "--compile=False", "--device=cpu"],
        ["chat_sft.py", "--data=chats.jsonl", "--init_from=resume", "--max_iters=2"],
        ["sample.py", "--checkpoint=out-chat", "--chat=True", "--prompt=a cat", "--max_new_tokens=4"],
        ["evaluate.py", "--tasks=hellaswag", "--task_dir=tasks", "--data_dir=data"],
        ["export_hf.py", "--out_dir=hf"],
        *([script, "--help"] for script in SCRIPTS))
    for code, output in results:
        assert code == 0, output[-3000:]
    assert "resumed at step 1" in results[2][1]
    assert "extras/rollback.py is not here: running without it" in results[1][1]


@pytest.mark.parametrize("extra", EXTRAS)
def test_without_one_file_the_rest_runs_and_asking_for_it_ends_in_one_line(extra, shards, tmp_path, driver):
    tree = copy_tree(tmp_path / "tree", without=[extra])
    commands = [["train_gpt2.py", "--help"], ["chat_sft.py", "--help"], train(shards, "--max_iters=1"),
                train(shards, "--init_from=resume", "--max_iters=2")]
    if extra == "lora":  # of chat tuning alone
        write_chats(tree / "chats.jsonl")
        commands.append(["chat_sft.py", "--data=chats.jsonl", "--lora_rank=2", "--out_dir=other"])
    elif ASKED[extra]:
        commands.append(train(shards, ASKED[extra], "--max_iters=1", "--out_dir=other"))
    results = run_in(driver, tree, *commands)
    for code, output in results[:4]:
        assert code == 0, output[-3000:]
    assert "resumed at step 1" in results[3][1] and "step 2/2: loss" in results[3][1]
    if ASKED[extra]:
        code, output = results[4]
        errors = [line for line in output.splitlines() if line.startswith("error:")]
        assert code == 2 and len(errors) == 1 and "Traceback" not in output, output[-3000:]
        assert f"extras/{extra}.py, which is not here" in errors[0] and ASKED[extra].split("=")[0] in errors[0]


def test_each_extra_is_tested_in_its_own_file_or_where_its_absence_is_looked_for():
    """So deleting extras/X.py together with tests/test_X.py leaves the rest of the tests as they are."""
    assert set(EXTRAS) <= set(ASKED)
    for extra in EXTRAS:
        assert (ROOT / "tests" / f"test_{extra}.py").exists()
        default = not ASKED[extra] or extra in ("rollback", "spam")
        flag = "" if default else f"|{ASKED[extra].split('=')[0]}=(?!1|False)"
        asks = re.compile(rf"extras\.{extra}\b|from extras import .*\b{extra}\b{flag}")
        for path in (ROOT / "tests").glob("*.py"):
            source = path.read_text(encoding="utf-8")
            guarded = f'extra_settings("{extra}")' in source
            if path.name not in (f"test_{extra}.py", "test_deletion.py", "test_configurator.py") and not guarded:
                assert not asks.search(source), (path, asks.search(source))


def test_a_copied_script_trains_resumes_and_names_itself(shards, tmp_path, driver):
    tree = copy_tree(tmp_path / "tree")
    shutil.copy(tree / "train_gpt2.py", tree / "mine.py")
    command = ["mine.py", *train(shards)[1:], "--max_iters=100000", "--eval_interval=100000"]
    program = subprocess.Popen([sys.executable, "-u", *command], cwd=tree, env=clean_env(), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    output = ""
    while "step 3/" not in output:
        line = program.stdout.readline()
        assert line, output
        output += line
    program.send_signal(signal.SIGTERM)
    output += program.communicate()[0]
    assert program.returncode == 0, output[-2000:]
    assert "resume with python mine.py --init_from=resume --out_dir=out" in output, output[-2000:]
    step = int(re.search(r"stopped after step (\d+)", output)[1])
    resume = ["mine.py", "--init_from=resume", "--out_dir=out", f"--max_iters={step + 2}"]
    [(code, output)] = run_in(driver, tree, resume)
    assert code == 0 and f"resumed at step {step}" in output, output[-2000:]
    assert f"done after {step + 2} steps" in output, output[-2000:]
