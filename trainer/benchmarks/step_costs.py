"""What the parts of a decoding step cost, and the speed-up of `spec` that follows from them."""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path


@dataclass(frozen=True)
class Costs:
    """What the parts of a step cost at one shape and batch size, in seconds at full depth.

    Attributes:
        backbone: of one packed forward of the backbone, by the number of candidate blocks in it; 1 is a plain step.
        logits: of `lm_head` and the reading of tokens and confidences, by the number of blocks.
        head: of one head step on one block.
    """

    shape: str
    batch_size: int
    backbone: dict[int, float]
    logits: dict[int, float]
    head: float

    def verification(self, candidates: int) -> float:
        """Seconds to verify so many candidates of a block; 1 is a step of backbone-only decoding."""
        return interpolate(self.backbone, candidates) + interpolate(self.logits, candidates)

    def ratio(self, candidates: int) -> float:
        """Verification over a plain step."""
        return self.verification(candidates) / self.verification(1)

    @property
    def draft(self) -> float:
        """Seconds of one draft: a head step and the reading of its logits."""
        return self.head + self.logits[1]

    def free_up_to(self, tolerance: float) -> int:
        """The most measured candidates K such that K and fewer cost at most (1 + tolerance) plain steps."""
        free = 1
        for candidates in sorted(self.backbone):
            if self.ratio(candidates) > 1 + tolerance:
                break
            free = candidates
        return free

    def block_seconds(self, candidates: int, accepted: Sequence[float], block_size: int) -> float:
        """Expected seconds per block of `spec` with K candidates; K = 1 is backbone-only decoding.

        The forward that opens a block also carries the one before it, whose keys and values the head adds too.
        """
        opening = interpolate(self.backbone, 2) + self.logits[1] + (self.head if candidates > 1 else 0.0)
        return opening + expected_block_cost(
            lambda c: self.verification(c) + (c - 1) * self.draft, candidates, accepted, block_size
        )

    def speedup(self, candidates: int, accepted: Sequence[float], block_size: int) -> float:
        """Expected time of backbone-only decoding over that of `spec` with K candidates."""
        alone = self.block_seconds(1, accepted, block_size)
        return alone / self.block_seconds(candidates, accepted, block_size)


def forwards_saved(candidates: int, accepted: Sequence[float], block_size: int) -> float:
    """Forwards of backbone-only decoding over those of `spec`, expected."""
    return block_size / (1 + expected_block_cost(lambda c: 1.0, candidates, accepted, block_size))


def expected_block_cost(
    round_cost: Callable[[int], float], candidates: int, accepted: Sequence[float], block_size: int
) -> float:
    """Expected cost of the rounds of a block behind its opening one, static rule, one token a step.

    With u positions still masked a round reads c = min(K, u) candidates: the current state and those after 1 .. c - 1
    drafts. When a drafts hold, the round ends with a + 1 positions fewer.

    Args:
        round_cost: of a round that reads c candidates.
        candidates: K.
        accepted: shares of the drafts 1, 2, ... steps behind the certain one that hold, all before them included;
            at least K - 1 of them. One that is above its predecessor counts as that.
        block_size: B; the opening round reveals the first position.
    """
    survives = list(accumulate(accepted, min, initial=1.0))  # survives[a]: at least a drafts hold
    cost = [0.0]
    for masked in range(1, block_size):
        read = min(candidates, masked)
        holds = [*survives[:read], 0.0]
        following = sum((holds[a] - holds[a + 1]) * cost[masked - a - 1] for a in range(read))
        cost.append(round_cost(read) + following)
    return cost[-1]


def interpolate(points: dict[int, float], at: int) -> float:
    """The value at `at` on the line between its measured neighbours.

    Raises:
        ValueError: outside of what was measured.
    """
    known = sorted(points)
    if not known[0] <= at <= known[-1]:
        raise ValueError(f"candidates={at} lies outside of those measured, {known[0]} to {known[-1]}")
    upper = known[bisect_left(known, at)]
    if upper == at:
        return points[at]
    lower = known[bisect_left(known, at) - 1]
    return points[lower] + (points[upper] - points[lower]) * (at - lower) / (upper - lower)


def read_accepted(path: str) -> list[float]:
    """The rates of an acceptance file, or of the deepest `spec-K` row in the output of `mrp bench decode --json`.

    Raises:
        ValueError: when the file does not hold {"accepted": [rates between 0 and 1]}, nor such a row.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if isinstance(values, dict) and "rows" in values:
        rows = values["rows"] if isinstance(values["rows"], list) else []
        rows = [row for row in rows if isinstance(row, dict) and re.fullmatch(r"spec-\d+", str(row.get("mode")))]
        found = [row["accepted"] for row in rows if isinstance(row.get("accepted"), list)]
        values = {"accepted": max(found, key=len, default=None)}
    rates = values.get("accepted") if isinstance(values, dict) else None
    if not isinstance(rates, list) or not all(isinstance(r, int | float) and 0 <= r <= 1 for r in rates):
        raise ValueError(
            f'{path} must hold {{"accepted": [rates between 0 and 1]}}, or what `mrp bench decode MODEL --modes spec-8'
            f" --json` prints, got {str(values)[:80]}"
        )
    return [float(rate) for rate in rates]


def result_rows(costs: Costs, candidates: Sequence[int], accepted: list[float] | None, block_size: int) -> list[dict]:
    """What the table shows, one dict for each K; predictions are None without rates for all its K - 1 drafts."""
    rows = []
    for k in candidates:
        known = accepted is not None and len(accepted) >= k - 1
        rows.append(
            {
                "shape": costs.shape,
                "batch_size": costs.batch_size,
                "candidates": k,
                "verification_seconds": costs.verification(k),
                "verification_ratio": costs.ratio(k),
                "drafting_seconds": (k - 1) * costs.draft,
                "forwards_saved": forwards_saved(k, accepted, block_size) if known else None,
                "speedup": costs.speedup(k, accepted, block_size) if known else None,
            }
        )
    return rows
