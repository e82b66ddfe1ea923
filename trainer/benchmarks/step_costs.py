"""Costs of the parts of a decoding step, and the speed-up of `spec` that they predict."""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of a step take at one shape and batch size, at full depth.

    Attributes:
        shape: name of the shape.
        batch_size: number of rows.
        backbone: one packed forward of the backbone, by the number of candidate blocks in it; 1 is a plain step.
        logits: `lm_head`, and reading tokens and confidences from its logits, by the number of blocks.
        head: one head step on one block.
    """

    shape: str
    batch_size: int
    backbone: dict[int, float]
    logits: dict[int, float]
    head: float

    def verification(self, candidates: int) -> float:
        """Seconds to verify `candidates` states of a block; 1 is a step of backbone-only decoding."""
        return interpolate(self.backbone, candidates) + interpolate(self.logits, candidates)

    def ratio(self, candidates: int) -> float:
        """Time to verify `candidates` states over that of a plain step."""
        return self.verification(candidates) / self.verification(1)

    @property
    def draft(self) -> float:
        """Seconds of one draft: a head step, and reading its logits."""
        return self.head + self.logits[1]

    def free_up_to(self, tolerance: float) -> int:
        """The largest measured K such that verifying K and fewer candidates costs at most (1 + tolerance) steps."""
        free = 1
        for candidates in sorted(self.backbone):
            if self.ratio(candidates) > 1 + tolerance:
                break
            free = candidates
        return free

    def block_seconds(self, candidates: int, accepted: Sequence[float], block_size: int) -> float:
        """Expected seconds per block of `spec` with K candidates; K = 1 is backbone-only decoding.

        The first forward of a block also holds the clean tokens of the previous block, whose keys and values are
        stored; the head stores its own for them too.

        Args:
            candidates: K.
            accepted: acceptance rates, see `expected_block_cost`.
            block_size: B.
        """
        opening = interpolate(self.backbone, 2) + self.logits[1] + (self.head if candidates > 1 else 0.0)
        return opening + expected_block_cost(
            lambda c: self.verification(c) + (c - 1) * self.draft, candidates, accepted, block_size
        )

    def speedup(self, candidates: int, accepted: Sequence[float], block_size: int) -> float:
        """Expected time of backbone-only decoding over that of `spec`; arguments as in `block_seconds`."""
        alone = self.block_seconds(1, accepted, block_size)
        return alone / self.block_seconds(candidates, accepted, block_size)


def forwards_saved(candidates: int, accepted: Sequence[float], block_size: int) -> float:
    """Expected forwards of backbone-only decoding over those of `spec`; arguments as in `expected_block_cost`."""
    return block_size / (1 + expected_block_cost(lambda c: 1.0, candidates, accepted, block_size))


def expected_block_cost(
    round_cost: Callable[[int], float], candidates: int, accepted: Sequence[float], block_size: int
) -> float:
    """Expected cost of the rounds of a block after its first one, for the static rule with one token per step.

    Every block is opened by a forward of its own here. Decoding also opens a block in the round that completes the one
    before it, where its drafts are right and K leaves room, so it needs fewer forwards than predicted.

    With u positions still masked, a round reads c = min(K, u) candidates: the current state, and the states after
    1 .. c - 1 drafts. If a drafts are accepted, the round reveals a + 1 positions.

    Args:
        round_cost: function of c: the cost of a round that reads c candidates.
        candidates: K.
        accepted: at least K - 1 acceptance rates: the shares of the drafts 1, 2, ... steps after the certain one that
            are accepted together with all drafts before them. A rate above its predecessor is lowered to it.
        block_size: B; the first round reveals the first position.
    """
    survives = list(accumulate(accepted, min, initial=1.0))  # [a]: share of rounds with at least a drafts accepted
    cost = [0.0]  # [u]: expected cost of the rounds from u masked positions on
    for masked in range(1, block_size):
        read = min(candidates, masked)
        holds = [*survives[:read], 0.0]
        following = sum((holds[a] - holds[a + 1]) * cost[masked - a - 1] for a in range(read))
        cost.append(round_cost(read) + following)
    return cost[-1]


def interpolate(points: dict[int, float], at: int) -> float:
    """Interpolate linearly between measured points.

    Args:
        points: measured values by position.
        at: position of the wanted value.

    Raises:
        ValueError: when `at` lies outside the measured positions.
    """
    known = sorted(points)
    if not known[0] <= at <= known[-1]:
        raise ValueError(f"candidates={at} lies outside the measured range, {known[0]} to {known[-1]}")
    upper = known[bisect_left(known, at)]
    if upper == at:
        return points[at]
    lower = known[bisect_left(known, at) - 1]
    return points[lower] + (points[upper] - points[lower]) * (at - lower) / (upper - lower)


def read_accepted(path: str) -> list[float]:
    """Read acceptance rates from a file, or from the output of `mrp bench decode --json`: its deepest `spec-K` row.

    Args:
        path: path of the file.

    Raises:
        ValueError: when the file holds neither {"accepted": [rates between 0 and 1]} nor such a row.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from error
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
    """Rows of the table for one shape and batch size.

    Args:
        costs: what was measured.
        candidates: the K of each row.
        accepted: acceptance rates, or None.
        block_size: B.

    Returns:
        One dict for each K; its predictions are None unless there are rates for all K - 1 drafts.
    """
    rows = []
    for k in candidates:
        known = accepted is not None and len(accepted) >= k - 1
        rows.append(
            {
                "shape": costs.shape,
                "batch_size": costs.batch_size,
                "candidates": k,
                "step_seconds": costs.verification(1),
                "head_step_ratio": costs.head / costs.verification(1),
                "verification_seconds": costs.verification(k),
                "verification_ratio": costs.ratio(k),
                "drafting_seconds": (k - 1) * costs.draft,
                "forwards_saved": forwards_saved(k, accepted, block_size) if known else None,
                "speedup": costs.speedup(k, accepted, block_size) if known else None,
            }
        )
    return rows
