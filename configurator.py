"""
Override a script's settings from config files and the command line.

A script states its settings as annotated globals, one a line, and calls this once below them:

    learning_rate: float = 6e-4  # peak, after the warm-up
    config, given = configure(globals())

    $ python script.py config/a.py --learning_rate=3e-4

Config files first, then flags, each in the order given; later wins. The annotation is the check, for
files and flags alike, and nothing is ever clamped or changed: a value is taken as it is or refused.
A config file is Python and is run as such: read one before you use it.
"""
import ast
import difflib
import math
import os
import re
import runpy
import sys
import traceback
import types
import typing


def fail(message, alone=False):
    """
    End the program for a mistake of its user's: one line on stderr, exit code 2, no traceback. Under torchrun every
    rank fails alike and one on each machine says so, unless it may be that this one fails `alone`.
    """
    if alone or int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def configure(namespace, argv=None):
    """
    Check and apply the overrides in `argv` (default: the command line) to the annotated globals of a script.

    namespace: the script's globals(); changed in place.
    Returns (config, given): every setting with its value, and only those that a file or flag set.
    A mistake ends the program with exit code 2 and one line that names the setting and what it accepts.
    """
    script = namespace["__file__"]
    hints = typing.get_type_hints(sys.modules[namespace["__name__"]])
    settings = {name: hint for name, hint in hints.items() if name in namespace and not name.startswith("_")}
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_help(script, namespace, settings)
        raise SystemExit(0)

    files = [arg for arg in argv if not arg.startswith("-")]
    flags = [arg for arg in argv if arg.startswith("-")]
    given = {}
    for path in files:
        for name, value in read_config_file(path, script).items():
            given[name] = check(name, value, settings, script, f"{path}: ")
    for flag in flags:
        name, equals, text = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not equals:
            known = flag.lstrip("-") in settings
            fail(f"{flag!r}: a setting is given as --name=value{'' if known else did_you_mean(flag.lstrip('-'), settings)}")
        if name not in settings:
            fail(f"--{name}: no such setting of {os.path.basename(script)}{did_you_mean(name, settings)}; "
                 f"--help lists them all")
        given[name] = check(name, parse(text, settings[name]), settings, script, "--")
    namespace.update(given)
    return {name: namespace[name] for name in settings}, given


def read_config_file(path, script):
    """The plain assignments of a config file, as a dict; imports and _names in it are left out."""
    if not os.path.isfile(path):
        fail(f"{path}: no such config file (a setting is given as --name=value)")
    if not path.endswith(".py"):
        fail(f"{path}: no config file, its name would end with .py; a setting is given as --name=value")
    try:
        values = runpy.run_path(path)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = lines[-1] if lines else getattr(error, "lineno", None)  # none of the file's ran: its syntax is wrong
        fail(f"{path}, line {line}: {type(error).__name__}: {error}")
    return {k: v for k, v in values.items() if not k.startswith("_") and not isinstance(v, types.ModuleType)}


def parse(text, hint):
    """The Python value that a flag's text stands for under an annotation; where it is none, the text itself."""
    for kind in alternatives(hint):
        if kind is type(None) and text == "None":
            return None
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                pass
        if typing.get_origin(kind) is typing.Literal:
            for choice in typing.get_args(kind):
                if text == str(choice):
                    return choice
    return text


def check(name, value, settings, script, where):
    """`value` if the annotation of `name` takes it (an int is fine for a float), else the program ends."""
    if name not in settings:
        fail(f"{where}{name}: no such setting of {os.path.basename(script)}{did_you_mean(name, settings)}")
    for kind in alternatives(settings[name]):
        if typing.get_origin(kind) is typing.Literal:
            if any(value == c and type(value) is type(c) for c in typing.get_args(kind)):
                return value
        elif kind is float:
            if type(value) in (int, float) and abs(value) <= sys.float_info.max:  # neither nan nor inf
                return float(value)
        elif type(value) is kind:  # not isinstance: True is no int here
            return value
    close = difflib.get_close_matches(str(value), [str(c) for k in alternatives(settings[name])
                                                   for c in typing.get_args(k)], n=1)
    fail(f"{where}{name}={value!r}: expected {accepted(settings[name])}, got {type(value).__name__} {value!r}"
         + (f"; did you mean {close[0]!r}?" if close else ""))


def expect_range(config, low, high, *names):
    """Ends the program, as configure does, where one of these settings is neither None nor from low to high (math.inf: no end)."""
    for name in names:
        if config[name] is not None and not low <= config[name] <= high:
            fail(f"--{name}={config[name]}: expected {f'at least {low}' if high == math.inf else f'a number from {low} to {high}'}")


def alternatives(hint):
    """The members of an Optional or a Union, else the annotation alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def accepted(hint):
    """An annotation in words: 'a finite float', "one of 'a', 'b'", 'True or False', 'None'."""
    words = {int: "an int", float: "a finite float", bool: "True or False", str: "a string", type(None): "None"}
    parts = [words.get(kind) or "one of " + ", ".join(repr(c) for c in typing.get_args(kind))
             for kind in alternatives(hint)]
    return " or ".join(parts)


def did_you_mean(name, settings):
    close = difflib.get_close_matches(name.partition("=")[0], settings, n=1)
    return f"; did you mean --{close[0]}?" if close else ""


def print_help(script, namespace, settings):
    """Every setting with its default and its comment, as they stand in the script, under its docstring."""
    source = open(script, encoding="utf-8").read()
    comments = dict(re.findall(r"^ *(\w+):[^=\n]+=[^#\n]*(?:# *(.*))?$", source, re.MULTILINE))
    lines = [(ast.get_docstring(ast.parse(source)) or "").strip(), "", "settings (--name=value, or in a config file):"]
    for name, hint in settings.items():
        lines.append(f"  --{name}={namespace[name]}".ljust(44) + (comments.get(name) or ""))
        if len(alternatives(hint)) > 1 or typing.get_origin(hint) is typing.Literal:
            lines.append(" " * 44 + accepted(hint))
    print("\n".join(lines))  # in one go: `| head` may close the pipe behind it
