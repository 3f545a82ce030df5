"""
LoRA (Hu et al. 2021): freezes the model and trains low-rank adapters; a checkpoint holds the adapters alone.

It names its base and identifies it by digest; every script merges the two when it opens one.
"""
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from checkpoint import GPT2_MODELS, digest_weights, load_checkpoint
from configurator import Annotated, BelowOne, fail, one_line_errors
from runtime import print0

lora_alpha: Annotated[float, 1e-6, math.inf] = 32.0  # adapters are scaled by lora_alpha / lora_rank
lora_dropout: BelowOne = 0.0  # on the adapters' input
lora_targets: str = "all"  # matrices that get an adapter: all, attn, mlp, or names, e.g. q_proj,v_proj,mlp.c_proj


class LoRALinear(nn.Linear):
    """
    y = W x + b + alpha / rank B A dropout(x), with A (rank, in), B (out, rank); W and b are those of `linear`,
    frozen. B starts at zero, so the model starts as it was; A as in the paper's code. alpha / rank keeps the size of
    an update about the same for any rank (section 4.1), so that another rank needs no other learning rate.
    """

    def __init__(self, linear, rank, alpha, dropout):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale, self.drop = alpha / rank, nn.Dropout(dropout)

    def forward(self, x):
        return super().forward(x) + self.scale * F.linear(F.linear(self.drop(x), self.lora_A), self.lora_B)

    def merged_weight(self):
        """The matrix (out, in) that evaluation multiplies by."""
        return self.weight + self.scale * (self.lora_B @ self.lora_A)


def add_adapters(model, rank, alpha, dropout, targets):
    """
    Freezes a GPT and gives the matrices of its blocks that `targets` names an adapter; seed torch's global generator
    first.
    targets: "all", or parts of their names: attn, mlp, c_attn, mlp.c_proj, ... Returns the number of adapters. Raises
    ValueError for a target that no matrix has.
    """
    linears = [(block, name) for block in model.transformer.h for name, m in block.named_modules()
               if isinstance(m, nn.Linear)]
    targets = [target.strip() for target in targets.split(",")] if targets != "all" else ["attn", "mlp"]
    for target in targets:
        if not any(f".{target}." in f".{name}." for _, name in linears):
            known = dict.fromkeys(part for name in sorted(name for _, name in linears) for part in name.split("."))
            raise ValueError(f"no matrix {target!r} in this model: expected all, or some of {', '.join(known)}")
    model.requires_grad_(False)
    linears = [(block, name) for block, name in linears if any(f".{target}." in f".{name}." for target in targets)]
    for block, name in linears:
        block.set_submodule(name, LoRALinear(block.get_submodule(name), rank, alpha, dropout))
    return len(linears)


class Lora:
    """
    Adds adapters to a model whose weights are the base's, loaded here if the run is resumed. Its state is the entry
    "lora" of a checkpoint: alpha, and where the base is (path, absolute) with its fingerprint.
    """

    def __init__(self, model, config, checkpoint, resuming):
        path, out_dir = checkpoint["path"], config["out_dir"]
        rates = [config[name] for name in ("embedding_lr", "head_lr", "vector_lr")]
        if config["optimizer"] != "adamw" or rates != [None, None, None]:
            fail(f"--lora_rank={config['lora_rank']}: adapters train with --optimizer=adamw and --learning_rate alone; "
                 f"leave out the other optimizer and rates")
        if resuming:
            self.base = checkpoint["lora"]
            model.load_state_dict(load_base(checkpoint))
        else:
            absolute = path if path in GPT2_MODELS and not os.path.exists(path) else os.path.abspath(path)
            if os.path.dirname(absolute) == os.path.abspath(out_dir):
                fail(f"--out_dir={out_dir}: holds {path}, the base of this LoRA run, which its checkpoints do not "
                     f"contain; give another folder")
            if "lora" in checkpoint:
                fail(f"--init_from={path}: holds adapters itself; merge them with export_hf.py, and start from that")
            self.base = {"alpha": lora_alpha, "path": path, "absolute": absolute,
                         "fingerprint": fingerprint(checkpoint)}
        n_params = sum(p.numel() for p in model.parameters())
        torch.manual_seed(config["seed"])
        with one_line_errors(f"--lora_targets={lora_targets}", errors=ValueError):
            n_adapters = add_adapters(model, config["lora_rank"], lora_alpha, lora_dropout, lora_targets)
        n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print0(f"LoRA: {n_trained:,} parameters in {n_adapters} adapters train, beside the model's {n_params:,}; a "
               f"checkpoint takes {12 * n_trained / 2 ** 20:.1f} MiB")  # float32, each with AdamW's two moments

    def state_dict(self):
        return self.base

    def load_state_dict(self, base):
        self.base = base


def load_base(checkpoint):
    """The weights that the adapters of a LoRA run's checkpoint were trained on, found by path and digest."""
    base, problem = checkpoint["lora"], "there is nothing"
    places = list(dict.fromkeys((base["absolute"], base["path"])))
    for place in places:
        if os.path.exists(place) or place in GPT2_MODELS:
            candidate = load_checkpoint(place, merge=False)
            if fingerprint(candidate) == base["fingerprint"]:
                return candidate["model"]
            problem = "other weights are there now"
    fail(f"{checkpoint['path']}: holds the adapters of a LoRA run; their base is expected in {' or '.join(places)}: "
         f"{problem}")


def merge_into_base(checkpoint):
    """Turns a LoRA run's checkpoint into that of a plain model, in place."""
    adapters, weights = checkpoint["model"], load_base(checkpoint)
    for name in [name.removesuffix("lora_A") for name in adapters if name.endswith(".lora_A")]:
        A, B = adapters[name + "lora_A"], adapters[name + "lora_B"]
        weights[name + "weight"] = weights[name + "weight"] + checkpoint["lora"]["alpha"] / len(A) * (B @ A)
    checkpoint["model"] = weights


def fingerprint(checkpoint):
    """
    SHA-256 of a checkpoint's weights. The rows that pad a GPT-2 vocabulary on import, from 50257 on, are left out: they
    are means, whose last bits depend on the machine.
    """
    return digest_weights(None, checkpoint["model"], rows=50257)
