"""`mrp bench decode`: every decoding mode by the clock, against backbone-only, published-style and autoregressive."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import Qwen3ForCausalLM

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.sampling import Sampler
from modeling_mrp.step_rules import StepRule

from ..evaluation.decoding import (
    Answer,
    Totals,
    decode_batch,
    end_of_text_ids,
    left_padded,
    pad_token_id,
)
from ..evaluation.modes import mode_options, needs_head
from .plain_sdar_loop import plain_sdar_loop
from .timing import StageClock, check_at_least_one, interleaved, median_ratio, timed

STATIC, PLAIN, AUTOREGRESSIVE = "static", "plain-sdar", "autoregressive"
REFERENCES = (STATIC, PLAIN, AUTOREGRESSIVE)  # speeds are compared with these
PLAIN_DYNAMIC = "plain-sdar-dynamic-0.9"
PLAIN_RULES = {
    PLAIN: StepRule("low_confidence_static", tokens_per_step=1),
    PLAIN_DYNAMIC: StepRule("low_confidence_dynamic", confidence_threshold=0.9),
}
OUTSIDE = (*PLAIN_RULES, AUTOREGRESSIVE)  # baselines that are not modes of `generate`
DEFAULT_MODES = (
    *(STATIC, PLAIN, AUTOREGRESSIVE, "dynamic-0.9", PLAIN_DYNAMIC, "spec-2", "spec-3", "spec-4", "spec-4-self"),
    *("graph-4", "graph-8", "auto", "spec-8-token", "direct-1", "direct-3", "remask-leave_one_out"),
)
STAGES = ("backbone", "head", "logits", "sampling")  # the rest of a run is bookkeeping


@dataclass(frozen=True)
class Row:
    """The figures of one mode at one batch size.

    Attributes:
        mode: name of the mode.
        batch_size: rows decoded together.
        new_tokens: decoded from all prompts together, end of text included, padding excluded.
        seconds: median over the rounds of the time for all prompts.
        tokens_per_second: new_tokens / seconds.
        speedups: by reference (`static`, `plain-sdar`, `autoregressive`), the median over the rounds of the mode's
            tokens per second over the reference's in the same round; only those that were run.
        backbone_forwards, head_forwards: number of calls, each over a whole batch.
        tokens_per_forward: new tokens per call of the backbone and row in it.
        identical: share of the answers that equal those of `static` token for token; None for `autoregressive`.
        accepted: share of the drafts 1, 2, ... steps after the certain one that were accepted; empty without drafts.
        split: share of the time in "backbone", "head", "logits" (`lm_head`), "sampling" (from logits to tokens) and
            "bookkeeping" (all the rest), from a separate run.
    """

    mode: str
    batch_size: int
    new_tokens: int
    seconds: float
    tokens_per_second: float
    speedups: dict[str, float]
    backbone_forwards: int
    head_forwards: int
    tokens_per_forward: float
    identical: float | None
    accepted: list[float]
    split: dict[str, float]


# Decodes one batch: takes its prompts and the number of tokens in static's answer to each, returns the answers. Those
# of the baselines have token ids only; `_profile` counts their forwards.
Decode = Callable[[list[list[int]], list[int]], list[Answer]]


def bench_decode(
    model: MRPForDiffusionLM,
    prompts: list[list[int]],
    modes: Sequence[str] | None = None,
    batch_sizes: Sequence[int] = (1, 4, 16),
    max_new_tokens: int = 128,
    repeats: int = 3,
    ignore_eos: bool = False,
    on_start: Callable[[], None] = lambda: None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Decode the same prompts greedily in every mode at every batch size, and return a row for each.

    Args:
        model: the model, in eval mode on its device.
        prompts: token ids of each prompt.
        modes: names as in `mode_decoder` (default: those of DEFAULT_MODES that the model can run); `static` is always
            run.
        batch_sizes: numbers of rows decoded together; the last batch may be smaller.
        max_new_tokens: limit per prompt.
        repeats: timed rounds; every mode decodes all prompts in each.
        ignore_eos: decode `max_new_tokens` of every prompt, past any end of text.
        on_start: called when everything has been checked, before the first measurement.
        on_row: called with each row as soon as it is measured.

    Raises:
        ValueError: if a mode is unknown or needs a head that the model does not have, or a number is below 1.
    """
    check_at_least_one(prompts=len(prompts), batch_sizes=batch_sizes, max_new_tokens=max_new_tokens, repeats=repeats)
    decoders = {name: mode_decoder(name, model, max_new_tokens, ignore_eos) for name in _names(model, modes)}
    on_start()
    rows = []
    for batch_size in batch_sizes:
        lengths = [max_new_tokens] * len(prompts)
        reference = _decode_all(decoders[STATIC], prompts, lengths, batch_size)
        lengths = [len(answer.token_ids) for answer in reference]
        runs = {name: partial(_decode_all, decode, prompts, lengths, batch_size) for name, decode in decoders.items()}
        seconds = interleaved(runs, repeats, model.device)
        profiles = {name: _profile(model, run) for name, run in runs.items()}
        for name in runs:
            rows.append(_row(name, batch_size, seconds, profiles))
            on_row(rows[-1])
    return rows


def mode_decoder(name: str, model: MRPForDiffusionLM, max_new_tokens: int, ignore_eos: bool = False) -> Decode:
    """Return the function that decodes a batch in a mode.

    Args:
        name: a name of `modes.mode_options`, or one of the baselines that `generate` does not have: `plain-sdar`,
            `plain-sdar-dynamic-0.9` and `autoregressive`.
        model: the model.
        max_new_tokens: limit per prompt.
        ignore_eos: decode past any end of text.

    Raises:
        ValueError: if the name is unknown, or the mode needs a head that the model does not have.
    """
    ends = [] if ignore_eos else end_of_text_ids(model)
    if name == AUTOREGRESSIVE:
        return partial(_autoregressive, autoregressive_twin(model), pad_token_id(model))
    if name in PLAIN_RULES:
        return partial(_plain, model, max_new_tokens, PLAIN_RULES[name], ends)
    try:
        options = mode_options(name, model.config.block_size)
    except ValueError as error:
        raise ValueError(f"modes: {error}; or {', '.join(OUTSIDE)}") from None
    if model.mrp_head is None and needs_head(options):
        raise ValueError(f"modes: {name!r} needs a head, and this checkpoint has none")
    return partial(_generate, model, options | {"eos_token_id": ends or None}, max_new_tokens)


def autoregressive_twin(model: MRPForDiffusionLM) -> Qwen3ForCausalLM:
    """Return transformers' own Qwen3ForCausalLM around the backbone's modules; no weight is copied."""
    with torch.device("meta"):
        twin = Qwen3ForCausalLM(model.model.config)
    twin.model, twin.lm_head = model.model, model.lm_head
    twin.generation_config.eos_token_id = None  # its text means nothing, so it is told how long to continue
    return twin.eval()


def _names(model: MRPForDiffusionLM, modes: Sequence[str] | None) -> list[str]:
    """The modes to run, references first; by default those of DEFAULT_MODES that the model can run."""
    if modes is None:
        size, has_head = model.config.block_size, model.mrp_head is not None
        modes = [
            name for name in DEFAULT_MODES if has_head or name in OUTSIDE or not needs_head(mode_options(name, size))
        ]
    return list(dict.fromkeys([STATIC, *(name for name in REFERENCES if name in modes), *modes]))


# --- one batch


def _generate(model, options: dict, max_new_tokens: int, prompts, lengths) -> list[Answer]:
    return decode_batch(model, prompts, options, max_new_tokens)


def _plain(model, max_new_tokens: int, rule: StepRule, ends: list[int], prompts, lengths) -> list[Answer]:
    return [Answer(ids) for ids in plain_sdar_loop(model, prompts, max_new_tokens, rule=rule, eos_token_ids=ends)]


def _autoregressive(twin, pad: int, prompts, lengths) -> list[Answer]:
    """Decode as many tokens of each row as static decoding did: weights trained for blocks predict no end here."""
    inputs = left_padded(prompts, pad, twin.device)
    new = twin.generate(**inputs, max_new_tokens=max(lengths), do_sample=False, pad_token_id=pad, use_cache=True)
    new = new[:, inputs["input_ids"].shape[1] :].tolist()
    return [Answer(row[:length]) for row, length in zip(new, lengths, strict=True)]


# --- all prompts


def _decode_all(decode: Decode, prompts, lengths, batch_size: int) -> list[Answer]:
    answers = []
    for start in range(0, len(prompts), batch_size):
        answers += decode(prompts[start : start + batch_size], lengths[start : start + batch_size])
    return answers


@dataclass
class _Profile:
    """A run with a clock on its stages: the answers, and the seconds and calls of each stage."""

    answers: list[Answer]
    split: dict[str, float]
    calls: dict[str, int]

    @property
    def totals(self) -> Totals:
        return Totals.of(self.answers)


def _profile(model, run: Callable[[], list[Answer]]) -> _Profile:
    """Decode all prompts once more, with a clock on the modules and on the reading of logits."""
    methods = [(model.model, "forward", "backbone"), (model.lm_head, "forward", "logits")]
    methods += [(Sampler, "choose", "sampling"), (Sampler, "confidence_of", "sampling")]
    if model.mrp_head is not None:
        methods.append((model.mrp_head, "forward", "head"))
    answers = []
    with StageClock(methods, model.device) as clock:
        seconds = timed(lambda: answers.extend(run()), model.device)
    split = {stage: clock.seconds[stage] / seconds for stage in STAGES}
    return _Profile(answers, split | {"bookkeeping": 1 - sum(split.values())}, clock.calls)


def _row(name: str, batch_size: int, seconds: dict[str, list[float]], profiles: dict[str, _Profile]) -> Row:
    profile, reference = profiles[name], profiles[STATIC]
    totals, rows = profile.totals, len(profile.answers)
    pairs = zip(profile.answers, reference.answers, strict=True)
    same = sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
    rows_per_call = rows / -(-rows // batch_size)
    median = statistics.median(seconds[name])
    return Row(
        mode=name,
        batch_size=batch_size,
        new_tokens=totals.tokens,
        seconds=median,
        tokens_per_second=totals.tokens / median,
        speedups={
            other: median_ratio(seconds[other], seconds[name]) * totals.tokens / profiles[other].totals.tokens
            for other in REFERENCES
            if other in profiles
        },
        backbone_forwards=profile.calls["backbone"],
        head_forwards=profile.calls["head"],
        tokens_per_forward=totals.tokens / profile.calls["backbone"] / rows_per_call,
        identical=None if name == AUTOREGRESSIVE else same / rows,
        accepted=totals.acceptance,
        split=profile.split,
    )
