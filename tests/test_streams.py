"""Streams without an end, and the noise of their rows."""

from itertools import islice

import pytest
import torch
from datasets import Dataset

from mrp_trainer.data.collator import MRPCollator
from mrp_trainer.data.rows import NUMBER_BITS, prepare_dataset
from mrp_trainer.data.streams import EndlessStream


def stream(count):
    rows = [
        {"input_ids": [5 + i] * 8, "answer_mask": [1] * 8, "lengths": [8], "sample_ids": [i << 20]}
        for i in range(count)
    ]
    return (
        Dataset.from_list(rows).to_iterable_dataset()
        if rows
        else Dataset.from_list([{"a": 1}]).to_iterable_dataset().take(0)
    )


def test_every_pass_has_every_row_once_in_another_order_and_its_number():
    rows = list(islice(EndlessStream(stream(6).shuffle(seed=0, buffer_size=6)), 18))
    assert [row["epoch"] for row in rows] == [0] * 6 + [1] * 6 + [2] * 6
    ids = [row["sample_ids"][0] >> 20 for row in rows]
    passes = [ids[:6], ids[6:12], ids[12:]]
    assert all(sorted(one) == list(range(6)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3


def test_second_iteration_yields_the_same_rows():
    endless = EndlessStream(stream(6).shuffle(seed=0, buffer_size=6))
    first = list(islice(endless, 15))
    assert list(islice(endless, 15)) == first


def test_epoch_of_a_row_changes_its_noise_like_the_epoch_of_the_collator():
    row = next(iter(stream(1)))
    options = {"block_size": 4, "mask_token_id": 3, "steps": 2}
    of_row, of_collator = MRPCollator(**options), MRPCollator(**options)
    masks = []
    for epoch in range(4):
        of_collator.set_epoch(epoch)
        masks.append(of_row([{**row, "epoch": epoch}])["reveal_step"])
        assert torch.equal(masks[-1], of_collator([row])["reveal_step"])
    assert any(not torch.equal(masks[0], mask) for mask in masks)


def test_stream_without_rows_is_refused():
    with pytest.raises(ValueError, match="without rows"):
        next(iter(EndlessStream(stream(0))))


def test_worker_without_a_shard_yields_nothing():
    loader = torch.utils.data.DataLoader(EndlessStream(stream(3)), batch_size=None, num_workers=2)
    rows = list(islice(loader, 7))
    assert [row["epoch"] for row in rows] == [0, 0, 0, 1, 1, 1, 2]
    assert [row["sample_ids"][0] >> 20 for row in rows] == [0, 1, 2, 0, 1, 2, 0]


def test_sample_ids_of_a_stream_do_not_depend_on_which_worker_reads_it(word_tokenizer):
    """Every worker counts its rows from 0: with that as the id, rows of different workers shared their noise."""
    texts = [{"text": f"{a} plus {b}"} for a in ("one", "two", "three") for b in ("four", "five")]
    data = Dataset.from_list(texts).to_iterable_dataset(num_shards=2)
    rows = prepare_dataset(data, word_tokenizer, sequence_length=8, packing=False)
    loaders = [torch.utils.data.DataLoader(rows, batch_size=None, num_workers=workers) for workers in (0, 2)]
    alone, shared = ({tuple(row["input_ids"]): row["sample_ids"][0] for row in loader} for loader in loaders)
    assert alone == shared and len(alone) == len(set(alone.values())) == len(texts)


def test_sample_id_of_a_stream_is_a_fixed_hash_of_its_tokens(word_tokenizer):
    data = Dataset.from_list([{"text": "one plus two"}, {"text": "one two three four"}]).to_iterable_dataset()
    rows = list(prepare_dataset(data, word_tokenizer, sequence_length=4, packing=False))
    assert [len(row["input_ids"]) for row in rows] == [4, 4, 1]
    first, long, rest = (row["sample_ids"][0] for row in rows)
    # echo -n "[6, 11, 7, 1]" | b2sum -l 64; 43 bits of it
    assert first == 0xAB2365784F6E0DC6 >> 21 << 2 * NUMBER_BITS
    assert rest == long + 1 and long % 2 ** (2 * NUMBER_BITS) == 0
    assert max(first, long) < 2**63
