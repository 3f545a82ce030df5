"""Settings from files and flags: what is accepted and what is refused, in which words; settings of extras."""
import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import configurator
from configurator import configure, extra_settings, fail, load_extra, one_line_errors, read_config_file
from conftest import ROOT, run

SCRIPT = '''
"""A script with a setting of each type."""
import json
from typing import Literal, Optional

from configurator import configure

steps: int = 10  # how many, at most
rate: float = 0.5  # how fast
shuffle: bool = True  # in a new order each time
name: str = "run"  # of the run
limit: Optional[int] = None  # None: all
label: Optional[str] = "x"
mode: Literal["slow", "fast"] = "slow"  # of the two
width: Literal[8, 16] = 8
backend: Optional[Literal["default", "eager"]] = None  # None: the usual one
not_annotated = 1
_hidden: int = 1

if __name__ == "__main__":
    config, overrides = configure(globals())
    print(json.dumps([config, overrides, {key: globals()[key] for key in config}]))
'''
DEFAULTS = {"steps": 10, "rate": 0.5, "shuffle": True, "name": "run", "limit": None, "label": "x", "mode": "slow",
            "width": 8, "backend": None}


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script above as a module, in a folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return load(tmp_path / "script.py", SCRIPT, monkeypatch)


def load(path, source, monkeypatch):
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("script_with_settings", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "script_with_settings", module)
    spec.loader.exec_module(module)
    return module


def run_script(*args):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "script.py", *args], env=env, capture_output=True, text=True)


def refusal(script, capsys, *argv):
    """The one line in which `argv` is refused; nothing may be changed by it."""
    before = dict(vars(script))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        configure(vars(script), argv=list(argv))
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == "" and err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert vars(script) == before
    return err


# ---------------------------------------------------------------------------------------------------
# what is accepted

FLAGS = [("--steps=3", 3), ("--steps=-3", -3), ("--rate=3e-4", 3e-4), ("--rate=2", 2.0), ("--rate=-.5", -0.5),
         ("--shuffle=False", False), ("--shuffle=true", True), ("--name=a b", "a b"), ("--name=a=b=c", "a=b=c"),
         ("--name=--steps=5", "--steps=5"), ("--name=None", "None"), ("--name=7", "7"), ("--name=", ""),
         ("--limit=5", 5), ("--limit=None", None), ("--label=y", "y"), ("--label=None", None), ("--mode=fast", "fast"),
         ("--steps 3", 3), ("--steps -3", -3), ("--rate .5", 0.5), ("--shuffle false", False), ("--name a=b", "a=b"),
         ("--limit None", None),
         ("--width=16", 16), ("--backend=eager", "eager"), ("--backend=default", "default"), ("--backend=None", None)]


@pytest.mark.parametrize("flag, value", FLAGS)
def test_a_flag_is_accepted(script, flag, value):
    argv = flag.split(" ") if " " in flag.split("=")[0] else [flag]
    setting = argv[0][2:].split("=")[0]
    config, overrides = configure(vars(script), argv=argv)
    assert overrides == {setting: value}
    assert config == {**DEFAULTS, setting: value}
    assert type(config[setting]) is type(value)
    assert {key: getattr(script, key) for key in DEFAULTS} == config


@pytest.mark.parametrize("line, value", [
    ("steps = 2 * 3", 6), ("rate = 3e-4", 3e-4), ("rate = 1", 1.0), ("shuffle = False", False),
    ("name = 'a=b'", "a=b"), ("limit = 5", 5), ("limit = None", None), ("label = None", None), ("label = 'y'", "y"),
    ("mode = 'fast'", "fast"),
    ("width = 16", 16), ("backend = 'eager'", "eager"), ("backend = None", None), ("steps: int = 4", 4)])
def test_an_assignment_in_a_file_is_accepted(script, line, value):
    setting = line.split()[0].strip(":")
    Path("a.py").write_text(f"import math\n_helper = 3  # names like this are the file's own\n{line}\n")
    config, overrides = configure(vars(script), argv=["a.py"])
    assert overrides == {setting: value}
    assert config == {**DEFAULTS, setting: value}
    assert type(config[setting]) is type(value)
    assert {key: getattr(script, key) for key in DEFAULTS} == config


def test_nothing_given_leaves_the_defaults(script):
    assert configure(vars(script), argv=[]) == (DEFAULTS, {})


def test_files_first_then_flags_and_later_wins(script):
    Path("a.py").write_text("steps = 1\nrate = 1.0\nname = 'a'\nlimit = 1\n")
    Path("b.py").write_text("rate = 2.0\nname = 'b'\n")
    config, overrides = configure(vars(script), argv=["--name", "flag", "a.py", "--limit=7", "b.py", "--limit=8"])
    assert overrides == {"steps": 1, "rate": 2.0, "name": "flag", "limit": 8}
    assert config == {**DEFAULTS, **overrides}
    assert configure(vars(script), argv=["b.py", "a.py"])[1]["rate"] == 1.0


def test_a_started_script_reads_its_command_line(script):
    Path("a.py").write_text("mode = 'fast'\nlimit = 3\n")
    done = run_script("--limit=4", "a.py", "--name=a=b", "--rate=3e-4")
    overrides = {"mode": "fast", "limit": 4, "name": "a=b", "rate": 3e-4}
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [{**DEFAULTS, **overrides}, overrides, {**DEFAULTS, **overrides}]


# ---------------------------------------------------------------------------------------------------
# what is refused

@pytest.mark.parametrize("key, value, parts", [
    ("steps", "1.5", ["an int", "1.5"]), ("steps", "1000.0", ["an int"]), ("steps", "True", ["an int", "bool True"]),
    ("steps", "", ["an int"]), ("steps", "None", ["an int"]), ("rate", "fast", ["a finite float", "'fast'"]),
    ("rate", "nan", ["a finite float"]), ("rate", "inf", ["a finite float"]), ("rate", "-inf", ["a finite float"]),
    ("rate", "True", ["a finite float"]), ("shuffle", "1", ["True or False", "int 1"]),
    ("shuffle", "yes", ["True or False"]), ("limit", "many", ["an int or None", "'many'"]),
    ("mode", "fats", ["'slow', 'fast'"]), ("mode", "None", ["'slow', 'fast'"]),
    ("width", "12", ["8, 16"]), ("backend", "defualt", ["'default', 'eager' or None"])])
def test_a_wrong_value_in_a_flag_is_refused(script, capsys, key, value, parts):
    line = refusal(script, capsys, "--name=other", f"--{key}={value}")
    assert f"--{key}=" in line and value in line and all(part in line for part in parts), line


@pytest.mark.parametrize("key, value, parts", [
    ("steps", "True", ["an int", "bool True"]), ("steps", "2.0", ["an int", "float 2.0"]),
    ("steps", "'2'", ["an int", "str '2'"]), ("steps", "None", ["an int"]),
    ("rate", "'3e-4'", ["a finite float", "str '3e-4'"]), ("rate", "True", ["a finite float"]),
    ("rate", "float('nan')", ["a finite float", "nan"]), ("rate", "float('inf')", ["a finite float", "inf"]),
    ("rate", "10 ** 400", ["a finite float"]), ("shuffle", "1", ["True or False", "int 1"]),
    ("shuffle", "None", ["True or False"]), ("name", "None", ["a string", "NoneType None"]),
    ("name", "b'x'", ["a string"]), ("limit", "False", ["an int or None"]),
    ("mode", "'FAST'", ["'slow', 'fast'", "'FAST'"]), ("width", "8.0", ["8, 16"]), ("width", "True", ["8, 16"]),
    ("backend", "str", ["'default', 'eager' or None"]), ("steps", "[1,\n2]", ["an int", "[1, 2]"]),
    ("name", "3, 'a\\nb'", ["a string"])])
def test_a_wrong_value_in_a_file_is_refused(script, capsys, key, value, parts):
    Path("a.py").write_text(f"label = 'other'\n{key} = {value}\n")
    line = refusal(script, capsys, "a.py")
    assert "a.py" in line and f"{key}=" in line and all(part in line for part in parts), line


@pytest.mark.parametrize("flag, nearest", [
    ("--step=5", "--steps"), ("--raet=1", "--rate"), ("--zzzzz=1", None), ("--not_annotated=2", None),
    ("--_hidden=2", None),
    ("--json=1", None), ("--__file__=x", None), ("--=5", None), ("--Steps=5", "--steps")])
def test_a_wrong_key_in_a_flag_is_refused(script, capsys, flag, nearest):
    line = refusal(script, capsys, "--name=other", flag)
    assert flag.split("=")[0] in line and "script.py" in line
    assert f"did you mean {nearest}?" in line if nearest else "did you mean" not in line, line


@pytest.mark.parametrize("assignment, nearest", [
    ("step = 5", "--steps"), ("raet = 1", "--rate"), ("zzzzz = 1", None), ("not_annotated = 2", None),
    ("from math import pi", None), ("def helper(): pass", None)])
def test_a_wrong_key_in_a_file_is_refused(script, capsys, assignment, nearest):
    Path("a.py").write_text(f"label = 'other'\n{assignment}\n")
    line = refusal(script, capsys, "--name=other", "a.py")
    key = assignment.replace("def ", "").split("(")[0].split(" =")[0].split()[-1]
    assert f"a.py: {key}: no such setting of script.py" in line
    assert f"did you mean {nearest}?" in line if nearest else "did you mean" not in line, line


@pytest.mark.parametrize("name, value, flag, answer", [
    ("train_gpt2.py", "block_size = 256", "--block_size=256", "here it is --max_seq_len;"),
    ("train_gpt2.py", "decay_lr = False", "--decay_lr=False", "here it is --lr_schedule=constant or cosine;"),
    ("train_gpt2.py", "compile_model = True", "--compile_model=True", "here it is --compile;"),
    ("train_gpt2.py", "dataset = 'x'", "--dataset=x", "here it is --data_dir, a folder;"),
    ("train_gpt2.py", "eval_only = True", "--eval_only=True", "python evaluate.py --checkpoint=CKPT --tasks= "),
    ("train_gpt2.py", "wandb_run_name = 'x'", "--wandb_run_name=x", "it is the environment variable WANDB_NAME;"),
    ("chat_sft.py", "dataset = 'x'", "--dataset=x", "here it is --data;"),
    ("sample.py", "init_from = 'resume'", "--init_from=resume", "here it is --checkpoint;"),
    ("sample.py", "start = 'x'", "--start=x", "here it is --prompt;"),
    ("evaluate.py", "out_dir = 'x'", "--out_dir=x", "here it is --checkpoint;"),
    ("sample.py", "block_size = 256", "--block_size=256", None)])  # it has none, and --batch_size would be wrong
def test_another_projects_name_is_answered_with_ours(tmp_path, name, value, flag, answer):
    (tmp_path / "a.py").write_text(value)
    for argument in flag, tmp_path / "a.py":
        output = run(name, argument, code=2)
        assert output.count("\n") == 1
        assert f"{value.split()[0]}: no such setting of {name}; {answer or '--help'}" in output


def test_what_another_projects_name_is_answered_with_exists():
    scripts = [ROOT / f"{name}.py" for name in ("train_gpt2", "chat_sft", "prepare_data", "sample", "evaluate")]
    settings = {name for path in scripts for name in re.findall(r"^ *(\w+): .+ = ", path.read_text(), re.MULTILINE)}
    renamed = {name: [re.match(r"\w+", answer)[0] for answer in answers.split("|")]
               for name, answers in configurator.RENAMED.items()}
    assert set(sum(renamed.values(), [])) <= settings and not configurator.NO_SETTING.keys() & settings
    # for each there is a script without a setting of that name, and with one of the answers
    for name, answers in renamed.items():
        assert any(not re.search(rf"^ *{name}: ", path.read_text(), re.MULTILINE)
                   and re.search(rf"^ *({'|'.join(answers)}): ", path.read_text(), re.MULTILINE) for path in scripts)


def test_a_wrong_file_is_refused_though_a_flag_would_win(script, capsys):
    Path("a.py").write_text("steps = 'many'\n")
    assert "steps='many'" in refusal(script, capsys, "a.py", "--steps=5")


@pytest.mark.parametrize("flag", ["--shuffle", "--steps", "-steps=5", "--", "-x"])
def test_a_flag_without_a_value_is_refused(script, capsys, flag):
    line = refusal(script, capsys, flag)
    assert repr(flag) in line and "--name=value" in line
    assert ("did you mean --steps?" in line) == (flag == "-steps=5")


@pytest.mark.parametrize("argv", [("--name", "--steps=5"), ("--steps=5", "--name")])
def test_a_flag_is_not_taken_for_the_value_of_another(script, capsys, argv):
    assert "'--name': a setting is given as --name=value, or as --name value if" in refusal(script, capsys, *argv)


def test_a_missing_file_is_refused(script, capsys):
    Path("folder").mkdir()
    assert "missing.py: no such config file" in refusal(script, capsys, "--steps=5", "missing.py")
    assert "folder: no such config file" in refusal(script, capsys, "folder")


@pytest.mark.parametrize("lines, line_number, parts", [
    (["steps = 5", "rate = = 2"], 2, ["SyntaxError"]),
    (["steps = 5", "", "  rate = 2"], 3, ["IndentationError"]),
    (["steps = 5", "", "rate = 1 / 0"], 3, ["ZeroDivisionError", "division by zero"]),
    (["def half(x):", "    return x / nothing", "rate = half(1)"], 2, ["NameError", "nothing"]),
    (["import no_such_module"], 1, ["ModuleNotFoundError", "no_such_module"]),
    (["raise ValueError('two\\nlines')"], 1, ["ValueError: two lines"])])
def test_an_error_in_a_file_is_named_with_its_line(script, capsys, lines, line_number, parts):
    Path("a.py").write_text("\n".join(lines) + "\n")
    line = refusal(script, capsys, "a.py", "--steps=5")
    assert f"a.py, line {line_number}: " in line and all(part in line for part in parts), line


@pytest.mark.parametrize("call", ["json.loads('{')", "ast.literal_eval('1 +')"])
def test_an_error_below_a_file_is_named_with_the_line_of_the_file(script, capsys, call):
    Path("a.py").write_text(f"import ast\nimport json\nsteps = {call}\n")
    assert "a.py, line 3: " in refusal(script, capsys, "a.py")


def test_a_started_script_ends_with_one_line_and_code_2(script):
    Path("a.py").write_text("steps = 1 / 0\n")
    for args in (["--rate=nan"], ["--raet=1"], ["a.py"], ["missing.py"], ["--shuffle"]):
        done = run_script(*args)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_of_many_ranks_only_the_first_of_a_machine_prints(script, capsys, monkeypatch):
    for rank, said in ("0", True), ("1", False):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as stop:
            configure(vars(script), argv=["--raet=1"])
        assert stop.value.code == 2
        assert ("raet" in capsys.readouterr().err) == said


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


def test_a_rank_that_may_be_the_only_one_to_fail_prints(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        fail("a shard of this rank", alone=True)
    assert capsys.readouterr().err == "error: a shard of this rank\n"


# ---------------------------------------------------------------------------------------------------
# --help

def test_help_lists_every_setting_with_default_and_comment(script):
    for args in (["--help"], ["-h"], ["--steps=wrong", "missing.py", "--help"]):
        done = run_script(*args)
        assert (done.returncode, done.stderr) == (0, "")
        lines = [line.strip() for line in done.stdout.splitlines()]
        assert lines[0] == "A script with a setting of each type."
        settings = [line for line in SCRIPT.splitlines() if re.match(r"[a-z]+: ", line)]
        assert len(settings) == len(DEFAULTS) and lines[-len(settings):] == settings
        assert "not_annotated" not in done.stdout and "_hidden" not in done.stdout


# ---------------------------------------------------------------------------------------------------
# ranges

RANGED = '''
from typing import Annotated, Optional
from configurator import BelowOne, Fraction, NonNegative, NonNegativeFloat, Positive

batch: Positive = 4
start: NonNegative = 0
rate: NonNegativeFloat = 0.5
share: Fraction = 0.5
beta: BelowOne = 0.9
end: Optional[Positive] = None
temperature: Annotated[float, 0.01, 100] = 1.0
'''


@pytest.fixture
def ranged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return load(tmp_path / "script.py", RANGED, monkeypatch)


def in_a_flag_and_in_a_file(key, value):
    Path("a.py").write_text(f"{key} = {value!r}\n")
    return [f"--{key}={value}"], ["a.py"]


@pytest.mark.parametrize("key, value", [
    ("batch", 1), ("start", 0), ("rate", 0.0), ("rate", 1e300), ("share", 0.0), ("share", 1.0), ("beta", 0.0),
    ("beta", 0.999), ("end", 1), ("end", None), ("temperature", 0.01), ("temperature", 100.0)])
def test_a_value_at_the_end_of_its_range_is_accepted(ranged, key, value):
    for argv in in_a_flag_and_in_a_file(key, value):
        config, overrides = configure(vars(ranged), argv=argv)
        assert config[key] == overrides[key] == vars(ranged)[key] == value and type(config[key]) is type(value)


@pytest.mark.parametrize("key, value, accepted", [
    ("batch", 0, "at least 1"), ("batch", -3, "at least 1"), ("start", -1, "at least 0"), ("rate", -0.1, "at least 0"),
    ("share", 1.01, "a number from 0 to 1"), ("share", -0.5, "a number from 0 to 1"), ("end", 0, "at least 1"),
    ("beta", 1.0, "a number from 0 to 0.99"), ("temperature", 0.0, "a number from 0.01 to 100")])
def test_a_value_outside_its_range_is_refused(ranged, capsys, key, value, accepted):
    for argv in in_a_flag_and_in_a_file(key, value):
        line = refusal(ranged, capsys, *argv)
        assert f"{key}={value}" in line and f"expected {accepted}" in line, line


@pytest.mark.parametrize("key, value, accepted", [
    ("batch", 1.5, "an int"), ("batch", None, "an int"), ("start", True, "an int"), ("end", 2.5, "an int or None"),
    ("share", "much", "a finite float")])
def test_a_setting_with_a_range_has_a_type(ranged, capsys, key, value, accepted):
    for argv in in_a_flag_and_in_a_file(key, value):
        line = refusal(ranged, capsys, *argv)
        assert f"{key}=" in line and f"expected {accepted}" in line, line
    for flag in ("--rate=inf", "--beta=nan"):
        assert "expected a finite float" in refusal(ranged, capsys, flag)


# ---------------------------------------------------------------------------------------------------
# extras

TOY = '''"""
A toy.

More about it.
"""
from typing import Literal, Optional
from configurator import Fraction, Positive

speed: Positive = 3  # how fast it goes
share: Optional[Fraction] = None
kind: Literal["a", "b"] = "a"  # of the two
not_a_setting = 1
print("imported")
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A folder extras/ with one file, toy.py, which prints something if it is imported."""
    folder = tmp_path / "extras"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    monkeypatch.setattr(configurator, "EXTRAS", folder)
    monkeypatch.setattr(importlib.import_module("extras"), "__path__", [str(folder)])
    monkeypatch.delitem(sys.modules, "extras.toy", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    yield folder
    sys.modules.pop("extras.toy", None)


def test_settings_of_extras_are_read_without_import(script, toy, capsys):
    before = dict(vars(script))
    settings = {"speed": 3, "share": None, "kind": "a"}
    assert configure(vars(script), ("toy", "gone"), argv=[]) == ({**DEFAULTS, **settings}, {})
    Path("a.py").write_text("speed = 5\nshare = 1\n")
    config, overrides = configure(vars(script), ("toy", "gone"), argv=["--speed=7", "a.py", "--kind=b"])
    assert overrides == {"speed": 7, "share": 1.0, "kind": "b"} and config == {**DEFAULTS, **overrides}
    assert vars(script) == before and capsys.readouterr().out == ""


def test_settings_of_extras_are_checked(script, toy, capsys):
    for flag, words in (("--speed=0", "expected at least 1"), ("--kind=c", "'a', 'b'"), ("--share=2", "from 0 to 1"),
                        ("--sped=1", "did you mean --speed?"), ("--not_a_setting=2", "no such setting")):
        with pytest.raises(SystemExit) as stop:
            configure(vars(script), ("toy",), argv=[flag])
        assert stop.value.code == 2 and words in capsys.readouterr().err, flag
    assert "no such setting" in refusal(script, capsys, "--speed=1")  # of a script without this extra


def test_an_extra_is_loaded_with_the_settings_of_the_run(toy, capsys):
    toy = load_extra("toy", {"speed": 7, "share": 0.5, "steps": 9})  # a checkpoint from before there was a kind
    assert (toy.speed, toy.share, toy.kind) == (7, 0.5, "a") and not hasattr(toy, "steps")
    assert load_extra("toy", {"speed": 8}) is toy and toy.speed == 8 and capsys.readouterr().out == "imported\n"


def test_a_deleted_extra_ends_the_run_if_asked_for_and_is_left_out_otherwise(script, toy, capsys, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        load_extra("gone", {"sparsity": 0.5, "speed": 1}, "sparsity")
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(lines) == 1
    assert lines[0].startswith("error: --sparsity=0.5: ") and "extras/gone.py" in lines[0]
    for rank, said in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert load_extra("gone", {}) is None
        assert ("extras/gone.py" in capsys.readouterr().out) == said


def test_a_deleted_extra_that_is_turned_off_is_not_asked_for(toy, capsys):
    assert load_extra("gone", {"sparsity": 0.0}, "sparsity") is None and capsys.readouterr().err == ""


def test_help_lists_the_settings_of_extras(script, toy, capfd):
    with pytest.raises(SystemExit) as stop:
        configure(vars(script), ("toy", "gone"), argv=["--help"])
    lines = capfd.readouterr().out.splitlines()
    assert stop.value.code == 0 and "imported" not in lines and not any("gone" in line for line in lines)
    assert "  steps: int = 10  # how many, at most" in lines
    assert [line.strip() for line in lines[lines.index("in toy.py") + 1:]] == [
        line for line in TOY.splitlines() if ": " in line and " = " in line]


# ---------------------------------------------------------------------------------------------------
# the files in extras/ and config/

def loop_settings(loop):
    """The source of a loop's settings, as a list of lines, and its extras."""
    source = (ROOT / loop).read_text(encoding="utf-8")
    settings = [ast.get_source_segment(source, node) for node in ast.parse(source).body
                if isinstance(node, ast.AnnAssign)]
    extras = ast.literal_eval(re.search(r"configure\(globals\(\), extras=(.*)\)", source)[1])
    assert len(settings) > 20 and len(extras) > 3
    return settings, extras


def test_no_two_settings_share_a_name():
    for loop in ("train_gpt2.py", "chat_sft.py"):
        settings, extras = loop_settings(loop)
        names = [line.partition(":")[0] for line in settings]
        for extra in extras:
            names += extra_settings(extra)
        assert len(set(names)) == len(names)


def test_config_files_are_plain_assignments_that_their_loop_takes(tmp_path, monkeypatch):
    for path in sorted((ROOT / "config").glob("*.py")):
        if path.stem.startswith("eval_"):  # evaluate.py's
            settings = re.findall(r"^    (\w+): .* = .*  # ", (ROOT / "evaluate.py").read_text(), re.MULTILINE)
            assert read_config_file(str(path)).keys() <= set(settings)
            continue
        settings, extras = loop_settings("chat_sft.py" if path.stem.endswith("_chat") else "train_gpt2.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assignment = isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets)
            assert docstring or assignment, f"{path}, line {node.lineno}"
        source = "\n".join(["from configurator import *", "from typing import *", *settings])
        script = load(tmp_path / "settings.py", source, monkeypatch)
        assert configure(vars(script), extras, argv=[str(path)])[1], f"{path} sets nothing"
