"""How far a round drafts: fixed by the options, or chosen in every round from what drafting gains and what it costs.

With `mrp_steps="auto"` a round follows the plan with the most denoising steps per second. What a plan gains, steps per
forward, is known from a *draft profile*, which `mrp calibrate` measures on decoded samples and stores in the config.
The gains of this call's own rounds, beside what the profile expected of them, correct it for the text at hand. What a
plan costs on this device, for this number of rows, is measured during decoding too:

    seconds of a round  =  a + b * tokens of the backbone's forward  +  c * depths drafted  +  d * head steps

where a depth of a chain counts as a part of a depth of a graph.

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
CHAIN_DEPTH = 0.6  # time of a depth of a chain, which has no alternatives to merge, beside one of a graph
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
        chain: whether the drafts form a chain instead of a graph.
    """

    candidates: int
    drafts_per_head_step: int
    steps: float
    tokens: float
    depths: float
    head_steps: float
    chain: bool = False

    def plan(self, block_size: int) -> DraftPlan:
        """Return the plan."""
        if self.candidates == 1:
            return DraftPlan(1, 1)
        if self.chain:
            return DraftPlan(self.candidates, self.candidates, drafts_per_head_step=self.drafts_per_head_step)
        return DraftPlan.graph(self.candidates, self.candidates, block_size, self.drafts_per_head_step)


# the embedded checkpoints' profiles on average, for checkpoints that have not been calibrated
DEFAULT_PROFILES = {
    "head": (
        Gain(1, 1, 1.0, 1.13, 0.0, 0.0, chain=True),
        Gain(2, 1, 1.48, 1.84, 0.81, 0.81, chain=True),
        Gain(3, 1, 1.88, 2.67, 1.55, 1.55, chain=True),
        Gain(3, 2, 1.85, 2.66, 1.56, 0.84, chain=True),
        Gain(4, 1, 2.07, 3.27, 2.17, 2.17, chain=True),
        Gain(4, 2, 2.03, 3.29, 2.2, 1.47, chain=True),
        Gain(4, 3, 2.03, 3.32, 2.21, 0.85, chain=True),
        Gain(5, 1, 2.33, 4.06, 2.83, 2.83, chain=True),
        Gain(5, 2, 2.22, 4.08, 2.83, 1.54, chain=True),
        Gain(5, 4, 2.18, 4.06, 2.84, 0.89, chain=True),
        Gain(4, 1, 2.16, 3.47, 2.1, 2.1),
        Gain(4, 2, 2.12, 3.49, 2.12, 1.39),
        Gain(4, 3, 2.13, 3.5, 2.13, 0.84),
        Gain(6, 1, 2.68, 5.01, 3.1, 3.1),
        Gain(6, 2, 2.58, 5.08, 3.1, 1.81),
        Gain(6, 5, 2.52, 5.07, 2.98, 0.88),
        Gain(8, 1, 2.89, 6.23, 3.57, 3.57),
        Gain(8, 2, 2.79, 6.36, 3.46, 1.96),
        Gain(8, 7, 2.7, 6.38, 3.26, 0.89),
        Gain(12, 1, 3.25, 8.77, 4.08, 4.08),
        Gain(12, 2, 3.04, 8.75, 3.94, 2.26),
        Gain(12, 11, 2.88, 8.7, 3.71, 0.88),
        Gain(16, 1, 3.44, 11.26, 4.29, 4.29),
        Gain(16, 2, 3.23, 11.28, 4.18, 2.4),
        Gain(16, 15, 3.02, 11.05, 3.98, 0.88),
    ),
    "self": (
        Gain(1, 1, 1.0, 1.13, 0.0, 0.0, chain=True),
        Gain(2, 1, 1.42, 1.88, 0.82, 0.0, chain=True),
        Gain(3, 2, 1.68, 2.68, 1.58, 0.0, chain=True),
        Gain(4, 3, 1.85, 3.41, 2.31, 0.0, chain=True),
        Gain(5, 4, 1.95, 4.11, 2.92, 0.0, chain=True),
        Gain(4, 3, 1.94, 3.54, 2.09, 0.0),
        Gain(6, 5, 2.23, 5.06, 2.8, 0.0),
        Gain(8, 7, 2.43, 6.42, 3.09, 0.0),
        Gain(12, 11, 2.54, 8.59, 3.54, 0.0),
        Gain(16, 15, 2.73, 10.96, 3.9, 0.0),
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
            self.drafting.add(cost.depths * _weight(gain), cost.head_steps * cost.rows, cost.drafting)
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
        drafting = per_depth * depths * _weight(gain) + per_head_step * head_steps * rows
        return per_forward + per_token * tokens * rows + drafting

    def _extent(self, gain: Gain, rows: int, block_size: int) -> tuple[float, float, float]:
        """Return the tokens per row, depths and head steps of a round: as observed, starting from the profile."""
        of_profile = gain.tokens * block_size, gain.depths, gain.head_steps
        return self._extents.get((gain, rows.bit_length()), of_profile)


def _weight(gain: Gain) -> float:
    """Return the cost of a depth of the gain's plan beside that of a depth of a graph."""
    return CHAIN_DEPTH if gain.chain else 1.0


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
