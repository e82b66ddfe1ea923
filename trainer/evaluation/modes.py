"""The names of decoding modes, and the options of `generate` that each name stands for."""

import re
from collections.abc import Sequence

from modeling_mrp.options import nearest

REFERENCE = "static"
REMASK_CRITERIA = ("leave_one_out", "confidence", "residual")
KINDS = ("static", "control", "dynamic", "wide-narrow", "spec", "spec-self", "spec-token")
KINDS += ("graph", "graph-self", "graph-token", "auto", "auto-self", "auto-token", "direct")
KINDS += tuple(f"remask-{criterion}" for criterion in REMASK_CRITERIA)
DEFAULT_KINDS = ("static", "spec", "direct", "remask-leave_one_out")
BASELINES = ("control", "dynamic", "wide-narrow", "spec-self")  # what the head has to beat
DEMO_MODES = (
    *("static", "static-2", "static-4", "spec-2", "spec-3", "spec-4", "spec-4-self", "spec-4-token", "spec-8-token"),
    *("graph-4", "graph-8", "auto"),
    *("direct-1", "direct-2", "direct-3", "dynamic-0.9", "dynamic-0.7", "dynamic-0.5"),
    *("remask-leave_one_out", "remask-confidence", "remask-residual"),
)
HEADLESS_KINDS = ("static", *BASELINES)
BACKBONE_ONLY = {"mrp_mode": None}
NARROW = 0.9  # the published threshold of narrow-out, for every threshold of wide-in
WIDE_NARROW = {"mrp_mode": "remask", "remask_criterion": "backbone", "remask_threshold": NARROW}
DYNAMIC = BACKBONE_ONLY | {"remasking_strategy": "low_confidence_dynamic"}
REMASK_THRESHOLD = "0.5"  # for `remask-C`; so low that some proposals have to be masked again
SPEC = {
    (): {"mrp_draft": "head"},
    ("self",): {"mrp_draft": "self"},
    ("token",): {"mrp_draft": "head", "mrp_acceptance": "token"},
}
FORMS = (
    "static, static-N, dynamic-T, wide-narrow-T, spec-K, spec-K-self, spec-K-token, graph-K, graph-K-self, "
    "graph-K-token, auto, auto-self, auto-token, direct-K, remask-C and remask-C-T"
)


def mode_options(name: str, block_size: int) -> dict:
    """Return the options of `generate` that a mode's name stands for.

    Args:
        name: `static`, one token per step by the backbone; `static-N`, N tokens per step; `dynamic-T`, SDAR's
            threshold decoding; `wide-narrow-T`, the same, but tokens that later forwards doubt are masked again;
            `spec-K` and `direct-K`, with the look-ahead K; `spec-K-self`, drafted without a head; `spec-K-token`, with
            token acceptance; `graph-K`, `graph-K-self` and `graph-K-token`, the same with drafts that form a graph
            of at most K states instead of a chain; `auto`, `auto-self` and `auto-token`, the same with as many states
            as pay; `remask-C-T`, criterion C of `REMASK_CRITERIA` on proposals above
            the threshold T (default: 0.5).
        block_size: block size of the model.

    Raises:
        ValueError: if the name is not one of these, or its number is out of range.
    """
    try:
        match name.split("-"):
            case ["static"]:
                return BACKBONE_ONLY
            case ["static", n] if block_size % _count(n) == 0:
                return BACKBONE_ONLY | {"denoising_steps": block_size // _count(n)}
            case ["dynamic", tau]:
                return DYNAMIC | _threshold(tau)
            case ["wide", "narrow", tau]:
                return WIDE_NARROW | _threshold(tau)
            case ["remask", criterion, *tau] if criterion in REMASK_CRITERIA and len(tau) <= 1:
                return {"mrp_mode": "remask", "remask_criterion": criterion} | _threshold(*tau)
            case ["direct", k]:
                return {"mrp_mode": "direct", "mrp_steps": _count(k)}
            case ["spec" | "graph" | "auto" as kind, *how]:
                return _speculative(kind, how)
    except ValueError:
        pass  # not a number, or out of range
    raise ValueError(
        f"unknown mode {name!r}; expected one of {FORMS}, with N a divisor of the block size ({block_size}), "
        f"K at least 1, T a threshold from 0 to 1 and C one of {', '.join(REMASK_CRITERIA)}"
    )


def _speculative(kind: str, how: list[str]) -> dict:
    """Return the options of `spec-K...`, `graph-K...` and `auto...`."""
    if kind == "auto":
        number: dict = {"mrp_steps": "auto"}
    else:
        number = {"mrp_steps" if kind == "spec" else "mrp_candidates": _count(*how[:1])}
        how = how[1:]
    if tuple(how) not in SPEC:
        raise ValueError(how)
    return {"mrp_mode": "spec"} | number | SPEC[tuple(how)]


def _count(text: str = "") -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _threshold(text: str = REMASK_THRESHOLD) -> dict[str, float]:
    if not 0 <= float(text) <= 1:
        raise ValueError(text)
    return {"confidence_threshold": float(text)}


def needs_head(options: dict) -> bool:
    """Return whether a mode with these options of `generate` decodes with a head."""
    if options["mrp_mode"] == "spec":
        return options.get("mrp_draft") != "self"
    return options["mrp_mode"] is not None and options.get("remask_criterion") != "backbone"


def grid(kinds: Sequence[str], thresholds: Sequence[float], steps: Sequence[int], block_size: int) -> dict[str, dict]:
    """Return the options of `generate` of every mode of a grid, by name; `static`, one token per step, comes first.

    Args:
        kinds: elements of `KINDS`: names as in `mode_options`, without their numbers. `control` is `static` with 2
            and with 4 tokens per step.
        thresholds: values of T for `dynamic`, `wide-narrow` and `remask-*`.
        steps: values of K for `spec*`, `graph*` and `direct`.
        block_size: block size of the model.

    Raises:
        ValueError: if a kind is unknown, or a number is out of range.
    """
    names = [REFERENCE]
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"modes must be among {', '.join(KINDS)}, got {kind!r}.{nearest(kind, KINDS)}")
        if kind == "control":
            names += [f"static-{n}" for n in (2, 4) if block_size % n == 0]
        elif kind == "direct":
            names += [f"direct-{k}" for k in steps]
        elif kind.startswith("auto"):
            names.append(kind)
        elif kind.startswith(("spec", "graph")):
            drafts, *how = kind.split("-")
            names += ["-".join([drafts, str(k), *how]) for k in steps]
        elif kind != REFERENCE:
            names += [f"{kind}-{tau:g}" for tau in thresholds]
    return {name: mode_options(name, block_size) for name in names}


def modes_of_the_head(modes: dict[str, dict]) -> dict[str, dict]:
    """Return the modes of a grid that differ by head: `direct`, and `spec` with the head as drafter."""
    return {
        name: options
        for name, options in modes.items()
        if options["mrp_mode"] in ("direct", "spec") and needs_head(options)
    }


def family(mode: str) -> str:
    """Return the name of the curve that a mode is a point of: the mode's name without its numbers."""
    return re.sub(r"-\d+(\.\d+)?(?=-|$)", "", mode)
