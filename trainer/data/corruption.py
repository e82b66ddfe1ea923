"""Noise and reveals: which tokens are masked, which each step reveals, and how each position weighs in the loss.

All of it follows from one integer per position, ``reveal_step``: 0 if the token is never masked, k in 1..K if reveal k
shows it, K + 1 if it is still masked after the last reveal. With K = 2 and one block of 6 tokens (m: a mask):

    clean_ids     a b c d e f
    reveal_step   0 2 1 3 3 0
    x_t           a m m m m f     masked where reveal_step > 0
    x_1           a m c m m f     masked where reveal_step > 1; the loss of step 1 looks at these masks
    x_2           a b c m m f     masked where reveal_step > 2; the loss of step 2 looks at these masks

The noise and the loss weights are those of Multi-token Residual Prediction (arXiv 2605.18817).
"""

import numpy as np
import torch
from torch import Tensor


def sample_rng(seed: int, sample: int, epoch: int) -> np.random.Generator:
    """Return a generator that depends on (seed, sample, epoch) alone: not on batch size, order or worker."""
    return np.random.default_rng((seed, sample, epoch))


def draw_noise(
    answer: Tensor, block: Tensor, rng: np.random.Generator, *, eps: float = 1e-3, per_block: bool = False
) -> tuple[Tensor, Tensor]:
    """Mask each answer token of one sample with probability p = (1 - eps) u + eps.

    Args:
        answer: tokens that may be masked, bool [S].
        block: block of each token, counted from 0, int64 [S].
        rng: source of random numbers.
        eps: lower end of p; u is uniform in [0, 1).
        per_block: draw p for each block instead of once for the sample.

    Returns:
        The masked tokens, bool [S], at least one if there is an answer; and p of each token, float32 [S].
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
    """Choose at random which masked tokens of one sample are shown by each of K reveals.

    At each step every block reveals n of its masked tokens, or all that are left; n is drawn from ``counts`` for each
    block and step.

    Args:
        masked: masked tokens, bool [S].
        block: block of each token, counted from 0, int64 [S].
        steps: number of reveals K.
        rng: source of random numbers.
        counts: the numbers that n is drawn from.

    Returns:
        reveal_step, int64 [S] (see the top of this file).
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
    """Draw, for each block of one sample, one of the states that decoding went through, and reveal as decoding did.

    Args:
        answer: tokens that may be masked, bool [S].
        block: block of each token, counted from 0, int64 [S].
        visited: denoising step of its block at which decoding revealed each answer token, -1 if it never did,
            int64 [S].
        steps: number of reveals K.
        rng: source of random numbers.

    Returns:
        reveal_step, int64 [S] (see the top of this file); and p, float32 [S], the share of its block's answer tokens
        that are masked, so that all states of a block get the same total weight.
    """
    blocks = int(block[-1]) + 1 if len(block) else 0
    visited = torch.where(answer, visited, -1)
    last = torch.full((blocks,), -1).scatter_reduce(0, block, visited, "amax")  # [blocks] last step of decoding
    # [S]: the state before step `now` of its block, now = 0..last with equal probability
    now = (torch.from_numpy(rng.random(blocks)) * (last + 1)).long()[block]
    never = answer & (visited < 0)
    masked = never | (answer & (visited >= now))
    answers, hidden = (torch.zeros(blocks).index_add(0, block, which.float()) for which in (answer, masked))
    p = torch.where(masked, (hidden / answers.clamp(min=1))[block], 1.0)
    reveal_step = (visited - now + 1).clamp(max=steps + 1).masked_fill(never, steps + 1)
    return torch.where(masked, reveal_step, 0), p


def order_reveals(reveal_step: Tensor, block: Tensor, score: Tensor) -> Tensor:
    """Reveal as many tokens of each block at each step as ``reveal_step`` does, but in the order of their scores.

    Args:
        reveal_step: reveals to reorder, int64 [N] (see the top of this file).
        block: block of each position, int64 [N]. Different blocks must have different ids, also across rows.
        score: score of each position, [N].

    Returns:
        The new reveal_step, int64 [N].
    """
    masked = reveal_step > 0
    position = masked.nonzero().squeeze(-1)
    by_step = position[_lexsort(block[position], reveal_step[position])]
    by_score = position[_lexsort(block[position], -score[position])]
    ordered = reveal_step.clone()
    ordered[by_score] = reveal_step[by_step]
    return ordered


def revealed_states(clean_ids: Tensor, reveal_step: Tensor, steps: int, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """Mask ``clean_ids`` as ``reveal_step`` says.

    Args:
        clean_ids: original ids, int64 [R, L].
        reveal_step: see the top of this file, int64 [R, L].
        steps: number of reveals K.
        mask_token_id: id of the mask token.

    Returns:
        The noisy ids x_t, int64 [R, L], and the states after each reveal x_1..x_K, int64 [R, K, L].
    """
    noisy = clean_ids.masked_fill(reveal_step > 0, mask_token_id)
    hidden = _still_masked(reveal_step, steps)
    return noisy, clean_ids[:, None].expand(hidden.shape).masked_fill(hidden, mask_token_id)


def loss_weights(reveal_step: Tensor, p_mask: Tensor, steps: int) -> Tensor:
    """Return the weight of each position in the loss of each step: 1/p if it is still masked in x_k, else 0.

    Args:
        reveal_step: see the top of this file, int64 [R, L].
        p_mask: masking probability of each position, float32 [R, L].
        steps: number of reveals K.

    Returns:
        The weights, float32 [R, K, L].
    """
    return _still_masked(reveal_step, steps) / p_mask[:, None]


def loss_normaliser(reveal_step: Tensor, p_mask: Tensor, answer: Tensor, steps: int) -> Tensor:
    """Return what the weighted sum of step k is divided by: answer tokens minus the sum of 1/p over reveals 1..k.

    Its expectation is that of the sum of the weights, because each answer token is masked with probability p.

    Args:
        reveal_step: see the top of this file, int64 [R, L].
        p_mask: masking probability of each position, float32 [R, L].
        answer: tokens that may be masked, bool [R, L].
        steps: number of reveals K.

    Returns:
        The normalisers, float32 [R, K].
    """
    shown = (reveal_step > 0)[:, None] & ~_still_masked(reveal_step, steps)
    return (answer.sum(-1, keepdim=True) - (shown / p_mask[:, None]).sum(-1)).float()


def _still_masked(reveal_step: Tensor, steps: int) -> Tensor:
    step = torch.arange(1, steps + 1, device=reveal_step.device)
    return reveal_step[:, None] > step[:, None]  # [R, K, L]


def _rank_in_block(masked: Tensor, block: Tensor, score: Tensor) -> Tensor:
    """Return the rank of each masked token in its block, 0 for the highest score; 0 for tokens that are not masked."""
    position = masked.nonzero().squeeze(-1)
    order = position[_lexsort(block[position], -score[position])]
    sorted_block = block[order]  # ascending: searchsorted gives the index at which each block begins
    rank = torch.zeros_like(block)
    rank[order] = torch.arange(len(order), device=block.device) - torch.searchsorted(sorted_block, sorted_block)
    return rank


def _lexsort(major: Tensor, minor: Tensor) -> Tensor:
    """Return the order that sorts by `major`, and by `minor` where that is equal; ties keep their order."""
    order = torch.argsort(minor, stable=True)
    return order[torch.argsort(major[order], stable=True)]
