"""`mrp bench decode`: every decoding mode by the clock, against backbone-only, published-style and autoregressive."""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice

import torch
from transformers import Qwen3ForCausalLM

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.sampling import Sampler
from modeling_mrp.step_rules import StepRule

from ..checkpoints.loading import encode, load
from ..commands.cli import command_parser
from ..commands.prompts import built_in_prompts, read_prompts
from ..evaluation.modes import FORMS, mode_options, needs_head
from .plain_sdar_loop import plain_sdar_loop
from .timing import DTYPES, StageClock, check_at_least_one, interleaved, machine, median_ratio, timed

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


# --- the command


def model_prompts(arguments, tokenizer) -> list[list[int]]:
    """Token ids of the prompts that were given, or of built-in ones, repeated until there are `--prompts`."""
    texts = read_prompts(arguments, required=False) or built_in_prompts(tokenizer, arguments.prompts)
    inputs = encode(tokenizer, texts, raw=arguments.raw)
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    return list(islice(cycle([ids[valid].tolist() for ids, valid in rows]), arguments.prompts))


def table_head(references: Sequence[str]) -> str:
    ratios = "".join(f"{'/ ' + name:>17}" for name in references)
    split = "".join(f"{stage:>10}" for stage in (*STAGES, "rest"))
    return (
        f"{'mode':22}{'batch':>6}{'tokens/s':>10}{ratios}{'forwards':>10}{'head':>7}{'tok/fwd':>9}{'identical':>11}"
        + split
    )


def table_line(row: Row) -> str:
    ratios = "".join(f"{ratio:16.2f}x" for ratio in row.speedups.values())
    identical = "-" if row.identical is None else f"{row.identical:.1%}"
    split = "".join(f"{share:10.0%}" for share in row.split.values())
    return (
        f"{row.mode:22}{row.batch_size:6d}{row.tokens_per_second:10.1f}{ratios}{row.backbone_forwards:10d}"
        f"{row.head_forwards:7d}{row.tokens_per_forward:9.2f}{identical:>11}{split}"
    )


def parser() -> argparse.ArgumentParser:
    made = command_parser(
        "bench decode",
        "Tokens per second and forwards of every decoding mode, greedily, on the same prompts. Compared with\n"
        f"  {STATIC}: backbone-only decoding of this package;\n"
        f"  {PLAIN}: a plain loop as published with SDAR: one more forward per block to store keys and values,\n"
        "    rows of a batch in lock-step;\n"
        f"  {AUTOREGRESSIVE}: transformers' own generate of Qwen3ForCausalLM on the same weights, as many tokens as\n"
        "    static decoding found (what they say means nothing: the weights were trained for blocks).\n"
        "Ratios are medians over interleaved rounds. The split of the time is from a run of its own.",
        "mrp bench decode sdar-tiny-mrp --modes spec-4 direct-3 plain-sdar --batch-sizes 1 16",
    )
    made.add_argument("model", metavar="MODEL", help="embedded checkpoint, folder or Hub id")
    made.add_argument(
        "--modes",
        nargs="+",
        metavar="MODE",
        help=f"{FORMS}, or {', '.join(OUTSIDE)} (default: {' '.join(DEFAULT_MODES)})",
    )
    made.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4, 16], help="default: 1 4 16")
    made.add_argument("--prompt", action="append", default=[], help="may be given several times")
    made.add_argument("--prompt-file", help="one prompt per line, - for standard input")
    made.add_argument("--raw", action="store_true", help="do not apply the tokenizer's chat template")
    made.add_argument("--prompts", type=int, help="prompts to decode, repeated if need be (default: largest batch)")
    made.add_argument("--max-new-tokens", type=int, default=128, help="default: 128")
    made.add_argument("--ignore-eos", action="store_true", help="decode --max-new-tokens of every prompt")
    made.add_argument("--repeats", type=int, default=3, help="timed rounds (default: 3)")
    made.add_argument("--head", help="folder or Hub id of a trained head to put on the backbone")
    made.add_argument("--revision", help="revision of MODEL on the Hub")
    made.add_argument("--device", help="default: cuda when there is one")
    made.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="default: the checkpoint's own")
    made.add_argument("--json", action="store_true", help="print machine, settings and rows as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of `mrp bench decode`."""
    arguments = parser().parse_args(argv)
    check_at_least_one(batch_sizes=arguments.batch_sizes)
    arguments.prompts = max(arguments.batch_sizes) if arguments.prompts is None else arguments.prompts
    check_at_least_one(prompts=arguments.prompts)
    model, tokenizer = load(arguments)
    prompts = model_prompts(arguments, tokenizer)
    decode = partial(
        bench_decode,
        model,
        prompts,
        modes=arguments.modes,
        batch_sizes=arguments.batch_sizes,
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        ignore_eos=arguments.ignore_eos,
    )
    about = describe(model, prompts, arguments)
    if arguments.json:
        print(json.dumps({**about, "rows": [asdict(row) for row in decode()]}))
        return 0
    print("\n".join(f"{name:9} {value}" for name, value in about.items()))
    print(
        "/ X: tokens per second over those of X; forwards, head: calls, each over a batch; tok/fwd: new tokens\n"
        "per forward and row; identical: answers that are those of static; then how the time splits\n"
    )
    shown = []

    def show(row: Row):
        if not shown:
            print(table_head(list(row.speedups)))
        shown.append(row)
        print(table_line(row), flush=True)

    decode(on_row=show)
    return 0


def describe(model, prompts: list[list[int]], arguments) -> dict[str, str]:
    """What was compared on which machine, in words."""
    config, lengths = model.config, [len(prompt) for prompt in prompts]
    size = sum(parameter.numel() for parameter in model.model.parameters()) / 1e6
    end = "whatever they say" if arguments.ignore_eos else "up to their end of text"
    return {
        "machine": machine(model.device),
        "model": f"{arguments.model}, backbone of {config.num_hidden_layers} layers of {config.hidden_size} "
        f"({size:.1f} M parameters), head of {config.num_mrp_layers}, vocabulary {config.vocab_size}, "
        f"blocks of {config.block_size}, {str(model.dtype).removeprefix('torch.')}",
        "prompts": f"{len(prompts)} of {min(lengths)} to {max(lengths)} tokens, at most {arguments.max_new_tokens} "
        f"new tokens each, {end}",
        "rounds": f"{arguments.repeats}, interleaved, after one that is not timed; medians",
    }
