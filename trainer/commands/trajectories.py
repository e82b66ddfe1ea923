"""`mrp trajectories`: decode training prompts, as data for a head on the states that decoding visits."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoints.output_paths import check_output
from .options import (
    AnswerField,
    BatchSize,
    Checkpoint,
    DataConfig,
    Device,
    Dtype,
    Head,
    MaxNewTokens,
    Model,
    PromptField,
    Revision,
    Split,
    check_at_least,
)


def trajectories(
    model: Model,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA", help="Data as train_data of `mrp train`; what is not supervised in it is the prompt."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Parquet file to write.")],
    split: Split = "train",
    data_config: DataConfig = None,
    prompt_field: PromptField = None,
    answer_field: AnswerField = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="Decode at most N samples.", show_default="all")
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    batch_size: BatchSize = 64,
    sequence_length: Annotated[int, typer.Option(metavar="N", help="Number of tokens of a packed row.")] = 1024,
    options: Annotated[
        str, typer.Option(metavar="JSON", help='Options of generate, such as {"remasking_strategy": "sequential"}.')
    ] = "{}",
    head: Head = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Decode training prompts, as data for a head.

    The backbone decodes the prompts of training data, and the order in which it revealed the tokens is kept. A head
    that is trained on these rows (`mrp train --train-data OUT`) sees the states that decoding visits instead of random
    ones. A trained --head makes the decoding faster.
    """
    check_at_least(
        1, samples=samples, max_new_tokens=max_new_tokens, batch_size=batch_size, sequence_length=sequence_length
    )
    if out.suffix != ".parquet":
        raise ValueError(f"--out must end in .parquet, got {out}")
    check_output("--out", out)
    try:
        decoding = json.loads(options)
    except json.JSONDecodeError as error:
        raise ValueError(f"--options is not valid JSON: {error}") from error
    if not isinstance(decoding, dict):
        raise ValueError(f'--options must be a JSON object such as {{"do_sample": true}}, got {options}')

    from ..checkpoints.loading import load
    from ..data.reading import load_source
    from ..data.rows import prepare_dataset
    from ..data.wording import counted
    from ..evaluation.acceptance import prompts_of
    from ..evaluation.trajectories import trajectories as decode
    from ..evaluation.trajectories import with_room

    loaded, tokenizer = load(Checkpoint(model, revision, head, device, dtype))
    size = loaded.config.block_size
    rows = prepare_dataset(
        load_source(data, name=data_config, split=split),
        tokenizer,
        sequence_length=2**31,
        packing=False,
        prompt_field=prompt_field,
        answer_field=answer_field,
    )
    wanted = prompts_of(rows, len(rows) if samples is None else samples, size)
    prompts = with_room(wanted, max_new_tokens, size, sequence_length)
    if len(prompts) < len(wanted):
        left_out = f"{len(wanted) - len(prompts)} of {counted(len(wanted), 'prompt')}"
        print(f"left out, since there is no room for an answer: {left_out}")
    found = []
    for row in decode(loaded, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size, **decoding):
        found.append(row)
        if len(found) % batch_size == 0 or len(found) == len(prompts):
            end = "\n" if len(found) == len(prompts) else ""
            print(f"\r{len(found)} of {counted(len(prompts), 'prompt')}", end=end, flush=True)
    _write(found, sequence_length, out)


def _write(rows: list[dict], sequence_length: int, out: Path) -> None:
    """Pack the rows and write them; the file appears only when it is complete."""
    from datasets import Dataset

    from ..data.wording import counted
    from ..evaluation.trajectories import packed

    result = Dataset.from_list(packed(rows, sequence_length))
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".new")
    result.to_parquet(str(temporary))
    temporary.replace(out)
    tokens = counted(sum(map(sum, result["answer_mask"])), "answer token")
    print(f"{tokens} in {counted(len(result), 'row')}: {out}")
