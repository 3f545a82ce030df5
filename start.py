"""Starts a run: loads what it starts from, settles its settings and checks its folder."""
import atexit
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from filelock import FileLock  # torch requires it

from checkpoint import has_checkpoint, load_checkpoint, pick_max_seq_len, replacing
from configurator import fail, one_line_errors
from distributed import get_rank, print0
from machine import describe_machine

# settings that a resumed run cannot change, and settings that it does not take from its checkpoint
FIXED = ("max_seq_len", "local_heads", "pack", "seed", "optimizer", "sparsity", "teacher_cache", "learn_temperature",
         "lora_rank", "lora_alpha", "lora_targets")
PER_START = ("out_dir", "overwrite", "print_batch", "chat_dir", "sanity_check")


def lock_out_dir(config):
    """
    Makes out_dir and returns its lock: until this process exits, no other run writes there. Call it before anything in
    the folder is read. out_dir=None becomes a temporary folder. That gets no lock, nor does --print_batch=True, which
    only reads.
    """
    out_dir = config["out_dir"]
    if config["init_from"] == "resume" and not (out_dir and has_checkpoint(out_dir)):
        fail(f"--init_from=resume: --out_dir={out_dir} holds no run; give the folder of an existing one")
    if out_dir is None:
        config["out_dir"] = make_temporary_folder()
        return None
    with one_line_errors("--out_dir", "torch cannot read a checkpoint from a folder whose name is not UTF-8"):
        out_dir.encode()
    if get_rank() == 0 and not config.get("print_batch"):
        with one_line_errors(f"--out_dir={out_dir}",
                             "give a folder that can be written to and that no other run is writing to", OSError):
            os.makedirs(out_dir, exist_ok=True)
            return FileLock(Path(out_dir) / "lock").acquire(blocking=False)  # its Timeout is an OSError


def load_init_from(config, overrides, stage):
    """
    Loads the checkpoint that --init_from asks for and updates `config` in place: a resumed run takes the settings of
    its checkpoint, except those that are overridden now; a run that starts from other weights takes the settings of
    their model. stage: base | chat. Returns (checkpoint or None, resuming).
    """
    out_dir, init_from = config["out_dir"], config["init_from"]
    auto = init_from == "auto" or init_from.startswith("auto:")
    resuming = init_from == "resume" or auto and has_checkpoint(out_dir)
    if auto and resuming and config["overwrite"]:
        fail(f"--overwrite=True: --init_from={init_from} resumes the run in {out_dir}; to replace it, give "
             f"--init_from=... without auto")
    if not resuming and init_from in ("scratch", "auto"):
        if stage == "chat":
            fail(f"--init_from={init_from}: chat tuning starts from a model; give its path, or auto:PATH")
        return None, False
    source = out_dir if resuming else init_from.removeprefix("auto:")
    from import_hf import ACCEPTED, hub_name  # not at the top: a run from scratch does not need it
    if not (Path(source).exists() or hub_name(source)):
        fail(f"--init_from={init_from}: neither scratch, resume, auto nor a file or folder; {ACCEPTED}")
    checkpoint = load_checkpoint(source, merge=not resuming)
    model_args = checkpoint["model_args"]
    # None for a setting of the model keeps what the model has
    overrides = {name: value for name, value in overrides.items() if value is not None or name not in model_args}
    if resuming:
        if checkpoint["stage"] != stage:
            fail(f"--out_dir={out_dir}: holds a {checkpoint['stage']} model; resume it with the script that trained "
                 f"it, or start from it with --init_from={out_dir}/ckpt.pt and another --out_dir")
        if "optimizer" not in checkpoint:
            fail(f"--init_from={init_from}: {out_dir} holds a model without its optimizer; start a new run with "
                 f"--init_from={out_dir} --out_dir=...")
        take_settings(config, overrides, checkpoint)
    for name in config.keys() & (model_args.keys() - {"max_seq_len", "dropout"}):
        if overrides.get(name, model_args[name]) != model_args[name]:
            fail(f"--{name}={overrides[name]}: the model in {source} has {model_args[name]}; leave the flag out, or "
                 f"train another model with train_gpt2.py")
        config[name] = model_args[name]
    # a new run takes the model's positions, not the script's default
    asked = config["max_seq_len"] if resuming else overrides.get("max_seq_len")
    with one_line_errors(source, errors=TypeError):  # a crafted checkpoint may hold any type
        config["max_seq_len"] = pick_max_seq_len(asked, model_args["max_seq_len"], most=2048)
    if "masks" in checkpoint and not resuming and not config.get("sparsity"):
        print0("WARNING: the pruned weights will grow back; --sparsity as before keeps them zero (not with LoRA)")
    return checkpoint, resuming


def make_temporary_folder():
    """The out_dir of a run that keeps nothing, one for all ranks of a machine. Rank 0 removes it when it exits."""
    launch = f"{os.getppid()}-{os.environ.get('TORCHELASTIC_RESTART_COUNT')}" if "RANK" in os.environ else os.getpid()
    folder = Path(tempfile.gettempdir(), f"run-{launch}")

    def remove():
        shutil.rmtree(folder)
        print(f"--out_dir=None: {folder} is removed; nothing of this run is kept")

    if get_rank() == 0:
        with one_line_errors("--out_dir=None", "remove the folder if a run that was killed left it"):
            folder.mkdir()
        atexit.register(remove)
    return str(folder)


def take_settings(config, overrides, checkpoint):
    """
    Copies the settings of a resumed run's checkpoint into `config`, except those that are overridden now. Prints what
    an override changes, and exits with an error if the setting is FIXED.
    """
    for key, before in checkpoint["config"].items():
        if key not in config:
            if before:
                print0(f"WARNING: the run was trained with {key}={before}, a setting that {Path(sys.argv[0]).name} "
                       f"lacks")
        elif key in PER_START:
            pass
        elif key not in overrides or key == "init_from":  # what the run began with, not "resume"
            config[key] = before
        elif overrides[key] != before:
            if key in FIXED:
                fail(f"--{key}={overrides[key]}: the checkpoint was trained with {before}, and a resumed run cannot "
                     f"change it")
            print0(f"changed on resume: {key} {before} -> {overrides[key]}")
    if bool(config.get("teacher")) != ("teacher" in checkpoint):
        fail(f"--teacher={config.get('teacher')}: a resumed run cannot gain or lose its teacher; start a new run from "
             f"its weights with --init_from={config['out_dir']}/ckpt.pt --out_dir=...")


def check_out_dir(config, resuming, checkpoint):
    """
    Exits with an error if this run would overwrite something that it was not asked to overwrite, or that it reads.
    checkpoint: load_init_from's, or None.
    """
    folder = Path(config["out_dir"])
    found = sorted(path.name for path in folder.glob("ckpt*.pt"))
    if found and not resuming:
        if not config["overwrite"]:
            resume = "resume it with --init_from=resume, " if has_checkpoint(folder) else ""
            fail(f"--out_dir={folder}: holds a checkpoint, {found[0]}: {resume}replace it with --overwrite=True, or "
                 f"give another folder")
        base = (checkpoint or {}).get("lora", {})  # of the adapters that the run starts from
        for source in filter(None, (config["init_from"], config.get("teacher"), base.get("absolute"),
                                    base.get("path"))):
            path = Path(source.removeprefix("auto:")).resolve()
            if path.exists() and folder.resolve() in (path, path.parent):
                fail(f"--out_dir={folder} --overwrite=True: holds {source}, which this run reads; give another folder")
    for name, key in (("config.json", b'"init_from": '), ("log.jsonl", b'{"iter": ')):  # a key in our files
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""  # an empty file is ours: the disk was full
        if content and key not in content:
            fail(f"--out_dir={folder}: holds a {name} that is not from a training run and would be replaced; give "
                 f"another folder")
    if not found and (folder / "loss.png").exists() and not (folder / "log.jsonl").exists():
        fail(f"--out_dir={folder}: its loss.png, with no log.jsonl beside it, would be replaced; give another folder")


def report_settings(config, overrides, device):
    """On rank 0: prints the settings that were given and the machine, and writes all settings to config.json."""
    if get_rank() > 0:
        return
    machine = describe_machine(device)
    path = Path(config["out_dir"], "config.json")
    print("settings given:", ", ".join(f"{key}={value}" for key, value in overrides.items()) or "none, all defaults")
    print("machine:", ", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    with one_line_errors(path), replacing(path) as temporary:
        temporary.write_text(json.dumps({**config, "machine": machine}, indent=1) + "\n", encoding="utf-8")
