"""Forwards on the cache equal forwards over whole rows, for backbone and head, with rows at different lengths."""

import pytest
import torch

from modeling_mrp.block_state import BlockState
from modeling_mrp.cached_forwards import HEAD, Candidates
from modeling_mrp.decoding import Decoder
from modeling_mrp.options import DecodingOptions
from modeling_mrp.sampling import Sampler

CLOSE = {"atol": 1e-4, "rtol": 1e-5}


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


def run_backbone(decoder, blocks, live):
    """Hidden states of candidates [R, C, B] of which all may be live in rows that have pending clean blocks."""
    count = blocks.shape[1]
    candidates = Candidates(blocks, live, torch.arange(1, count + 1), torch.zeros_like(live), most_beside_clean=count)
    hidden = decoder.forwards.backbone(decoder.state, candidates)
    decoder.state.synchronise()  # as the engine does at the end of every round
    return hidden


def check_candidates_and_head(model, decoder, rows, seed):
    """One packed forward of 3 candidates per row, then the head on two states: both against whole rows."""
    blocks = random_blocks(model, (len(rows), 3, 4), seed)
    live = torch.ones(len(rows), 3, dtype=torch.bool)
    live[0, 2] = False  # rows draft chains of different length
    hidden = run_backbone(decoder, blocks, live)
    states = random_blocks(model, (len(rows), 2, 4), seed + 100)
    before = hidden[:, :1].expand(-1, 2, -1, -1)
    corrected = decoder.forwards.head(decoder.state, states, before, torch.ones(len(rows), 2).bool())
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
        hidden = run_backbone(decoder, blocks, live)
        for index in (0, 2, 3):
            whole = torch.tensor([rows[index] + blocks[index, 1].tolist()])
            torch.testing.assert_close(hidden[index, 1], model(whole).last_hidden_state[0, -4:], **CLOSE)
    assert decoder.state.forwards[:, 0].tolist() == [2, 1, 2, 2]


def test_the_head_reads_the_blocks_that_it_has_skipped_and_only_in_rows_that_draft(tiny_model, rows):
    """Rows go on by different numbers of blocks while the head does not run, up to the end of the cache."""
    model = tiny_model(num_mrp_layers=2)
    decoder, rows = decoder_at(model, rows), [list(row) for row in rows]
    state, live = decoder.state, torch.ones(4, 1, dtype=torch.bool)
    with torch.no_grad():
        for number, moving in enumerate(([True, False, True, False], [True, True, False, False])):
            run_backbone(decoder, random_blocks(model, (4, 1, 4), number), live)
            block = torch.randint(4, 61, (4, 4), generator=torch.Generator().manual_seed(number))
            state.write(block, torch.tensor(moving), torch.zeros_like(block))
            state.advance()
            state.synchronise()
            for index, moves in enumerate(moving):
                rows[index] += block[index].tolist() if moves else []
        blocks = random_blocks(model, (4, 1, 4), 7)
        hidden = run_backbone(decoder, blocks, live)
        assert state.unread.tolist() == [4, 2, 1, 3] and (state.max_unread, state.unread_blocks) == (4, 10)
        for drafting in ([True, False, True, True], [True, True, False, True]):
            states = random_blocks(model, (4, 2, 4), 8)
            drafts = torch.tensor(drafting)[:, None].expand(-1, 2)
            corrected = decoder.forwards.head(state, states, hidden.expand(-1, 2, -1, -1), drafts)
            state.synchronise()
            for index in torch.tensor(drafting).nonzero()[:, 0].tolist():
                before = torch.tensor([rows[index] + blocks[index, 0].tolist()])
                for number in range(2):
                    after = torch.tensor([[rows[index] + states[index, number].tolist()]])
                    expected = model(before, revealed_ids=after).corrected_hidden_states[0, 0, -4:]
                    torch.testing.assert_close(corrected[index, number], expected, **CLOSE)
    assert state.unread.tolist() == [0, 0, 0, 0]
    assert state.forwards[:, HEAD].tolist() == [2, 1, 1, 2]
