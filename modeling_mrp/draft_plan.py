"""How far a round drafts: fixed by the options, or chosen in every round from what drafting gains and what it costs.

With `mrp_steps="auto"` a round follows the plan with the most denoising steps per second. What a plan gains, steps per
forward, is known from a *draft profile*, which `mrp calibrate` measures on decoded samples and stores in the config.
The gains of this call's own rounds, beside what the profile expected of them, correct it for the text at hand. What a
plan costs on this device, for this number of rows, is measured during decoding too:

    seconds of a round  =  a + b * tokens of the backbone's forward  +  c * depths drafted  +  d * head steps

The clock is read where the host waits for the device anyway (see decoding.py), so the measurements add no wait. Plans
differ in cost, never in the tokens that are returned: verification does not depend on them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from .configuration_mrp import MRPConfig
from .options import ALTERNATIVES, DecodingOptions

RETAINED = 0.95  # weight of all earlier rounds beside a new one: the last 20 rounds or so count
# tokens whose time equals that of a forward's fixed part, until forwards of two widths were measured
ASSUMED_FIXED_TOKENS = {"cpu": 64.0, "cuda": 256.0}
ASSUMED_HEAD_STEP = 0.1  # time of a head step beside that of a forward, until one has been measured
ASSUMED_DEPTH = 0.3  # time of a depth beside that of a head step, until both have been measured apart
TRUST_IN_PROFILE = 20.0  # steps of this call that count as much as the profile
REVIEWED_EVERY = 4  # rounds, after the first few: comparing the plans takes time too
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


# the embedded checkpoints' profiles on average, for checkpoints that have not been calibrated
DEFAULT_PROFILES = {
    "head": (
        Gain(1, 1, 1.0, 1.13, 0.0, 0.0),
        Gain(2, 1, 1.5, 1.85, 0.8, 0.8),
        Gain(3, 1, 1.93, 2.77, 1.54, 1.54),
        Gain(3, 2, 1.87, 2.75, 1.53, 0.81),
        Gain(4, 1, 2.19, 3.48, 2.1, 2.1),
        Gain(4, 2, 2.14, 3.5, 2.13, 1.39),
        Gain(4, 3, 2.16, 3.52, 2.14, 0.84),
        Gain(6, 1, 2.68, 4.95, 3.05, 3.05),
        Gain(6, 2, 2.6, 5.03, 3.07, 1.79),
        Gain(6, 5, 2.53, 5.03, 2.95, 0.87),
        Gain(8, 1, 2.92, 6.19, 3.55, 3.55),
        Gain(8, 2, 2.82, 6.29, 3.44, 1.94),
        Gain(8, 7, 2.71, 6.31, 3.24, 0.88),
        Gain(12, 1, 3.3, 8.74, 4.06, 4.06),
        Gain(12, 2, 3.1, 8.77, 3.95, 2.26),
        Gain(12, 11, 2.91, 8.62, 3.67, 0.87),
        Gain(16, 1, 3.53, 11.35, 4.3, 4.3),
        Gain(16, 2, 3.3, 11.2, 4.15, 2.39),
        Gain(16, 15, 3.07, 10.99, 3.95, 0.87),
    ),
    "self": (
        Gain(1, 1, 1.0, 1.13, 0.0, 0.0),
        Gain(2, 1, 1.42, 1.89, 0.82, 0.0),
        Gain(3, 2, 1.71, 2.8, 1.58, 0.0),
        Gain(4, 3, 1.94, 3.54, 2.09, 0.0),
        Gain(6, 5, 2.23, 5.05, 2.79, 0.0),
        Gain(8, 7, 2.44, 6.42, 3.1, 0.0),
        Gain(12, 11, 2.54, 8.57, 3.54, 0.0),
        Gain(16, 15, 2.73, 10.95, 3.89, 0.0),
    ),
}


class LinearCost:
    """Seconds as a linear function of two quantities, x and y, fitted to measurements of which old ones count less."""

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


class RoundCost(NamedTuple):
    """What a round of spec has done up to its verification, and when.

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


class Costs:
    """What rounds cost on one device: the backbone's forward, and drafting.

    Args:
        device: type of the device.
    """

    def __init__(self, device: str) -> None:
        self.fixed_tokens = ASSUMED_FIXED_TOKENS.get(device, ASSUMED_FIXED_TOKENS["cuda"])
        self.forward = LinearCost()  # x: one forward, y: its tokens
        self.drafting = LinearCost()  # x: depths, y: head steps of one row each
        # how far the rounds of a plan go with about as many rows: with many, further than the profile of one says
        self._extents: dict[tuple[Gain, int], tuple[float, float, float]] = {}

    def add(self, gain: Gain, cost: RoundCost, forward: float, block_size: int) -> None:
        """Add a round of a plan, whose forward and verification took the given seconds."""
        self.forward.add(1.0, cost.tokens, forward)
        if cost.depths:
            self.drafting.add(cost.depths, cost.head_steps * cost.rows, cost.drafting)
        old = self._extent(gain, cost.rows, block_size)
        new = (cost.tokens / cost.rows, cost.depths, cost.head_steps)
        mean = tuple(RETAINED * a + (1 - RETAINED) * b for a, b in zip(old, new, strict=True))
        self._extents[gain, cost.rows.bit_length()] = mean

    def seconds(self, gain: Gain, plain: Gain, rows: int, block_size: int) -> float:
        """Return the expected seconds of a round.

        Args:
            gain: what its plan does on average.
            plain: what the plan without drafts does.
            rows: number of running rows.
            block_size: tokens per block.
        """
        tokens, depths, head_steps = self._extent(gain, rows, block_size)
        per_forward, per_token = self.forward.coefficients(self.fixed_tokens) or (self.fixed_tokens, 1.0)
        head_step = ASSUMED_HEAD_STEP * (per_forward + per_token * plain.tokens * block_size * rows)
        measured = self.drafting.coefficients(ASSUMED_DEPTH * rows)
        per_depth, per_head_step = measured or (ASSUMED_DEPTH * head_step, head_step / rows)
        drafting = per_depth * depths + per_head_step * head_steps * rows
        return per_forward + per_token * tokens * rows + drafting

    def _extent(self, gain: Gain, rows: int, block_size: int) -> tuple[float, float, float]:
        """Return the tokens per row, depths and head steps of a round: as observed, starting from the profile."""
        of_profile = gain.tokens * block_size, gain.depths, gain.head_steps
        return self._extents.get((gain, rows.bit_length()), of_profile)


_remembered: WeakKeyDictionary[torch.nn.Module, dict[tuple, Costs]] = WeakKeyDictionary()
_observers: WeakKeyDictionary[torch.nn.Module, Callable[[RoundCost], None]] = WeakKeyDictionary()


class Planner:
    """Follows one plan in every round.

    Args:
        model: the model, whose rounds may be observed.
        plan: the plan.
    """

    def __init__(self, model: torch.nn.Module, plan: DraftPlan) -> None:
        self.current = plan
        self._observer = _observers.get(model)

    def plan(self, rows: int) -> DraftPlan:
        """Return the plan of the next round for this number of running rows."""
        return self.current

    def begin(self, cost: RoundCost) -> None:
        """Note what a round has done up to its verification."""
        if self._observer is not None:
            self._observer(cost)

    def end(self, now: float, gained: int) -> None:
        """Note the end of the round.

        Args:
            now: when it ended, in seconds of `time.perf_counter`.
            gained: denoising steps beyond the first of each row, all rows together.
        """


class AdaptivePlanner(Planner):
    """Chooses the plan of every round.

    Args:
        model: the model; what its rounds have cost is remembered from call to call.
        options: decoding options of this call.
    """

    def __init__(self, model: torch.nn.Module, options: DecodingOptions) -> None:
        gains = draft_profile(model.config, options.mrp_draft)
        self.block_size = options.block_size
        self.plain = self.chosen = gains[0]
        super().__init__(model, self.chosen.plan(self.block_size))
        self.gains = [gain for gain in gains if gain.candidates <= options.candidates]
        key = str(model.device), str(model.dtype), options.mrp_draft
        self.costs = _remembered.setdefault(model, {}).setdefault(key, Costs(model.device.type))
        self.round: RoundCost | None = None  # the round that is under way
        self.rounds = 0
        self.gained = self.expected = TRUST_IN_PROFILE  # steps beyond the first of a round, per row

    def plan(self, rows: int) -> DraftPlan:
        """Return the plan of the next round for this number of running rows."""
        self.rounds += 1
        if self.rounds <= REVIEWED_EVERY or self.rounds % REVIEWED_EVERY == 0:
            self._review(rows)
        return self.current

    def _review(self, rows: int) -> None:
        """Compare the plans, and change to the best if it promises enough."""
        ratio = self.gained / self.expected
        pace = {
            gain: (1 + (gain.steps - 1) * ratio) / self.costs.seconds(gain, self.plain, rows, self.block_size)
            for gain in self.gains
        }
        best = max(pace, key=pace.get)
        if pace[best] > HYSTERESIS * pace[self.chosen]:
            self.chosen, self.current = best, best.plan(self.block_size)

    def begin(self, cost: RoundCost) -> None:
        """Note what a round has done up to its verification; `end` records it."""
        super().begin(cost)
        self.round = cost

    def end(self, now: float, gained: int) -> None:
        """Record what the round that `begin` noted has cost and gained; rounds that it did not note are left out."""
        cost, self.round = self.round, None
        if cost is None:
            return
        self.costs.add(self.chosen, cost, now - cost.drafted, self.block_size)
        if self.chosen.steps > 1:
            self.gained = RETAINED * self.gained + gained / cost.rows
            self.expected = RETAINED * self.expected + self.chosen.steps - 1


def planner_for(model: torch.nn.Module, options: DecodingOptions) -> Planner:
    """Return the planner that the decoding options ask for."""
    return AdaptivePlanner(model, options) if options.adaptive else Planner(model, DraftPlan.of(options))


@contextmanager
def observe_rounds(model: torch.nn.Module) -> Iterator[list[RoundCost]]:
    """Collect what the rounds of a model's spec calls do, in a list that grows with every round."""
    rounds: list[RoundCost] = []
    _observers[model] = rounds.append
    try:
        yield rounds
    finally:
        del _observers[model]


def draft_profile(config: MRPConfig, draft: str) -> list[Gain]:
    """Return what the plans gain with a checkpoint: its own profile, or else the embedded checkpoints' on average.

    Args:
        config: the checkpoint's config.
        draft: "head" or "self".
    """
    measured = (config.draft_profile or {}).get(draft)
    return [Gain(**values) for values in measured] if measured else list(DEFAULT_PROFILES[draft])
