"""`mrp bench decode`: tokens per second of every decoding mode."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Annotated

import typer

from .options import (
    AsJson,
    Checkpoint,
    Device,
    Dtype,
    Head,
    MaxNewTokens,
    Model,
    PromptFile,
    Prompts,
    Raw,
    Record,
    Repeats,
    Revision,
    check_at_least,
)
from .prompts import built_in_prompts, read_prompts
from .recording import Measurement

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..benchmarks.decode import Row

BATCH_SIZES = [1, 4, 16]


def decode(
    model: Model,
    modes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODES",
            help="A rule (static, static-N, dynamic-T, entropy-E, sequential, sequential-N), speculation (spec-K, "
            "graph-K, auto, each also with -self or -token), both as in dynamic-0.9+graph-8, wide-narrow-T, "
            "direct-K, remask-C, remask-C-T, plain-sdar, plain-sdar-dynamic-0.9 or autoregressive.",
            show_default="a selection that the model can run",
        ),
    ] = None,
    batch_sizes: Annotated[
        list[int], typer.Option(metavar="NUMBERS", help="Numbers of prompts that are decoded together.")
    ] = BATCH_SIZES,
    prompt: Prompts = None,
    prompt_file: PromptFile = None,
    raw: Raw = False,
    prompts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of prompts to decode; they are repeated where there are fewer.",
            show_default="the largest batch",
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Decode --max-new-tokens of every prompt, past its end of text.")
    ] = False,
    repeats: Repeats = 3,
    head: Head = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = "auto",
    as_json: AsJson = False,
    record: Record = None,
) -> Measurement:
    """Measure tokens per second and forwards of every decoding mode.

    All modes decode the same prompts greedily. They are compared with three references:

    \b
    static          backbone-only decoding of this package
    plain-sdar      a plain loop as published with SDAR: one more forward per
                    block to store keys and values, rows of a batch in lock-step
    autoregressive  transformers' own generate of Qwen3ForCausalLM on the same
                    weights, for as many tokens as static decoding found (the
                    text means nothing: the weights were trained for blocks)

    Ratios are medians over interleaved rounds. The split of the time is from a separate run.
    """
    for size in batch_sizes:
        check_at_least(1, batch_sizes=size)
    count = max(batch_sizes) if prompts is None else prompts
    check_at_least(1, prompts=count, max_new_tokens=max_new_tokens, repeats=repeats)

    from ..benchmarks.decode import bench_decode
    from ..checkpoints.loading import load

    loaded, tokenizer = load(Checkpoint(model, revision, head, device, dtype))
    texts = read_prompts(prompt, prompt_file, required=False) or built_in_prompts(tokenizer, count)
    ids = prompt_ids(tokenizer, texts, count, raw)
    measure = partial(
        bench_decode,
        loaded,
        ids,
        modes=modes or None,
        batch_sizes=batch_sizes,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        ignore_eos=ignore_eos,
    )
    about = _settings(loaded, model, ids, max_new_tokens, ignore_eos, repeats)
    if as_json:
        rows = [asdict(row) for row in measure()]
        print(json.dumps({**about, "rows": rows}))
        return Measurement({"rows": rows}, about, device=str(loaded.device))
    rows = [asdict(row) for row in measure(on_start=partial(_introduce, about), on_row=TablePrinter())]
    return Measurement({"rows": rows}, about, device=str(loaded.device))


def _introduce(about: dict[str, str]) -> None:
    """Print what is compared, and what the columns of the table mean."""
    print("\n".join(f"{name:9} {value}" for name, value in about.items()))
    print(
        "/ X: tokens per second over those of X; forwards, head: calls, each over a batch; tok/fwd: new tokens\n"
        "per forward and row; identical: answers that equal those of static; then how the time splits\n",
        flush=True,
    )


def prompt_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], count: int, raw: bool) -> list[list[int]]:
    """Token ids of `count` prompts, repeating `texts` where there are fewer.

    Args:
        tokenizer: the model's tokenizer.
        texts: the prompts.
        count: number of prompts to return.
        raw: whether to leave the chat template out.
    """
    from ..evaluation.decoding import encode

    inputs = encode(tokenizer, texts, raw=raw)
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    return list(islice(cycle([ids[valid].tolist() for ids, valid in rows]), count))


class TablePrinter:
    """Prints each row when it is measured, the first one under a heading that names the references that were run."""

    def __init__(self):
        self.has_heading = False

    def __call__(self, row: "Row") -> None:
        """Print one row."""
        if not self.has_heading:
            self.has_heading = True
            print(self.heading(row))
        ratios = "".join(f"{ratio:16.2f}x" for ratio in row.speedups.values())
        identical = "-" if row.identical is None else f"{row.identical:.1%}"
        split = "".join(f"{share:10.0%}" for share in row.split.values())
        line = (
            f"{row.mode:22}{row.batch_size:6d}{row.tokens_per_second:10.1f}{ratios}{row.backbone_forwards:10d}"
            f"{row.head_forwards:7d}{row.tokens_per_forward:9.2f}{identical:>11}{split}"
        )
        print(line, flush=True)

    @staticmethod
    def heading(row: "Row") -> str:
        """The heading of a table whose rows have the references and stages of `row`."""
        ratios = "".join(f"{'/ ' + name:>17}" for name in row.speedups)
        *stages, _ = row.split
        columns = f"{'mode':22}{'batch':>6}{'tokens/s':>10}{ratios}{'forwards':>10}{'head':>7}{'tok/fwd':>9}"
        return columns + f"{'identical':>11}" + "".join(f"{stage:>10}" for stage in (*stages, "rest"))


def _settings(model, name: str, prompts: list[list[int]], max_new_tokens: int, ignore_eos: bool, repeats: int) -> dict:
    """What is compared on which machine, in words, by names that no parameter of the command has."""
    from ..benchmarks.timing import machine
    from ..data.wording import counted

    config, lengths = model.config, [len(prompt) for prompt in prompts]
    size = sum(parameter.numel() for parameter in model.model.parameters()) / 1e6
    end = "whatever they say" if ignore_eos else "up to their end of text"
    return {
        "machine": machine(model.device),
        "network": f"{name}, backbone of {counted(config.num_hidden_layers, 'layer')} of {config.hidden_size} "
        f"({size:.1f} M parameters), head of {config.num_mrp_layers}, vocabulary {config.vocab_size}, "
        f"blocks of {config.block_size}, {str(model.dtype).removeprefix('torch.')}",
        "decoded": f"{counted(len(prompts), 'prompt')} of {min(lengths)} to {counted(max(lengths), 'token')}, "
        f"at most {counted(max_new_tokens, 'new token')} each, {end}",
        "rounds": f"{repeats}, interleaved, after one that is not timed; medians",
    }
