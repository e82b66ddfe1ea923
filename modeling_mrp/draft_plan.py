"""How far a round drafts: fixed by the options, or chosen in every round from what drafting gains and what it costs.

With `mrp_steps="auto"` a round follows the plan with the most denoising steps per second. What a plan gains, steps per
forward, is known from a *draft profile*, which `mrp calibrate` measures on decoded samples and stores in the config.
What it costs on this device, for this number of rows, is measured during decoding, round by round:

    seconds of a round  =  a + b * tokens of the backbone's forward  +  c * depths drafted  +  d * head steps

The clock is read where the host waits for the device anyway (see decoding.py), so the measurement adds no wait. Plans
differ in cost, never in the tokens that are returned: verification does not depend on them.
"""

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from .configuration_mrp import MRPConfig
from .options import ALTERNATIVES, DecodingOptions

RETAINED = 0.95  # weight of all earlier rounds beside a new one: the last 20 rounds or so count
ASSUMED_SHARE = 0.3  # share of a forward's time that grows with its tokens, until forwards of two widths were measured
ASSUMED_HEAD_STEP = 0.1  # time of a head step beside that of a forward, until one has been measured
ASSUMED_DEPTH = 0.3  # time of a depth beside that of a head step, until both have been measured apart
HYSTERESIS = 1.03  # another plan has to promise this much more: expectations are noisy


@dataclass(frozen=True)
class DraftPlan:
    """How far drafts reach in one round.

    Attributes:
        candidates: the most states C per row that the verification reads.
        depths: number of depths, that of the current block included.
        width: the most drafts of one depth from which drafting continues.
        alternatives: how many alternatives of each step are considered; with one, the drafts form a chain.
        drafts_per_head_step: how many depths share one head step.
    """

    candidates: int
    depths: int
    width: int = 1
    alternatives: int = 1
    drafts_per_head_step: int = 1

    @classmethod
    def graph(cls, candidates: int, depths: int, block_size: int, drafts_per_head_step: int = 1) -> "DraftPlan":
        """Return the plan of a graph with this many places and depths."""
        width = max(2, candidates // 4)
        return cls(candidates, depths, width, min(ALTERNATIVES, block_size), drafts_per_head_step)

    @classmethod
    def of(cls, options: DecodingOptions) -> "DraftPlan":
        """Return the plan that fixed options describe."""
        if options.mrp_candidates is None:
            return cls(options.candidates, options.depths, drafts_per_head_step=options.mrp_drafts_per_head_step)
        return cls.graph(options.candidates, options.depths, options.block_size, options.mrp_drafts_per_head_step)


@dataclass(frozen=True)
class Gain:
    """What a plan does in one round of one row, on average over decoded samples.

    Attributes:
        candidates: the plan's number of candidates.
        drafts_per_head_step: the plan's number of depths per head step.
        steps: denoising steps done.
        tokens: tokens in the backbone's forward, clean blocks included, over the block size.
        depths: depths drafted.
        head_steps: head steps.
    """

    candidates: int
    drafts_per_head_step: int
    steps: float
    tokens: float
    depths: float
    head_steps: float

    def plan(self, block_size: int) -> DraftPlan:
        """Return the plan."""
        if self.candidates == 1:
            return DraftPlan(1, 1)
        return DraftPlan.graph(self.candidates, self.candidates, block_size, self.drafts_per_head_step)


DEFAULT_PROFILES = {
    "head": (Gain(1, 1, 1.0, 1.13, 0.0, 0.0), Gain(8, 8, 2.6, 7.0, 3.0, 1.2)),
    "self": (Gain(1, 1, 1.0, 1.13, 0.0, 0.0), Gain(8, 8, 2.3, 7.0, 3.0, 0.0)),
}


class LinearCost:
    """Seconds as a linear function of two quantities, x and y, fitted to measurements; old ones count less and less."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of x x, x y, y y, x t and y t

    def add(self, x: float, y: float, seconds: float) -> None:
        """Add a measurement."""
        new = (x * x, x * y, y * y, x * seconds, y * seconds)
        self._sums = [RETAINED * old + value for old, value in zip(self._sums, new, strict=True)]

    def coefficients(self, ratio: float) -> tuple[float, float] | None:
        """Return the seconds per unit of x and of y, or None if nothing has been measured.

        Args:
            ratio: seconds per unit of x over those per unit of y, where the measurements cannot tell them apart.
        """
        xx, xy, yy, xt, yt = self._sums
        if xx + yy == 0:
            return None
        determinant = xx * yy - xy * xy
        if determinant > 1e-3 * xx * yy:  # x and y did not grow in proportion: least squares
            x, y = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
            if x >= 0 and y >= 0:
                return x, y
        y = (ratio * xt + yt) / (ratio * ratio * xx + 2 * ratio * xy + yy)
        return ratio * y, y


class Costs:
    """What rounds cost on one device with about as many rows: the backbone's forward, and drafting."""

    def __init__(self) -> None:
        self.forward = LinearCost()  # x: one forward, y: its tokens
        self.drafting = LinearCost()  # x: depths, y: head steps

    def seconds(self, gain: Gain, plain: Gain, tokens_per_block: int) -> float:
        """Return the expected seconds of a round.

        Args:
            gain: what its plan does on average.
            plain: what the plan without drafts does.
            tokens_per_block: tokens in one block of each row, all rows together.
        """
        plain_tokens = plain.tokens * tokens_per_block
        ratio = (1 - ASSUMED_SHARE) / ASSUMED_SHARE * plain_tokens
        per_forward, per_token = self.forward.coefficients(ratio) or (ratio, 1.0)
        forward = per_forward + per_token * gain.tokens * tokens_per_block
        assumed = ASSUMED_HEAD_STEP * (per_forward + per_token * plain_tokens)
        per_depth, per_head_step = self.drafting.coefficients(ASSUMED_DEPTH) or (ASSUMED_DEPTH * assumed, assumed)
        return forward + per_depth * gain.depths + per_head_step * gain.head_steps


class RoundCost(NamedTuple):
    """What a round has done, and when.

    Attributes:
        rows: number of running rows.
        tokens: tokens in the backbone's forward, all rows together.
        depths: depths drafted.
        head_steps: head steps.
        drafting: seconds until the drafts were known.
        drafted: when they were known, in seconds of `time.perf_counter`.
    """

    rows: int
    tokens: int
    depths: int
    head_steps: int
    drafting: float
    drafted: float


_remembered: WeakKeyDictionary[torch.nn.Module, dict[tuple, Costs]] = WeakKeyDictionary()


class Planner:
    """Chooses the plan of every round.

    Args:
        model: the model; what its rounds have cost is remembered from call to call.
        options: decoding options of this call.
    """

    def __init__(self, model: torch.nn.Module, options: DecodingOptions) -> None:
        self.round: RoundCost | None = None
        self.fixed = None if options.adaptive else DraftPlan.of(options)
        if self.fixed is not None:
            return
        self.block_size = options.block_size
        self.gains = [gain for gain in draft_profile(model.config, options.mrp_draft)]
        self.plain = next(gain for gain in self.gains if gain.candidates == 1)
        self.gains = [gain for gain in self.gains if gain.candidates <= options.candidates]
        self.key = str(model.device), str(model.dtype), options.mrp_draft
        self.costs = _remembered.setdefault(model, {})
        self.chosen: Gain | None = None

    def plan(self, running_rows: int) -> DraftPlan:
        """Return the plan of the next round for this number of running rows."""
        if self.fixed is not None:
            return self.fixed
        costs, tokens = self._costs(running_rows), running_rows * self.block_size
        pace = {gain: gain.steps / costs.seconds(gain, self.plain, tokens) for gain in self.gains}
        best = max(pace, key=pace.get)
        if self.chosen is None or pace[best] > HYSTERESIS * pace[self.chosen]:
            self.chosen = best
        return self.chosen.plan(self.block_size)

    def begin(self, cost: RoundCost) -> None:
        """Note what a round has cost up to its verification, for `record`."""
        self.round = cost

    def record(self, now: float) -> None:
        """Record the cost of the round that `begin` noted, if any; it ends now (seconds of `time.perf_counter`)."""
        cost, self.round = self.round, None
        if cost is None or self.fixed is not None:
            return
        costs = self._costs(cost.rows)
        costs.forward.add(1.0, cost.tokens, now - cost.drafted)
        if cost.depths:
            costs.drafting.add(cost.depths, cost.head_steps, cost.drafting)

    def _costs(self, rows: int) -> Costs:
        return self.costs.setdefault((*self.key, rows.bit_length()), Costs())


def draft_profile(config: MRPConfig, draft: str) -> list[Gain]:
    """Return what the plans gain with a checkpoint: its own profile, or else the embedded checkpoints' on average.

    Args:
        config: the checkpoint's config.
        draft: "head" or "self".
    """
    measured = (config.draft_profile or {}).get(draft)
    return [Gain(**values) for values in measured] if measured else list(DEFAULT_PROFILES[draft])
