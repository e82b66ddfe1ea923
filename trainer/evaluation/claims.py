"""The paper's claims, measured on a checkpoint: figures, and rows with the verdicts that follow (claim_rules.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from modeling_mrp.options import one_of
from modeling_mrp.sampling import Sampler
from modeling_mrp.step_rules import StepRule

from .claim_rules import CLAIMS, NO_HEAD, Scale
from .head_metrics import HeadMetrics, measure_head
from .head_probe import kl_by_depth
from .modes import REFERENCE, REMASK_CRITERIA, grid
from .runs import Settings, evaluate, evaluate_full_head, prompt_ids
from .scorers import Scorer
from .summary import summarise

SPEC_STEPS = (2, 4, 8)
DIRECT_STEPS = (1, 2, 3, 4)
THRESHOLD = 0.5
MAX_DISTANCE = 8
REPLAYED_ROWS = 4  # replayed together: every step's hidden states are kept

Sample = tuple[list[int], list[int]]  # token ids of prompt and answer


@dataclass(frozen=True)
class Row:
    """One claim with its verdict; `figures` are the numbers behind `here`, None when nothing was measured."""

    name: str
    claim: str
    published: str
    here: str
    verdict: str
    reason: str
    rule: str
    figures: dict | None


# -- trajectories


@torch.no_grad()
def replay(model, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """The states that static decoding, greedy and one token a step, goes through, all blocks of all rows at once.

    Every block sees the clean blocks before it, as in decoding, so one forward of both streams is a step of each.

    Args:
        samples: prompts with the answers that static decoding gave, end of text included.

    Returns:
        states x_0 .. x_{B-1} of each block [R, B, L]; the backbone's hidden states on them [R, B, L, H]; which
        positions are the answer's [R, L].
    """
    size, mask_id = model.config.block_size, model.config.mask_token_id
    width = max(-(-len(prompt + answer) // size) * size for prompt, answer in samples)
    first = min(len(prompt) for prompt, _ in samples) // size * size  # nothing is denoised before it
    clean = torch.full((len(samples), width), mask_id)
    is_answer, real = torch.zeros(2, len(samples), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(samples):
        length = len(prompt + answer)
        clean[row, :length] = torch.tensor(prompt + answer)
        is_answer[row, len(prompt) : length] = True
        real[row, : -(-length // size) * size] = True
    clean, is_answer, real = (tensor.to(model.device) for tensor in (clean, is_answer, real))
    sampler, rule = Sampler(mask_id, shaping=[], truncation=[]), StepRule("low_confidence_static")
    state, states, hidden = clean.masked_fill(is_answer, mask_id), [], []
    for step in range(size):
        output = model(state, attention_mask=real, clean_ids=clean, logits_to_keep=width - first)
        states.append(state)
        hidden.append(output.last_hidden_state)
        blocks = state[:, first:].unflatten(1, (-1, size))
        read = sampler.read(output.logits.unflatten(1, (-1, size)), None, step, None)
        reveal = rule(read.confidence, None, blocks == mask_id)
        state = torch.cat([state[:, :first], torch.where(reveal, read.token, blocks).flatten(1)], dim=1)
    return torch.stack(states, dim=1), torch.stack(hidden, dim=1), is_answer


@torch.no_grad()
def kl_by_distance(
    model, samples: Sequence[Sample], distances: Sequence[int] | None = None
) -> tuple[list[float], list[float]]:
    """KL between the backbone's logits at one masked position, by the number of steps between two states.

    Args:
        samples: see `replay`; those with an empty answer are left out.
        distances: in steps (default: 1, 2, ... as the block size allows, at most 8).

    Returns:
        Mean KL(later || earlier) in nats over positions masked in both, for each distance; and as a yardstick
        KL(later || unrelated), where the unrelated logits are those of a masked position of another prompt (or, in
        the last batch of one prompt, of another state). Both are shorter where nothing was left to compare.
    """
    size, mask_id = model.config.block_size, model.config.mask_token_id
    distances = range(1, min(MAX_DISTANCE, size - 1) + 1) if distances is None else distances
    metrics = HeadMetrics.zeros(len(distances), model.device)
    samples = [sample for sample in samples if sample[1]]
    for start in range(0, len(samples), REPLAYED_ROWS):
        states, hidden, is_answer = replay(model, samples[start : start + REPLAYED_ROWS])
        masked = (states == mask_id) & is_answer[:, None]
        unrelated, rows = hidden.clone(), hidden[masked]
        unrelated[masked] = rows.roll(len(rows) // 2, 0)  # ordered by prompt: half of all lies in another one
        block_ids = (torch.arange(states.shape[2], device=states.device) // size).expand_as(is_answer)
        for earlier in range(size):
            later = earlier + torch.tensor(distances, device=states.device, dtype=torch.long)
            within, later = later < size, later.clamp(max=size - 1)
            metrics += measure_head(
                hidden[:, earlier],
                unrelated[:, earlier, None].expand(-1, len(distances), -1, -1),
                hidden[:, later],
                model.lm_head.weight,
                (masked[:, later] & within[:, None]).float(),
                block_ids,
                mask_id,
            )
    figures = metrics.summary()
    return figures.kl_before, figures.kl_after


# -- decoding


class Decoded:
    """Records of `evaluate`, by mode; without a scorer an answer scores 1 when it is static's, to the token."""

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
        return self.rows[mode]["accuracy"]

    def saved(self, mode: str) -> float:
        """Share of static's forwards that a mode does not need."""
        return 1 - self.rows[mode]["forwards"] / self.rows[REFERENCE]["forwards"]

    def lead(self, ours: str, theirs: str, of: str = "score") -> dict[str, float]:
        """Mean over the prompts of what `ours` has more of than `theirs`, and its standard error."""
        pairs = zip(self.by_mode[ours], self.by_mode[theirs], strict=True)
        gaps = torch.tensor([a[of] - b[of] for a, b in pairs], dtype=torch.double)
        spread = gaps.var(unbiased=False) / max(len(gaps) - 1, 1)
        return {"mean": gaps.mean().item(), "error": spread.sqrt().item()}

    def samples(self, prompts: list[list[int]]) -> list[Sample]:
        """The prompts with static's answers."""
        return [(prompts[record["index"]], record["token_ids"]) for record in self.by_mode[REFERENCE]]


def modes_of(names: Sequence[str], block_size: int, has_head: bool) -> dict[str, dict]:
    """Options of `generate`, by mode, of what the claims `names` have to decode."""
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
    model,
    tokenizer,
    rows: list[dict],
    scorer: Scorer | None,
    settings: Settings,
    folder,
    names: Sequence[str] = tuple(CLAIMS),
    full=None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure claims and judge them.

    Args:
        rows: of the data, see `load_rows`.
        scorer: function of (completion, row); None: the share of answers identical to static's stands in.
        settings: how to decode; its modes are set here.
        folder: where the decoded answers go; a killed run goes on there.
        names: of `CLAIMS`.
        full: the same backbone with a head that predicts the full distribution.
        on_row: called with every row as soon as it is judged.

    Raises:
        ValueError: for an unknown claim, or a `full` whose head is residual.
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
        judged.append(judge(name, measures[name]() if measurable else None, scale_of(model, settings)))
        on_row(judged[-1])
    return judged


def judge(name: str, figures: dict | None, scale: Scale) -> Row:
    """The row of a claim; figures None where there is no head to measure."""
    claim = CLAIMS[name]
    verdict, reason = (NO_HEAD, "") if figures is None else claim.verdict(figures, scale)
    here = "-" if figures is None else claim.show(figures)
    return Row(name, claim.sentence, claim.published, here, verdict, reason, claim.rule, figures)


def scale_of(model, settings: Settings) -> Scale:
    """What a model is measured on."""
    parameters = {id(p): p.numel() for part in (model.model, model.lm_head) for p in part.parameters()}
    return Scale(
        parameters=sum(parameters.values()),
        block_size=model.config.block_size,
        device=model.device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        batch_size=settings.batch_size,
    )


def _decode(model, tokenizer, rows, scorer, settings: Settings, folder: Path, names, full) -> Decoded:
    """Decode what the claims need; modes of the full head end in -full."""

    def run(of, modes, into, evaluation=evaluate) -> list[dict]:
        return evaluation(of, tokenizer, rows, scorer or (lambda text, row: 0), replace(settings, modes=modes), into)

    modes = modes_of(names, model.config.block_size, model.mrp_head is not None)
    records, shown = run(model, modes, folder), list(modes)
    if full is not None and "unverified" in names:
        direct = {mode: options for mode, options in modes.items() if mode.startswith("direct-")}
        records = records + run(full, direct, folder, evaluate_full_head)
        shown += [f"{mode}-full" for mode in direct]
    return Decoded(records, shown, scored=scorer is not None)
