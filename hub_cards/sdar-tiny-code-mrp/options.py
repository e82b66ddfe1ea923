"""Options of one decoding call, checked."""

import difflib
import warnings
from dataclasses import dataclass, fields

from .step_rules import STRATEGIES, StepRule

MODES = (None, "direct", "spec", "remask")
DRAFTERS = ("head", "self")
ACCEPTANCES = ("exact", "token")
CRITERIA = ("leave_one_out", "confidence", "residual", "backbone")


@dataclass(frozen=True)
class DecodingOptions:
    """Keyword arguments of `generate` that are ours; None means the default (see README).

    Attributes:
        mrp_mode: None (backbone only), "direct", "spec" or "remask".
        mrp_steps: look-ahead K >= 1.
        mrp_draft: who drafts in spec: "head", or "self" (the backbone's last known logits).
        mrp_drafts_per_head_step: draft steps of a chain that share one head step, >= 1.
        mrp_acceptance: "exact" (lossless), or "token": also where the order differs (see `mrp_acceptance_floor`).
        mrp_acceptance_floor: confidence in [0, 1] that token acceptance asks of the backbone out of order.
        mrp_draft_threshold: stop a chain before a draft whose confidence is below it; None: never.
        remasking_strategy: the step rule; remask proposes by the dynamic one.
        denoising_steps: static and sequential reveal ceil(block_size / denoising_steps) tokens a step.
        confidence_threshold, eb_threshold: bounds of the dynamic and of the entropy rule.
        remask_criterion: "leave_one_out", "confidence" or "residual" of the head; "backbone" needs none: every token
            of the block is checked again in the next forward (wide-in / narrow-out, arXiv 2507.18578).
        remask_threshold: None: the checkpoint's calibrated |C| for "residual", else `confidence_threshold`.
        block_size: tokens per block.
    """

    mrp_mode: str | None = None
    mrp_steps: int = 3
    mrp_draft: str | None = None
    mrp_drafts_per_head_step: int = 1
    mrp_acceptance: str = "exact"
    mrp_acceptance_floor: float = 0.9
    mrp_draft_threshold: float | None = None
    remasking_strategy: str | None = None
    denoising_steps: int | None = None
    confidence_threshold: float = 0.9
    eb_threshold: float = 0.1
    remask_criterion: str = "leave_one_out"
    remask_threshold: float | None = None
    block_size: int | None = None

    @classmethod
    def resolve(cls, values: dict, config) -> "DecodingOptions":
        """Options for a checkpoint with this config, from the values that were set.

        Raises:
            ValueError: for a value out of range, or a mode that the checkpoint cannot run.
        """
        values = {key: value for key, value in values.items() if value is not None}
        has_head = config.num_mrp_layers > 0
        values.setdefault("block_size", config.block_size)
        values.setdefault("denoising_steps", values["block_size"])
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
        for name in ("block_size", "mrp_steps", "mrp_drafts_per_head_step", "denoising_steps"):
            _whole(name, getattr(self, name))
        for name in ("mrp_acceptance_floor", "mrp_draft_threshold", "confidence_threshold"):
            _number(name, getattr(self, name), upper=1.0)
        residual = self.remask_criterion == "residual"
        _number("remask_threshold", self.remask_threshold, upper=None if residual else 1.0)
        _number("eb_threshold", self.eb_threshold)
        if self.mrp_mode == "remask" and self.remasking_strategy != "low_confidence_dynamic":
            raise ValueError(
                f"remasking_strategy={self.remasking_strategy!r} does not go with mrp_mode='remask', which "
                "proposes by 'low_confidence_dynamic': leave it out"
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
        return (
            self.mrp_mode == "direct"
            or (self.mrp_mode == "remask" and not self.revokes)
            or (self.mrp_mode == "spec" and self.mrp_draft == "head" and self.mrp_steps > 1)
        )

    @property
    def revokes(self) -> bool:
        """Whether the backbone itself may take back what an earlier step revealed."""
        return self.mrp_mode == "remask" and self.remask_criterion == "backbone"

    @property
    def candidates(self) -> int:
        """States that one backbone forward reads per row."""
        return self.mrp_steps if self.mrp_mode == "spec" else 1

    @property
    def keep_threshold(self) -> float:
        return self.confidence_threshold if self.remask_threshold is None else self.remask_threshold

    @property
    def step_rule(self) -> StepRule:
        tokens_per_step = -(-self.block_size // self.denoising_steps)
        return StepRule(self.remasking_strategy, tokens_per_step, self.confidence_threshold, self.eb_threshold)


OPTION_NAMES = tuple(field.name for field in fields(DecodingOptions))


def nearest(name: str, names, likeness: float = 0.6) -> str:
    """' Did you mean ...?' for a mistyped name, or nothing."""
    close = difflib.get_close_matches(str(name), [str(known) for known in names], n=1, cutoff=likeness)
    return f" Did you mean {close[0]!r}?" if close else ""


def one_of(name: str, value, allowed):
    """Raise a ValueError that names the argument, the value and what is allowed, unless it is."""
    if value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{nearest(value, allowed)}"
        )


def _whole(name: str, value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _number(name: str, value, upper: float | None = None):
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0 or value == float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    if upper is not None and value > upper:
        raise ValueError(f"{name} must lie between 0 and {upper:g}, got {value!r}")
