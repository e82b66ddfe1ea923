"""Step rules: they decide which masked positions of a block a denoising step reveals."""

from dataclasses import dataclass

import torch

TINY = 1e-7  # below the spacing of float32 numbers at 1
THRESHOLD_SHARPNESS = 4  # 1 to 8 were tried on the embedded checkpoints: 4 and 8 saved the most forwards
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

    def alternatives(
        self, confidence: torch.Tensor, entropy: torch.Tensor | None, masked: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most likely reveals when confidence and entropy are estimates, and how likely they are.

        The rule reveals the first m positions in an order. Both the order and m are uncertain. After the first m - 1
        positions, each remaining one comes next with a probability proportional to its *strength* (Luce's choice
        axiom): the odds o = p / (1 - p) of its confidence p, or the inverse of its entropy. Odds o exceed those of
        the dynamic rule's threshold, t, with probability o^s / (o^s + t^s) for a constant s. Cumulative entropy e
        stays within the bound b of the entropy rule with probability b / (b + e).

        Args:
            confidence: estimated confidence of the token chosen at each position, [..., B].
            entropy: estimated entropy at each position, [..., B]; may be None where the rule does not need it.
            masked: which positions are masked, boolean [..., B].
            count: number of alternatives A, at most B.

        Returns:
            The positions to reveal, boolean [..., A, B], and the estimated probability of each alternative, [..., A].
            Alternatives with probability 0 are padding.
        """
        strength = (1 / entropy.clamp(min=TINY) if self.needs_entropy else odds(confidence)).masked_fill(~masked, 0.0)
        if self.strategy == "sequential":  # every position is infinitely stronger than those to the right of it
            order = (~masked).long().sort(dim=-1, stable=True).indices
            next_one = torch.nn.functional.one_hot(torch.zeros_like(order), count)
        else:
            strength, order = strength.sort(dim=-1, descending=True, stable=True)
            windows = torch.nn.functional.pad(strength, (0, count - 1)).unfold(-1, count, 1)
            remaining = strength.flip(-1).cumsum(-1).flip(-1)
            next_one = windows / remaining.clamp(min=TINY)[..., None]
            if self.strategy == "low_confidence_dynamic":  # beyond the first, the threshold alone decides
                next_one[..., 1:, 1:] = 0.0
                next_one[..., 1:, 0] = 1.0
        probability = self._lengths(strength, masked)[..., None] * next_one  # of m (dim -2) and the last one (dim -1)
        probability, best = probability.flatten(-2).sort(dim=-1, descending=True, stable=True)
        fixed = best[..., :count, None] // count  # m - 1
        last = fixed + best[..., :count, None] % count
        rank = order.argsort(-1)[..., None, :]
        return masked[..., None, :] & ((rank < fixed) | (rank == last)), probability[..., :count]

    def _lengths(self, strength: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of revealing 1, 2, ..., B positions, given decreasing strengths [..., B]."""
        number = torch.arange(1, masked.shape[-1] + 1, device=masked.device)
        left = masked.sum(-1, keepdim=True)
        if self.strategy in ("low_confidence_static", "sequential"):
            return (number == left.clamp(max=self.tokens_per_step)).to(strength.dtype)
        if self.strategy == "entropy_bounded":
            spent = (1 / strength.clamp(min=TINY)).cumsum(-1)
            reaches = self.entropy_bound / (self.entropy_bound + spent).clamp(min=TINY)  # at least this many
        else:
            threshold = odds(strength.new_tensor(self.confidence_threshold))
            reaches = torch.sigmoid(THRESHOLD_SHARPNESS * (strength.clamp(min=TINY) / threshold).log()).cumprod(-1)
        reaches = reaches.masked_fill(number == 1, 1.0).masked_fill(number > left, 0.0)
        return reaches - torch.nn.functional.pad(reaches[..., 1:], (0, 1))


def odds(probability: torch.Tensor) -> torch.Tensor:
    """Return p / (1 - p), finite for p = 1."""
    return probability / (1 - probability).clamp(min=TINY)


def confidence_rank(confidence: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Rank the positions by confidence, 0 for the most confident, [..., B].

    Args:
        confidence: confidence at each position, [..., B].
        among: positions to rank, boolean [..., B]; all others come after them.
    """
    order = confidence.masked_fill(~among, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    return order.argsort(-1)
