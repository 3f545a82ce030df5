"""Token shards -> batches, in an order that depends only on a row's number in the run."""
import functools
import glob
import hashlib
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from configurator import fail, one_line_errors
from distributed import all_reduce, get_rank, get_world_size
from model import IGNORE
from shards import read_headerless, read_meta, read_shard
from tokenizer import get_tokenizer, padded_vocab_size, token_bytes


def to_device(array, device):
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class TokenDataset:
    """
    The shards of one split as rows of T = max_seq_len inputs and their targets. Row i of a shard is its tokens i T to
    (i + 1) T, both included, so each token of its rows but the first is a target once. Up to T tokens at the end of a
    shard are no row's inputs: dropped_tokens. nanoGPT's train.bin and val.bin are read as one shard each.
    """

    def __init__(self, data_dir, split, max_seq_len):
        self.data_dir, self.max_seq_len = data_dir, max_seq_len
        names = sorted(glob.glob(f"*{split}_[0-9]*.bin", root_dir=data_dir))
        nanogpt = f"{data_dir}/{split}.bin"
        if os.path.exists(f"{data_dir}/meta.pkl"):
            fail(f"data_dir={data_dir}: nanoGPT's character-level tokens; prepare the text again, with "
                 f"python prepare_data.py --files={data_dir}/input.txt --tokenizer=bytes --data_dir=...")
        if not names and not os.path.exists(nanogpt):
            sources = {"python": "--dataset=python", "fineweb-edu": "--max_tokens=1000000000"}
            source = sources.get(Path(data_dir).name, "--files='TEXTS/*.txt'")
            ready = (" (or fetch 20 GB of ready-made ones: hf download kjj0/fineweb10B-gpt2 --repo-type=dataset "
                     f"--local-dir={data_dir})" if "fineweb" in data_dir else "")
            fail(f"data_dir={data_dir}: no {split} shards (*{split}_*.bin) there; make them, e.g. with "
                 f"python prepare_data.py {source} --data_dir={data_dir}{ready}")
        meta = read_meta(data_dir)
        tokenizer_name = meta["tokenizer"]
        self.tokenizer = get_tokenizer(f"{data_dir}/tokenizer" if tokenizer_name.startswith("hf-") else tokenizer_name)
        if self.tokenizer.name != tokenizer_name:
            fail(f"data_dir={data_dir}: its tokenizer/ is {self.tokenizer.name}, but meta.json names "
                 f"{tokenizer_name}; restore it, or prepare the data again")
        self.vocab_size = padded_vocab_size(self.tokenizer)
        entries = [meta["shards"].get(name) for name in names]
        self.shards = [read_shard(f"{data_dir}/{name}", entry) for name, entry in zip(names, entries)]
        self.shards = self.shards or [read_headerless(nanogpt)]
        self.checksums = [entry and entry[0] for entry in entries]
        # rows before each shard, and in all
        self.starts = np.cumsum([0, *((len(shard) - 1) // max_seq_len for shard in self.shards)])
        self.tokens = sum(map(len, self.shards))
        if "val_tokens" in meta:  # prepare_data.py wrote it; its first version did not record this
            with one_line_errors(f"{data_dir}/meta.json", "run prepare_data.py again"):
                recorded = meta["val_tokens"] if split == "val" else meta["tokens"] - meta["val_tokens"]
                if self.tokens != recorded:
                    fail(f"data_dir={data_dir}: its {split} shards have {self.tokens:,} tokens, but meta.json records "
                         f"{recorded:,}; restore the shards, or remove the folder and run prepare_data.py again")
        self.dropped_tokens = self.tokens - len(self) * max_seq_len
        if len(self) == 0:
            fail(f"max_seq_len={max_seq_len}: a row needs {max_seq_len + 1} tokens, and the longest {split} shard in "
                 f"{data_dir} has {max(map(len, self.shards))} tokens; lower it, or prepare more data"
                 f"{' with a larger --val_tokens' if split == 'val' else ''}")

    def __len__(self):
        return int(self.starts[-1])

    @property
    def fingerprint(self):
        """Identifies the shards: a digest of each one's length, first and last thousand tokens."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(len(shard).to_bytes(8, "little") + shard[:1000].tobytes() + shard[-1000:].tobytes())
        return digest.hexdigest()

    def __getitem__(self, indices):
        """indices (B,) -> idx, targets (B, max_seq_len) int64: tokens, and the token after each."""
        T = self.max_seq_len
        shards = np.searchsorted(self.starts, indices, side="right") - 1
        begins = (indices - self.starts[shards]) * T
        rows = np.stack([self.shards[shard][i:i + T + 1] for shard, i in zip(shards, begins)])  # (B, T + 1)
        if rows.max() >= self.vocab_size:
            fail(f"--data_dir={self.data_dir}: holds the token {rows.max()}, but the vocabulary of its tokenizer, "
                 f"{self.tokenizer.name}, ends at {self.vocab_size - 1}: its shards come from another tokenizer, or "
                 f"are damaged", alone=True)
        # two arrays, not two views of one: a single row's view would keep a stride of T + 1 and cause a recompile
        return rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)

    def get_batch(self, indices, device):
        """Keyword arguments of GPT.forward, on `device`."""
        idx, targets = self[indices]
        return {"idx": to_device(idx, device), "targets": to_device(targets, device)}


@functools.lru_cache(maxsize=2)  # a step may reach into the next epoch
def epoch_permutation(n, seed, epoch):
    return np.random.default_rng((seed, epoch)).permutation(n)


def sample_indices(rows, n, seed):
    """
    The g-th row of a run is row perm[g % n] of the n in the data set, where perm depends on the seed and the epoch,
    g // n. So rows_seen is all that a resumed run must know.
    """
    return np.array([epoch_permutation(n, seed, g // n)[g % n] for g in rows])


class BatchLoader:
    """
    The endless training batches of one rank, read ahead by a thread. Micro-batch m of rank r is number
    m * world_size + r of the run, so any number of ranks sees the same rows.

    sources: each maps indices to arrays that join the batch, and is read ahead too. transforms: each maps a batch to
    tensors that join it when the batch is taken or peeked at.
    """

    def __init__(self, dataset, batch_size, seed, rank, world_size, device):
        self.dataset, self.batch_size, self.seed, self.device = dataset, batch_size, seed, device
        self.rank, self.world_size = rank, world_size
        self.sources, self.transforms = [], []
        self.rows_seen, self.wait_seconds = 0, 0.0
        self.pool, self.next_batch = ThreadPoolExecutor(1), None

    def indices(self, first, n):
        """Dataset indices of the run's n rows from row `first` on."""
        return sample_indices(range(first, first + n), len(self.dataset), self.seed)

    def read(self, rows_seen):
        indices = self.indices(rows_seen + self.rank * self.batch_size, self.batch_size)
        batch = self.dataset.get_batch(indices, self.device)
        for source in self.sources:
            batch |= {name: to_device(array, self.device) for name, array in source[indices].items()}
        return batch

    def peek(self):
        """The next batch, without taking it."""
        start = time.perf_counter()
        self.next_batch = self.next_batch or self.pool.submit(self.read, self.rows_seen)
        batch = self.next_batch.result()
        self.wait_seconds += time.perf_counter() - start
        for transform in self.transforms:
            batch = batch | transform(batch)
        return batch

    def __next__(self):
        batch = self.peek()
        self.rows_seen += self.batch_size * self.world_size
        self.next_batch = self.pool.submit(self.read, self.rows_seen)
        return batch

    @property
    def tokens(self):
        return self.rows_seen * self.dataset.max_seq_len

    def state_dict(self):
        return self.rows_seen

    def load_state_dict(self, rows_seen):
        self.rows_seen, self.next_batch = rows_seen, None


@torch.no_grad()
def validation_loss(model, dataset, batch_size, eval_iters, device, progress=iter):
    """
    Loss over the first eval_iters * batch_size rows of `dataset`, in nats per target and in bits per byte of the
    targets' text. Every call reads the same rows; any number of ranks gives the same result.

    model: compiled or not; it sees one shape. A last batch that is not full is padded with rows that do not count.
    progress: wraps an iterable, as tqdm does.
    """
    was_training = model.training
    model.eval()
    n_rows = min(len(dataset), eval_iters * batch_size)
    token_sizes = torch.from_numpy(token_bytes(dataset.tokenizer))  # (V,)
    totals = torch.zeros(3, dtype=torch.float64)  # nats, targets, bytes
    for first in progress(range(0, n_rows, get_world_size() * batch_size)):  # equally many per rank, as FSDP requires
        rows = torch.arange(batch_size) + first + get_rank() * batch_size
        batch = dataset.get_batch(rows.clamp(max=n_rows - 1).numpy(), device)
        batch["targets"][rows >= n_rows] = IGNORE
        targets = batch["targets"][batch["targets"] != IGNORE].cpu()
        totals += torch.tensor([model(**batch).item(), len(targets), token_sizes[targets].sum()], dtype=torch.float64)
    model.train(was_training)
    if device.type == "cuda":  # for nccl; MPS has no float64
        totals = totals.to(device)
    nats, targets, n_bytes = all_reduce(*totals).tolist()
    return nats / targets, nats / math.log(2) / max(n_bytes, 1)
