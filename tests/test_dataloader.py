"""Shards, their rows, and the order of rows: each token is a target once, and a row's number alone says what it is."""
import json
import os
import shutil
import time
import zlib

import numpy as np
import pytest
import torch

import shards
from conftest import error_line, write_shard
from dataloader import BatchLoader, TokenDataset, epoch_permutation, sample_indices
from shards import read_meta, read_shard

CPU = torch.device("cpu")


def counting_shards(folder, *lengths, split="train"):
    """Shards whose tokens count on from 0, so that each token says where it is from."""
    first = 0
    for i, length in enumerate(lengths):
        write_shard(folder / f"{split}_{i:06d}.bin", range(first, first + length))
        first += length
    return str(folder)


# ---------------------------------------------------------------------------------------------------
# shards

def test_a_damaged_shard_is_named(tmp_path):
    data_dir = counting_shards(tmp_path / "data", 100, 100, 100)
    path = tmp_path / "data" / "train_000001.bin"
    whole = path.read_bytes()  # it begins with magic, version and number of tokens, four bytes each
    for damaged in (b"", whole[:8], whole[:-1], whole[:-2], whole + b"\0\0", b"not a shard at all " * 1000,
                    b"x" + whole[1:], whole[:4] + b"\2" + whole[5:], whole[:8] + b"\x9c\xff\xff\xff" + whole[12:],
                    whole[:8] + bytes(1016)):
        path.write_bytes(damaged)
        error = error_line(TokenDataset, data_dir, "train", 8)
        assert f"{path}: not a token shard, of another version, or damaged" in error


@pytest.mark.parametrize("meta", ["{", "[]", "{}", '{"vocab_size": 384}'])
def test_an_unreadable_meta_is_named(tmp_path, meta):
    (tmp_path / "meta.json").write_text(meta)
    assert str(tmp_path / "meta.json") in error_line(read_meta, tmp_path)


def test_an_unfinished_folder_is_refused(tmp_path):
    (tmp_path / "meta.json").write_text('{"tokenizer": "bytes", "finished": false}')
    error = error_line(read_meta, tmp_path)
    assert f"data_dir={tmp_path}" in error and "interrupted" in error


@pytest.fixture
def recorded(tmp_path):
    """A folder of shards that meta.json records. Returns it, and the path of its second training shard."""
    data_dir = counting_shards(tmp_path / "data", 100, 90, 80)
    counting_shards(tmp_path / "data", 50, split="val")
    shards = {path.name: (zlib.crc32(read_shard(path)), path.stat().st_mtime_ns)
              for path in (tmp_path / "data").glob("*.bin")}
    (tmp_path / "data" / "meta.json").write_text(json.dumps(
        {"tokenizer": "bytes", "tokens": 100 + 90 + 80 + 50, "val_tokens": 50, "shards": shards}))
    time.sleep(0.02)  # the clock of a file system is coarse
    return data_dir, tmp_path / "data" / "train_000001.bin"


def test_shards_that_are_missing_changed_or_not_recorded_are_refused(recorded, tmp_path):
    data_dir, path = recorded
    whole, changed = path.read_bytes(), tmp_path / "changed"
    changed.write_bytes(whole[:-2] + b"\7\0")
    os.utime(changed, (0, 0))
    for change, words in [
        (path.unlink, "its train shards have 180 tokens, but meta.json records 270"),
        (lambda: write_shard(path, range(91)), f"{path}: its tokens have changed since they were prepared"),
        (lambda: write_shard(tmp_path / "data" / "train_000003.bin", range(9)), "have 279 tokens"),
        (lambda: path.write_bytes(changed.read_bytes()), f"{path}: its tokens have changed"),
        (lambda: shutil.copy2(changed, path), f"{path}: its tokens have changed"),  # with its times
    ]:
        change()
        assert words in error_line(TokenDataset, data_dir, "train", 8)
        TokenDataset(data_dir, "val", 8)  # which may be there alone
        path.write_bytes(whole)
        (tmp_path / "data" / "train_000003.bin").unlink(missing_ok=True)
        TokenDataset(data_dir, "train", 8)


@pytest.mark.parametrize("entry", [5, [1], {"crc": 1}])
def test_a_damaged_entry_in_meta_json_is_refused(recorded, tmp_path, entry):
    data_dir, path = recorded
    meta = json.loads((tmp_path / "data" / "meta.json").read_text())
    meta["shards"][path.name] = entry
    (tmp_path / "data" / "meta.json").write_text(json.dumps(meta))
    assert f"{path}: " in error_line(TokenDataset, data_dir, "train", 8)


def test_a_damaged_copy_is_refused(recorded, tmp_path):
    """In whatever order the files of a folder are copied."""
    data_dir, path = recorded
    path.write_bytes(path.read_bytes()[:-2] + b"\7\0")
    for last in "meta.json", "train_000001.bin":
        copy = tmp_path / f"{last} last"
        copy.mkdir()
        for source in sorted((tmp_path / "data").iterdir(), key=lambda source: source.name == last):
            (copy / source.name).write_bytes(source.read_bytes())
            time.sleep(0.02)
        assert "its tokens have changed" in error_line(TokenDataset, str(copy), "train", 8)


def test_only_shards_that_changed_are_read(recorded, monkeypatch):
    data_dir, path = recorded
    read = []
    monkeypatch.setattr(shards.zlib, "crc32", lambda shard, crc32=zlib.crc32: read.append(len(shard)) or crc32(shard))
    TokenDataset(data_dir, "train", 8)
    assert read == []
    path.write_bytes(path.read_bytes())
    TokenDataset(data_dir, "train", 8)
    assert read == [90]


def test_published_shards_are_found_and_are_gpt2s(tmp_path):
    write_shard(tmp_path / "d" / "fineweb_train_000002.bin", range(100, 150))
    write_shard(tmp_path / "d" / "fineweb_train_000001.bin", range(0, 100))
    write_shard(tmp_path / "d" / "fineweb_val_000000.bin", range(1000, 1030))
    assert TokenDataset(tmp_path / "d", "train", 49)[[0, 1, 2]][0][:, 0].tolist() == [0, 49, 100]
    assert TokenDataset(tmp_path / "d", "val", 10)[[1]][1].tolist() == [list(range(1011, 1021))]
    assert read_meta(tmp_path / "d")["tokenizer"] == "gpt2"


# ---------------------------------------------------------------------------------------------------
# rows

def test_rows_cover_every_token_but_the_dropped_ones_once(tmp_path):
    data_dir = counting_shards(tmp_path / "d[1]", 10, 3, 4, 25, 9)  # rows of 4 and a target after each: 2, 0, 0, 6, 2
    dataset = TokenDataset(data_dir, "train", 4)
    starts = [*range(0, 8, 4), *range(17, 41, 4), *range(42, 50, 4)]
    assert len(dataset) == len(starts) == 10
    assert (dataset.tokens, dataset.dropped_tokens) == (51, 51 - 40)
    idx, targets = dataset[np.arange(10)]
    assert idx.dtype == targets.dtype == np.int64 and idx.shape == targets.shape == (10, 4)
    assert idx.tolist() == [list(range(start, start + 4)) for start in starts]
    assert np.array_equal(targets, idx + 1)
    order = np.random.default_rng(0).permutation(10)
    assert np.array_equal(dataset[order][0], idx[order]) and np.array_equal(dataset[order][1], targets[order])


def test_max_seq_len_longer_than_every_shard_is_refused(tmp_path):
    """A row needs the token after it."""
    data_dir = counting_shards(tmp_path / "data", 10, 20)
    assert TokenDataset(data_dir, "train", 19)[[0]][1][0, -1] == 10 + 19
    error = error_line(TokenDataset, data_dir, "train", 20)
    assert "max_seq_len=20" in error and "20 tokens" in error


def test_a_folder_without_shards_is_refused(tmp_path):
    data_dir = counting_shards(tmp_path / "data", 100)
    assert "no val shards" in error_line(TokenDataset, data_dir, "val", 8)
    assert "data_dir=nowhere" in error_line(TokenDataset, "nowhere", "train", 8)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.json").write_text('{"tokenizer": "bytes", "vocab_size": 384}')
    dataset = TokenDataset(counting_shards(tmp_path / "data", 400), "train", 8)
    dataset[[46]]  # tokens 368 to 376
    error = error_line(dataset.__getitem__, [47])  # 376 to 384
    assert f"--data_dir={tmp_path / 'data'}" in error and "384" in error and "bytes" in error


def test_the_fingerprint_tells_shards_apart(tmp_path):
    def fingerprint(name, *shards):
        for i, tokens in enumerate(shards):
            write_shard(tmp_path / name / f"train_{i:06d}.bin", tokens)
        return TokenDataset(tmp_path / name, "train", 8).fingerprint

    a, b = np.arange(3000), np.arange(3000, 6000)
    first, last = np.where(a == 0, 7, a), np.where(b == 5999, 7, b)
    datasets = [[a, b], [first, b], [a, last], [b, a], [a, b[:-1]], [a], [a, b, b], [0 * a], [0 * a[1:]]]
    prints = [fingerprint(str(i), *shards) for i, shards in enumerate(datasets)]
    assert len(set(prints)) == len(prints) and fingerprint("copy", a, b) == prints[0]


# ---------------------------------------------------------------------------------------------------
# order and batches

def test_each_epoch_is_another_permutation_and_a_row_depends_on_its_number_alone():
    rows = sample_indices(range(300), 100, seed=5)
    epochs = rows.reshape(3, 100).tolist()
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs) and len(set(map(tuple, epochs))) == 3
    assert sample_indices(range(100), 100, seed=6).tolist() != epochs[0]
    epoch_permutation.cache_clear()
    assert [sample_indices([row], 100, seed=5)[0] for row in reversed(range(300))] == rows[::-1].tolist()
    assert sample_indices([299, 3, 150], 100, seed=5).tolist() == rows[[299, 3, 150]].tolist()
    assert sample_indices(range(3), 1, seed=5).tolist() == [0, 0, 0]


def test_any_number_of_ranks_sees_the_same_rows_and_resumes_by_rows_seen(tmp_path):
    dataset = TokenDataset(counting_shards(tmp_path / "data", 1000), "train", 8)
    expected = dataset[sample_indices(range(24), len(dataset), seed=3)]
    for world_size in (1, 2, 3):
        loaders = [BatchLoader(dataset, 2, 3, rank, world_size, CPU) for rank in range(world_size)]
        batches = [next(loaders[m % world_size]) for m in range(12)]  # micro-batch m is rank m % world_size's
        for name, rows in zip(("idx", "targets"), expected):
            assert torch.cat([batch[name] for batch in batches]).tolist() == rows.tolist()
        assert {loader.state_dict() for loader in loaders} == {24} and loaders[0].tokens == 24 * 8
    resumed = BatchLoader(dataset, 2, 3, 0, 1, CPU)
    resumed.peek()
    resumed.load_state_dict(22)
    assert resumed.peek()["idx"].tolist() == next(resumed)["idx"].tolist() == expected[0][22:].tolist()


class RowNumbers:
    """A source of a loader: the index of each row."""

    def __getitem__(self, indices):
        return {"number": np.asarray(indices)}


def test_sources_and_transforms_join_the_batch(tmp_path):
    dataset = TokenDataset(counting_shards(tmp_path / "data", 100), "train", 8)
    loader = BatchLoader(dataset, 2, 3, 0, 1, CPU)
    loader.sources.append(RowNumbers())
    loader.transforms.append(lambda batch: {"twice": 2 * batch["number"]})
    batch = next(loader)
    assert batch["number"].tolist() == sample_indices(range(2), len(dataset), seed=3).tolist()
    assert batch["twice"].tolist() == (2 * batch["number"]).tolist()


# ---------------------------------------------------------------------------------------------------
# nanoGPT's data: train.bin and val.bin, GPT-2 tokens without a header

def nanogpt_files(folder, **splits):
    for split, ids in splits.items():
        np.array(ids, dtype="<u2").tofile(folder / f"{split}.bin")
    return str(folder)


def test_nanogpts_files_are_read_as_one_shard_each(tmp_path, gpt2_vocabulary):
    data_dir = nanogpt_files(tmp_path, train=range(3000), val=range(50_000, 50_042))
    train, val = (TokenDataset(data_dir, split, 8) for split in ("train", "val"))
    assert (train.tokens, len(train), train.dropped_tokens, train.vocab_size) == (3000, 374, 8, 50304)
    assert train[[0, 373]][0][:, 0].tolist() == [0, 2984] and train[[373]][1][0, -1] == 2992
    assert len(val) == 5 and val[[0]][0].tolist() == [list(range(50_000, 50_008))]
    counting_shards(tmp_path, 100)
    assert TokenDataset(data_dir, "train", 8).tokens == 100  # shards come first
    assert TokenDataset(data_dir, "val", 8).fingerprint == val.fingerprint != train.fingerprint


@pytest.mark.parametrize("content", [b"", b"ab", b"abcde"])
def test_a_damaged_file_of_nanogpts_is_named(tmp_path, content):
    (tmp_path / "val.bin").write_bytes(content)
    error = error_line(TokenDataset, str(tmp_path), "val", 1)
    assert ("the longest val shard" if content == b"ab" else f"{tmp_path / 'val.bin'}: ") in error


def test_nanogpts_characters_are_prepared_again(tmp_path):
    data_dir = nanogpt_files(tmp_path, train=range(65))
    (tmp_path / "meta.pkl").touch()
    assert "--files=" in error_line(TokenDataset, data_dir, "train", 8)
