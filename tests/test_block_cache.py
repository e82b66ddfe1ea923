"""Cached forwards equal forwards over whole rows, for backbone and head, with rows at different lengths."""

import pytest
import torch

from modeling_mrp.block_cache import BlockCache
from modeling_mrp.block_state import BlockState
from modeling_mrp.decoding import Candidates, Decoder
from modeling_mrp.masks import CLEAN, PADDING, UNWRITTEN, Tokens
from modeling_mrp.options import DecodingOptions
from modeling_mrp.sampling import Sampler

CLOSE = {"atol": 1e-4, "rtol": 1e-5}


def group(rows, blocks, stream=CLEAN, size=2):
    """Mask fields of consecutive blocks [R, len(blocks) * size] in one stream."""
    block = torch.tensor(blocks).repeat_interleave(size).expand(rows, -1)
    zeros = torch.zeros_like(block)
    return Tokens(zeros, block, torch.full_like(block, stream), zeros)


def states(rows, length, value, heads=1, size=3):
    """Keys whose entries tell row and slot of writing: value + row + at / 100."""
    at = torch.arange(length) / 100 + torch.arange(rows)[:, None] + value
    return at[:, None, :, None].expand(rows, heads, length, size).clone()


def write(cache, length, value, layer=0):
    keys, values = cache.update(states(2, length, value), states(2, length, -value), layer)
    return keys[:, 0, :, 0], values[:, 0, :, 0]


def test_each_row_writes_behind_its_own_length():
    cache = BlockCache(2, capacity=12, block_size=2, device=torch.device("cpu"))
    cache.place(group(2, [0, 1]))
    write(cache, 4, 10.0)
    cache.commit(torch.tensor([2, 4]), longest=4)
    assert cache.lengths.tolist() == [2, 4] and cache.get_seq_length() == 4

    cache.place(group(2, [2], stream=1))
    keys, values = write(cache, 2, 50.0)
    assert keys.shape == (2, 6)  # the longest row and the forward's width, not the capacity
    torch.testing.assert_close(keys[0, :4], torch.tensor([10.0, 10.01, 50.0, 50.01]))
    torch.testing.assert_close(keys[1], torch.tensor([11.0, 11.01, 11.02, 11.03, 51.0, 51.01]))
    torch.testing.assert_close(values[0, :4], torch.tensor([-10.0, -9.99, -50.0, -49.99]))


def test_what_was_not_committed_is_written_over():
    cache = BlockCache(2, capacity=12, block_size=2, device=torch.device("cpu"))
    cache.place(group(2, [0]))
    write(cache, 2, 10.0)
    cache.commit(torch.tensor([2, 2]), longest=2)
    for value in (20.0, 30.0):
        cache.place(group(2, [1, 1], stream=1))
        keys, _ = write(cache, 4, value)
        torch.testing.assert_close(keys[0], torch.tensor([10.0, 10.01, *(value + at / 100 for at in range(4))]))


def test_layers_keep_their_own_entries():
    cache = BlockCache(2, capacity=4, block_size=2, device=torch.device("cpu"))
    cache.place(group(2, [0]))
    first, _ = write(cache, 2, 10.0, layer=0)
    second, _ = write(cache, 2, 20.0, layer=7)
    assert first[0, 0] == 10.0 and second[0, 0] == 20.0


def test_keys_tell_committed_scratch_and_unwritten_slots_apart():
    cache = BlockCache(2, capacity=12, block_size=2, device=torch.device("cpu"))
    cache.place(group(2, [0, 1, 2]))
    write(cache, 6, 10.0)
    cache.commit(torch.tensor([2, 6]), longest=6)
    queries = group(2, [3], stream=1)._replace(segment=torch.tensor([[0, 0], [PADDING, PADDING]]))
    keys = cache.place(queries)
    assert keys.segment[0].tolist() == [0, 0, 0, 0, *[UNWRITTEN] * 4]
    assert keys.segment[1].tolist() == [0] * 6 + [PADDING] * 2
    assert keys.block[0, :4].tolist() == [0, 0, 3, 3] and keys.block[1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert keys.stream[0, :4].tolist() == [CLEAN, CLEAN, 1, 1]


def test_a_forward_that_does_not_fit_is_refused():
    cache = BlockCache(1, capacity=5, block_size=2, device=torch.device("cpu"))
    cache.place(group(1, [0, 1]))
    cache.commit(torch.tensor([2]), longest=2)
    with pytest.raises(ValueError, match="BlockCache holds 5 slots per row, but 6 are needed"):
        cache.place(group(1, [1, 2]))


# -- the engine's cached forwards against forward() over whole rows


def decoder_at(model, rows, mode="direct", steps=3):
    """A decoder whose rows (clean ids, multiples of the block size) are prompts; the next block is all masked."""
    size = model.config.block_size
    lengths = torch.tensor([len(row) for row in rows])
    prompts = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for index, row in enumerate(rows):
        prompts[index, : len(row)] = torch.tensor(row)
    options = DecodingOptions.resolve({"mrp_mode": mode, "mrp_steps": steps}, model.config)
    eos = torch.empty(0, dtype=torch.long)
    state = BlockState(prompts, lengths, 3 * size, size, model.config.mask_token_id, eos, steps)
    return Decoder(model, state, options, Sampler(model.config.mask_token_id, [], []))


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 61, (n,), generator=generator).tolist() for n in (8, 4, 0, 12)]


def random_blocks(model, shape, seed):
    """States of a block: some tokens revealed, some masked."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 61, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, model.config.mask_token_id, ids)


def check_candidates_and_head(model, decoder, rows, seed):
    """One packed forward of 3 candidates per row, then the head on two states: both against whole rows."""
    blocks = random_blocks(model, (len(rows), 3, 4), seed)
    live = torch.ones(len(rows), 3, dtype=torch.bool)
    live[0, 2] = False  # rows draft chains of different length
    hidden = decoder.forward_candidates(Candidates(blocks, live, torch.arange(1, blocks.shape[1] + 1)))
    states = random_blocks(model, (len(rows), 2, 4), seed + 100)
    corrected = decoder.corrected_hidden(states, hidden[:, :1].expand(-1, 2, -1, -1), torch.ones(len(rows), 2).bool())
    for index, row in enumerate(rows):
        for candidate in range(3):
            if not live[index, candidate]:
                continue
            whole = torch.tensor([row + blocks[index, candidate].tolist()])
            torch.testing.assert_close(hidden[index, candidate], model(whole).last_hidden_state[0, -4:], **CLOSE)
        before = torch.tensor([row + blocks[index, 0].tolist()])
        for number in range(2):
            after = torch.tensor([[row + states[index, number].tolist()]])
            expected = model(before, revealed_ids=after).corrected_hidden_states[0, 0, -4:]
            torch.testing.assert_close(corrected[index, number], expected, **CLOSE)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_cached_backbone_and_head_equal_whole_rows(tiny_model, rows, implementation):
    """Over three rounds with rows that go on to their next block at different times."""
    model = tiny_model(num_mrp_layers=2)
    model.set_attn_implementation(implementation)
    decoder, rows = decoder_at(model, rows), [list(row) for row in rows]
    with torch.no_grad():
        for round_number, moving in enumerate(([True, False, True, False], [True, True, False, True], [True] * 4)):
            check_candidates_and_head(model, decoder, rows, seed=10 * round_number)
            check_candidates_and_head(model, decoder, rows, seed=10 * round_number + 1)  # over the same scratch
            block = torch.randint(4, 61, (4, 4), generator=torch.Generator().manual_seed(round_number))
            decoder.state.write(block, torch.tensor(moving), torch.zeros_like(block))
            decoder.state.advance()
            decoder.state.synchronise()
            for index, moves in enumerate(moving):
                rows[index] += block[index].tolist() if moves else []
    assert decoder.cache.lengths.tolist() == [16, 8, 4, 16]  # no row's current block, and no forward only to store


def test_a_row_that_stopped_does_not_disturb_the_others(tiny_model, rows):
    model = tiny_model()
    decoder = decoder_at(model, rows)
    with torch.no_grad():
        check_candidates_and_head(model, decoder, rows, seed=0)
        decoder.state.running[1] = False
        decoder.state.synchronise()
        blocks = random_blocks(model, (4, 2, 4), 5)
        live = decoder.state.running[:, None].expand(-1, 2).clone()
        hidden = decoder.forward_candidates(Candidates(blocks, live, torch.arange(1, blocks.shape[1] + 1)))
        for index in (0, 2, 3):
            whole = torch.tensor([rows[index] + blocks[index, 1].tolist()])
            torch.testing.assert_close(hidden[index, 1], model(whole).last_hidden_state[0, -4:], **CLOSE)
    assert decoder.state.forwards[:, 0].tolist() == [2, 1, 2, 2]
