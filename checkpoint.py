"""
Checkpoints: ckpt.pt and the one before it, ckpt_prev.pt, written atomically by a thread; ckpt_best.pt; snapshots.

A checkpoint is a dict of tensors and plain values with nanoGPT's keys (model, optimizer, model_args, iter_num,
best_val_loss, config) and what an exact resume needs. Nothing in it is executed (weights_only).
"""
import hashlib
import json
import math
import os
import shutil
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from filelock import FileLock  # torch brings it

import runtime
from configurator import fail, format_error, load_extra, one_line_errors
from model import GPT, GPTConfig
from runtime import print0
from tokenizer import padded_vocab_size

CHECKPOINTS = ("ckpt.pt", "ckpt_prev.pt")
GPT2_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # OpenAI's weights, on the Hugging Face hub
# settings that a resumed run cannot change, and those that it does not take from its checkpoint
FIXED = ("max_seq_len", "pack", "seed", "optimizer", "sparsity", "teacher_cache", "learn_temperature", "lora_rank",
         "lora_alpha", "lora_targets")
PER_START = ("out_dir", "overwrite", "print_batch", "chat_dir", "sanity_check")


def has_checkpoint(out_dir):
    return any((Path(out_dir) / name).exists() for name in CHECKPOINTS)


def load_checkpoint(path, merge=True):
    """
    Load any supported checkpoint, on the CPU: a ckpt.pt of ours or nanoGPT's, or the out_dir it is in (where ckpt.pt
    is damaged, the previous one is used, with a warning); a Hugging Face folder; or one of GPT2_MODELS. Returns a
    dict with at least model, model_args, config, tokenizer, stage, iter_num, val_loss (nan if unknown), val_iter and
    path. A LoRA run's adapters are merged into their base, or with merge=False come alone.
    """
    path = Path(path)
    candidates = [path / name for name in CHECKPOINTS if (path / name).exists()] if path.is_dir() else [path]
    if not candidates or str(path) in GPT2_MODELS and not path.exists():
        from export_hf import load_hf
        return load_hf(path)
    for candidate in candidates:
        try:
            with zipfile.ZipFile(candidate) as archive:
                damaged = archive.testzip()  # torch.load does not compare checksums
            if damaged:
                raise ValueError(f"{damaged} in it is damaged")
            checkpoint = torch.load(candidate, map_location="cpu", weights_only=True, mmap=True)
            if "block_size" in checkpoint["model_args"]:
                from export_hf import convert_nanogpt
                checkpoint = convert_nanogpt(checkpoint)
            for key in ("model", "config", "tokenizer", "stage", "iter_num", "val_loss", "val_iter"):
                checkpoint[key]  # or it is a checkpoint of something else
            # older checkpoints have no norm_eps
            checkpoint["model_args"] = asdict(GPTConfig(**{"norm_eps": 1e-5, **checkpoint["model_args"]}))
        except Exception as error:  # a damaged file raises whatever its bytes lead to
            problem = format_error(error)
            continue
        checkpoint["path"] = str(candidate)
        if candidate == path / CHECKPOINTS[1]:
            print0(f"WARNING: no readable {CHECKPOINTS[0]} in {path}: using the checkpoint before it, {candidate}, "
                   f"step {checkpoint['iter_num']}")
        if merge and "lora" in checkpoint:
            load_extra("lora", {"init_from": candidate}, "init_from").merge_into_base(checkpoint)
        return checkpoint
    fail(f"{candidate}: not a readable checkpoint ({problem}); expected a ckpt.pt of ours or nanoGPT's, its "
         f"folder, a Hugging Face folder, or one of {', '.join(GPT2_MODELS)}")


def load_model(path, device):
    """The GPT in a checkpoint, in eval mode on `device`, and the checkpoint without its weights and optimizer."""
    checkpoint = load_checkpoint(path)
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    with one_line_errors(path):
        model.load_state_dict(checkpoint.pop("model"))
    checkpoint.pop("optimizer", None)
    return model.to(device).eval(), checkpoint


def describe_model(checkpoint):
    """The model in a checkpoint, in one line."""
    args, val_loss = checkpoint["model_args"], checkpoint["val_loss"]
    trained = f", step {checkpoint['iter_num']}, val loss {val_loss:.4f} at step {checkpoint['val_iter']}"
    return (f"{checkpoint['path']}: {checkpoint['stage']} model, {args['arch']}, {args['attention']}, "
            f"{args['n_layer']} layers, {args['n_embd']} wide, {args['max_seq_len']} positions, "
            f"tokenizer {checkpoint['tokenizer']}"
            + (trained if math.isfinite(val_loss) else "")
            + (f", LoRA on {checkpoint['lora']['path']}" if "lora" in checkpoint else ""))


def digest_weights(facts, state_dict, rows=None):
    """SHA-256 of a plain value and of weights: of each tensor the first `rows`, or all."""
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name, tensor in sorted(state_dict.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor[:rows].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_tokenizer(where, tokenizer, checkpoint):
    """Ends the program unless the checkpoint's model has this tokenizer; `where` says whose tokenizer it is."""
    vocab_size = checkpoint["model_args"]["vocab_size"]
    if (tokenizer.name, padded_vocab_size(tokenizer)) != (checkpoint["tokenizer"], vocab_size):
        fail(f"{where}: has {tokenizer.name} tokens, but the model {checkpoint['path']} has {checkpoint['tokenizer']} "
             f"tokens, {vocab_size} ids")


# -----------------------------------------------------------------------------
# how a run starts

def start_run(config, overrides, stage):
    """
    Reads --init_from and completes `config` in place: a resumed run has its checkpoint's settings, but for those
    overridden now; one that starts from weights has their model's. stage: base | chat. Returns (checkpoint or None,
    resuming).
    """
    out_dir, init_from = config["out_dir"], config["init_from"]
    auto = init_from == "auto" or init_from.startswith("auto:")
    resuming = init_from == "resume" or auto and has_checkpoint(out_dir)
    if not resuming and init_from in ("scratch", "auto"):
        if stage == "chat":
            fail(f"--init_from={init_from}: chat tuning starts from a model; give its path, or auto:PATH")
        return None, False
    if resuming and not has_checkpoint(out_dir):
        fail(f"--init_from=resume: --out_dir={out_dir} holds no run; give the folder of one")
    source = out_dir if resuming else init_from.removeprefix("auto:")
    checkpoint = load_checkpoint(source, merge=not resuming)
    if resuming:
        if checkpoint["stage"] != stage:
            fail(f"--out_dir={out_dir}: holds a {checkpoint['stage']} model; resume it with the script that trained "
                 f"it, or start from it with --init_from={out_dir}/ckpt.pt and another --out_dir")
        if "optimizer" not in checkpoint:
            fail(f"--init_from={init_from}: {out_dir} holds a model without its optimizer; start a new run with "
                 f"--init_from={out_dir} --out_dir=...")
        resume_config(config, overrides, checkpoint)
    model_args = checkpoint["model_args"]
    for name in config.keys() & model_args.keys() - {"max_seq_len", "dropout"}:
        accepted = model_args[name], checkpoint["config"].get(name)  # as built, and as given: None may stand for it
        if name in overrides and overrides[name] not in accepted:
            fail(f"--{name}={overrides[name]}: the model in {source} has {model_args[name]}")
        config[name] = model_args[name]
    positions = model_args["max_seq_len"]
    if not resuming and overrides.get("max_seq_len") is None:
        config["max_seq_len"] = positions if stage == "base" else min(2048, positions)
    if config["max_seq_len"] > positions:
        fail(f"--max_seq_len={config['max_seq_len']}: the model in {source} has {positions} positions; give at most "
             f"that")
    if "masks" in checkpoint and not resuming and not config["sparsity"]:
        print0("WARNING: the pruned weights grow back; --sparsity, as before, keeps them zero")
    return checkpoint, resuming


def resume_config(config, overrides, checkpoint):
    """Updates `config` to that of the checkpoint, except for overrides, which are printed, or refused if FIXED."""
    for key, before in checkpoint["config"].items():
        if key not in config or key in PER_START:
            continue
        if key not in overrides or key == "init_from":  # what the run began with, not "resume"
            config[key] = before
        elif overrides[key] != before:
            if key in FIXED:
                fail(f"--{key}={overrides[key]}: the checkpoint was trained with {before}, and a resumed run cannot "
                     f"change it")
            print0(f"changed on resume: {key} {before} -> {overrides[key]}")
    if bool(config["teacher"]) != ("teacher" in checkpoint):
        fail(f"--teacher={config['teacher']}: the run in {config['out_dir']} has "
             f"{'one' if 'teacher' in checkpoint else 'none'}; to train its weights otherwise start a new run with "
             f"--init_from={config['out_dir']}/ckpt.pt --out_dir=...")


# -----------------------------------------------------------------------------
# state of model and optimizer

def excluded_params(model):
    """The parameters that a checkpoint does not hold: frozen ones (LoRA), and those of the loss function."""
    return {name: p for name, p in model.named_parameters(remove_duplicate=False)
            if not p.requires_grad or name.startswith("loss_fn.")}


def get_state(model, optimizer):
    """State dicts of both, on rank 0. All ranks call it: those of a sharded model are gathered."""
    if runtime.is_sharded(model):
        from extras import fsdp
        return fsdp.get_state(model, optimizer)
    excluded = excluded_params(model)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in excluded}
    return weights, optimizer.state_dict()


def load_state(model, optimizer, checkpoint):
    """The reverse, on every rank. The settings of the optimizer's groups stay: they may have changed on resume."""
    if runtime.is_sharded(model):
        from extras import fsdp
        return fsdp.load_state(model, optimizer, checkpoint)
    model.load_state_dict({**excluded_params(model), **checkpoint["model"]})
    optimizer.load_state_dict({"state": checkpoint["optimizer"]["state"],
                               "param_groups": optimizer.state_dict()["param_groups"]})


# -----------------------------------------------------------------------------
# files

def write_checkpoint(out_dir, checkpoint, snapshot_name=None):
    """
    Writes ckpt.pt; the one before it becomes ckpt_prev.pt. At every moment at least one of the two is whole: the new
    file is on disk before the old one is renamed. snapshot_name: a second name, which is kept. Returns False, with a
    warning, if it could not be written; the one before stays.
    """
    path, previous, temporary = (Path(out_dir) / name for name in (*CHECKPOINTS, "ckpt.pt.tmp"))
    try:
        os.makedirs(out_dir, exist_ok=True)  # somebody may have removed it
        with open(temporary, "wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)  # or no resume could read it
        if path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
        if snapshot_name:
            link(path, snapshot_name)
        if hasattr(os, "O_DIRECTORY"):  # the renames, too, should survive a power cut
            directory = os.open(out_dir, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(directory)
            os.close(directory)
        return True
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        print(f"WARNING: --out_dir={out_dir}: the checkpoint of step {checkpoint['iter_num']} could not be written "
              f"({format_error(error)}); the one before it stays", flush=True)
        with suppress(OSError):
            temporary.unlink()
        return False


def link(path, name):
    """A second name for a checkpoint in the same folder: a hard link, or a copy where the file system has none."""
    temporary = path.with_name(name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
        os.replace(temporary, path.with_name(name))
        temporary.unlink(missing_ok=True)  # a rename does nothing where both names are one file already
    except OSError as error:
        print(f"WARNING: {path.with_name(name)} could not be written: {error}")


class Checkpointer:
    """
    Saves and restores a run. state: a dict from a checkpoint's key to anything with state_dict and load_state_dict,
    with at least model and optimizer. facts: plain values that every checkpoint holds (model_args, config, ...).
    """

    def __init__(self, out_dir, state, facts, resuming):
        config, folder = facts["config"], Path(out_dir)
        self.out_dir, self.state, self.keep_interval = folder, state, config["keep_interval"]
        self.facts = {**facts, "val_loss": math.inf, "val_iter": None, "best_val_loss": math.inf}
        self.on_disk = 0, None  # iter_num and val_iter of ckpt.pt; at first there is none, and step 0 needs none
        self.pool, self.pending = ThreadPoolExecutor(1), None
        found = sorted(path.name for path in folder.glob("ckpt*.pt"))
        if found and not resuming:
            if not config["overwrite"]:
                resume = "resume it with --init_from=resume, " if has_checkpoint(out_dir) else ""
                fail(f"--out_dir={out_dir}: holds a checkpoint, {found[0]}: {resume}replace it with --overwrite=True, "
                     f"or give another folder")
            for source in filter(None, (config["init_from"], config["teacher"])):
                path = Path(source.removeprefix("auto:")).resolve()
                if path.exists() and folder.resolve() in (path, path.parent):
                    fail(f"--out_dir={out_dir} --overwrite=True: holds {source}, which this run reads; give another "
                         f"folder")
        if (folder / "config.json").exists() and b"model_type" in (folder / "config.json").read_bytes():
            fail(f"--out_dir={out_dir}: holds a model in Hugging Face's format; give another folder")
        if runtime.rank() == 0:
            with one_line_errors(f"--out_dir={out_dir}",
                                 "give a folder that can be written to and that no other run is writing to", OSError):
                os.makedirs(out_dir, exist_ok=True)
                self.lock = FileLock(folder / "lock")
                self.lock.acquire(blocking=False)  # its Timeout is an OSError, as is a folder that is read-only

    def remove_old(self):
        """Removes the checkpoints of an overwritten run, after all checks have passed."""
        if runtime.rank() == 0:
            for pattern in ("ckpt.pt*", "ckpt_prev.pt", "ckpt_best.pt", "ckpt_damaged.pt", "ckpt_[0-9]*.pt"):
                for path in self.out_dir.glob(pattern):
                    path.unlink()

    def save(self, iter_num, again=False):
        """
        Starts writing a checkpoint, unless this step's is there. It holds the last evaluation's val_loss, of step
        val_iter: a step is saved before it is evaluated. Call wait before a weight changes.
        """
        if iter_num == self.on_disk[0] and not again:
            return
        weights, optimizer = get_state(self.state["model"], self.state["optimizer"])
        entries = {key: entry.state_dict() for key, entry in self.state.items() if key not in ("model", "optimizer")}
        checkpoint = dict(**entries, **self.facts, model=weights, optimizer=optimizer, iter_num=iter_num)
        snapshot = f"ckpt_{iter_num}.pt" if self.keep_interval and iter_num % self.keep_interval == 0 else None
        write = write_checkpoint if runtime.rank() == 0 else lambda *_: False
        self.pending = (iter_num, self.facts["val_iter"]), self.pool.submit(write, self.out_dir, checkpoint, snapshot)

    def wait(self):
        """Waits for the write under way, if any; every rank learns whether it succeeded."""
        if self.pending is None:
            return
        step, future = self.pending
        self.pending = None
        device = next(self.state["model"].parameters()).device
        if runtime.all_reduce(torch.tensor(float(future.result()), device=device))[0]:
            self.on_disk = step
            runtime.interrupt_message = f": step {step[0]} is saved; {runtime.resume_hint(self.out_dir)}"

    def evaluated(self, iter_num, val_loss):
        """Waits for the checkpoint of this step, and gives the one with the lowest val_loss a second name."""
        best = min(self.facts["best_val_loss"], val_loss)
        self.facts |= {"val_loss": val_loss, "val_iter": iter_num, "best_val_loss": best}
        self.wait()
        self.link_best()

    def link_best(self):
        is_best = self.facts["val_loss"] == self.facts["best_val_loss"]
        if runtime.rank() == 0 and self.on_disk[0] == self.facts["val_iter"] > 0 and is_best:
            link(self.out_dir / "ckpt.pt", "ckpt_best.pt")

    def finish(self, iter_num):
        """Saves the last step, with its own val_loss if it was evaluated; where that fails, again, for ten minutes."""
        for attempt in range(20):
            if self.on_disk == (iter_num, self.facts["val_iter"]):
                return self.link_best()
            if attempt:
                print0("trying again in 30 seconds")
                time.sleep(30)
            self.save(iter_num, again=True)
            self.wait()
        fail(f"--out_dir={self.out_dir}: step {iter_num} could not be saved")

    def resume(self, checkpoint, max_iters):
        """Restores all of a run from load_checkpoint(out_dir, merge=False). Returns iter_num."""
        if max_iters < checkpoint["iter_num"]:
            fail(f"--max_iters={max_iters}: the run in {self.out_dir} has taken {checkpoint['iter_num']} steps; give "
                 f"more")
        if checkpoint["data"] != self.facts["data"]:
            fail(f"the run in {self.out_dir} was started with other data; to train these weights on this data start a "
                 f"new run with --init_from={self.out_dir}/ckpt.pt --out_dir=...")
        self.facts |= {key: checkpoint[key] for key in ("val_loss", "val_iter", "best_val_loss")}
        return self.restore(checkpoint)

    def restore(self, checkpoint=None, skip=()):
        """Restores the state, but for the entries in `skip`, by default from the last checkpoint. Returns iter_num."""
        checkpoint = checkpoint or load_checkpoint(self.out_dir, merge=False)
        with one_line_errors(checkpoint["path"], errors=(RuntimeError, KeyError, ValueError)):
            load_state(self.state["model"], self.state["optimizer"], checkpoint)
            for key, entry in self.state.items():
                if key in ("model", "optimizer", *skip):
                    continue
                if key not in checkpoint:
                    print0(f"WARNING: {checkpoint['path']} has no {key}: it keeps its initial state")
                elif checkpoint[key] != {}:  # that of a loss scale that was off
                    entry.load_state_dict(checkpoint[key])
        unclaimed = checkpoint.keys() - self.state.keys() - self.facts.keys() - {"iter_num", "path"}
        if unclaimed:
            print0(f"WARNING: nothing here uses {', '.join(sorted(unclaimed))} of {checkpoint['path']}")
        path, previous = (self.out_dir / name for name in CHECKPOINTS)
        if checkpoint["path"] == str(previous) and runtime.rank() == 0:  # or it would be replaced by a corrupt one
            if path.exists():
                os.replace(path, path.with_name("ckpt_damaged.pt"))
            link(previous, path.name)
        self.on_disk = checkpoint["iter_num"], checkpoint["val_iter"]
        runtime.interrupt_message = f": step {checkpoint['iter_num']} is saved; {runtime.resume_hint(self.out_dir)}"
        return checkpoint["iter_num"]
