"""Measure the paper's claims on a checkpoint: the figures, and a row with the verdict of each (claim_rules.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.options import one_of

from .claim_rules import CLAIMS, NO_HEAD, Scale
from .decoding import prompt_ids
from .kl_between_states import Sample, kl_by_depth, kl_by_distance
from .modes import REFERENCE, REMASK_CRITERIA, grid
from .runs import Settings, evaluate, evaluate_full_head
from .scorers import Scorer
from .summary import summarise

SPEC_STEPS = (2, 4, 8)
DIRECT_STEPS = (1, 2, 3, 4)
THRESHOLD = 0.5


@dataclass(frozen=True)
class ClaimRow:
    """One claim with its verdict; `figures` are the numbers that `here` shows, None if nothing was measured."""

    name: str
    claim: str
    published: str
    here: str
    verdict: str
    reason: str
    rule: str
    figures: dict | None


# -- decoding


class Decoded:
    """The records of `evaluate` by mode; without a scorer an answer scores 1 if it equals static's token for token."""

    def __init__(self, records: list[dict], modes: Sequence[str], scored: bool):
        self.score = "accuracy" if scored else "share identical to static"
        static = {record["index"]: record for record in records if record["mode"] == REFERENCE}
        if not scored:
            records = [
                record | {"score": float(record["token_ids"] == static[record["index"]]["token_ids"])}
                for record in records
            ]
        self.by_mode = {mode: [] for mode in modes}
        for record in sorted(records, key=lambda record: record["index"]):
            self.by_mode[record["mode"]].append(record)
        self.rows = {row["mode"]: row for row in summarise(records, modes)["rows"]}

    def accuracy(self, mode: str) -> float:
        """Return the mean score of a mode."""
        return self.rows[mode]["accuracy"]

    def saved(self, mode: str) -> float:
        """Return the share of static's forwards that a mode does not need."""
        return 1 - self.rows[mode]["forwards"] / self.rows[REFERENCE]["forwards"]

    def lead(self, ours: str, theirs: str, of: str = "score") -> dict[str, float]:
        """Return the mean over the prompts of `ours` minus `theirs` in the field `of`, and its standard error."""
        pairs = zip(self.by_mode[ours], self.by_mode[theirs], strict=True)
        gaps = torch.tensor([a[of] - b[of] for a, b in pairs], dtype=torch.double)
        spread = gaps.var(unbiased=False) / max(len(gaps) - 1, 1)
        return {"mean": gaps.mean().item(), "error": spread.sqrt().item()}

    def samples(self, prompts: list[list[int]]) -> list[Sample]:
        """Return the prompts with static's answers."""
        return [(prompts[record["index"]], record["token_ids"]) for record in self.by_mode[REFERENCE]]


def modes_of(names: Sequence[str], block_size: int, has_head: bool) -> dict[str, dict]:
    """Return the modes, with their options of `generate`, that have to be decoded to measure the claims `names`."""
    kinds = {
        "unverified": (["direct"], DIRECT_STEPS),
        "lossless": (["spec", "spec-self"], SPEC_STEPS),
        "gain": (["spec"], SPEC_STEPS),
        "drafter": (["spec", "spec-self"], SPEC_STEPS),
        "remask": (["dynamic", *(f"remask-{criterion}" for criterion in REMASK_CRITERIA)], ()),
    }
    modes = grid([], (), (), block_size)
    for name in names:
        wanted, steps = kinds.get(name, ([], ()))
        if not has_head:
            wanted = [kind for kind in wanted if kind == "spec-self" and name == "lossless"]
        modes |= grid(wanted, [THRESHOLD], steps, block_size)
    return modes


# -- figures


def _similarity(model, samples: Sequence[Sample]) -> dict:
    kl, unrelated = kl_by_distance(model, samples)
    return {"kl_by_distance": kl, "kl_unrelated": unrelated[0] if unrelated else 0.0}


def _residual(model, samples: Sequence[Sample], settings: Settings, full) -> dict:
    ours, theirs = (
        kl_by_depth(one, samples, max(DIRECT_STEPS), settings.batch_size, settings.seed) if one is not None else None
        for one in (model, full)
    )
    return {"before": ours["before"], "residual": ours["after"], "full": theirs["after"] if theirs else None}


def _unverified(decoded: Decoded, has_full: bool) -> dict:
    modes = [f"direct-{k}" for k in DIRECT_STEPS]
    return {
        "score": decoded.score,
        "static": decoded.accuracy(REFERENCE),
        "residual": [decoded.accuracy(mode) for mode in modes],
        "full": [decoded.accuracy(f"{mode}-full") for mode in modes] if has_full else None,
        "lead": decoded.lead(modes[-1], f"{modes[-1]}-full") if has_full else None,
    }


def _lossless(decoded: Decoded) -> dict:
    modes = [mode for mode in decoded.by_mode if mode.startswith("spec-")]
    pairs = [
        (ours["token_ids"], theirs["token_ids"])
        for mode in modes
        for ours, theirs in zip(decoded.by_mode[mode], decoded.by_mode[REFERENCE], strict=True)
    ]
    equal = sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=False))
    return {
        "modes": modes,
        "prompts": sum(ours == theirs for ours, theirs in pairs) / len(pairs),
        "tokens": equal / sum(max(len(ours), len(theirs)) for ours, theirs in pairs),
    }


def _gain(decoded: Decoded) -> dict:
    rows = [decoded.rows[f"spec-{k}"] for k in SPEC_STEPS]
    return {
        "steps": list(SPEC_STEPS),
        "static_forwards": decoded.rows[REFERENCE]["forwards"],
        "saved": [decoded.saved(row["mode"]) for row in rows],
        "time_ratio": [row["time_ratio"] for row in rows],
        "acceptance": [row["acceptance"] for row in rows],
    }


def _drafter(decoded: Decoded) -> dict:
    leads = [decoded.lead(f"spec-{k}-self", f"spec-{k}", of="forwards") for k in SPEC_STEPS]
    figures = {"steps": list(SPEC_STEPS), "lead": leads}
    for drafter, suffix in (("head", ""), ("self", "-self")):
        modes = [f"spec-{k}{suffix}" for k in SPEC_STEPS]
        figures[f"saved_{drafter}"] = [decoded.saved(mode) for mode in modes]
        figures[f"acceptance_{drafter}"] = [decoded.rows[mode]["acceptance"] for mode in modes]
    return figures


def _remask(decoded: Decoded) -> dict:
    dynamic = f"dynamic-{THRESHOLD:g}"
    modes = {criterion: f"remask-{criterion}-{THRESHOLD:g}" for criterion in REMASK_CRITERIA}
    shown = {"static": REFERENCE, "dynamic": dynamic} | modes
    return {
        "score": decoded.score,
        "static": decoded.accuracy(REFERENCE),
        "dynamic": decoded.accuracy(dynamic),
        "remask": {criterion: decoded.accuracy(mode) for criterion, mode in modes.items()},
        "lead": {criterion: decoded.lead(mode, dynamic) for criterion, mode in modes.items()},
        "tokens_per_forward": {name: decoded.rows[mode]["tokens_per_forward"] for name, mode in shown.items()},
    }


# -- rows


def check_claims(
    model: MRPForDiffusionLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict],
    scorer: Scorer | None,
    settings: Settings,
    folder: str | Path,
    names: Sequence[str] = tuple(CLAIMS),
    full: MRPForDiffusionLM | None = None,
    on_row: Callable[[ClaimRow], None] = lambda row: None,
) -> list[ClaimRow]:
    """Measure claims and judge them.

    Args:
        model: the model, in eval mode on its device.
        tokenizer: its tokenizer.
        rows: rows of the data, see `read_eval_rows`.
        scorer: function of (completion, row); None to use the share of answers identical to static's.
        settings: how to decode; its modes are replaced by those that the claims need.
        folder: where the decoded answers are kept; a run that was interrupted there is resumed.
        names: keys of `CLAIMS`.
        full: the same backbone with a head that predicts the full distribution.
        on_row: called with each row as soon as it is judged.

    Raises:
        ValueError: if a claim is unknown, or the head of `full` is residual.
    """
    for name in names:
        one_of("claim", name, CLAIMS)
    if full is not None and full.config.mrp_residual:
        raise ValueError("the full head has mrp_residual true: give one that was trained with mrp_residual: false")
    has_head = model.mrp_head is not None
    decoded = _decode(model, tokenizer, rows, scorer, settings, Path(folder), names, full if has_head else None)
    samples = decoded.samples([prompt_ids(tokenizer, row, settings.raw) for row in rows])
    measures = {
        "similarity": lambda: _similarity(model, samples),
        "residual": lambda: _residual(model, samples, settings, full),
        "unverified": lambda: _unverified(decoded, full is not None),
        "lossless": lambda: _lossless(decoded),
        "gain": lambda: _gain(decoded),
        "drafter": lambda: _drafter(decoded),
        "remask": lambda: _remask(decoded),
    }
    judged = []
    for name in names:
        measurable = has_head or name in ("similarity", "lossless")
        judged.append(judge_claim(name, measures[name]() if measurable else None, scale_of(model, settings)))
        on_row(judged[-1])
    return judged


def judge_claim(name: str, figures: dict | None, scale: Scale) -> ClaimRow:
    """Return the row of a claim from its figures, which are None if there is no head to measure."""
    claim = CLAIMS[name]
    verdict, reason = (NO_HEAD, "") if figures is None else claim.verdict(figures, scale)
    here = "-" if figures is None else claim.show(figures)
    return ClaimRow(name, claim.sentence, claim.published, here, verdict, reason, claim.rule, figures)


def scale_of(model: MRPForDiffusionLM, settings: Settings) -> Scale:
    """Return the size of a model and where it runs, which the verdicts take into account."""
    # counted by identity, because lm_head may share its weight with the embedding
    parameters = {id(p): p.numel() for part in (model.model, model.lm_head) for p in part.parameters()}
    return Scale(
        parameters=sum(parameters.values()),
        block_size=model.config.block_size,
        device=model.device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        batch_size=settings.batch_size,
    )


def _decode(model, tokenizer, rows, scorer, settings: Settings, folder: Path, names, full) -> Decoded:
    """Decode what the claims need; the modes of the full head end in -full."""
    modes = modes_of(names, model.config.block_size, model.mrp_head is not None)
    records, shown = evaluate(model, tokenizer, rows, scorer, replace(settings, modes=modes), folder), list(modes)
    if full is not None and "unverified" in names:
        direct = {mode: options for mode, options in modes.items() if mode.startswith("direct-")}
        records += evaluate_full_head(full, tokenizer, rows, scorer, replace(settings, modes=direct), folder)
        shown += [f"{mode}-full" for mode in direct]
    return Decoded(records, shown, scored=scorer is not None)
