"""
--sanity_check=True: looks for what keeps a model from learning, on one micro-batch, and exits.

The first loss against ln(vocabulary), gradients that are missing, NaN or vanish, dead MLP units, and whether the
model can overfit the micro-batch in 100 steps. Exit code 0 if all is well, else 1.
"""
import math

import torch

from configurator import fail
from model import IGNORE, linear_cross_entropy


def check(model, batch, optimizer, autocast, from_scratch, world_size, steps=100):
    """batch: what GPT.forward takes; model and optimizer are not the same afterwards."""
    if world_size > 1:
        fail("--sanity_check=True: start it without torchrun")
    model.train()
    del model.loss_fn  # a teacher's is a submodule, which torch does not let a function replace
    model.loss_fn = linear_cross_entropy
    batch = {name: batch[name] for name in ("idx", "targets", "positions", "mask") if name in batch}
    targets, good = max(int((batch["targets"] != IGNORE).sum()), 1), True
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and "loss_fn" not in name}

    def report(ok, text):
        nonlocal good
        good = good and ok
        print(f"{'ok      ' if ok else 'PROBLEM '}{text}", flush=True)

    losses, norms = [], {}
    for step in range(steps):
        with autocast:
            loss = model(**batch) / targets
        loss.backward()
        losses.append(loss.item())
        if step == 0 and from_scratch:
            expected = math.log(model.config.vocab_size)
            report(abs(losses[0] / expected - 1) < 0.05,
                   f"the first loss is {losses[0]:.3f}; ln(vocabulary) is {expected:.3f}")
        if step < 3:  # the gradients of what LoRA's zeros multiply come a step later
            for name, p in trained.items():
                norm = p.grad.norm().item() if p.grad is not None else 0.0
                norms[name] = norm if math.isnan(norm) else max(norms.get(name, 0.0), norm)
        if step == 2:
            without_grad = [name for name, norm in norms.items() if norm == 0]
            not_finite = [name for name, norm in norms.items() if not math.isfinite(norm)]
            typical = sorted(norms.values())[len(norms) // 2]
            vanishing = [name for name, norm in norms.items() if 0 < norm < 1e-6 * typical]
            report(not without_grad, f"{len(norms) - len(without_grad)} of {len(norms)} parameters get a gradient"
                   + "".join(f"; not {name}" for name in without_grad[:5]))
            report(not not_finite, f"{len(not_finite)} gradients are NaN or infinite"
                   + "".join(f"; {name}" for name in not_finite[:5]))
            report(not vanishing, f"{len(vanishing)} gradients vanish (below a millionth of the median, {typical:.2e})"
                   + "".join(f"; {name}" for name in vanishing[:5]))
            inputs = ("mlp.c_fc.weight", "mlp.up_proj.weight", "mlp.c_fc.lora_B", "mlp.up_proj.lora_B")
            dead = {name: (p.grad.abs().sum(1) == 0).float().mean().item() for name, p in trained.items()
                    if p.grad is not None and name.endswith(inputs)}
            for worst in sorted(dead, key=dead.get)[-1:]:  # none where LoRA leaves out the MLPs
                report(dead[worst] < 0.5, f"{dead[worst]:.1%} of the units of {worst} are dead, the most of all layers")
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    report(losses[-1] < 0.5 * losses[0],
           f"overfitting one micro-batch: its loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps")
    raise SystemExit(0 if good else 1)
