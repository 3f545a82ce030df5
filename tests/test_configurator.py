"""Settings from files and flags: what is accepted, and what is refused in which words."""
import ast
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from configurator import HINTS, configure, fail, one_line_errors, update_settings
from conftest import ROOT, error_line, one_line_or_works

SCRIPT = '''
"""A script with a setting of each type."""
import json
from typing import Annotated, Literal

from configurator import BelowOne, Fraction, NonNegative, Positive, configure

steps: int = 10  # how many, at most
rate: float = 0.5  # how fast
shuffle: bool = True  # in a new order each time
name: str = "run"  # of the run
limit: int | None = None  # None: all
label: str | None = "x"
mode: Literal["slow", "fast"] = "slow"  # of the two
width: Literal[8, 16] = 8
backend: Literal["default", "eager"] | None = None  # None: the usual one
batch: Positive = 4
first: NonNegative = 0
share: Fraction = 0.5
beta: BelowOne = 0.9
last: Positive | None = None
temperature: Annotated[float, 0.01, 100] = 1.0
not_annotated = 1
_hidden: int = 1

if __name__ == "__main__":
    config, overrides = configure(globals())
    print(json.dumps([config, overrides, {key: globals()[key] for key in config}]))
'''
DEFAULTS = {"steps": 10, "rate": 0.5, "shuffle": True, "name": "run", "limit": None, "label": "x", "mode": "slow",
            "width": 8, "backend": None, "batch": 4, "first": 0, "share": 0.5, "beta": 0.9, "last": None,
            "temperature": 1.0}


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script above as a module, in a folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return import_script(tmp_path / "script.py", SCRIPT, monkeypatch)


def import_script(path, source, monkeypatch):
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("script_with_settings", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "script_with_settings", module)
    spec.loader.exec_module(module)
    module.__annotations__  # Python 3.14 adds them to the module at the first access
    return module


def run_script(*args):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "script.py", *args], env=env, capture_output=True, text=True)


def refusal(script, *argv):
    """The one line in which `argv` is refused; nothing may be changed by it."""
    before = dict(vars(script))
    line = error_line(configure, vars(script), argv)
    assert vars(script) == before
    return line


# ---------------------------------------------------------------------------------------------------
# what is accepted

@pytest.mark.parametrize("key, text, value", [
    ("steps", "-3", -3), ("rate", "2", 2.0), ("shuffle", "False", False), ("name", "a=b=c", "a=b=c"),
    ("name", "None", "None"), ("name", "", ""), ("limit", "5", 5), ("label", "None", None), ("mode", "fast", "fast"),
    ("width", "16", 16), ("backend", "None", None), ("batch", "1", 1), ("share", "0", 0.0),
    ("temperature", "100", 100.0)])
def test_a_value_is_accepted_in_a_flag_and_in_a_file(script, key, text, value):
    Path("a.py").write_text(f"import math\n_helper = 3  # such names are the file's own\n{key} = {value!r}\n")
    for argv in ([f"--{key}={text}"], [f"--{key}", text], ["a.py"]):
        vars(script).update(DEFAULTS)
        config, overrides = configure(vars(script), argv)
        assert overrides == {key: value} and config == {**DEFAULTS, key: value}
        assert type(config[key]) is type(value)
        assert {key: getattr(script, key) for key in DEFAULTS} == config


def test_files_first_then_flags_and_later_wins(script):
    Path("a.py").write_text("steps: int = 2 * 3\nrate = 1\nname = 'a'\nlimit = 1\n")
    Path("b.py").write_text("rate = 2\nname = 'b'\n")
    config, overrides = configure(vars(script), argv=["--name", "flag", "a.py", "--limit=7", "b.py", "--limit=8"])
    assert overrides == {"steps": 6, "rate": 2.0, "name": "flag", "limit": 8} and type(config["rate"]) is float
    assert config == {**DEFAULTS, **overrides}
    assert configure(vars(script), argv=["b.py", "a.py"])[1]["rate"] == 1.0


def test_a_comment_that_zsh_passes_on_is_one(script):
    assert configure(vars(script), ["--steps=5", "#", "--steps=6", "or", "more"])[1] == {"steps": 5}


def test_a_started_script_reads_its_command_line(script):
    Path("a.py").write_text("mode = 'fast'\nlimit = 3\n")
    done = run_script("--limit=4", "a.py", "--name=--steps=5", "--rate=3e-4")
    overrides = {"mode": "fast", "limit": 4, "name": "--steps=5", "rate": 3e-4}
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [{**DEFAULTS, **overrides}, overrides, {**DEFAULTS, **overrides}]
    done = run_script("--raet=1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


# ---------------------------------------------------------------------------------------------------
# what is refused

@pytest.mark.parametrize("key, text, source, expected", [
    ("steps", "1.5", "True", "an int"), ("steps", "None", "[1,\n2]", "an int"), ("steps", "", "'2'", "an int"),
    ("steps", "{[]: 1}", "{}", "an int"), ("steps", "(" * 9999, "()", "an int"),
    ("rate", "fast", "'3e-4'", "a finite float"), ("rate", "nan", "10 ** 400", "a finite float"),
    ("rate", "True", "float('inf')", "a finite float"), ("shuffle", "1", "None", "True or False"),
    ("name", None, "3, 'a\\nb'", "a string"), ("limit", "many", "False", "an int or None"),
    ("mode", "fats", "None", "one of 'slow', 'fast'"), ("width", "8.0", "True", "one of 8, 16"),
    ("backend", "defualt", "str", "one of 'default', 'eager' or None"), ("batch", "0", "1.5", "an int of at least 1"),
    ("first", "-1", "True", "an int of at least 0"), ("share", "1.01", "-0.5", "a finite float from 0 to 1"),
    ("beta", "1.0", "1", "a finite float from 0 to 0.999999"), ("last", "0", "2.5", "an int of at least 1 or None"),
    ("temperature", "0.0", "1000", "a finite float from 0.01 to 100")])
def test_a_wrong_value_is_refused_in_a_flag_and_in_a_file(script, key, text, source, expected):
    Path("a.py").write_text(f"label = 'other'\n{key} = {source}\n")
    line = refusal(script, "a.py", f"--{key}={DEFAULTS[key]}")  # though the flag would win
    assert line.startswith(f"error: a.py: {key}=") and line.endswith(f": expected {expected}\n")
    if text is not None:
        line = refusal(script, "--label=other", f"--{key}={text}")
        assert re.match(f"error: --{key}='?{re.escape(text)}'?: expected {re.escape(expected)}\n", line), line


def test_what_a_shell_did_not_expand_is_refused(script):
    """An empty variable does not mean None, and ~ after = would be a folder of that name."""
    assert "--label='': expected a string that is not empty, or None" in refusal(script, "--label=")
    assert "--name=~/run: the shell expands ~ only" in refusal(script, "--name=~/run")
    assert configure(vars(script), ["--name=", "--label=~x"])[1] == {"name": "", "label": "~x"}


@pytest.mark.parametrize("key, nearest", [
    ("step", "--steps"), ("raet", "--rate"), ("Steps", "--steps"), ("zzzzz", None), ("not_annotated", None),
    ("_hidden", None), ("json", None), ("__file__", None), ("", None)])
def test_a_wrong_name_is_refused_with_the_nearest(script, key, nearest):
    Path("a.py").write_text(f"label = 'other'\n{key or 'x'} = 5\n")
    lines = [refusal(script, "--name=other", f"--{key}=5")]
    if not key.startswith("_"):  # in a file such a name is its own
        lines.append(refusal(script, "--name=other", "a.py"))
        assert f"a.py: {key or 'x'}: no such setting of script.py" in lines[1]
    for line in lines:
        assert f"--{key}" in lines[0] and "no such setting of script.py" in line
        assert f"; did you mean {nearest}?" in line if nearest else "did you mean" not in line, line
        assert ("; annotate it" in line) == (key in ("not_annotated", "_hidden", "json", "__file__")), line


def test_what_a_terminal_cannot_show_is_replaced(script, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    configure(vars(script), argv=[])
    print("\u00fc", flush=True)
    assert terminal.buffer.getvalue() == b"?\n"


def test_another_projects_name_is_answered_with_ours(script):
    Path("a.py").write_text("total_batch_size = 256")
    for argument in ("a.py", "--total_batch_size=256", "--total-batch-size=256"):
        assert "here use" not in refusal(script, argument)  # for a setting that this script lacks, too
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(HINTS, "total_batch_size", "--batch, which counts rows")
            assert "no such setting of script.py; here use --batch, which counts rows;" in refusal(script, argument)


def settings_of(script):
    """The lines with the settings of a script, which is not run."""
    source = (ROOT / script).read_text(encoding="utf-8")
    return [line.strip() for line in re.findall(r"^ *\w+: .+ = .+$", source, re.MULTILINE)]


def names_of(script):
    return [line.partition(":")[0] for line in settings_of(script)]


def test_each_setting_that_a_hint_names_exists_in_a_script_without_that_other_name():
    scripts = [names_of(f"{name}.py") for name in ("train_gpt2", "chat_sft", "prepare_data", "sample", "evaluate")]
    assert all(len(names) > 10 and len(set(names)) == len(names) for names in scripts)
    for name, hint in HINTS.items():
        flags = re.findall(r"--(\w+)", hint)
        assert flags or hint.startswith(("nothing: ", "the environment variable ")), hint
        for flag in flags:
            assert any(flag in names and name not in names for names in scripts), (name, hint)


@pytest.mark.parametrize("flag", ["--shuffle", "--steps", "-steps=5", "--", "-x"])
def test_a_flag_without_a_value_is_refused(script, flag):
    line = refusal(script, flag)
    assert repr(flag) in line and "--name=value" in line
    assert ("did you mean --steps?" in line) == (flag == "-steps=5")


def test_a_flag_is_not_taken_for_the_value_of_another(script):
    for argv in (("--name", "--steps=5"), ("--steps=5", "--name")):
        assert "'--name': write a setting as --name=value, or as --name value if" in refusal(script, *argv)


def test_a_missing_file_is_refused(script):
    Path("folder.py").mkdir()
    Path("a.txt").write_text("steps = 5\n")
    for path in ("missing.py", "folder.py", "a.txt"):
        assert f"{path}: no such config file" in refusal(script, "--steps=5", path)


def test_an_error_in_a_file_is_named(script):
    for source, words in (("steps = 5\nrate = = 2", "SyntaxError: invalid syntax (a.py, line 2)"),
                          ("  rate = 2", "IndentationError"), ("steps = 1 / 0", "ZeroDivisionError: division by zero"),
                          ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
                          ("raise ValueError('two\\nlines')", "two lines"), ("exit(0)", "SystemExit: 0"),
                          ("from math import pi", "pi: no such setting"), ("def pi(): pass", "pi: no such setting")):
        Path("a.py").write_text(source)
        assert f"a.py: {words}" in refusal(script, "a.py", "--steps=5")


ARGUMENT = st.text(max_size=12) | st.sampled_from(["--steps=3", "--mode=fast"]) | st.builds(
    "--{}={}".format, st.sampled_from([*DEFAULTS, "rte"]), st.text(max_size=8))


@given(argv=st.lists(ARGUMENT, max_size=3).filter(lambda argv: "-h" not in argv))
def test_odd_command_lines_work_or_end_in_one_line(script, argv):
    one_line_or_works(lambda: configure(vars(script), argv))


def test_of_many_ranks_only_the_first_of_a_machine_prints_unless_it_may_be_the_only_one_to_fail(monkeypatch, capsys):
    for rank, alone, said in ("0", False, True), ("1", False, False), ("1", True, True):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as stop:
            fail("a shard\nof this rank", alone=alone)
        assert stop.value.code == 2 and capsys.readouterr().err == said * "error: a shard of this rank\n"


def test_an_error_is_one_line_with_its_place_and_what_to_do(capsys):
    for error, text in ((ValueError("two\nlines"), "two lines"), (KeyError("x"), "KeyError: 'x'"),
                        (OSError("disk"), "OSError: disk")):
        with pytest.raises(SystemExit) as stop, one_line_errors("a.json", "make it again"):
            raise error
        assert stop.value.code == 2 and capsys.readouterr().err == f"error: a.json: {text}; make it again\n"
    with pytest.raises(KeyError), one_line_errors("a.json", errors=OSError):
        raise KeyError
    with pytest.raises(SystemExit) as stop, one_line_errors("a.json"):
        raise SystemExit(3)
    assert stop.value.code == 3


def test_an_os_error_that_nobody_catches_is_one_line_that_names_the_script_and_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("import configurator\n\n\ndef read():\n    open('gone')\n\n\nread()\n")
    done = run_script()
    assert done.returncode == 2
    assert "No such file or directory: 'gone' (script.py, line 8)\n" in done.stderr and done.stderr.count("\n") == 1


def test_help_lists_every_setting_with_default_and_comment(script):
    for args in (["--help"], ["--steps=wrong", "missing.py", "-h"]):
        done = run_script(*args)
        assert (done.returncode, done.stderr) == (0, "")
        lines = [line.strip() for line in done.stdout.splitlines()]
        assert lines[0] == "A script with a setting of each type."
        settings = [line for line in SCRIPT.splitlines() if re.match(r"[a-z]+: ", line)]
        assert len(settings) == len(DEFAULTS) and lines[-len(settings):] == settings


# ---------------------------------------------------------------------------------------------------
# the scripts' settings, and the files in config/

def settings_module(script, tmp_path, monkeypatch):
    source = ["import math", "from configurator import *", "from typing import *", *settings_of(script)]
    return import_script(tmp_path / script, "\n".join(source), monkeypatch)


def test_values_without_a_run_are_refused(tmp_path, monkeypatch):
    script = settings_module("train_gpt2.py", tmp_path, monkeypatch)
    for flag in ("--batch_size=0", "--n_layer=0", "--kv_lora_rank=0", "--rope_theta=-1.0", "--beta2=1.0",
                 "--sparsity=1.0", "--seed=-1", "--max_iters=-1", "--eval_interval=0", "--dropout=1.0"):
        assert f"error: {flag}: expected " in refusal(script, flag)


def test_a_variable_that_is_annotated_after_the_settings_is_none_of_them(script):
    config, _ = configure(vars(script), [])
    script.__annotations__["lock"] = object
    update_settings(vars(script), {**config, "steps": 11}, "a checkpoint")
    assert script.steps == 11


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_a_config_file_is_plain_assignments_that_its_script_takes(path, tmp_path, monkeypatch):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            assert node.module.startswith("config.")  # another config file
        else:
            assert isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets)
    script = "evaluate" if path.stem.startswith("eval_") else "chat_sft" if path.stem.endswith("_chat") else \
        "train_gpt2"
    settings = settings_module(f"{script}.py", tmp_path, monkeypatch)
    assert configure(vars(settings), [str(path)])[1], f"{path} sets nothing"
