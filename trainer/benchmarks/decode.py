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

from ..evaluation.modes import mode_options, needs_head
from .plain_sdar_loop import plain_sdar_loop
from .timing import StageClock, check_at_least_one, interleaved, median_ratio, timed

STATIC, PLAIN, AUTOREGRESSIVE = "static", "plain-sdar", "autoregressive"
REFERENCES = (STATIC, PLAIN, AUTOREGRESSIVE)  # the ratios are to these
PLAIN_DYNAMIC = "plain-sdar-dynamic-0.9"
PLAIN_RULES = {
    PLAIN: StepRule("low_confidence_static", tokens_per_step=1),
    PLAIN_DYNAMIC: StepRule("low_confidence_dynamic", confidence_threshold=0.9),
}
OUTSIDE = (*PLAIN_RULES, AUTOREGRESSIVE)  # baselines that are no mode of `generate`
DEFAULT_MODES = (
    *(STATIC, PLAIN, AUTOREGRESSIVE, "dynamic-0.9", PLAIN_DYNAMIC, "spec-2", "spec-3", "spec-4", "spec-4-self"),
    *("spec-8-token", "direct-1", "direct-3", "remask-leave_one_out"),
)
STAGES = ("backbone", "head", "logits", "sampling")  # what is left of a run is bookkeeping


@dataclass(frozen=True)
class Row:
    """One mode at one batch size.

    Attributes:
        new_tokens: decoded from all prompts together, end of text included, padding excluded.
        seconds: median over the rounds, of all prompts together.
        tokens_per_second: new_tokens / seconds.
        speedups: by reference (`static`, `plain-sdar`, `autoregressive`), the median over the rounds of the mode's
            tokens per second over the reference's in the same round; only those that were run.
        backbone_forwards, head_forwards: calls, each over a whole batch.
        tokens_per_forward: new tokens per call of the backbone and row in it.
        identical: share of the answers that are token for token those of `static`; None for `autoregressive`.
        accepted: of `spec`: share of the drafts 1, 2, ... steps behind the certain one that were accepted.
        split: share of the time in "backbone", "head", "logits" (`lm_head`), "sampling" (from logits to tokens) and
            "bookkeeping" (all the rest), from one run of its own.
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


@dataclass
class Answers:
    """New tokens of each row of a batch; of `spec`, drafts proposed and accepted per depth, [2, K]."""

    tokens: list[list[int]]
    drafts: torch.Tensor | None = None


# prompts of one batch and how many tokens static decoding answers to each -> Answers
Decode = Callable[[list[list[int]], list[int]], Answers]


def bench_decode(
    model: MRPForDiffusionLM,
    prompts: list[list[int]],
    modes: Sequence[str] | None = None,
    batch_sizes: Sequence[int] = (1, 4, 16),
    max_new_tokens: int = 128,
    repeats: int = 3,
    ignore_eos: bool = False,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Decode the same prompts greedily in every mode and batch size.

    Args:
        model: in eval mode on its device.
        prompts: token ids of each.
        modes: names as in `mode_decoder` (default: those of DEFAULT_MODES that the model can run); `static` is always
            run.
        batch_sizes: rows decoded together; the last batch may be smaller.
        max_new_tokens: at most so many per prompt.
        repeats: timed rounds, in each of which every mode decodes all prompts.
        ignore_eos: decode `max_new_tokens` of every prompt, whatever the model says.
        on_row: called with every row as soon as it is measured.

    Raises:
        ValueError: for an unknown mode, one that needs a head where there is none, or a number below 1.
    """
    check_at_least_one(prompts=len(prompts), batch_sizes=batch_sizes, max_new_tokens=max_new_tokens, repeats=repeats)
    decoders = {name: mode_decoder(name, model, max_new_tokens, ignore_eos) for name in _names(model, modes)}
    rows = []
    for batch_size in batch_sizes:
        lengths = [max_new_tokens] * len(prompts)
        reference = _decode_all(decoders[STATIC], prompts, lengths, batch_size)
        lengths = [len(answer) for answer in reference.tokens]
        runs = {name: partial(_decode_all, decode, prompts, lengths, batch_size) for name, decode in decoders.items()}
        seconds = interleaved(runs, repeats, model.device)
        profiles = {name: _profile(model, run) for name, run in runs.items()}
        for name in runs:
            rows.append(_row(name, batch_size, seconds, profiles))
            on_row(rows[-1])
    return rows


def mode_decoder(name: str, model: MRPForDiffusionLM, max_new_tokens: int, ignore_eos: bool = False) -> Decode:
    """How a mode decodes a batch.

    Args:
        name: as in `modes.mode_options`, or one of the baselines from outside: `plain-sdar`,
            `plain-sdar-dynamic-0.9` and `autoregressive`.

    Raises:
        ValueError: for another name, or a mode that needs a head where there is none.
    """
    eos, pad = _special_ids(model, ignore_eos)
    if name == AUTOREGRESSIVE:
        return partial(_autoregressive, autoregressive_twin(model), pad)
    if name in PLAIN_RULES:
        return partial(_plain, model, max_new_tokens, PLAIN_RULES[name], eos)
    try:
        options = mode_options(name, model.config.block_size)
    except ValueError as error:
        raise ValueError(f"modes: {error}; and {', '.join(OUTSIDE)}") from None
    if model.mrp_head is None and needs_head(options):
        raise ValueError(f"modes: {name!r} needs a head, and this checkpoint has none")
    common = {"max_new_tokens": max_new_tokens, "eos_token_id": eos, "pad_token_id": pad}
    return partial(_generate, model, common | options)


def autoregressive_twin(model: MRPForDiffusionLM) -> Qwen3ForCausalLM:
    """transformers' own Qwen3ForCausalLM around the very modules of the backbone: no copy of a weight."""
    with torch.device("meta"):
        twin = Qwen3ForCausalLM(model.model.config)
    twin.model, twin.lm_head = model.model, model.lm_head
    twin.generation_config.eos_token_id = None  # what it says means nothing, so it is told how long to go on
    return twin.eval()


def _names(model: MRPForDiffusionLM, modes: Sequence[str] | None) -> list[str]:
    """The modes to run, references first; by default those of DEFAULT_MODES that the model can run."""
    if modes is None:
        size, able = model.config.block_size, model.mrp_head is not None
        modes = [name for name in DEFAULT_MODES if able or name in OUTSIDE or not needs_head(mode_options(name, size))]
    return list(dict.fromkeys([STATIC, *(name for name in REFERENCES if name in modes), *modes]))


def _special_ids(model, ignore_eos: bool) -> tuple[list[int], int]:
    """(ids that end a row, the pad id). To ignore ends of text, an id is named that no token has."""
    eos = model.generation_config.eos_token_id
    eos = model.config.eos_token_id if eos is None else eos
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    pad = model.config.pad_token_id
    pad = (eos or [0])[0] if pad is None else pad
    return [model.config.vocab_size] if ignore_eos or not eos else eos, pad


# --- one batch


def _left_padded(model, prompts: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(ids, device=model.device),
        "attention_mask": torch.tensor(mask, device=model.device),
    }


def _generate(model, options: dict, prompts, lengths) -> Answers:
    inputs = _left_padded(model, prompts, options["pad_token_id"])
    output = model.generate(**inputs, **options, do_sample=False, return_dict_in_generate=True)
    stats = output.stats
    counts = (stats.tokens_by_backbone + stats.tokens_by_head).tolist()
    new = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    drafts = torch.stack([stats.drafts_proposed.sum(0), stats.drafts_accepted.sum(0)]).cpu()
    return Answers([row[:count] for row, count in zip(new, counts, strict=True)], drafts[:, 1:])


def _plain(model, max_new_tokens: int, rule: StepRule, eos: list[int], prompts, lengths) -> Answers:
    return Answers(plain_sdar_loop(model, prompts, max_new_tokens, rule=rule, eos_token_ids=eos))


def _autoregressive(twin, pad: int, prompts, lengths) -> Answers:
    """As many tokens of every row as static decoding found: weights trained for blocks never say when to stop."""
    inputs = _left_padded(twin, prompts, pad)
    new = twin.generate(**inputs, max_new_tokens=max(lengths), do_sample=False, pad_token_id=pad, use_cache=True)
    new = new[:, inputs["input_ids"].shape[1] :].tolist()
    return Answers([row[:length] for row, length in zip(new, lengths, strict=True)])


# --- all prompts


def _decode_all(decode: Decode, prompts, lengths, batch_size: int) -> Answers:
    answers = Answers([])
    for start in range(0, len(prompts), batch_size):
        batch = decode(prompts[start : start + batch_size], lengths[start : start + batch_size])
        answers.tokens += batch.tokens
        if batch.drafts is not None:
            answers.drafts = batch.drafts if answers.drafts is None else answers.drafts + batch.drafts
    return answers


@dataclass
class _Profile:
    """One run that was taken apart: its answers, seconds per stage and calls per stage."""

    answers: Answers
    split: dict[str, float]
    calls: dict[str, int]

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.answers.tokens))


def _profile(model, run: Callable[[], Answers]) -> _Profile:
    """Decode all prompts once more, with a clock on the modules and on the reading of logits."""
    methods = [(model.model, "forward", "backbone"), (model.lm_head, "forward", "logits")]
    methods += [(Sampler, "read", "sampling"), (Sampler, "confidence_of", "sampling")]
    if model.mrp_head is not None:
        methods.append((model.mrp_head, "forward", "head"))
    answers = []
    with StageClock(methods, model.device) as clock:
        seconds = timed(lambda: answers.append(run()), model.device)
    split = {stage: clock.seconds[stage] / seconds for stage in STAGES}
    return _Profile(answers[0], split | {"bookkeeping": 1 - sum(split.values())}, clock.calls)


def _row(name: str, batch_size: int, seconds: dict[str, list[float]], profiles: dict[str, _Profile]) -> Row:
    profile, reference = profiles[name], profiles[STATIC]
    rows = len(profile.answers.tokens)
    same = sum(ours == theirs for ours, theirs in zip(profile.answers.tokens, reference.answers.tokens, strict=True))
    rows_per_call = rows / -(-rows // batch_size)
    proposed, accepted = ([], []) if profile.answers.drafts is None else profile.answers.drafts.tolist()
    median = statistics.median(seconds[name])
    return Row(
        mode=name,
        batch_size=batch_size,
        new_tokens=profile.new_tokens,
        seconds=median,
        tokens_per_second=profile.new_tokens / median,
        speedups={
            other: median_ratio(seconds[other], seconds[name]) * profile.new_tokens / profiles[other].new_tokens
            for other in REFERENCES
            if other in profiles
        },
        backbone_forwards=profile.calls["backbone"],
        head_forwards=profile.calls["head"],
        tokens_per_forward=profile.new_tokens / profile.calls["backbone"] / rows_per_call,
        identical=None if name == AUTOREGRESSIVE else same / rows,
        accepted=[a / p for a, p in zip(accepted, proposed, strict=True) if p],
        split=profile.split,
    )
