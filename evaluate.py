"""
Scores a model.
"""
import math

import torch
import torch.distributed as dist

from model import IGNORE

# ---------------------------------------------------------------------------------------------------
# validation loss

@torch.no_grad()
def validation_loss(model, get_batch, n_rows, batch_size, bytes_of, rank=0, world_size=1):
    """
    Loss over the first n_rows rows of a split, in nats a target and in bits a byte of the targets' text: the same rows at
    every call, dealt to the ranks, so that the result is that of one rank.

    model: compiled or not; it sees one shape. get_batch(indices (batch_size,)) -> what model.forward takes: x, y
    (batch_size, T) int64, IGNORE where y is no target, and perhaps positions and a mask. A last batch that is not full is
    filled up with rows that do not count. bytes_of: from prepare_data.token_bytes.
    """
    model.eval()
    bytes_of = torch.from_numpy(bytes_of)
    totals = torch.zeros(3, dtype=torch.float64)  # nats, targets, bytes
    for first in range(rank * batch_size, n_rows, world_size * batch_size):
        rows = torch.arange(first, first + batch_size)
        x, y, *packing = get_batch(rows.clamp(max=n_rows - 1).numpy())
        y[rows >= n_rows] = IGNORE
        targets = y[y != IGNORE]
        totals += torch.tensor([model(x, y, *packing).item(), len(targets), bytes_of[targets.cpu()].sum()], dtype=torch.float64)
    model.train()
    if dist.is_initialized():
        totals = totals.to(next(model.parameters()).device)
        dist.all_reduce(totals)
    nats, targets, bytes_ = totals.tolist()
    return nats / max(targets, 1), nats / math.log(2) / max(bytes_, 1)
