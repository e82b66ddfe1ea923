"""What the head gains: KL and agreement with the backbone's next step, measured on a training batch."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..losses.acceptance import first_of_each
from ..losses.linear_kl import auto_chunk_rows


@dataclass
class HeadMetrics:
    """Sums per depth k = 1..K, each [K] float64; they add up over batches and ranks.

    Attributes:
        weight: sum of the loss weights.
        kl_uncorrected, kl_corrected: weighted sums of KL(B, A) and KL(B, A + C).
        rows, same_token: supervised positions; those where B and A + C have the same first choice.
        blocks, same_pick: blocks with masks left; those where B and A + C would reveal the same token at the same
            position next (the surest one).
    """

    weight: Tensor
    kl_uncorrected: Tensor
    kl_corrected: Tensor
    rows: Tensor
    same_token: Tensor
    blocks: Tensor
    same_pick: Tensor

    @classmethod
    def zeros(cls, steps: int, device=None) -> "HeadMetrics":
        return cls(*torch.zeros(len(fields(cls)), steps, dtype=torch.float64, device=device))

    def stacked(self) -> Tensor:
        """[7, K], to be added up over ranks."""
        return torch.stack([getattr(self, f.name) for f in fields(self)])

    def __add__(self, other: "HeadMetrics") -> "HeadMetrics":
        return HeadMetrics(*(self.stacked() + other.stacked()))

    def summary(self) -> dict[str, float]:
        """Figures to log; depths that nothing was measured at are left out.

        `expected_tokens_per_forward` is what spec would accept if every draft were accepted as often as the pick
        agreed at its depth: 1 + a_1 + a_1 a_2 + ...
        """
        out, accepted, expected = {}, 1.0, 1.0
        for k in range(len(self.weight)):
            if not self.rows[k]:
                break
            before = float(self.kl_uncorrected[k] / self.weight[k])
            after = float(self.kl_corrected[k] / self.weight[k])
            agreement = float(self.same_pick[k] / self.blocks[k])
            accepted *= agreement
            expected += accepted
            out[f"kl_before_{k + 1}"] = before
            out[f"kl_after_{k + 1}"] = after
            out[f"kl_removed_{k + 1}"] = 1 - after / before if before > 0 else 0.0
            out[f"same_token_{k + 1}"] = float(self.same_token[k] / self.rows[k])
            out[f"same_pick_{k + 1}"] = agreement
        if out:
            out["expected_tokens_per_forward"] = expected
        return out


@torch.no_grad()
def measure_head(
    backbone_hidden: Tensor,
    corrected_hidden: Tensor,
    revealed_hidden: Tensor,
    lm_head: Tensor,
    loss_weight: Tensor,
    block_ids: Tensor,
    mask_token_id: int,
) -> HeadMetrics:
    """Compare A, A + C and B wherever the loss looks, a few rows of logits at a time.

    Args:
        backbone_hidden: h_A [R, L, H]; corrected_hidden: h_A + h_C [R, K, L, H]; revealed_hidden: h_B [R, K, L, H].
        lm_head: [V, H].
        loss_weight: [R, K, L]; block_ids: [R, L], counted over each row.
        mask_token_id: never chosen.
    """
    metrics = HeadMetrics.zeros(loss_weight.shape[1], loss_weight.device)
    for k in range(loss_weight.shape[1]):
        row, position = (loss_weight[:, k] > 0).nonzero(as_tuple=True)
        if not len(row):
            continue
        weight = loss_weight[row, k, position].double()
        picks = {"b": [], "c": []}
        size = auto_chunk_rows(len(row), lm_head, torch.float32)
        for r, i, w in zip(row.split(size), position.split(size), weight.split(size), strict=True):
            b = _log_probs(revealed_hidden[r, k, i], lm_head)
            metrics.kl_uncorrected[k] += (w * _kl(b, _log_probs(backbone_hidden[r, i], lm_head))).sum()
            c = _log_probs(corrected_hidden[r, k, i], lm_head)
            metrics.kl_corrected[k] += (w * _kl(b, c)).sum()
            for name, log_p in (("b", b), ("c", c)):
                log_p[:, mask_token_id] = -torch.inf
                picks[name].append(torch.stack(surest(log_p)))
        (b_score, b_token), (c_score, c_token) = (torch.cat(picks[name], dim=1) for name in "bc")
        block = row * (block_ids.max() + 1) + block_ids[row, position]
        first = first_of_each(block, b_score), first_of_each(block, c_score)
        metrics.weight[k] = weight.sum()
        metrics.rows[k] = len(row)
        metrics.same_token[k] = (b_token == c_token).sum()
        metrics.blocks[k] = len(first[0])
        metrics.same_pick[k] = ((first[0] == first[1]) & (b_token[first[0]] == c_token[first[0]])).sum()
    return metrics


def _log_probs(hidden: Tensor, lm_head: Tensor) -> Tensor:
    return torch.log_softmax((hidden.to(lm_head.dtype) @ lm_head.T).float(), dim=-1)  # [rows, V]


def _kl(b: Tensor, other: Tensor) -> Tensor:
    return (b.exp() * (b - other)).sum(-1).double()


def surest(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence once the mask token is ruled out, and the token, each [rows] float64."""
    value, token = log_p.max(dim=-1)
    return (value - log_p.logsumexp(-1)).double(), token.double()
