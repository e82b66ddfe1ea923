"""Step rules: which masked positions a denoising step reveals."""

from dataclasses import dataclass

import torch

STRATEGIES = ("low_confidence_static", "low_confidence_dynamic", "sequential", "entropy_bounded")


@dataclass(frozen=True)
class StepRule:
    """One of `STRATEGIES` with its numbers.

    static: the `tokens_per_step` most confident positions; dynamic: all above `confidence_threshold`, at least the
    most confident; sequential: the `tokens_per_step` leftmost; entropy bounded: the most certain positions while
    the sum of their entropies (nats) stays within `entropy_bound`, at least one. Ties go to the left.
    """

    strategy: str
    tokens_per_step: int = 1
    confidence_threshold: float = 0.9
    entropy_bound: float = 0.1

    @property
    def needs_entropy(self) -> bool:
        return self.strategy == "entropy_bounded"

    def __call__(self, confidence: torch.Tensor, entropy: torch.Tensor | None, masked: torch.Tensor) -> torch.Tensor:
        """Positions to reveal, boolean [..., B], from confidence and entropy (both [..., B]) and what is masked."""
        if self.strategy == "sequential":
            return masked & (masked.cumsum(-1) <= self.tokens_per_step)
        if self.strategy == "entropy_bounded":
            certain_first = entropy.masked_fill(~masked, torch.inf).sort(dim=-1, stable=True)
            within = certain_first.values.cumsum(-1) <= self.entropy_bound
            within[..., 0] = True
            return masked & within.gather(-1, certain_first.indices.argsort(-1))
        rank = confidence_rank(confidence, masked)
        if self.strategy == "low_confidence_static":
            return masked & (rank < self.tokens_per_step)
        return masked & ((confidence > self.confidence_threshold) | (rank == 0))


def confidence_rank(confidence: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Rank of each position by confidence among the given ones, 0 for the most confident, [..., B]."""
    order = confidence.masked_fill(~among, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    return order.argsort(-1)
