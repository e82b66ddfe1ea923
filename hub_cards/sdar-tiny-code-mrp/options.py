"""Decoding options of one `generate` call, and their validation."""

import difflib
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

from .configuration_mrp import MRPConfig
from .step_rules import STRATEGIES, StepRule

MODES = (None, "direct", "spec", "remask")
DRAFTERS = ("head", "self")
ACCEPTANCES = ("exact", "token")
DEFAULT_STEPS = 3
MOST_CANDIDATES = 16  # with mrp_steps="auto"
ALTERNATIVES = 3  # of a draft step in a graph; more gained nothing on either embedded checkpoint
CRITERIA = ("leave_one_out", "confidence", "residual", "backbone")


@dataclass(frozen=True)
class DecodingOptions:
    """The keyword arguments that `generate` takes beside those of transformers. None means the default.

    Attributes:
        mrp_mode: None (backbone only), "direct", "spec" or "remask".
        mrp_steps: look-ahead K, at least 1. spec: drafts per round, the first of which is the backbone's own certain
            step. direct: head steps after each backbone step. "auto": spec chooses in every round how many candidates
            and head steps pay (at most 16 candidates, or `mrp_candidates`). It stands for 3 where the text depends on
            the drafts, lest it depend on the clock: in the other modes, and with `mrp_acceptance="token"`.
        mrp_candidates: the most states C per row that one verification of spec reads, at least 1. The drafts form a
            graph (see draft_graph.py) of at most K depths, by default C. None: they form a chain of K states.
        mrp_draft: what spec drafts from: "head" (logits that the head estimates), or "self" (the backbone's logits of
            the last round).
        mrp_drafts_per_head_step: how many depths of drafts share one head step, at least 1.
        mrp_acceptance: "exact" accepts a draft where the backbone takes the same step, which changes no token.
            "token" also accepts it where the backbone would choose the same tokens, but would reveal others first.
        mrp_acceptance_floor: confidence, from 0 to 1, that the backbone needs in tokens accepted out of order.
        mrp_draft_vocabulary: whether drafts are chosen among the tokens of the checkpoint's draft vocabulary, where it
            has one (see draft_vocabulary.py), instead of among all tokens.
        mrp_draft_threshold: confidence below which a draft ends its chain; None means that no draft does.
        remasking_strategy: the step rule, one of `STRATEGIES`; remask requires the dynamic one.
        denoising_steps: the static and the sequential rule reveal ceil(block_size / denoising_steps) tokens per step.
        confidence_threshold: threshold of the dynamic rule.
        eb_threshold: bound of the entropy rule, in nats.
        remask_criterion: how remask decides which tokens to mask again. "leave_one_out", "confidence" and "residual"
            ask the head. "backbone" needs no head: the next forward checks every token of the block again (wide-in /
            narrow-out, arXiv 2507.18578).
        remask_threshold: threshold of that criterion. By default the checkpoint's calibrated one for "residual" if it
            has one, and `confidence_threshold` otherwise.
        block_size: tokens per block.
    """

    mrp_mode: str | None = None
    mrp_steps: int | str = DEFAULT_STEPS
    mrp_candidates: int | None = None
    mrp_draft: str | None = None
    mrp_drafts_per_head_step: int = 1
    mrp_acceptance: str = "exact"
    mrp_acceptance_floor: float = 0.9
    mrp_draft_vocabulary: bool = True
    mrp_draft_threshold: float | None = None
    remasking_strategy: str | None = None
    denoising_steps: int | None = None
    confidence_threshold: float = 0.9
    eb_threshold: float = 0.1
    remask_criterion: str = "leave_one_out"
    remask_threshold: float | None = None
    block_size: int | None = None

    @classmethod
    def resolve(cls, values: dict, config: MRPConfig) -> "DecodingOptions":
        """Fill in the defaults that depend on other options or on the checkpoint, and validate all options.

        Args:
            values: the options that were set; None counts as not set.
            config: the model's config.

        Raises:
            ValueError: for a value out of range, or a mode that the checkpoint does not support.
        """
        values = {key: value for key, value in values.items() if value is not None}
        has_head = config.num_mrp_layers > 0
        values.setdefault("block_size", config.block_size)
        values.setdefault("denoising_steps", values["block_size"])
        if "mrp_candidates" in values:
            values.setdefault("mrp_steps", values["mrp_candidates"])
        values.setdefault("mrp_draft", "head" if has_head else "self")
        remask = values.get("mrp_mode") == "remask"
        values.setdefault("remasking_strategy", "low_confidence_dynamic" if remask else "low_confidence_static")
        if values.get("remask_criterion") == "residual" and config.calibrated_remask_threshold is not None:
            values.setdefault("remask_threshold", config.calibrated_remask_threshold)
        options = cls(**values)
        options._check(has_head)
        if options.block_size != config.block_size:
            warnings.warn(
                f"block_size={options.block_size} overrides {config.block_size}, which the model was trained with",
                stacklevel=2,
            )
        return options

    def _check(self, has_head: bool):
        one_of("mrp_mode", self.mrp_mode, MODES)
        one_of("mrp_draft", self.mrp_draft, DRAFTERS)
        one_of("mrp_acceptance", self.mrp_acceptance, ACCEPTANCES)
        one_of("remasking_strategy", self.remasking_strategy, STRATEGIES)
        one_of("remask_criterion", self.remask_criterion, CRITERIA)
        if not isinstance(self.mrp_draft_vocabulary, bool):
            raise ValueError(f"mrp_draft_vocabulary must be True or False, got {self.mrp_draft_vocabulary!r}")
        for name in ("block_size", "mrp_drafts_per_head_step", "denoising_steps"):
            _whole(name, getattr(self, name))
        if self.mrp_candidates is not None:
            _whole("mrp_candidates", self.mrp_candidates)
        if self.mrp_steps != "auto":
            _whole("mrp_steps", self.mrp_steps, or_else='"auto"')
        for name in ("mrp_acceptance_floor", "mrp_draft_threshold", "confidence_threshold"):
            _number(name, getattr(self, name), upper=1.0)
        residual = self.remask_criterion == "residual"
        _number("remask_threshold", self.remask_threshold, upper=None if residual else 1.0)
        _number("eb_threshold", self.eb_threshold)
        if self.mrp_mode == "remask" and self.remasking_strategy != "low_confidence_dynamic":
            raise ValueError(
                f"remasking_strategy={self.remasking_strategy!r} cannot be combined with mrp_mode='remask', which "
                "uses 'low_confidence_dynamic': omit it"
            )
        needs_head = self.uses_head or (self.mrp_mode == "spec" and self.mrp_draft == "head")
        if needs_head and not has_head:
            raise ValueError(
                f"mrp_mode={self.mrp_mode!r} with mrp_draft={self.mrp_draft!r} needs a residual head, but this "
                "checkpoint has none: use mrp_mode=None, mrp_mode='spec' with mrp_draft='self', "
                "mrp_mode='remask' with remask_criterion='backbone', or train a head"
            )

    @property
    def uses_head(self) -> bool:
        """Whether this call runs the head."""
        return (
            self.mrp_mode == "direct"
            or (self.mrp_mode == "remask" and not self.revokes)
            or (self.mrp_mode == "spec" and self.mrp_draft == "head" and self.depths > 1)
        )

    @property
    def revokes(self) -> bool:
        """Whether the backbone itself may mask tokens of earlier steps again."""
        return self.mrp_mode == "remask" and self.remask_criterion == "backbone"

    @property
    def adaptive(self) -> bool:
        """Whether spec chooses in every round how far it drafts (see draft_plan.py)."""
        return self.mrp_mode == "spec" and self.mrp_steps == "auto" and self.mrp_acceptance == "exact"

    @property
    def candidates(self) -> int:
        """The most states that one forward of the backbone reads per row (without shadows)."""
        if self.mrp_mode != "spec":
            return 1
        return self.look_ahead if self.mrp_candidates is None else self.mrp_candidates

    @property
    def depths(self) -> int:
        """The most depths that drafts reach, that of the current block included."""
        return self.candidates if self.adaptive else min(self.look_ahead, self.candidates)

    @property
    def look_ahead(self) -> int:
        """The number K that `mrp_steps` stands for."""
        if self.mrp_steps != "auto":
            return self.mrp_steps
        return MOST_CANDIDATES if self.adaptive else DEFAULT_STEPS

    @property
    def keep_threshold(self) -> float:
        """Threshold of the remask criterion."""
        return self.confidence_threshold if self.remask_threshold is None else self.remask_threshold

    @property
    def step_rule(self) -> StepRule:
        """The step rule that the options describe."""
        tokens_per_step = -(-self.block_size // self.denoising_steps)
        return StepRule(self.remasking_strategy, tokens_per_step, self.confidence_threshold, self.eb_threshold)


OPTION_NAMES = tuple(field.name for field in fields(DecodingOptions))


def nearest(name: str, names: Iterable[str], likeness: float = 0.6) -> str:
    """Return " Did you mean ...?" with the most similar name, or "" when none is similar.

    Args:
        name: the mistyped name.
        names: the known names.
        likeness: how similar a name has to be, from 0 to 1 (equal).
    """
    close = difflib.get_close_matches(str(name), [str(known) for known in names], n=1, cutoff=likeness)
    return f" Did you mean {close[0]!r}?" if close else ""


def one_of(name: str, value: object, allowed: Collection) -> None:
    """Raise a ValueError that names an argument, its value and the allowed values, unless the value is allowed."""
    if value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{nearest(value, allowed)}"
        )


def _whole(name: str, value, or_else: str | None = None):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        alternative = f" or {or_else}" if or_else else ""
        raise ValueError(f"{name} must be an integer of at least 1{alternative}, got {value!r}")


def _number(name: str, value, upper: float | None = None):
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0 or value == float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    if upper is not None and value > upper:
        raise ValueError(f"{name} must lie between 0 and {upper:g}, got {value!r}")
