"""`mrp bench rules`: what every step rule saves on a task, and what speculation saves on top of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from modeling_mrp import MRPForDiffusionLM

from ..evaluation.decoding import decode_batch, encode_prompt
from ..evaluation.modes import REFERENCE, UNDER, mode_options, needs_head
from ..evaluation.summary import ModeFigures
from ..evaluation.task_evaluation import Task, evaluate_task
from .timing import check_at_least_one, interleaved

RULES = (REFERENCE, "dynamic-0.9", "dynamic-0.7", "entropy-0.1", "sequential")
SPECULATION = ("graph-4", "graph-8", "graph-16")


@dataclass(frozen=True)
class Row:
    """The figures of one rule, alone or with speculation.

    Attributes:
        mode: name of the mode, see `modes.mode_options`.
        rule: name of the rule alone.
        accuracy: share of the answers that are right; None if the task cannot tell.
        backbone_forwards: forwards of the backbone over all samples; a forward counts once for each sample in it.
        head_forwards: those of the head.
        tokens_per_forward: new tokens per forward of the backbone.
        same_as_rule: share of the answers that equal those of the rule alone token for token.
        speed_alone: speed with one sample at a time: the time of `static` over that of the mode, for the same samples.
        speed_in_batch: the same with `batch_size` samples at a time, for all samples.
    """

    mode: str
    rule: str
    accuracy: float | None
    backbone_forwards: int
    head_forwards: int
    tokens_per_forward: float
    same_as_rule: float
    speed_alone: float
    speed_in_batch: float


def bench_rules(
    model: MRPForDiffusionLM,
    task: Task,
    samples: Sequence,
    rules: Sequence[str] = RULES,
    speculation: Sequence[str] = SPECULATION,
    batch_size: int = 50,
    samples_alone: int = 16,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> list[Row]:
    """Decode samples of a task greedily by every rule, alone and with every kind of speculation.

    All samples are decoded in batches, one mode after the other; then the first `samples_alone` alone, each by all
    modes in turn, so that a change in the machine's load affects all modes.

    Args:
        model: the model, in eval mode on its device.
        task: the task.
        samples: samples of its `held_out`, each with a `prompt`.
        rules: rules of `modes.mode_options`, such as `dynamic-0.9`; `static`, whose time is the unit of every speed,
            is always run, as the first.
        speculation: names such as `graph-8`, `spec-4-self` or `auto`.
        batch_size: samples decoded together.
        samples_alone: number of samples that are decoded one at a time too, at most all of them.
        on_stage: called with what comes next, before each rule and before samples are decoded alone.

    Returns:
        For each rule, its own row and one for each kind of speculation.

    Raises:
        ValueError: if a name is unknown or needs a head that the model does not have, or a number is below 1.
    """
    check_at_least_one(samples=len(samples), batch_size=batch_size, samples_alone=samples_alone)
    by_rule = rule_modes(model, rules, speculation)
    figures: list[tuple[str, ModeFigures]] = []
    for rule, modes in by_rule.items():
        on_stage(rule)
        measured = evaluate_task(model, task, samples, modes, batch_size)  # the rule alone is the reference
        figures += [(rule, row) for row in measured]
    on_stage("one at a time")
    prompts = [encode_prompt(task.tokenizer, sample.prompt, raw=True) for sample in samples[:samples_alone]]
    every_mode = {name: options for modes in by_rule.values() for name, options in modes.items()}
    alone = _seconds_alone(model, prompts, every_mode, task.answer_tokens)
    in_batch = {row.mode: row.seconds for _, row in figures}
    return [
        Row(
            mode=row.mode,
            rule=rule,
            accuracy=row.accuracy,
            backbone_forwards=row.forwards,
            head_forwards=row.head_forwards,
            tokens_per_forward=row.tokens_per_forward,
            same_as_rule=row.identical,
            speed_alone=alone[REFERENCE] / alone[row.mode],
            speed_in_batch=in_batch[REFERENCE] / in_batch[row.mode],
        )
        for rule, row in figures
    ]


def rule_modes(
    model: MRPForDiffusionLM, rules: Sequence[str], speculation: Sequence[str]
) -> dict[str, dict[str, dict]]:
    """Return the options of `generate` by rule and mode: for each rule, the rule alone and then all its speculation.

    Args:
        model: the model.
        rules: as in `bench_rules`.
        speculation: as in `bench_rules`.

    Raises:
        ValueError: if a name is unknown, is no rule or no speculation, or needs a head that the model does not have.
    """
    size = model.config.block_size
    rules = _checked("rules", [REFERENCE, *rules], None, RULES, size)
    speculation = _checked("speculation", speculation, "spec", SPECULATION, size)
    for how in speculation:
        if model.mrp_head is None and needs_head(mode_options(how, size)):
            raise ValueError(f"speculation: {how!r} needs a head, and this checkpoint has none; use {how}-self")
    return {
        rule: {name: mode_options(name, size) for name in (rule, *(f"{rule}{UNDER}{how}" for how in speculation))}
        for rule in rules
    }


def _checked(argument: str, names: Sequence[str], mode: str | None, examples: Sequence[str], size: int) -> list[str]:
    """Return names without repetition; each must be of a mode with that `mrp_mode`, and not joined from two names."""
    for name in names:
        try:
            found = mode_options(name, size)["mrp_mode"]
        except ValueError as error:
            raise ValueError(f"{argument}: {error}") from None
        if found != mode or UNDER in name:
            raise ValueError(f"{argument}: {name!r} cannot be used here; expected names such as {', '.join(examples)}")
    return list(dict.fromkeys(names))


def _seconds_alone(
    model: MRPForDiffusionLM, prompts: list[list[int]], modes: dict[str, dict], max_new_tokens: int
) -> dict[str, float]:
    """Return the time of each mode for all prompts, each of which is decoded alone by all modes in turn."""
    totals = dict.fromkeys(modes, 0.0)
    for prompt in prompts:
        runs = {
            name: partial(decode_batch, model, [prompt], options, max_new_tokens) for name, options in modes.items()
        }
        for name, (seconds,) in interleaved(runs, 1, model.device, warm_up=False).items():
            totals[name] += seconds
    return totals
