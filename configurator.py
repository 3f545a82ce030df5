"""
Override a script's settings from config files and the command line.

A script states its settings as annotated globals, one a line, and calls this once below them:

    learning_rate: float = 6e-4  # peak, after the warm-up
    config, overrides = configure(globals(), extras=("prune",))

    $ python script.py config/a.py --learning_rate=3e-4

Config files first, then flags, each in the order given; later wins. The annotation is the check, for files and flags
alike, and nothing is ever clamped or changed: a value is taken as it is or refused. The settings of optional features
are the annotated globals of extras/NAME.py; they are read from its source, and the file is imported only if it is
used.
A config file is Python and is executed: read one before you use it.
"""
import ast
import difflib
import importlib
import math
import os
import re
import runpy
import sys
import traceback
import types
import typing
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

# settings with a range: the type, the least and the greatest value
Positive = Annotated[int, 1, math.inf]
NonNegative = Annotated[int, 0, math.inf]
NonNegativeFloat = Annotated[float, 0, math.inf]
Fraction = Annotated[float, 0, 1]
BelowOne = Annotated[float, 0, 0.999999]
Seed = Annotated[int, 0, 2 ** 63 - 1]  # a little less than torch takes: steps are added to it

# settings of nanoGPT, nanochat and transformers' Trainer -> ours, with a remark; of several (|) the first that a
# script has
RENAMED = {
    "block_size": "max_seq_len", "max_length": "max_seq_len", "max_seq_length": "max_seq_len",
    "device_batch_size": "batch_size", "per_device_train_batch_size": "batch_size",
    "total_batch_size": "gradient_accumulation_steps, in micro-batches", "num_iterations": "max_iters",
    "max_steps": "max_iters", "num_train_epochs": "epochs|max_iters", "warmup_steps": "warmup_iters",
    "lr": "learning_rate", "decay_lr": "lr_schedule=constant or cosine", "matrix_lr": "muon_lr",
    "unembedding_lr": "head_lr", "max_grad_norm": "grad_clip", "depth": "n_layer",
    "bias": "arch=gpt2 (with biases) or llama (without)", "compile_model": "compile", "bf16": "dtype=bfloat16",
    "fp16": "dtype=float16", "gradient_checkpointing": "recompute", "eval_every": "eval_interval",
    "eval_steps": "eval_interval", "save_every": "save_interval", "logging_steps": "log_interval",
    "report_to": "wandb_log", "init_from": "checkpoint", "model_name_or_path": "init_from|checkpoint",
    "checkpoint": "init_from", "out_dir": "checkpoint|data_dir", "output_dir": "out_dir",
    "dataset": "data_dir, a folder|data", "data_dir": "data", "start": "prompt"}
NO_SETTING = {  # in a training loop
    "eval_only": "python evaluate.py --checkpoint=CKPT --tasks= --data_dir=DIR does that",
    "always_save_checkpoint": "every evaluation saves, and the best so far is ckpt_best.pt",
    "wandb_run_name": "it is the environment variable WANDB_NAME", "run": "it is the environment variable WANDB_NAME",
    "backend": "it is nccl with CUDA, else gloo"}
EXTRAS = Path(__file__).resolve().parent / "extras"


def fail(message, alone=False, code=""):
    """
    End the program because of a user's mistake: one line on stderr, followed by `code` that mends it, if given; exit
    code 2, no traceback. Under torchrun every rank fails alike and only the first of each machine prints, unless this
    rank may be the only one to fail (`alone`).
    """
    if alone or int(os.environ.get("LOCAL_RANK", 0)) == 0:
        error = f"error: {' '.join(message.split())}"
        print(*filter(None, (error, code)), sep="\n", file=sys.stderr, flush=True)
    raise SystemExit(2)


def format_error(error):
    """An exception as one line of text, with its type unless the message is ours."""
    text = " ".join(str(error).split())[:300]
    return text if type(error) in (ValueError, AssertionError) else f"{type(error).__name__}: {text}"


@contextmanager
def one_line_errors(where="", advice="", errors=Exception):
    """
    Any exception inside ends the program in one line: where it happened (a file, a flag), what it was, what to do.
    """
    try:
        yield
    except errors as error:
        fail(f"{where}: {format_error(error)}".removeprefix(": ") + (f"; {advice}" if advice else ""))


def configure(namespace, extras=(), argv=None):
    """
    Check and apply the overrides in `argv` (default: the command line) to the annotated globals of a script.

    namespace: the script's globals(); changed in place. extras: names of files in extras/ whose settings are taken
    too. Returns (config, overrides): every setting with its value, and only those set by a file or flag. A mistake
    ends the program with exit code 2 and one line that names the setting and what is accepted.
    """
    script = namespace["__file__"]
    hints = typing.get_type_hints(sys.modules[namespace["__name__"]], include_extras=True)
    settings = {name: (hint, namespace[name]) for name, hint in hints.items() if not name.startswith("_")}
    for extra in extras:
        settings |= extra_settings(extra)
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_help(script, settings, extras)
        raise SystemExit(0)

    overrides = {}
    files, flags = split_arguments(argv, settings)
    for path in files:
        for name, value in read_config_file(path).items():
            overrides[name] = check(name, value, settings, script, f"{path}: ")
    for name, text in flags:
        value = parse(text, settings[name][0]) if name in settings else text
        overrides[name] = check(name, value, settings, script, "--")
    namespace.update({name: value for name, value in overrides.items() if name in hints})
    return {name: overrides.get(name, default) for name, (_, default) in settings.items()}, overrides


def split_arguments(argv, settings):
    """A command line -> [config file, ...], [(name, text), ...]. A flag is --name=value or --name value."""
    files, flags, arguments = [], [], iter(argv)
    for arg in arguments:
        name, equals, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("-"):
            files.append(arg)
            continue
        if not equals:
            text = next(arguments, "--")  # none: refused, as another flag is
        if name.startswith("-") or not equals and text.startswith("--"):
            fail(f"{arg!r}: a setting is given as --name=value, or as --name value if that does not begin with --"
                 f"{did_you_mean(name, settings)}")
        flags.append((name, text))
    return files, flags


def extra_settings(name):
    """
    The settings of extras/NAME.py as {setting: (annotation, default)}, without importing it; {} if it was deleted.
    """
    path = EXTRAS / f"{name}.py"
    if not path.exists():
        return {}
    return {node.target.id: (eval(ast.unparse(node.annotation), {**vars(typing), **globals()}),
                             ast.literal_eval(node.value))
            for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.AnnAssign)}


def load_extra(name, config, *settings):
    """
    Import extras/NAME.py and give its settings their values in `config`. Returns the module. If the file was deleted,
    the program ends if the feature was asked for: if one of `settings` is on in `config`. Otherwise prints that it is
    left out, and returns None.
    """
    if not (EXTRAS / f"{name}.py").exists():
        for setting in settings:
            if config[setting]:
                fail(f"--{setting}={config[setting]}: needs extras/{name}.py, which is not here")
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"extras/{name}.py is not here: running without it")
        return None
    module = importlib.import_module(f"extras.{name}")
    vars(module).update({key: config[key] for key in extra_settings(name) if key in config})
    return module


def read_config_file(path):
    """The plain assignments of a config file, as a dict; imports and _names are left out."""
    if not (path.endswith(".py") and os.path.isfile(path)):
        fail(f"{path}: no such config file, or its name does not end in .py; a setting is given as --name=value")
    try:
        values = runpy.run_path(path)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = lines[-1] if lines else getattr(error, "lineno", None)  # a syntax error: none of its lines ran
        fail(f"{path}, line {line}: {type(error).__name__}: {error}")
    return {k: v for k, v in values.items() if not k.startswith("_") and not isinstance(v, types.ModuleType)}


def parse(text, hint):
    """The Python value that a flag's text stands for under an annotation; if there is none, the text itself."""
    kinds = [kind for kind, _ in alternatives(hint)]
    if str in kinds and not (text == "None" and type(None) in kinds):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    with suppress(Exception):  # whatever is wrong with it, check names the text
        return ast.literal_eval(text)
    return text


def check(name, value, settings, script, where):
    """`value` if the annotation of `name` accepts it (an int is fine for a float), else the program ends."""
    if name not in settings:
        fail(f"{where}{name}: no such setting of {os.path.basename(script)}{did_you_mean(name, settings)}; "
             f"--help lists them all")
    hint = settings[name][0]
    for kind, bounds in alternatives(hint):
        if typing.get_origin(kind) is typing.Literal:
            if repr(value) in map(repr, typing.get_args(kind)):  # neither 8.0 nor True is an int
                return value
        elif type(value) is kind or kind is float and type(value) is int:  # not isinstance: True is no int here
            if kind is float and not abs(value) <= sys.float_info.max:  # nan and inf
                continue
            if bounds and not bounds[0] <= value <= bounds[1]:
                low, high = bounds
                fail(f"{where}{name}={value}: expected "
                     + (f"at least {low}" if high == math.inf else f"a number from {low} to {high}"))
            return kind(value) if kind is float else value
    fail(f"{where}{name}={value!r}: expected {accepted(hint)}, got {type(value).__name__} {value!r}")


def alternatives(hint):
    """The members of an Optional or a Union, or the annotation alone: a list of (type, range or None)."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return [(kind.__origin__, kind.__metadata__) if typing.get_origin(kind) is Annotated else (kind, None)
            for kind in kinds]


def accepted(hint):
    """An annotation as text: 'a finite float', "one of 'a', 'b'", 'True or False', 'None'."""
    names = {int: "an int", float: "a finite float", bool: "True or False", str: "a string", type(None): "None"}
    return " or ".join(names.get(kind) or "one of " + ", ".join(map(repr, typing.get_args(kind)))
                       for kind, _ in alternatives(hint))


def did_you_mean(name, settings):
    """What an unknown setting may be, to follow an error: what it is called here, or the nearest name, or ""."""
    if name in settings:
        return ""
    name = name.replace("-", "_")
    if name in NO_SETTING and "wandb_log" in settings:
        return f"; {NO_SETTING[name]}"
    if name in RENAMED:
        return next((f"; here it is --{here}" for here in RENAMED[name].split("|")
                     if re.match(r"\w+", here)[0] in settings), "")
    close = difflib.get_close_matches(name, settings, n=1)
    return f"; did you mean --{close[0]}?" if close else ""


def print_help(script, settings, extras):
    """A script's docstring, and its settings as they stand in the source, with defaults and comments; then extras'."""
    lines = [ast.get_docstring(ast.parse(Path(script).read_text(encoding="utf-8"))) or ""]
    lines += ["", "settings, given as --name=value or --name value, or as name = value in a config file:"]
    for path in [Path(script), *filter(Path.exists, (EXTRAS / f"{extra}.py" for extra in extras))]:
        found = re.findall(r"^ *((\w+): .+ = .+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        lines += ["", f"in {path.name}", *(f"  {line}" for line, name in found if name in settings)]
    with suppress(BrokenPipeError):  # of `| head`; print would try again when the program ends
        os.write(1, ("\n".join(lines) + "\n").encode())
