"""Noise and reveals: distributions, seeds, and the golden loss weights."""

import pytest
import torch
from safetensors.torch import load_file

from mrp_trainer.data.corruption import (
    draw_noise,
    draw_reveals,
    draw_visit,
    loss_normaliser,
    loss_weights,
    order_reveals,
    revealed_states,
    sample_rng,
)

MASK = 99


def blocks(length, size):
    return torch.arange(length) // size


def test_noise_is_a_function_of_seed_sample_and_epoch():
    answer, block = torch.ones(64, dtype=torch.bool), blocks(64, 8)

    def draw(*key):
        masked, p = draw_noise(answer, block, sample_rng(*key))
        return masked, draw_reveals(masked, block, 3, sample_rng(*key)), p

    for again, first in zip(draw(1, 2, 3), draw(1, 2, 3), strict=True):
        assert torch.equal(again, first)
    others = [draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4)]
    assert all(not torch.equal(other[0], draw(1, 2, 3)[0]) for other in others)


def test_masked_share_follows_p_and_p_is_uniform_between_eps_and_one():
    answer, block = torch.ones(500, dtype=torch.bool), blocks(500, 8)
    shares, levels = [], []
    for sample in range(400):
        masked, p = draw_noise(answer, block, sample_rng(0, sample, 0), eps=0.1)
        assert (p == p[0]).all()
        shares.append(masked.float().mean())
        levels.append(p[0])
    shares, levels = torch.stack(shares), torch.stack(levels)
    # A share of 500 draws has a standard deviation of at most 0.023; the mean of 400 uniforms one of 0.013.
    assert ((shares - levels).abs() < 0.12).all()
    assert levels.min() >= 0.1
    assert levels.max() <= 1
    assert abs(levels.mean() - 0.55) < 0.06


def test_prompt_tokens_are_never_masked_and_at_least_one_answer_token_is():
    answer = torch.tensor([False] * 20 + [True] * 4)
    for sample in range(300):
        masked, _ = draw_noise(answer, blocks(24, 8), sample_rng(0, sample, 0))
        assert not masked[:20].any()
        assert masked.any()


def test_nothing_is_masked_without_an_answer():
    masked, p = draw_noise(torch.zeros(9, dtype=torch.bool), blocks(9, 4), sample_rng(0, 0, 0))
    assert not masked.any()
    assert p.shape == (9,)


def test_noise_level_per_block_differs_between_blocks_and_not_within():
    _, p = draw_noise(torch.ones(32, dtype=torch.bool), blocks(32, 8), sample_rng(0, 0, 0), per_block=True)
    levels = p.view(4, 8)
    assert (levels == levels[:, :1]).all()
    assert len(levels[:, 0].unique()) == 4


@pytest.mark.parametrize("counts", [(1,), (2,), (3,), (1, 3)])
def test_each_step_reveals_n_tokens_of_every_block_or_all_that_are_left(counts):
    block, steps = blocks(40, 8), 3
    for sample in range(50):
        rng = sample_rng(0, sample, 0)
        masked = torch.from_numpy(rng.random(40)) < 0.6
        reveal_step = draw_reveals(masked, block, steps, rng, counts=counts)
        assert torch.equal(reveal_step > 0, masked)
        for b in range(5):
            left = int(masked[block == b].sum())
            for step in range(1, steps + 1):
                shown = int((reveal_step[block == b] == step).sum())
                assert shown in {min(n, left) for n in counts}
                left -= shown


def test_each_masked_position_is_equally_likely_to_be_revealed():
    masked = torch.tensor([True, False, True, True])
    first = torch.zeros(4)
    for sample in range(3000):
        first += draw_reveals(masked, blocks(4, 4), 1, sample_rng(5, sample, 0)) == 1
    # 3000 draws at 1/3: standard deviation 26.
    assert first[1] == 0
    assert ((first[[0, 2, 3]] - 1000).abs() < 110).all()


def test_order_reveals_shows_the_highest_scores_first_in_each_block():
    reveal_step = torch.tensor([2, 0, 1, 2, 1, 1, 0, 3])
    block = blocks(8, 4)
    score = torch.tensor([0.9, 1.0, 0.1, 0.5, 0.2, 0.3, 1.0, 0.8])
    assert order_reveals(reveal_step, block, score).tolist() == [1, 0, 2, 2, 3, 1, 0, 1]


def test_order_reveals_keeps_the_order_of_positions_with_equal_scores():
    reveal_step, block = torch.tensor([1, 2, 0, 2, 1, 0]), torch.tensor([0, 0, 0, 1, 1, 1])
    assert order_reveals(reveal_step, block, torch.zeros(6)).tolist() == [1, 2, 0, 1, 2, 0]


def test_states_mask_exactly_what_is_not_revealed_yet():
    clean = torch.arange(6)[None]
    reveal_step = torch.tensor([[0, 1, 2, 3, 0, 1]])
    noisy, states = revealed_states(clean, reveal_step, 2, MASK)
    assert noisy.tolist() == [[0, MASK, MASK, MASK, 4, MASK]]
    assert states.tolist() == [[[0, 1, MASK, MASK, 4, 5], [0, 1, 2, MASK, 4, 5]]]


@pytest.mark.parametrize("name", ["block4", "block8-tied"])
def test_weights_and_normaliser_give_the_golden_loss(name):
    golden = load_file(f"tests/golden/{name}/expected.safetensors")
    masked, reveal = golden["train.masked"], golden["train.reveal"]
    answer = golden["train.labels"] != -100
    reveal_step = masked * (2 - reveal)
    p_mask = golden["train.p_mask"][:, None].expand(answer.shape)
    weight = loss_weights(reveal_step, p_mask, 1)
    normaliser = loss_normaliser(reveal_step, p_mask, answer, 1)
    torch.testing.assert_close(normaliser.sum(), golden["train.normaliser"], rtol=1e-6, atol=0)
    loss = (weight[:, 0] * golden["train.kl_per_token"]).sum() / normaliser.sum()
    torch.testing.assert_close(loss, golden["train.loss"], rtol=1e-5, atol=0)


def test_normaliser_counts_reveals_of_all_steps_so_far():
    reveal_step = torch.tensor([[0, 0, 1, 2, 3]])
    answer = torch.tensor([[False, True, True, True, True]])
    p_mask = torch.full((1, 5), 0.5)
    normaliser = loss_normaliser(reveal_step, p_mask, answer, 2)
    assert normaliser.tolist() == [[4 - 2, 4 - 4]]
    assert loss_weights(reveal_step, p_mask, 2).tolist() == [[[0, 0, 0, 2, 2], [0, 0, 0, 0, 2]]]


def test_a_visit_is_one_state_of_each_block_followed_by_the_next_reveals_of_decoding():
    visited = torch.tensor([-1, -1, 1, 0, 3, 1, 0, 2, 0, -1])  # two prompt tokens; the last is never revealed
    answer, block = torch.arange(10) > 1, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    seen = set()
    for sample in range(200):
        reveal_step, p = draw_visit(answer, block, visited, 2, sample_rng(0, sample, 0))
        masked = reveal_step > 0
        assert not masked[:2].any() and (p[~masked] == 1).all()
        assert masked[8:].all() and reveal_step[8:].tolist() == [1, 3]
        for number, answers in ((0, 2), (1, 4)):
            inside = masked & (block == number)
            now = int(visited[inside].min())
            assert torch.equal(inside, answer & (block == number) & (visited >= now))
            assert torch.equal(reveal_step[inside], (visited[inside] - now + 1).clamp(max=3))
            torch.testing.assert_close(p[inside], torch.full_like(p[inside], int(inside.sum()) / answers))
            seen.add((number, now))
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)}
