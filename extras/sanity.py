"""
--sanity_check=True: looks for faults that keep a model from learning, on one micro-batch, then exits.

Checks the first loss against that of random weights, looks for gradients that are missing, not finite or vanishing
and for dead MLP units, and tries to overfit the micro-batch in 100 steps. A low loss does not prove that attention
works, since a token and its position alone say much about the next one. So it also checks each layer's attention: an
output must depend on earlier positions and on no later one. Exits with code 0 if all is well, else 1.
"""
import math
from collections import Counter

import torch

from configurator import fail
from model import IGNORE

# a row of these is a unit of an MLP
MLP_INPUTS = ("mlp.c_fc.weight", "mlp.up_proj.weight", "mlp.c_fc.lora_B", "mlp.up_proj.lora_B")


def check(model, batch, optimizer, autocast, from_scratch, world_size, steps=100):
    """batch: arguments of GPT.forward. Changes model and optimizer, and exits."""
    if world_size > 1:
        fail("--sanity_check=True: start it without torchrun")
    model.eval()  # for the plain cross entropy, without a teacher's, and without dropout
    targets = (batch["targets"] != IGNORE).sum()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad and "loss_fn" not in name}
    for p in params.values():
        p.grad = torch.zeros_like(p)  # a parameter without a gradient keeps this one
    norms, results = Counter(), []

    def report(ok, text):
        results.append(ok)
        print(f"{'ok      ' if ok else 'PROBLEM '}{text}", flush=True)

    for step in range(steps):
        with autocast:
            loss = model(**batch) / targets
        loss.backward()
        if step == 0:
            # ln(vocabulary) and half the variance of the logits: the head is N(0, 0.02), its input normalized
            first, expected = loss.item(), math.log(model.config.vocab_size) + 0.02 ** 2 * model.config.n_embd / 2
            if from_scratch:
                report(abs(first / expected - 1) < 0.05,
                       f"the first loss is {first:.3f}; {expected:.3f} is expected of random weights")
        if step < 3:  # lora_A gets its first gradient a step later, since lora_B starts at zero
            for name, p in params.items():
                norms[name] += p.grad.norm().item()
        if step == 2:
            least = 1e-6 * sorted(norms.values())[len(norms) // 2]  # a millionth of the median
            bad = [f"; {name}: {norm:.1e}" for name, norm in norms.items() if not least < norm < math.inf]
            report(not bad, f"{len(norms) - len(bad)} of {len(norms)} parameters get a gradient, finite and not tiny"
                            f"{''.join(bad[:5])}")
            dead = {name: (p.grad == 0).all(1).float().mean() for name, p in params.items()
                    if name.endswith(MLP_INPUTS)}
            bad = [f"; {name}: {share:.0%}" for name, share in dead.items() if share > 0.05]
            report(not bad, f"in {len(bad)} of {len(dead)} MLPs more than 5 % of the units are dead{''.join(bad[:5])}")
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    no_past, future = [], []

    def look_at(i):
        def hook(attention, inputs, output):
            x, *others = inputs  # (B, T, C)
            without_past, without_last = x.clone(), x.clone()
            without_past[:, :-1], without_last[:, -1] = 0, 0
            if torch.equal(attention.forward(without_past, *others)[:, -1], output[:, -1]):
                no_past.append(i)
            if not torch.allclose(attention.forward(without_last, *others)[:, :-1], output[:, :-1], atol=1e-4):
                future.append(i)
        return hook

    for i, block in enumerate(model.transformer.h):
        block.attn.register_forward_hook(look_at(i))
    with torch.no_grad(), autocast:
        model.hidden_states(batch["idx"])
    report(not no_past, f"layers whose attention ignores all earlier positions: {no_past or 'none'}")
    report(not future, f"layers whose attention sees later positions: {future or 'none'}")
    report(loss < 0.5 * first,
           f"overfitting one micro-batch: its loss went from {first:.3f} to {loss:.3f} in {steps} steps at the peak "
           f"learning rate; less than half is expected")
    raise SystemExit(0 if all(results) else 1)
