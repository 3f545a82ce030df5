"""
Saves and loads checkpoints: ckpt.pt, the one before it as ckpt_prev.pt, and the best as ckpt_best.pt. ckpt.pt and
ckpt_prev.pt are written whole or not at all.

A checkpoint is a dict of tensors and plain values with nanoGPT's keys (model, optimizer, model_args, iter_num,
best_val_loss, config) and what an exact resume needs. Loading one executes nothing in it (weights_only).
"""
import hashlib
import json
import math
import os
import shutil
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch

from configurator import NonNegative, Positive, check, fail, format_error, one_line_errors
from distributed import get_rank, print0
from model import GPT, GPTConfig
from tokenizer import get_tokenizer, sanitize

CHECKPOINTS = ("ckpt.pt", "ckpt_prev.pt")
# what each checkpoint holds, besides model_args
ENTRIES = {"model": dict, "config": dict, "tokenizer": str | dict, "stage": str, "iter_num": int, "val_loss": float,
           "val_iter": int | None}
BASE = "ckpt_base.pt"  # beside adapters: a link to the model they were trained on


def has_checkpoint(out_dir):
    return any((Path(out_dir) / name).exists() for name in CHECKPOINTS)


def load_checkpoint(path, merge=True):
    """
    Load any supported checkpoint, on the CPU: a ckpt.pt of ours or nanoGPT's, or its folder (if ckpt.pt is damaged,
    the previous one is used, with a warning); a Hugging Face folder; or gpt2, gpt2-medium, ... Returns a dict with at
    least model, model_args, config, tokenizer, stage, iter_num, val_loss (nan if unknown), val_iter and path. The
    adapters of a LoRA run are merged into their base, and what a loss function learned is left out, except with
    merge=False.
    """
    from import_hf import ACCEPTED, hub_name, load_hf  # not at the top: a run from scratch does not need it
    path = Path(path)
    candidates = [path / name for name in CHECKPOINTS if (path / name).exists()] if path.is_dir() else [path]
    if not candidates or hub_name(path):
        return load_hf(path)
    problem = None
    for candidate in candidates:
        try:
            checkpoint = read_checkpoint(candidate)
            if merge:
                checkpoint["model"] = plain_weights(checkpoint)
        except Exception as error:  # a damaged file may raise anything
            problem = problem or f"{candidate}: not a readable checkpoint ({format_error(error)})"
        else:
            if candidate == path / CHECKPOINTS[1]:
                print0(f"WARNING: no readable {CHECKPOINTS[0]} in {path}: using the checkpoint before it, "
                       f"{candidate}, step {checkpoint['iter_num']}")
            return checkpoint
    fail(f"{problem}; {ACCEPTED}")


def read_checkpoint(path):
    """The checkpoint in one file. Raises an exception of any kind if it is damaged or not a checkpoint."""
    from import_hf import convert_nanogpt
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()  # torch.load does not compare checksums
    if damaged:
        raise ValueError(f"the checksum of {damaged} in it is wrong")
    # AdamW's moments stay in the mapped file until the run ends, and Windows cannot replace a file that is mapped
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=os.name != "nt")
    if "block_size" in checkpoint["model_args"]:
        checkpoint = convert_nanogpt(checkpoint)
    for key, kind in ENTRIES.items():
        if not isinstance(checkpoint[key], kind):
            raise ValueError(f"its {key} is a {type(checkpoint[key]).__name__}")
    # older checkpoints lack norm_eps and have local_heads, which concerned only the initial weights
    model_args = {"norm_eps": 1e-5, **checkpoint["model_args"]}
    model_args.pop("local_heads", None)
    for name, value in model_args.items():
        if name not in GPTConfig.__annotations__:
            raise ValueError(f"it has {name}={value}, which GPTConfig lacks here")
        kind = GPTConfig.__annotations__[name]
        # sizes are above 0, except where the default is 0, as it may be for a field that you added
        sizes = {int: Positive if getattr(GPTConfig, name) else NonNegative, int | None: NonNegative | None}
        check(f"{path}: {name}", value, sizes.get(kind, kind))
    return {**checkpoint, "model_args": vars(GPTConfig(**model_args)), "path": str(path)}


def load_model(path, device):
    """The GPT in a checkpoint, in eval mode on `device`, and the checkpoint without its weights and optimizer."""
    checkpoint = load_checkpoint(path)
    with one_line_errors(path):
        model = GPT(GPTConfig(**checkpoint["model_args"]))
        model.load_state_dict(checkpoint.pop("model"))
    checkpoint.pop("optimizer", None)
    return model.to(device).eval(), checkpoint


def pick_max_seq_len(max_seq_len, positions, most=4096):
    """--max_seq_len if given, else the model's positions, at most `most`. Exits if the model has fewer than given."""
    if max_seq_len and max_seq_len > positions:
        fail(f"--max_seq_len={max_seq_len}: the model has {positions} positions; give at most that")
    return max_seq_len or min(most, positions)


def describe_model(checkpoint):
    """The model in a checkpoint, in one line."""
    args, name, val_loss = checkpoint["model_args"], checkpoint["tokenizer"], checkpoint["val_loss"]
    text = (f"{checkpoint['path']}: {checkpoint['stage']} model, {args['arch']}, {args['attention']}, "
            f"{args['n_layer']} layers, {args['n_embd']} wide, {args['max_seq_len']} positions, "
            f"{'its own tokenizer' if isinstance(name, dict) else f'tokenizer {name}'}")
    if math.isfinite(val_loss):
        text += f", step {checkpoint['iter_num']}, val loss {val_loss:.4f} at step {checkpoint['val_iter']}"
    if "lora" in checkpoint:
        text += f", LoRA on {checkpoint['lora']['path']}"
    return sanitize(text)


def digest_weights(facts, state_dict, rows=None):
    """SHA-256 of a plain value and of weights in float32: each tensor's first `rows`, or all."""
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name, tensor in sorted(state_dict.items()):
        digest.update(f"{name} torch.float32 {tuple(tensor.shape)}".encode())
        digest.update(tensor[:rows].float().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_tokenizer(where, tokenizer, checkpoint):
    """Exit with an error if the checkpoint's model has another tokenizer. `where` says where this one is from."""
    expected, vocab_size = get_tokenizer(checkpoint["tokenizer"]), checkpoint["model_args"]["vocab_size"]
    # comparing the rules may take a second
    same_ids = tokenizer.name == expected.name or tokenizer.text_rules == expected.text_rules
    if not same_ids or tokenizer.n_vocab > vocab_size:
        fail(f"{where}: has {tokenizer.name} tokens, but the model {checkpoint['path']} has {expected.name} tokens, "
             f"{vocab_size} ids")
    if tokenizer.eot_token != expected.eot_token:
        fail(f"{where}: texts begin with the token {tokenizer.eot_token}, but with {expected.eot_token} for the model "
             f"{checkpoint['path']}; use this model's tokenizer")


# -----------------------------------------------------------------------------
# A LoRA run's checkpoint holds the adapters alone, with the path and the fingerprint of their base.

def fingerprint(checkpoint):
    """
    SHA-256 of a checkpoint's weights, without rows 50257 and up of a GPT-2 vocabulary. An import pads it with means,
    whose last bits depend on the machine.
    """
    return digest_weights(None, checkpoint["model"], rows=50257 if checkpoint["tokenizer"] == "gpt2" else None)


def load_base(checkpoint):
    """The weights that the adapters in a LoRA run's checkpoint were trained on, found by path and fingerprint."""
    from import_hf import hub_name
    base = checkpoint["lora"]
    for place in (Path(checkpoint["path"]).with_name(BASE), base["absolute"], base["path"]):
        if os.path.exists(place) or hub_name(place):
            candidate = load_checkpoint(place, merge=False)
            if "lora" not in candidate:  # adapters are no base
                candidate["model"] = plain_weights(candidate)
                if fingerprint(candidate) == base["fingerprint"]:
                    return candidate["model"]
    fail(f"{checkpoint['path']}: holds the adapters of a LoRA run; their base is expected in {BASE} beside "
         f"it, {base['absolute']} or {base['path']}, but each of these is missing or holds other weights now")


def plain_weights(checkpoint):
    """
    The weights of a checkpoint's model, without those of a loss function. A LoRA run's adapters are merged into their
    base: W + alpha / rank B A.
    """
    trained = {name: tensor for name, tensor in checkpoint["model"].items() if not name.startswith("loss_fn.")}
    if "lora" not in checkpoint:
        return trained
    weights = load_base(checkpoint)
    for name, tensor in trained.items():
        if name.endswith("lora_A"):
            B, target = trained[name.replace("lora_A", "lora_B")], name.replace("lora_A", "weight")
            weights[target] = weights[target] + checkpoint["lora"]["alpha"] / len(tensor) * (B @ tensor)
        elif not name.endswith("lora_B"):  # trained besides the adapters
            weights[name] = tensor
    return weights


# -----------------------------------------------------------------------------
# saving and restoring

@contextmanager
def replacing(path):
    """Yields the path of a new file, which replaces the one at `path` once written, or is removed on failure."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:  # a partial file remains; or both names are links to one file, for which os.replace does nothing
        temporary.unlink(missing_ok=True)


def write_checkpoint(out_dir, checkpoint, keep_previous=True):
    """
    Writes ckpt.pt; the one before it becomes ckpt_prev.pt, unless keep_previous is False. The new file is on disk
    before the old one is renamed, so at every moment at least one of the two is whole.
    """
    path, previous = (Path(out_dir) / name for name in CHECKPOINTS)
    os.makedirs(out_dir, exist_ok=True)  # it may have been removed during the run
    with replacing(path) as temporary:
        with open(temporary, "wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        if keep_previous and path.exists():
            os.replace(path, previous)


def link(path, target):
    """A second name for a checkpoint: a hard link, or a copy where no hard link is possible."""
    with replacing(target) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)


class Checkpointer:
    """
    Saves and restores a run. state: a dict from a checkpoint's key to anything with state_dict and load_state_dict,
    with at least model and optimizer. facts: plain values that every checkpoint holds (model_args, config, ...).
    """

    def __init__(self, out_dir, state, facts):
        self.out_dir, self.state = Path(out_dir), state
        self.facts = {**facts, "val_loss": math.inf, "val_iter": None, "best_val_loss": math.inf}
        self.saved_iter = None  # step of the last checkpoint of this run
        self.keep_previous = True  # False: ckpt.pt is damaged

    def save(self, iter_num, val_loss=None):
        """
        Writes a checkpoint, with val_loss if the step has just been evaluated; the best one so far is linked as
        ckpt_best.pt. All ranks call it, rank 0 writes. If it cannot (a full disk), it warns and the old one stays.
        """
        facts, best_before = self.facts, self.facts["best_val_loss"]
        # resumed at a step that is saved with this evaluation: a new save would differ only in changed settings
        written = (self.keep_previous and val_loss == facts["val_loss"]
                   and iter_num == facts["val_iter"] == self.saved_iter)
        if val_loss is not None:
            facts |= {"val_loss": val_loss, "val_iter": iter_num, "best_val_loss": min(best_before, val_loss)}
        checkpoint = {key: entry.state_dict() for key, entry in self.state.items()} | facts | {"iter_num": iter_num}
        if get_rank() > 0:
            return
        best, base = self.out_dir / "ckpt_best.pt", self.out_dir / BASE
        what = f"step {iter_num}"
        try:
            if not written:  # a step saved again, as after a rollback, replaces its own file, not the one before it
                write_checkpoint(self.out_dir, checkpoint, self.keep_previous and iter_num != self.saved_iter)
            if self.saved_iter is None:  # the first save of a new run: remove what an overwritten one left
                for path in (self.out_dir / "ckpt_prev.pt", best, base):
                    path.unlink(missing_ok=True)
            self.saved_iter, self.keep_previous, what = iter_num, True, f"ckpt_best.pt or {BASE} of step {iter_num}"
            if val_loss == facts["best_val_loss"]:
                link(self.out_dir / "ckpt.pt", best)
            if "lora" in checkpoint and os.path.isfile(checkpoint["lora"]["absolute"]) and not base.exists():
                link(os.path.realpath(checkpoint["lora"]["absolute"]), base)  # follows a symbolic link
                load_base({**checkpoint, "path": base})  # or exits: the base has been retrained since this run read it
        except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
            facts["best_val_loss"] = best_before
            last = "nothing is saved" if self.saved_iter is None else f"the last checkpoint is step {self.saved_iter}"
            hint = "" if isinstance(error, OSError) else "is the disk full? "
            print(f"WARNING: --out_dir={self.out_dir}: {what} could not be saved ({hint}{format_error(error)}); "
                  f"{last}", flush=True)

    def resume(self, checkpoint, max_iters):
        """Restores a run from load_checkpoint(out_dir, merge=False), if it can be continued. Returns iter_num."""
        path, iter_num, facts = checkpoint["path"], checkpoint["iter_num"], self.facts
        with one_line_errors(path):
            if not 0 <= iter_num <= max_iters:
                fail(f"--max_iters={max_iters}: the run in {self.out_dir} has taken {iter_num} steps; give more, or, "
                     f"in chat tuning, more --epochs")
            if checkpoint["data"] != facts["data"]:
                fail(f"the run in {self.out_dir} was started with other data; to train these weights on this data "
                     f"start a new run with --init_from={self.out_dir}/ckpt.pt --out_dir=...")
            unused = checkpoint.keys() - self.state.keys() - facts.keys() - {"iter_num", "path"}
            if unused:
                print0(f"WARNING: nothing here uses {', '.join(sorted(unused))} of {path}")
            check(f"{path}: rows_seen", checkpoint.get("rows_seen", 0), NonNegative)
            before, now = (config.get("eval_iters", 1) * config.get("batch_size", 1)
                           for config in (checkpoint["config"], facts["config"]))
            if before != now:
                print0(f"WARNING: validation now reads up to {now} rows, before it read up to {before}: if val has "
                       f"more than {min(before, now)} rows, the losses are not comparable, and ckpt_best.pt stays "
                       f"until one is lower; --eval_iters can make up for --batch_size")
            facts |= {"val_loss": checkpoint["val_loss"], "val_iter": checkpoint["val_iter"],
                      "best_val_loss": min(math.inf, checkpoint["best_val_loss"])}  # nan becomes inf
            self.restore(checkpoint)
        print0(f"resumed at step {iter_num}")
        return iter_num

    def restore(self, checkpoint, skip=()):
        """Restores the state from a checkpoint, except the entries in `skip`. Returns iter_num."""
        for key, entry in self.state.items():
            if key in skip:
                continue
            if key not in checkpoint:
                print0(f"WARNING: {checkpoint['path']} has no {key}: it keeps its initial state")
            elif key != "scaler" or checkpoint[key]:  # empty if the loss scale was off
                entry.load_state_dict(checkpoint[key])
        self.keep_previous = checkpoint["path"] == str(self.out_dir / CHECKPOINTS[0])
        self.saved_iter = checkpoint["iter_num"]
        return self.saved_iter
