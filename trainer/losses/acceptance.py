"""Objectives other than the KL of linear_kl.py, aimed at the acceptance of drafts: total variation and the position.

A draft of `spec` is accepted if the backbone would reveal the same token at the same position. The total variation
between two distributions is the chance that coupled draws from them differ, so it asks for the token; the loss of the
chosen position asks for the position.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .linear_kl import auto_chunk_rows

DIVERGENCES = ("kl", "total_variation")


def linear_total_variation(h_student: Tensor, h_teacher: Tensor, weight: Tensor) -> Tensor:
    """Compute half the sum of |p_student - p_teacher| over the vocabulary, for each row.

    Args:
        h_student: corrected hidden states, [N, H]. Only they get a gradient.
        h_teacher: the backbone's hidden states on the revealed block, [N, H].
        weight: output embedding, [V, H], frozen.

    Returns:
        The total variation of each row, float32 [N].
    """
    return _LinearTotalVariation.apply(h_student, h_teacher.detach(), weight.detach())


class _LinearTotalVariation(torch.autograd.Function):
    """Computes the gradient together with the value, a chunk of rows at a time; backward only scales rows.

    With q = softmax(z) and s = sign(q - p), the value is sum_v s_v (q_v - p_v) / 2, and its gradient in the logits z
    is q (s - sum_v q_v s_v) / 2.
    """

    @staticmethod
    def forward(ctx: Any, h_student: Tensor, h_teacher: Tensor, weight: Tensor) -> Tensor:
        values = torch.empty(len(h_student), device=h_student.device)
        gradient = torch.empty_like(h_student)
        size = auto_chunk_rows(len(h_student), weight, values.dtype)
        for start in range(0, len(h_student), size):
            rows = slice(start, min(start + size, len(h_student)))
            q, p = (
                torch.softmax((hidden[rows].to(weight.dtype) @ weight.T).float(), dim=-1)
                for hidden in (h_student, h_teacher)
            )
            difference = torch.sub(q, p, out=p)
            sign = difference.sign()
            values[rows] = difference.abs_().sum(-1) / 2
            logits_gradient = sign.sub_((q * sign).sum(-1, keepdim=True)).mul_(q).div_(2)  # [c, V]
            gradient[rows] = (logits_gradient.to(weight.dtype) @ weight).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_values[:, None].to(gradient.dtype), None, None


def chosen_positions(block: Tensor, score: Tensor) -> Tensor:
    """Mark the position of each block that the backbone is surest of, which decoding would reveal next.

    Args:
        block: block of each masked position, int64 [N]. Different blocks must have different ids, also across rows.
        score: log-probability of the backbone's token at each masked position, [N].

    Returns:
        True at one position per block, bool [N].
    """
    chosen = torch.zeros_like(block, dtype=torch.bool)
    chosen[first_of_each(block, score)] = True
    return chosen


def chosen_position_loss(log_prob: Tensor, block: Tensor, chosen: Tensor) -> Tensor:
    """Penalise drafts that would reveal another position than the backbone, or another token there.

    Positions are ranked by the log-odds of their confidence, o_i = log(q_i / (1 - q_i)), where q_i is the student's
    probability of the backbone's token. For a block with m masked positions and the chosen position c the loss is

        m * (-log softmax(o)_c - log q_c)

    It is returned at c, multiplied by m so that blocks weigh as in losses that have a value at every position.

    Args:
        log_prob: the student's log-probability of the backbone's token at each masked position, [N].
        block: block of each masked position, int64 [N]. Different blocks must have different ids, also across rows.
        chosen: the chosen positions, one per block, bool [N].

    Returns:
        The loss at the chosen positions and 0 elsewhere, [N].
    """
    _, number, masked = torch.unique(block, return_inverse=True, return_counts=True)
    log_prob = log_prob.clamp(max=-1e-6)  # closer to 0, float32 cannot represent 1 - q
    odds = log_prob - torch.log(-torch.expm1(log_prob))
    peak = odds.detach().new_full((len(masked),), -torch.inf).scatter_reduce(0, number, odds.detach(), "amax")
    total = odds.new_zeros(len(masked)).index_add(0, number, (odds - peak[number]).exp())
    cross_entropy = (total.log() + peak)[number] - odds - log_prob
    return torch.where(chosen, cross_entropy * masked[number], 0.0)


def first_of_each(block: Tensor, score: Tensor) -> Tensor:
    """Return the index of the highest score in each block, the first of equals; blocks in ascending order.

    Args:
        block: block of each position, int64 [N].
        score: score of each position, [N].
    """
    # Two stable sorts: by score, then by block, so that each block begins with its highest score.
    order = torch.argsort(score, descending=True, stable=True)
    order = order[torch.argsort(block[order], stable=True)]
    new = torch.ones_like(order, dtype=torch.bool)
    new[1:] = block[order][1:] != block[order][:-1]
    return order[new]
