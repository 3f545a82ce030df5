"""
Override a script's settings from config files and the command line.

A script declares its settings as annotated globals, one per line, and calls this once below them:

    learning_rate: float = 6e-4  # peak, after the warm-up
    config, overrides = configure(globals())

    $ python script.py config/a.py --learning_rate=3e-4

Config files come first, then flags, each in the order given; the later one wins. The annotation validates files and
flags alike: a value is accepted as it is or refused, never clamped or changed. A config file is Python and is
executed, so read one before you use it.
"""
import ast
import difflib
import math
import os
import re
import runpy
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

# settings with a range: the type, the smallest and the largest value
Positive = Annotated[int, 1, math.inf]
NonNegative = Annotated[int, 0, math.inf]
NonNegativeFloat = Annotated[float, 0, math.inf]
Fraction = Annotated[float, 0, 1]
BelowOne = Annotated[float, 0, 0.999999]
Seed = Annotated[int, 0, 2 ** 63 - 1]  # torch accepts a little more, but step numbers are added to it

# names in nanoGPT, nanochat, transformers' Trainer and other projects that did_you_mean would not guess -> what to use
HINTS = {
    "block_size": "--max_seq_len", "per_device_train_batch_size": "--batch_size",
    "total_batch_size": "--gradient_accumulation_steps, which counts micro-batches",
    "num_train_epochs": "--epochs (chat) or --max_iters", "lr": "--learning_rate", "max_lr": "--learning_rate",
    "decay_lr": "--lr_schedule=constant or cosine", "matrix_lr": "--muon_lr", "unembedding_lr": "--head_lr",
    "max_grad_norm": "--grad_clip", "clip_grad": "--grad_clip", "depth": "--n_layer",
    "bias": "--arch=gpt2 (with biases) or llama (without)", "compile_model": "--compile", "bf16": "--dtype=bfloat16",
    "fp16": "--dtype=float16", "gradient_checkpointing": "--recompute", "eval_every": "--eval_interval",
    "eval_steps": "--eval_interval", "save_checkpoint_steps": "--save_interval", "logging_steps": "--log_interval",
    "report_to": "--wandb_log", "model_name_or_path": "--init_from or --checkpoint",
    "model_tag": "--out_dir or --checkpoint", "start": "--prompt",
    "dataset": "--data_dir, a folder (pretraining), or --data (chat)", "data_dir": "--data",
    "init_from": "--checkpoint", "checkpoint": "--init_from", "out_dir": "--checkpoint (or --data_dir, in data prep)",
    "eval_only": "python evaluate.py --checkpoint=CKPT --tasks= --data_dir=DIR",
    "adam_eps": "nothing: AdamW's eps is 1e-8, torch's default, in optim.py",
    "always_save_checkpoint": "nothing: every evaluation saves, and the best so far is ckpt_best.pt",
    "wandb_run_name": "the environment variable WANDB_NAME", "run": "the environment variable WANDB_NAME",
    "backend": "nothing: the process group is nccl with CUDA, else gloo"}


def fail(message, alone=False):
    """
    Exit because of a user's mistake: one line on stderr, exit code 2, no traceback. Under torchrun every rank fails in
    the same way and only the first of each machine prints, unless this rank may be the only one to fail (`alone`).
    """
    if alone or os.environ.get("LOCAL_RANK", "0") == "0":
        text = re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", message)  # no escape sequences for the terminal
        print(f"error: {text}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def format_error(error):
    """An exception as one line of text, with its type unless the message is ours."""
    text = " ".join(str(error).split())[:300].removesuffix(".")
    return text if type(error) in (ValueError, AssertionError) else f"{type(error).__name__}: {text}".rstrip(": ")


@contextmanager
def one_line_errors(where="", advice="", errors=Exception, alone=False):
    """Turn an exception in the block into fail(): where it happened (a file, a flag), what it was, what to do."""
    try:
        yield
    except errors as error:
        fail(f"{where}: {format_error(error)}; {advice}".removeprefix(": ").removesuffix("; "), alone)


def excepthook(kind, error, tb):
    """
    One line for Ctrl-C and for an OSError, such as a full disk, with the script's line that led to it; nothing for a
    closed output; otherwise the traceback.
    """
    if issubclass(kind, KeyboardInterrupt):
        print(f"\ninterrupted: {error}".removesuffix(": "), file=sys.stderr)
    elif issubclass(kind, BrokenPipeError):  # stdout closed, e.g. by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif issubclass(kind, OSError):
        script = Path(tb.tb_frame.f_code.co_filename).name
        fail(f"{kind.__name__}: {error} ({script}, line {tb.tb_lineno})", alone=True)
    else:
        sys.__excepthook__(kind, error, tb)


sys.excepthook = excepthook  # at import: the imports after it take long and can be interrupted, too


def configure(namespace, argv=None):
    """
    Check the overrides in `argv` (default: the command line) and write them into the annotated globals of a script.

    namespace: the script's globals(). Returns (config, overrides): every setting with its value, and only those that a
    file or flag set. A mistake exits with one line that names the setting and what is accepted.
    """
    for stream in (sys.stdin, sys.stdout):  # replace characters that cannot be decoded or encoded
        if hasattr(stream, "reconfigure"):  # not closed
            stream.reconfigure(errors="replace")
    settings = settings_of(namespace)
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_help(namespace, settings)
        raise SystemExit

    overrides = {}
    for where, name, value in read_arguments(argv, settings):
        if name not in settings:
            hint = "; annotate it, as in name: int = 3" if name in namespace else did_you_mean(name, settings)
            fail(f"{where}{name}: no such setting of {Path(namespace['__file__']).name}{hint}; --help lists them all")
        overrides[name] = check(where + name, value, settings[name])
    namespace.update(overrides)
    return {name: namespace[name] for name in settings}, overrides


def settings_of(namespace):
    """{name: annotation} of a script's settings."""
    hints = get_type_hints(sys.modules[namespace["__name__"]], include_extras=True)
    return {name: hint for name, hint in hints.items() if not name.startswith("_")}


def update_settings(namespace, config, where):
    """Writes what start.py has changed in `config` into the script's globals. where: the source that errors name."""
    hints = settings_of(namespace)  # and other variables that a script has annotated since
    for name, value in config.items():
        namespace[name] = config[name] = check(f"{where}: {name}", value, hints[name])


def read_arguments(argv, settings):
    """
    A command line -> [(where, name, value), ...], config files first. A flag is --name=value or --name value. where:
    "--" or the file; an error puts it before the name.
    """
    from_files, flags, arguments = [], [], iter(argv)
    for arg in arguments:
        if arg == "#":
            break  # a comment; zsh, the shell of a Mac, passes it on
        if not arg.startswith("-"):
            from_files += [(f"{arg}: ", name, value) for name, value in read_config_file(arg).items()]
            continue
        name, equals, text = arg.removeprefix("--").partition("=")
        if not equals:
            text = next(arguments, "--")  # a missing value is refused like one that is another flag
        if name.startswith("-") or not equals and text.startswith("--"):
            fail(f"{arg!r}: write a setting as --name=value, or as --name value if the value does not begin with --"
                 f"{'' if name in settings else did_you_mean(name, settings)}")
        flags.append(("--", name, parse(text, settings.get(name, str))))
    return from_files + flags


def read_config_file(path):
    """The settings in a config file, its own and those that it imports, as a dict without modules and _names."""
    if not (path.endswith(".py") and os.path.isfile(path)):
        fail(f"{path}: no such config file, or its name does not end in .py; write a setting as --name=value")
    with one_line_errors(path, errors=(Exception, SystemExit)):
        values = runpy.run_path(path)
    return {k: v for k, v in values.items() if not k.startswith("_") and not isinstance(v, ModuleType)}


def members(hint):
    """The members of a union annotation, or the annotation itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def parse(text, hint):
    """A flag's text as a Python literal, if it is one; a setting that takes a string keeps it, except for None."""
    if str in members(hint):
        return None if text == "None" and NoneType in members(hint) else text
    try:
        return ast.literal_eval(text)
    except Exception:  # not only ValueError
        return text


def check(setting, value, hint):
    """`value` if the annotation accepts it (an int is accepted as a float), else an error that names `setting`."""
    kinds, accepted = members(hint), []
    if value == "" and str in kinds and NoneType in kinds:  # a shell variable that is not set
        fail(f"{setting}='': expected a string that is not empty, or None")
    if isinstance(value, str) and value.startswith("~/"):
        fail(f"{setting}={value}: the shell expands ~ only at the beginning of a word; write $HOME/... instead, "
             f"or in a file the whole path")
    for kind in kinds:
        if get_origin(kind) is Literal:
            choices = [repr(choice) for choice in get_args(kind)]
            if repr(value) in choices:  # so that 8.0 and True do not pass for 8 and 1
                return value
            accepted.append(f"one of {', '.join(choices)}")
            continue
        kind, *limits = get_args(kind) or [kind]
        low, high = limits or (-math.inf, math.inf)
        if type(value) is kind or kind is float and type(value) is int:  # not isinstance: True isn't an int here
            if kind not in (int, float) or low <= value <= high and abs(value) <= sys.float_info.max:  # not inf, nan
                return float(value) if kind is float else value
        text = {int: "an int", float: "a finite float", bool: "True or False", str: "a string"}.get(kind, "None")
        if limits:
            text += f" of at least {low}" if high == math.inf else f" from {low} to {high}"
        accepted.append(text)
    fail(f"{setting}={value!r}: expected {' or '.join(accepted)}")


def did_you_mean(name, settings):
    """A hint appended to an error about an unknown setting: what to use instead, the nearest name, or ""."""
    name = name.replace("-", "_")
    hint = HINTS.get(name, "")
    if hint and (not hint.startswith("--") or any(f"--{setting}" in hint for setting in settings)):
        return f"; here use {hint}"
    close = difflib.get_close_matches(name, settings, n=1)
    return f"; did you mean --{close[0]}?" if close else ""


def print_help(namespace, settings):
    """Prints a script's docstring, and its settings as they stand in the source, with defaults and comments."""
    source = Path(namespace["__file__"]).read_text(encoding="utf-8")
    annotated = re.findall(r"^ *((\w+): .+ = .+)$", source, re.MULTILINE)  # also variables that are no settings
    print(f"{(namespace['__doc__'] or '').strip()}\n\nsettings, written as --name=value or --name value, or as "
          f"name = value in a config file (Fraction: 0 to 1; BelowOne: 0 to less than 1):",
          *(line for line, name in annotated if name in settings), sep="\n  ", flush=True)
