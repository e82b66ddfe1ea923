"""Step rules: they decide which masked positions of a block a denoising step reveals."""

from dataclasses import dataclass

import torch

STRATEGIES = ("low_confidence_static", "low_confidence_dynamic", "sequential", "entropy_bounded")


@dataclass(frozen=True)
class StepRule:
    """One of `STRATEGIES` with its parameters.

    - "low_confidence_static" reveals the `tokens_per_step` most confident positions;
    - "low_confidence_dynamic" reveals every position whose confidence exceeds `confidence_threshold`, and always the
      most confident one;
    - "sequential" reveals the `tokens_per_step` leftmost positions;
    - "entropy_bounded" reveals positions in order of increasing entropy as long as the sum of their entropies (nats)
      does not exceed `entropy_bound`, and always the first.

    Ties are broken in favour of the position on the left. Every rule reveals at least one masked position of a block
    that has any, so a block ends after at most block_size steps.

    Args:
        strategy: name of the rule.
        tokens_per_step: number of tokens that the static and the sequential rule reveal.
        confidence_threshold: threshold of the dynamic rule.
        entropy_bound: bound of the entropy rule, in nats.
    """

    strategy: str
    tokens_per_step: int = 1
    confidence_threshold: float = 0.9
    entropy_bound: float = 0.1

    @property
    def needs_entropy(self) -> bool:
        """Whether the rule reads entropies."""
        return self.strategy == "entropy_bounded"

    def __call__(self, confidence: torch.Tensor, entropy: torch.Tensor | None, masked: torch.Tensor) -> torch.Tensor:
        """Return the positions to reveal, boolean [..., B].

        Args:
            confidence: confidence of the token chosen at each position, [..., B].
            entropy: entropy at each position, [..., B]; may be None where the rule does not need it.
            masked: which positions are masked, boolean [..., B].
        """
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
    """Rank the positions by confidence, 0 for the most confident, [..., B].

    Args:
        confidence: confidence at each position, [..., B].
        among: positions to rank, boolean [..., B]; all others come after them.
    """
    order = confidence.masked_fill(~among, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    return order.argsort(-1)
