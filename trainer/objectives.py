"""Objectives beside the KL of linear_kl.py, for drafts that are accepted: total variation and the chosen position.

Both need only one number per row, so the gradient of the logits is made along with it, a chunk of rows at a time, and
backward only scales rows, as in linear_kl.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .head_metrics import first_of_each, surest
from .linear_kl import auto_chunk_rows

DIVERGENCES = ("kl", "total_variation")


def linear_total_variation(h_student: Tensor, h_teacher: Tensor, weight: Tensor) -> Tensor:
    """Half the sum of |p_student - p_teacher| over the vocabulary, [N]: the chance that two coupled draws differ.

    Args:
        h_student, h_teacher: [N, H]; only the student gets a gradient.
        weight: [V, H], the output embedding, frozen.
    """

    def value_and_gradient(rows: slice, logits: Tensor):
        q = torch.softmax(logits, dim=-1)
        difference = q - torch.softmax((h_teacher[rows].to(weight.dtype) @ weight.T).float(), dim=-1)
        side = difference.sign()
        value = difference.abs_().sum(-1) / 2
        return value, side.sub_((q * side).sum(-1, keepdim=True)).mul_(q).div_(2)

    return _RowValues.apply(h_student, weight.detach(), value_and_gradient)


def linear_log_prob(h_student: Tensor, weight: Tensor, targets: Tensor, mask_token_id: int) -> Tensor:
    """log p_student(target), [N], with the mask token ruled out as in decoding.

    Args:
        h_student: [N, H]; weight: [V, H], frozen; targets: int64 [N].
    """

    def value_and_gradient(rows: slice, logits: Tensor):
        logits[:, mask_token_id] = -torch.inf
        log_q = torch.log_softmax(logits, dim=-1)
        target = targets[rows, None]
        gradient = -log_q.exp()
        return log_q.gather(1, target)[:, 0], gradient.scatter_add_(1, target, torch.ones_like(gradient[:, :1]))

    return _RowValues.apply(h_student, weight.detach(), value_and_gradient)


@torch.no_grad()
def teacher_choice(h_teacher: Tensor, weight: Tensor, block: Tensor, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """The backbone's token at each masked position, int64 [N], and which position of each block it is surest of, bool.

    Args:
        h_teacher: [N, H]; weight: [V, H]; block: int64 [N], unique over everything passed.
    """
    tokens, scores = [], []
    for rows in h_teacher.split(auto_chunk_rows(len(h_teacher), weight, torch.float32)):
        log_p = torch.log_softmax((rows.to(weight.dtype) @ weight.T).float(), dim=-1)
        log_p[:, mask_token_id] = -torch.inf
        score, token = surest(log_p)
        tokens.append(token.long())
        scores.append(score)
    chosen = torch.zeros(len(block), dtype=torch.bool, device=block.device)
    if tokens:
        chosen[first_of_each(block, torch.cat(scores))] = True
    return torch.cat(tokens) if tokens else block.new_empty(0), chosen


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
    number = torch.unique(block, return_inverse=True)[1]
    blocks = int(number.max()) + 1 if len(number) else 0
    log_prob = log_prob.clamp(max=-1e-6)  # beyond it float32 knows no odds
    odds = log_prob - torch.log(-torch.expm1(log_prob))
    peak = odds.detach().new_full((blocks,), -torch.inf).scatter_reduce(0, number, odds.detach(), "amax")
    total = odds.new_zeros(blocks).index_add(0, number, (odds - peak[number]).exp())
    masked = torch.bincount(number, minlength=blocks)
    cross_entropy = (total.log() + peak)[number] - odds - log_prob
    return torch.where(chosen, cross_entropy * masked[number], 0.0)


class _RowValues(torch.autograd.Function):
    """One value per row of hidden states, from that row's logits; keeps the gradient of the rows, [N, H]."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, value_and_gradient: Callable) -> Tensor:
        values = torch.empty(len(hidden), device=hidden.device)
        gradient = torch.empty_like(hidden)
        size = auto_chunk_rows(len(hidden), weight, values.dtype)
        for start in range(0, len(hidden), size):
            rows = slice(start, min(start + size, len(hidden)))
            logits = (hidden[rows].to(weight.dtype) @ weight.T).float()
            values[rows], of_logits = value_and_gradient(rows, logits)
            gradient[rows] = (of_logits.to(weight.dtype) @ weight).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, of_values):
        (gradient,) = ctx.saved_tensors
        return gradient * of_values[:, None].to(gradient.dtype), None, None
