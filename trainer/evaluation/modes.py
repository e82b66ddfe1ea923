"""The names of decoding modes, and the options of `generate` that each name stands for."""

import math
import re
from collections.abc import Mapping, Sequence

from modeling_mrp.options import nearest

REFERENCE = "static"
REMASK_CRITERIA = ("leave_one_out", "confidence", "residual")
KINDS = ("static", "control", "dynamic", "wide-narrow", "spec", "spec-self", "spec-token")
KINDS += ("graph", "graph-self", "graph-token", "auto", "auto-self", "direct")
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
UNDER = "+"  # in `dynamic-0.9+graph-8`: speculation under a rule
RULE_OPTIONS = ("remasking_strategy", "denoising_steps", "confidence_threshold", "eb_threshold")
RULE_FORMS = "static, static-N, dynamic-T, entropy-E, sequential, sequential-N"
SPEC_FORMS = "spec-K, spec-K-self, spec-K-token, graph-K, graph-K-self, graph-K-token, auto, auto-self"
OTHER_FORMS = "wide-narrow-T, direct-K, remask-C or remask-C-T"


def mode_options(name: str, block_size: int) -> dict:
    """Return the options of `generate` that a mode's name stands for.

    - A step rule, with which the backbone decodes alone: `static`, the most confident token per step, or `static-N`,
      the N most confident; `dynamic-T`, every token whose confidence exceeds T (SDAR's threshold decoding);
      `entropy-E`, the most certain tokens whose entropies add up to at most E nats; `sequential` or `sequential-N`,
      the leftmost.
    - Speculation: `spec-K` drafts a chain with the look-ahead K, `graph-K` a graph of at most K states, `auto` as many
      states as pay. With `-self` it drafts without a head. With `-token` it accepts tokens in another order too, which
      may change the text; otherwise the text is that of the rule, which is `static`.
    - Speculation under another rule: both names joined by `+`, such as `dynamic-0.9+graph-8`, which returns the text
      of `dynamic-0.9`.
    - Others: `direct-K`, with the look-ahead K; `remask-C-T`, criterion C of `REMASK_CRITERIA` on proposals above the
      threshold T (default: 0.5); `wide-narrow-T`, threshold decoding in which tokens that later forwards doubt are
      masked again.

    Args:
        name: the name.
        block_size: block size of the model.

    Raises:
        ValueError: if the name is not one of these, or its number is out of range.
    """
    try:
        rule, joined, speculation = name.partition(UNDER)
        if joined:
            return _rule(rule, block_size) | _speculation(speculation)
        match name.split("-"):
            case ["static" | "dynamic" | "entropy" | "sequential", *_]:
                return _rule(name, block_size)
            case ["spec" | "graph" | "auto", *_]:
                return _speculation(name)
            case ["wide", "narrow", tau]:
                return WIDE_NARROW | _threshold(tau)
            case ["remask", criterion, *tau] if criterion in REMASK_CRITERIA and len(tau) <= 1:
                return {"mrp_mode": "remask", "remask_criterion": criterion} | _threshold(*tau)
            case ["direct", k]:
                return {"mrp_mode": "direct", "mrp_steps": _count(k)}
    except ValueError:
        pass  # not a number, or out of range
    raise ValueError(
        f"unknown mode {name!r}; expected a rule ({RULE_FORMS}), speculation ({SPEC_FORMS}), both joined by {UNDER} "
        f"as in dynamic-0.9+graph-8, or {OTHER_FORMS}, with N a divisor of the block size ({block_size}), K at least "
        f"1, T a threshold from 0 to 1, E a bound of at least 0 nats and C one of {', '.join(REMASK_CRITERIA)}"
    )


def _rule(name: str, block_size: int) -> dict:
    """Return the options of decoding by the backbone alone with a step rule."""
    match name.split("-"):
        case ["static" | "sequential" as kind, *n] if len(n) <= 1 and block_size % _count(*(n or ["1"])) == 0:
            strategy = {} if kind == "static" else {"remasking_strategy": kind}
            steps = {"denoising_steps": block_size // _count(*n)} if n else {}
            return BACKBONE_ONLY | strategy | steps
        case ["dynamic", tau]:
            return DYNAMIC | _threshold(tau)
        case ["entropy", bound] if 0 <= float(bound) < math.inf:
            return BACKBONE_ONLY | {"remasking_strategy": "entropy_bounded", "eb_threshold": float(bound)}
    raise ValueError(name)


def _speculation(name: str) -> dict:
    """Return the options that turn those of a rule into speculation under it."""
    kind, *how = name.split("-")
    if kind == "auto":
        number: dict = {"mrp_steps": "auto"}
    else:
        if kind not in ("spec", "graph"):
            raise ValueError(name)
        number = {"mrp_steps" if kind == "spec" else "mrp_candidates": _count(*how[:1])}
        how = how[1:]
    if tuple(how) not in SPEC:
        raise ValueError(name)
    return {"mrp_mode": "spec"} | number | SPEC[tuple(how)]


def is_lossless(options: Mapping, reference: Mapping) -> bool:
    """Return whether a mode returns the text of a reference by construction, rounding aside.

    Args:
        options: options of `generate` of the mode.
        reference: those of the reference, which decodes by the backbone alone.
    """
    exact = options.get("mrp_mode") == "spec" and options.get("mrp_acceptance") in (None, "exact")
    return exact and all(options.get(name) == reference.get(name) for name in RULE_OPTIONS)


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
            and with 4 tokens per step. Complete names, such as `sequential+spec-4`, are allowed too.
        thresholds: values of T for `dynamic`, `wide-narrow` and `remask-*`.
        steps: values of K for `spec*`, `graph*` and `direct`.
        block_size: block size of the model.

    Raises:
        ValueError: if a kind is unknown, or a number is out of range.
    """
    names = [REFERENCE]
    for kind in kinds:
        if kind not in KINDS:
            names.append(_complete(kind, block_size))
        elif kind == "control":
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


def _complete(name: str, block_size: int) -> str:
    """Return an element of a grid's kinds that is the complete name of a mode."""
    try:
        mode_options(name, block_size)
    except ValueError as error:
        raise ValueError(
            f"modes must be among {', '.join(KINDS)} or complete names, got {name!r}.{nearest(name, KINDS)} ({error})"
        ) from None
    return name


def modes_of_the_head(modes: dict[str, dict]) -> dict[str, dict]:
    """Return the modes of a grid that differ by head: `direct`, and `spec` with the head as drafter."""
    return {
        name: options
        for name, options in modes.items()
        if options["mrp_mode"] in ("direct", "spec") and needs_head(options)
    }


def family(mode: str) -> str:
    """Return the name of the curve that a mode is a point of: the mode's name without its numbers."""
    return re.sub(r"-\d+(\.\d+)?(?=[-+]|$)", "", mode)
