"""`BlockState`: which block each row is at, when a row ends, and taking and putting back a subset of the rows."""

import torch

from modeling_mrp.block_state import BlockState

MASK, EOS, SIZE = 3, 1, 4


def make_state(prompts, max_new_tokens=6):
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    return BlockState(ids, lengths, max_new_tokens, SIZE, MASK, torch.tensor([EOS]), depth=2)


def reveal(state, blocks):
    """Write the rows' current blocks as one denoising step would, and move on."""
    blocks = torch.tensor(blocks)
    state.write(blocks, state.running, torch.zeros_like(blocks))
    state.advance()
    state.synchronise()


def test_a_row_starts_at_the_block_that_holds_its_first_new_token():
    state = make_state([[5, 6], [5, 6, 7, 8], [5, 6, 7, 8, 9]])
    assert state.starts.tolist() == [0, 4, 4] and state.pending.tolist() == [0, 1, 1]
    assert state.block.tolist() == [[5, 6, MASK, MASK], [MASK] * 4, [9, MASK, MASK, MASK]]
    assert not state.revocable.any()
    assert (state.running_rows, state.opening_rows, state.max_pending, state.longest_start) == (3, 3, 1, 4)


def test_a_complete_block_becomes_pending_and_rows_move_on_independently():
    state = make_state([[5, 6], [5, 6, 7, 8]])
    reveal(state, [[5, 6, 10, 11], [12, MASK, 13, 14]])
    assert state.starts.tolist() == [4, 4] and state.pending.tolist() == [1, 1]
    assert state.running.tolist() == [True, True]
    ids, positions, real = state.pending_clean_blocks()
    assert ids.tolist() == [[[5, 6, 10, 11]], [[5, 6, 7, 8]]] and positions[0].tolist() == [[0, 1, 2, 3]]
    assert real.all()
    assert state.finished_tokens(pad_token_id=0).tolist() == [[5, 6, 10, 11], [5, 6, 7, 8]]


def test_a_row_ends_at_its_end_of_text_or_at_its_limit_although_masks_are_left():
    state = make_state([[5, 6], [5, 6, 7, 8]], max_new_tokens=2)
    reveal(state, [[5, 6, EOS, MASK], [9, 10, MASK, MASK]])
    assert state.running.tolist() == [False, False] and state.running_rows == 0


def test_a_mask_before_the_end_of_text_keeps_the_row_running():
    state = make_state([[5], [5]])
    reveal(state, [[5, MASK, EOS, MASK], [5, EOS, MASK, MASK]])
    assert state.running.tolist() == [True, False]


def test_an_end_of_text_in_the_prompt_does_not_end_the_row():
    state = make_state([[5, EOS]])
    reveal(state, [[5, EOS, 9, MASK]])
    assert state.running.tolist() == [True] and state.starts.tolist() == [0]


def test_writing_records_how_each_changed_token_was_revealed():
    state = make_state([[5, 6], [5, 6]])
    block = torch.tensor([[5, 6, 9, MASK], [5, 6, 9, MASK]])
    state.write(block, torch.tensor([True, False]), torch.full((2, SIZE), 7), by_head=True)
    assert state.block.tolist() == [[5, 6, 9, MASK], [5, 6, MASK, MASK]]
    assert state.reveal_steps[:, :SIZE].tolist() == [[-1, -1, 7, -1], [-1] * 4]
    assert state.revealed_by_head.sum() == 1 and state.revealed_by_head[0, 2]


def test_map_reaches_every_tensor_that_has_a_row_per_row():
    state = make_state([[5, 6], [5, 6, 7], [5]])
    state.hidden, state.scores = torch.zeros(3, SIZE, 2), torch.zeros(3, state.width, 11)
    taken = state.map(lambda tensor: tensor[torch.tensor([2, 0])])
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor) and name != "eos_token_ids":
            assert torch.equal(vars(taken)[name], value[[2, 0]]), name


def test_a_subset_changes_independently_until_it_is_put_back():
    state = make_state([[5, 6], [5, 6, 7], [5]])
    rows = torch.tensor([0, 2])
    subset = state.take(rows)
    subset.forwards[:, 0] += 1
    reveal(subset, [[5, 6, 10, 11], [5, 12, 13, EOS]])
    assert state.forwards.eq(0).all() and state.block[0].tolist() == [5, 6, MASK, MASK]
    state.put(rows, subset)
    assert state.forwards[:, 0].tolist() == [1, 0, 1]
    assert state.tokens[:, :SIZE].tolist() == [[5, 6, 10, 11], [5, 6, 7, MASK], [5, 12, 13, EOS]]
    assert state.starts.tolist() == [4, 0, 0] and state.running.tolist() == [True, True, False]
