"""Noise and reveal: what is masked, what each step reveals, and how each position weighs in the loss.

One integer per position says it all. ``reveal_step`` is 0 where a token was never masked, k in 1..K where reveal k
shows it, and K + 1 where it stays masked to the end. The noisy ids, the K revealed states, the loss weights and the
normaliser all follow from it.
"""

import numpy as np
import torch
from torch import Tensor


def sample_rng(seed: int, sample: int, epoch: int) -> np.random.Generator:
    """Random numbers that depend on (seed, sample, epoch) and on nothing else: not on batch size, order or worker."""
    return np.random.default_rng((seed, sample, epoch))


def draw_noise(
    answer: Tensor, block: Tensor, rng: np.random.Generator, *, eps: float = 1e-3, per_block: bool = False
) -> tuple[Tensor, Tensor]:
    """Mask each answer token of one sample with probability p = (1 - eps) u + eps.

    Args:
        answer: bool [S], the tokens that may be masked.
        block: int64 [S], the block of each token, counted from 0.
        eps: lower end of p.
        per_block: draw one p for each block instead of one for the sample.

    Returns:
        masked bool [S], with at least one token set when there is an answer; p float32 [S].
    """
    blocks = int(block[-1]) + 1 if len(block) else 0
    u = rng.random(max(blocks, 1))
    p = torch.from_numpy((1 - eps) * u + eps).float()
    p = p[block] if per_block else p[:1].expand(len(block)).clone()
    masked = answer & (torch.from_numpy(rng.random(len(answer))).float() < p)
    if answer.any() and not masked.any():
        candidates = answer.nonzero().squeeze(-1)
        masked[candidates[int(rng.integers(len(candidates)))]] = True
    return masked, p


def draw_reveals(
    masked: Tensor, block: Tensor, steps: int, rng: np.random.Generator, *, counts: tuple[int, ...] = (1,)
) -> Tensor:
    """Choose at random which masked tokens of one sample each of ``steps`` reveals shows.

    Every block reveals n of its masked tokens at a step, or all that are left; n is drawn from ``counts`` for each
    block and step.

    Args:
        masked: bool [S].
        block: int64 [S], the block of each token, counted from 0.

    Returns:
        reveal_step int64 [S], see the head of this file.
    """
    blocks = int(block[-1]) + 1 if len(block) else 0
    drawn = torch.from_numpy(rng.choice(np.asarray(counts), size=(blocks, steps)))
    shown = drawn.cumsum(-1)  # [blocks, K] tokens shown up to each step
    score = torch.from_numpy(rng.random(len(masked)))
    rank = _rank_in_block(masked, block, score)
    reveal_step = 1 + (rank[:, None] >= shown[block]).sum(-1)
    return torch.where(masked, reveal_step, 0)


def draw_visit(
    answer: Tensor, block: Tensor, visited: Tensor, steps: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Choose, for each block of one sample, one of the states that decoding visited; the next ones follow.

    Args:
        answer: bool [S]; block: int64 [S], the block of each token, counted from 0.
        visited: int64 [S], the denoising step of its block at which each answer token was revealed, -1: never.

    Returns:
        reveal_step int64 [S], see the head of this file; p float32 [S], the share of its block's answer tokens that
        is masked, so that every state of a block weighs alike.
    """
    blocks = int(block[-1]) + 1 if len(block) else 0
    visited = torch.where(answer, visited, -1)
    last = torch.full((blocks,), -1).scatter_reduce(0, block, visited, "amax")  # [blocks]
    now = (torch.from_numpy(rng.random(blocks)) * (last + 1)).long()[block]
    never = answer & (visited < 0)
    masked = never | (answer & (visited >= now))
    answers, hidden = (torch.zeros(blocks).index_add(0, block, which.float()) for which in (answer, masked))
    p = torch.where(masked, (hidden / answers.clamp(min=1))[block], 1.0)
    reveal_step = (visited - now + 1).clamp(max=steps + 1).masked_fill(never, steps + 1)
    return torch.where(masked, reveal_step, 0), p


def order_reveals(reveal_step: Tensor, block: Tensor, score: Tensor) -> Tensor:
    """Reveal as many tokens of each block at each step as ``reveal_step`` does, but the highest scores first.

    Args:
        reveal_step: int64 [N]; block: int64 [N], unique over everything passed; score: float [N].

    Returns:
        reveal_step int64 [N].
    """
    masked = reveal_step > 0
    position = masked.nonzero().squeeze(-1)
    by_step = position[_lexsort(block[position], reveal_step[position])]
    by_score = position[_lexsort(block[position], -score[position])]
    ordered = reveal_step.clone()
    ordered[by_score] = reveal_step[by_step]
    return ordered


def revealed_states(clean_ids: Tensor, reveal_step: Tensor, steps: int, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """The noisy ids x_t [R, L] and the states after each reveal x_1..x_K [R, K, L], of ``clean_ids`` [R, L]."""
    noisy = clean_ids.masked_fill(reveal_step > 0, mask_token_id)
    hidden = _still_masked(reveal_step, steps)
    return noisy, clean_ids[:, None].expand(hidden.shape).masked_fill(hidden, mask_token_id)


def loss_weights(reveal_step: Tensor, p_mask: Tensor, steps: int) -> Tensor:
    """Weight of each position in the loss of each step: 1/p where it is still masked in x_k, else 0.

    Args:
        reveal_step: int64 [R, L]; p_mask: float32 [R, L], the masking probability of each position.

    Returns:
        float32 [R, K, L].
    """
    return _still_masked(reveal_step, steps) / p_mask[:, None]


def loss_normaliser(reveal_step: Tensor, p_mask: Tensor, answer: Tensor, steps: int) -> Tensor:
    """What the weighted sum of each step is divided by: answer tokens minus the sum of 1/p over reveals 1..k.

    Args:
        reveal_step: int64 [R, L]; p_mask: float32 [R, L]; answer: bool [R, L].

    Returns:
        float32 [R, K].
    """
    shown = (reveal_step > 0)[:, None] & ~_still_masked(reveal_step, steps)
    return (answer.sum(-1, keepdim=True) - (shown / p_mask[:, None]).sum(-1)).float()


def _still_masked(reveal_step: Tensor, steps: int) -> Tensor:
    step = torch.arange(1, steps + 1, device=reveal_step.device)
    return reveal_step[:, None] > step[:, None]  # [R, K, L]


def _rank_in_block(masked: Tensor, block: Tensor, score: Tensor) -> Tensor:
    """Place of each masked token among those of its block, highest score first; 0 elsewhere."""
    position = masked.nonzero().squeeze(-1)
    order = position[_lexsort(block[position], -score[position])]
    sorted_block = block[order]
    rank = torch.zeros_like(block)
    rank[order] = torch.arange(len(order), device=block.device) - torch.searchsorted(sorted_block, sorted_block)
    return rank


def _lexsort(major: Tensor, minor: Tensor) -> Tensor:
    order = torch.argsort(minor, stable=True)
    return order[torch.argsort(major[order], stable=True)]
