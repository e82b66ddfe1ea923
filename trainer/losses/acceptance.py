"""Objectives beside the KL of linear_kl.py, for drafts that are accepted: total variation and the chosen position."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .linear_kl import auto_chunk_rows

DIVERGENCES = ("kl", "total_variation")


def linear_total_variation(h_student: Tensor, h_teacher: Tensor, weight: Tensor) -> Tensor:
    """Half the sum of |p_student - p_teacher| over the vocabulary, [N]: the chance that two coupled draws differ.

    Args:
        h_student, h_teacher: [N, H]; only the student gets a gradient.
        weight: [V, H], the output embedding, frozen.
    """
    return _LinearTotalVariation.apply(h_student, h_teacher.detach(), weight.detach())


class _LinearTotalVariation(torch.autograd.Function):
    """Makes the gradient along with the value, a chunk of rows at a time; backward only scales rows."""

    @staticmethod
    def forward(ctx, h_student, h_teacher, weight):
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
            side = difference.sign()
            values[rows] = difference.abs_().sum(-1) / 2
            of_logits = side.sub_((q * side).sum(-1, keepdim=True)).mul_(q).div_(2)
            gradient[rows] = (of_logits.to(weight.dtype) @ weight).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, of_values):
        (gradient,) = ctx.saved_tensors
        return gradient * of_values[:, None].to(gradient.dtype), None, None


def chosen_positions(block: Tensor, score: Tensor) -> Tensor:
    """Which position of each block the backbone is surest of, bool [N]; decoding reveals it next.

    Args:
        block: int64 [N], unique over everything passed.
        score: [N], the log-probability of the backbone's token at each masked position.
    """
    chosen = torch.zeros_like(block, dtype=torch.bool)
    chosen[first_of_each(block, score)] = True
    return chosen


def chosen_position_loss(log_prob: Tensor, block: Tensor, chosen: Tensor) -> Tensor:
    """How much a draft would rather reveal another position than the one that the backbone will, [N].

    Positions are ranked by the log-odds of their confidence: cross-entropy of their softmax over each block's masked
    positions against the chosen one, less the chosen position's log probability. A value stands at the chosen
    positions, times the number of masked positions of the block; elsewhere it is 0.

    Args:
        log_prob: [N], the student's for the backbone's token at each masked position.
        block: int64 [N], unique over everything passed.
        chosen: bool [N], one per block.
    """
    _, number, masked = torch.unique(block, return_inverse=True, return_counts=True)
    log_prob = log_prob.clamp(max=-1e-6)  # beyond it float32 knows no odds
    odds = log_prob - torch.log(-torch.expm1(log_prob))
    peak = odds.detach().new_full((len(masked),), -torch.inf).scatter_reduce(0, number, odds.detach(), "amax")
    total = odds.new_zeros(len(masked)).index_add(0, number, (odds - peak[number]).exp())
    cross_entropy = (total.log() + peak)[number] - odds - log_prob
    return torch.where(chosen, cross_entropy * masked[number], 0.0)


def first_of_each(block: Tensor, score: Tensor) -> Tensor:
    """Index of the highest score within each block, blocks in ascending order."""
    order = torch.argsort(score, descending=True, stable=True)
    order = order[torch.argsort(block[order], stable=True)]
    new = torch.ones_like(order, dtype=torch.bool)
    new[1:] = block[order][1:] != block[order][:-1]
    return order[new]
