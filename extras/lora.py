"""
LoRA (Hu et al. 2021, --lora_rank=16): freezes the model and trains low-rank adapters. A checkpoint holds the adapters
alone, with the path and the fingerprint of their base; checkpoint.py merges the two when a script loads one.
"""
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from checkpoint import fingerprint, load_base
from configurator import fail, one_line_errors
from distributed import print0


class LoRALinear(nn.Linear):
    """
    y = W x + b + alpha / rank B A dropout(x), with A (rank, in), B (out, rank); W and b are those of `linear`. B
    starts at zero, so the model starts as it was; A as in the paper's code. alpha / rank keeps the size of an update
    about the same for any rank (section 4.1), so that you need not tune the learning rate again for another rank.
    """

    def __init__(self, linear, rank, alpha, dropout):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale = alpha / rank
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return super().forward(x) + self.scale * F.linear(F.linear(self.drop(x), self.lora_A), self.lora_B)

    def merged_weight(self):
        """W + alpha / rank B A, (out, in), for the decoding of latent attention."""
        return self.weight + self.scale * (self.lora_B @ self.lora_A)


def add_adapters(model, targets, rank, alpha, dropout):
    """
    Freezes a GPT and gives an adapter to the matrices of its blocks that `targets` names (all, attn, mlp, or names
    like q_proj,mlp.c_proj). Draws from torch's global generator: seed it first. Fails if no matrix has such a name.
    """
    blocks = model.transformer.h
    names = {path: {"all", path.partition(".")[2], *path.split(".")[1:]}  # 0.mlp.c_proj: all, mlp.c_proj, mlp, c_proj
             for path, module in blocks.named_modules() if isinstance(module, nn.Linear)}
    known, wanted = set().union(*names.values()), {target.strip() for target in targets.split(",")}
    if wanted - known:
        fail(f"--lora_targets={targets}: no matrix {min(wanted - known)!r} in this model; expected some of "
             f"{', '.join(sorted(known))}")
    model.requires_grad_(False)
    for path in names:
        if wanted & names[path]:
            blocks.set_submodule(path, LoRALinear(blocks.get_submodule(path), rank, alpha, dropout))


class Adapters:
    """The entry "model" of a LoRA run's checkpoint: the adapters, and what else trains."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return {name: p.detach() for name, p in self.model.state_dict(keep_vars=True).items()
                if p.requires_grad or ".lora_" in name}

    def load_state_dict(self, adapters):
        if adapters.keys() != self.state_dict().keys():
            raise ValueError("its adapters are on other matrices")
        self.model.load_state_dict(adapters, strict=False)  # the rest is the base's


class Lora:
    """
    Adds adapters to a model that holds the base's weights. On resume it loads those weights first. dtype: of the
    matmuls; if it is bfloat16, frozen matrices are kept in it. Its state is the entry "lora" of a checkpoint: alpha,
    and where the base is (path, absolute) with its fingerprint.
    """

    def __init__(self, model, config, dtype, checkpoint, resuming):
        path = checkpoint["path"]
        if config["optimizer"] != "adamw":
            fail(f"--optimizer={config['optimizer']}: adapters (--lora_rank) train with adamw")
        if resuming:
            with one_line_errors(path):
                model.load_state_dict(load_base(checkpoint))  # the adapters follow when the run is restored
        else:
            if "lora" in checkpoint:
                fail(f"--init_from={path}: holds adapters itself; merge them with export_hf.py, and start from that")
            if checkpoint["stage"] == "base":
                print0("WARNING: a base model has not learned the chat tokens, and LoRA does not train them: tune it "
                       "in full first")
            self.base = {"alpha": config["lora_alpha"], "path": path, "absolute": os.path.abspath(path),
                         "fingerprint": fingerprint(checkpoint)}
        torch.manual_seed(config["seed"])
        add_adapters(model, config["lora_targets"], config["lora_rank"], config["lora_alpha"], config["lora_dropout"])
        for p in model.parameters():
            if dtype == "bfloat16" and p.dim() > 1 and not p.requires_grad:  # else autocast converts it in each step
                p.data = p.bfloat16()
        n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print0(f"LoRA: {n_trained:,} of {sum(map(torch.numel, model.parameters())):,} parameters train")

    def state_dict(self):
        return self.base

    def load_state_dict(self, base):
        self.base = base
