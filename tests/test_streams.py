"""Streams that do not end."""

from itertools import islice

import pytest
import torch
from datasets import Dataset

from trainer.data import MRPCollator
from trainer.streams import EndlessStream


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


def test_every_pass_holds_every_row_once_in_another_order_and_says_which_it_is():
    rows = list(islice(EndlessStream(stream(6).shuffle(seed=0, buffer_size=6)), 18))
    assert [row["epoch"] for row in rows] == [0] * 6 + [1] * 6 + [2] * 6
    ids = [row["sample_ids"][0] >> 20 for row in rows]
    passes = [ids[:6], ids[6:12], ids[12:]]
    assert all(sorted(one) == list(range(6)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3


def test_iterating_again_begins_again():
    endless = EndlessStream(stream(6).shuffle(seed=0, buffer_size=6))
    first = list(islice(endless, 15))
    assert list(islice(endless, 15)) == first


def test_noise_of_a_row_follows_its_epoch_as_it_follows_the_collator_s():
    row = next(iter(stream(1)))
    options = {"block_size": 4, "mask_token_id": 3, "steps": 2}
    of_row, of_collator = MRPCollator(**options), MRPCollator(**options)
    masks = []
    for epoch in range(4):
        of_collator.set_epoch(epoch)
        masks.append(of_row([{**row, "epoch": epoch}])["reveal_step"])
        assert torch.equal(masks[-1], of_collator([row])["reveal_step"])
    assert any(not torch.equal(masks[0], mask) for mask in masks)


def test_stream_without_a_row_is_refused():
    with pytest.raises(ValueError, match="without a row"):
        next(iter(EndlessStream(stream(0))))
