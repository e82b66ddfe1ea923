"""How much the head improves on stale logits: KL and agreement with the backbone's next step, on a training batch.

Three distributions are compared at every masked position. A is the backbone's output before a reveal, A + C the output
that the head corrects for that reveal, and B the backbone's own output after it, which the head is trained to predict.
Depth k compares them k reveals after the backbone's forward.
"""

from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from ..losses.acceptance import first_of_each
from ..losses.linear_kl import auto_chunk_rows


@dataclass(frozen=True)
class HeadFigures:
    """The figures of `HeadMetrics`, as lists by depth: index 0 is depth 1.

    Attributes:
        kl_before: mean KL(B || A) per masked position, in nats.
        kl_after: mean KL(B || A + C) per masked position, in nats.
        kl_removed: share of `kl_before` that the head removes.
        same_token: share of masked positions where B and A + C have the same most likely token.
        same_pick: share of blocks where B and A + C would next reveal the same token at the same position.
        expected_tokens_per_forward: tokens per backbone forward in `spec` mode if every draft were accepted as often
            as `same_pick` says for its depth, 1 + a_1 + a_1 a_2 + ...; None when nothing was measured.
    """

    kl_before: list[float]
    kl_after: list[float]
    kl_removed: list[float]
    same_token: list[float]
    same_pick: list[float]
    expected_tokens_per_forward: float | None

    def log_entries(self) -> dict[str, float]:
        """Return the figures under the flat names of a training log: `kl_before_1`, `kl_after_1`, ..."""
        lists = {name: value for name, value in asdict(self).items() if isinstance(value, list)}
        entries = {f"{name}_{k + 1}": lists[name][k] for k in range(len(self.kl_before)) for name in lists}
        if self.expected_tokens_per_forward is not None:
            entries["expected_tokens_per_forward"] = self.expected_tokens_per_forward
        return entries


def by_depth(entries: dict[str, float], name: str) -> list[float]:
    """Collect `name_1`, `name_2`, ... of a log into a list, up to the first depth that is missing.

    This is the inverse of `HeadFigures.log_entries`, for readers of a log.
    """
    values = []
    while (key := f"{name}_{len(values) + 1}") in entries:
        values.append(entries[key])
    return values


@dataclass
class HeadMetrics:
    """Sums for each depth k = 1..K, each a float64 tensor of shape [K]; they add up over batches and ranks.

    Attributes:
        weight: sum of the loss weights.
        kl_uncorrected: weighted sum of KL(B || A).
        kl_corrected: weighted sum of KL(B || A + C).
        rows: number of supervised positions.
        same_token: number of those where B and A + C have the same most likely token.
        blocks: number of blocks that still have masked positions.
        same_pick: number of those where B and A + C are surest of the same token at the same position.
    """

    weight: Tensor
    kl_uncorrected: Tensor
    kl_corrected: Tensor
    rows: Tensor
    same_token: Tensor
    blocks: Tensor
    same_pick: Tensor

    @classmethod
    def zeros(cls, steps: int, device: torch.device | None = None) -> "HeadMetrics":
        """Return empty sums for K = `steps` depths."""
        return cls(*torch.zeros(len(fields(cls)), steps, dtype=torch.float64, device=device))

    def stacked(self) -> Tensor:
        """Return all sums as one tensor [7, K], which can be reduced over ranks in one call."""
        return torch.stack([getattr(self, f.name) for f in fields(self)])

    def __add__(self, other: "HeadMetrics") -> "HeadMetrics":
        return HeadMetrics(*(self.stacked() + other.stacked()))

    def summary(self) -> HeadFigures:
        """Divide the sums into figures. The lists end before the first depth at which nothing was measured."""
        depths = int((self.rows > 0).long().cumprod(0).sum())
        weight, blocks = self.weight[:depths], self.blocks[:depths]
        before, after = self.kl_uncorrected[:depths] / weight, self.kl_corrected[:depths] / weight
        same_pick = self.same_pick[:depths] / blocks
        return HeadFigures(
            kl_before=before.tolist(),
            kl_after=after.tolist(),
            kl_removed=torch.where(before > 0, 1 - after / before, 0.0).tolist(),
            same_token=(self.same_token[:depths] / self.rows[:depths]).tolist(),
            same_pick=same_pick.tolist(),
            expected_tokens_per_forward=1 + float(same_pick.cumprod(0).sum()) if depths else None,
        )


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
    """Compare A, A + C and B at every position with a positive loss weight, a few rows of logits at a time.

    Args:
        backbone_hidden: hidden states that give A, [R, L, H].
        corrected_hidden: hidden states that give A + C after each of the K reveals, [R, K, L, H].
        revealed_hidden: hidden states that give B after each of the K reveals, [R, K, L, H].
        lm_head: output embedding, [V, H].
        loss_weight: weight of each position in the loss of each step, [R, K, L].
        block_ids: block of each position, counted over its row, [R, L].
        mask_token_id: id of the mask token, which is never chosen.

    Returns:
        The sums over this batch.
    """
    metrics = HeadMetrics.zeros(loss_weight.shape[1], loss_weight.device)
    for k in range(loss_weight.shape[1]):
        row, position = (loss_weight[:, k] > 0).nonzero(as_tuple=True)  # each [N]
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
                picks[name].append(torch.stack(_surest(log_p)))
        (b_score, b_token), (c_score, c_token) = (torch.cat(picks[name], dim=1) for name in "bc")
        # block_ids restart in every row: number the blocks of the whole batch before choosing one position in each.
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


def _surest(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest probability of each row and its token.

    Args:
        log_p: log-probabilities [rows, V] in which the mask token is already -inf; they are normalised again.

    Returns:
        The log-probability and the token id, each float64 [rows].
    """
    value, token = log_p.max(dim=-1)
    return (value - log_p.logsumexp(-1)).double(), token.double()
