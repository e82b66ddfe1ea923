"""The grid of decoding modes that an evaluation runs."""

import re
from collections.abc import Sequence

from modeling_mrp.options import nearest

REFERENCE = "static"
REMASK_CRITERIA = ("leave_one_out", "confidence", "residual")
KINDS = ("static", "control", "dynamic", "wide-narrow", "spec", "spec-self", "spec-token", "direct")
KINDS += tuple(f"remask-{criterion}" for criterion in REMASK_CRITERIA)
DEFAULT_KINDS = ("static", "spec", "direct", "remask-leave_one_out")
BASELINES = ("control", "dynamic", "wide-narrow", "spec-self")  # what the head has to beat
HEADLESS_KINDS = ("static", *BASELINES)
BACKBONE_ONLY = {"mrp_mode": None}
NARROW = 0.9  # the published threshold of narrow-out, whatever that of wide-in
WIDE_NARROW = {"mrp_mode": "remask", "remask_criterion": "backbone", "remask_threshold": NARROW}
DYNAMIC = BACKBONE_ONLY | {"remasking_strategy": "low_confidence_dynamic"}


def grid(kinds: Sequence[str], thresholds: Sequence[float], steps: Sequence[int], block_size: int) -> dict[str, dict]:
    """Options of `generate` for every mode, by its name; `static`, one token a step, comes first.

    Args:
        kinds: of `KINDS`. `control` reveals 2 and 4 tokens a step from the backbone's logits, `dynamic` is SDAR's
            threshold decoding, `wide-narrow` takes back what later forwards doubt (wide-in / narrow-out), `spec-self`
            drafts without a head.
        thresholds: confidence thresholds of `dynamic` and of the proposals of `wide-narrow` and `remask-*`.
        steps: K of `spec*` and `direct`.

    Raises:
        ValueError: for an unknown kind.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"modes must be of {', '.join(KINDS)}, got {kind!r}.{nearest(kind, KINDS)}")
    modes = {REFERENCE: BACKBONE_ONLY}
    for kind in kinds:
        if kind == "control":
            modes |= {
                f"static-{n}": BACKBONE_ONLY | {"denoising_steps": block_size // n} for n in (2, 4) if block_size >= n
            }
        elif kind == "dynamic":
            modes |= {f"dynamic-{tau:g}": DYNAMIC | {"confidence_threshold": tau} for tau in thresholds}
        elif kind == "wide-narrow":
            modes |= {f"wide-narrow-{tau:g}": WIDE_NARROW | {"confidence_threshold": tau} for tau in thresholds}
        elif kind == "direct":
            modes |= {f"direct-{k}": {"mrp_mode": "direct", "mrp_steps": k} for k in steps}
        elif kind.startswith("spec"):
            extra = {"mrp_draft": "self" if kind == "spec-self" else "head"}
            extra |= {"mrp_acceptance": "token"} if kind == "spec-token" else {}
            suffix = kind.removeprefix("spec")
            modes |= {f"spec-{k}{suffix}": {"mrp_mode": "spec", "mrp_steps": k} | extra for k in steps}
        elif kind.startswith("remask"):
            criterion = {"mrp_mode": "remask", "remask_criterion": kind.removeprefix("remask-")}
            modes |= {f"{kind}-{tau:g}": criterion | {"confidence_threshold": tau} for tau in thresholds}
    return modes


def modes_of_the_head(modes: dict[str, dict]) -> dict[str, dict]:
    """Those of a grid in which another head on the same backbone compares: `direct`, and `spec` that it drafts."""
    return {
        name: options
        for name, options in modes.items()
        if options["mrp_mode"] == "direct" or (options["mrp_mode"] == "spec" and options.get("mrp_draft") != "self")
    }


def family(mode: str) -> str:
    """Name of the curve that a mode is a point of: its name without the numbers."""
    return re.sub(r"-\d+(\.\d+)?(?=-|$)", "", mode)
