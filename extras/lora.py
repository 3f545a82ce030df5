"""
LoRA (Hu et al. 2021): freezes the model and trains low-rank adapters; a checkpoint holds the adapters alone, with the
path and the digest of their base. Every script merges base and adapters when it loads one.
"""
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from checkpoint import GPT2_MODELS, digest_weights, load_checkpoint
from configurator import Annotated, BelowOne, fail
from runtime import print0

lora_alpha: Annotated[float, 1e-6, math.inf] = 32.0  # adapters are scaled by lora_alpha / lora_rank
lora_dropout: BelowOne = 0.0  # on the adapters' input
lora_targets: str = "all"  # matrices that get an adapter: all, attn, mlp, or names, e.g. q_proj,v_proj,mlp.c_proj


class LoRALinear(nn.Linear):
    """
    y = W x + b + alpha / rank B A dropout(x), with A (rank, in), B (out, rank); W and b are those of `linear`. B
    starts at zero, so the model starts as it was; A as in the paper's code. alpha / rank keeps the size of an update
    about the same for any rank (section 4.1), so that another rank needs no other learning rate.
    """

    def __init__(self, linear, rank):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale = lora_alpha / rank
        self.drop = nn.Dropout(lora_dropout)

    def forward(self, x):
        return super().forward(x) + self.scale * F.linear(F.linear(self.drop(x), self.lora_A), self.lora_B)

    def merged_weight(self):
        """The matrix (out, in) that evaluation multiplies by."""
        return self.weight + self.scale * (self.lora_B @ self.lora_A)


def add_adapters(model, rank):
    """
    Freezes a GPT and gives the matrices of its blocks that lora_targets names an adapter; seed torch's global
    generator first. Ends the program for a target that no matrix has.
    """
    blocks, names = model.transformer.h, {}  # 0.mlp.c_proj -> what may name it: all, mlp, c_proj, mlp.c_proj
    for path, module in blocks.named_modules():
        if isinstance(module, nn.Linear):
            name = path.partition(".")[2]
            names[path] = {"all", name, *name.split(".")}
    known = set().union(*names.values())
    targets = {target.strip() for target in lora_targets.split(",")}
    if targets - known:
        fail(f"--lora_targets={lora_targets}: no matrix {min(targets - known)!r} in this model; expected some of "
             f"{', '.join(sorted(known))}")
    model.requires_grad_(False)
    for path in names:
        if targets & names[path]:
            blocks.set_submodule(path, LoRALinear(blocks.get_submodule(path), rank))


class Lora:
    """
    Adds adapters to a model whose weights are the base's, loaded here if the run is resumed. Its state is the entry
    "lora" of a checkpoint: alpha, and where the base is (path, absolute) with its fingerprint.
    """

    def __init__(self, model, config, checkpoint, resuming):
        path = checkpoint["path"]
        if config["optimizer"] != "adamw":
            fail(f"--optimizer={config['optimizer']}: adapters (--lora_rank) train with adamw")
        if resuming:
            model.load_state_dict(load_base(checkpoint))  # the rest comes with load_state_dict
        else:
            if "lora" in checkpoint:
                fail(f"--init_from={path}: holds adapters itself; merge them with export_hf.py, and start from that")
            self.base = {"alpha": lora_alpha, "path": path, "absolute": os.path.abspath(path),
                         "fingerprint": fingerprint(checkpoint)}
        torch.manual_seed(config["seed"])
        add_adapters(model, config["lora_rank"])
        n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print0(f"LoRA: {n_trained:,} of {sum(map(torch.numel, model.parameters())):,} parameters train")

    def state_dict(self):
        return self.base

    def load_state_dict(self, base):
        self.base = base


def load_base(checkpoint):
    """The weights that the adapters of a LoRA run's checkpoint were trained on, found by path and digest."""
    base = checkpoint["lora"]
    for place in (base["absolute"], base["path"]):
        if os.path.exists(place) or place in GPT2_MODELS:
            candidate = load_checkpoint(place, merge=False)
            if fingerprint(candidate) == base["fingerprint"]:
                return candidate["model"]
    fail(f"{checkpoint['path']}: holds the adapters of a LoRA run; their base is expected in {base['absolute']} or "
         f"{base['path']}, but there is nothing, or other weights are there now")


def merge_into_base(checkpoint):
    """Turns a LoRA run's checkpoint into that of a plain model, in place."""
    adapters, weights = checkpoint["model"], load_base(checkpoint)
    for name, A in adapters.items():
        if name.endswith("lora_A"):
            B = adapters[name.replace("lora_A", "lora_B")]
            target = name.replace("lora_A", "weight")
            weights[target] = weights[target] + checkpoint["lora"]["alpha"] / len(A) * (B @ A)
    checkpoint["model"] = weights


def fingerprint(checkpoint):
    """
    SHA-256 of a checkpoint's weights. The rows that pad a GPT-2 vocabulary on import, from 50257 on, are left out:
    they are means, whose last bits depend on the machine.
    """
    return digest_weights(None, checkpoint["model"], rows=50257)
