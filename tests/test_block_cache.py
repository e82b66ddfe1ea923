"""`BlockCache`: where keys and values are written, what is committed, and what the next forward sees."""

import pytest
import torch

from modeling_mrp.block_cache import BlockCache
from modeling_mrp.masks import CLEAN, PADDING, UNWRITTEN, TokenLayout


def group(rows, blocks, stream=CLEAN, size=2):
    """Mask fields of consecutive blocks [R, len(blocks) * size] in one stream."""
    block = torch.tensor(blocks).repeat_interleave(size).expand(rows, -1)
    zeros = torch.zeros_like(block)
    return TokenLayout(zeros, block, torch.full_like(block, stream), zeros)


def states(rows, length, value, heads=1, size=3):
    """Keys whose entries tell row and slot of writing: value + row + at / 100."""
    at = torch.arange(length) / 100 + torch.arange(rows)[:, None] + value
    return at[:, None, :, None].expand(rows, heads, length, size).clone()


def write(cache, length, value, layer=0):
    keys, values = cache.update(states(2, length, value), states(2, length, -value), layer)
    return keys[:, 0, :, 0], values[:, 0, :, 0]


def test_each_row_writes_after_its_own_length():
    cache = BlockCache(2, capacity=12, block_size=2, device=torch.device("cpu"))
    cache.assign_slots(group(2, [0, 1]))
    write(cache, 4, 10.0)
    cache.commit(torch.tensor([2, 4]), longest=4)
    assert cache.lengths.tolist() == [2, 4] and cache.get_seq_length() == 4

    cache.assign_slots(group(2, [2], stream=1))
    keys, values = write(cache, 2, 50.0)
    assert keys.shape == (2, 6)  # the longest row and the forward's width, not the capacity
    torch.testing.assert_close(keys[0, :4], torch.tensor([10.0, 10.01, 50.0, 50.01]))
    torch.testing.assert_close(keys[1], torch.tensor([11.0, 11.01, 11.02, 11.03, 51.0, 51.01]))
    torch.testing.assert_close(values[0, :4], torch.tensor([-10.0, -9.99, -50.0, -49.99]))


def test_the_next_forward_overwrites_what_was_not_committed():
    cache = BlockCache(2, capacity=12, block_size=2, device=torch.device("cpu"))
    cache.assign_slots(group(2, [0]))
    write(cache, 2, 10.0)
    cache.commit(torch.tensor([2, 2]), longest=2)
    for value in (20.0, 30.0):
        cache.assign_slots(group(2, [1, 1], stream=1))
        keys, _ = write(cache, 4, value)
        torch.testing.assert_close(keys[0], torch.tensor([10.0, 10.01, *(value + at / 100 for at in range(4))]))


def test_layers_keep_their_own_entries():
    cache = BlockCache(2, capacity=4, block_size=2, device=torch.device("cpu"))
    cache.assign_slots(group(2, [0]))
    first, _ = write(cache, 2, 10.0, layer=0)
    second, _ = write(cache, 2, 20.0, layer=7)
    assert first[0, 0] == 10.0 and second[0, 0] == 20.0


def test_the_key_layout_separates_committed_scratch_and_unwritten_slots():
    cache = BlockCache(2, capacity=12, block_size=2, device=torch.device("cpu"))
    cache.assign_slots(group(2, [0, 1, 2]))
    write(cache, 6, 10.0)
    cache.commit(torch.tensor([2, 6]), longest=6)
    queries = group(2, [3], stream=1)._replace(segment=torch.tensor([[0, 0], [PADDING, PADDING]]))
    keys = cache.assign_slots(queries)
    assert keys.segment[0].tolist() == [0, 0, 0, 0, *[UNWRITTEN] * 4]
    assert keys.segment[1].tolist() == [0] * 6 + [PADDING] * 2
    assert keys.block[0, :4].tolist() == [0, 0, 3, 3] and keys.block[1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert keys.stream[0, :4].tolist() == [CLEAN, CLEAN, 1, 1]


def test_a_forward_that_does_not_fit_is_refused():
    cache = BlockCache(1, capacity=5, block_size=2, device=torch.device("cpu"))
    cache.assign_slots(group(1, [0, 1]))
    cache.commit(torch.tensor([2]), longest=2)
    with pytest.raises(ValueError, match="BlockCache holds 5 slots per row, but 6 are needed"):
        cache.assign_slots(group(1, [1, 2]))


def test_dropping_rows_keeps_the_others_entries():
    cache = BlockCache(2, capacity=8, block_size=2, device=torch.device("cpu"))
    cache.assign_slots(group(2, [0, 1]))
    write(cache, 4, 10.0)
    cache.commit(torch.tensor([2, 4]), longest=4)
    cache.keep_rows(torch.tensor([1]))
    assert cache.lengths.tolist() == [4]
    cache.assign_slots(group(1, [2], stream=1))
    keys, _ = cache.update(states(1, 2, 50.0), states(1, 2, -50.0), 0)
    torch.testing.assert_close(keys[0, 0, :, 0], torch.tensor([11.0, 11.01, 11.02, 11.03, 50.0, 50.01]))
