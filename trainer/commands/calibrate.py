"""`mrp calibrate`: measure what drafting gains with a checkpoint, for mrp_steps="auto"."""

import json
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from .options import (
    AnswerField,
    AsJson,
    Checkpoint,
    DataConfig,
    Device,
    Dtype,
    MaxNewTokens,
    Model,
    PromptField,
    Raw,
    Split,
    check_at_least,
)


def calibrate(
    model: Model,
    data: Annotated[
        str, typer.Option(metavar="DATA", help="Prompts: data as for `mrp eval`, of the kind that will be decoded.")
    ],
    prompt_field: PromptField = None,
    answer_field: AnswerField = None,
    data_config: DataConfig = None,
    split: Split = "train",
    skip: Annotated[int, typer.Option(metavar="N", min=0, help="Leave out the first N rows.")] = 0,
    limit: Annotated[int, typer.Option(metavar="N", help="Decode N rows.")] = 24,
    draft: Annotated[
        Literal["head", "self"] | None,
        typer.Option(metavar="head|self", help="What drafts.", show_default="the head when there is one"),
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    raw: Raw = False,
    device: Device = None,
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure what drafting gains with a checkpoint.

    Decodes a few prompts with all plans that mrp_steps="auto" chooses from: numbers of candidates, and of depths per
    head step. How many denoising steps each of them does per forward is stored in MODEL's config.json as
    draft_profile. With it, "auto" weighs gains against times that it measures while decoding.
    """
    check_at_least(1, limit=limit, max_new_tokens=max_new_tokens)

    from ..checkpoints.loading import load
    from ..data.wording import counted
    from ..evaluation.calibration import config_file, store_in_config
    from ..evaluation.decoding import prompt_ids
    from ..evaluation.draft_profile import measure_profile
    from ..evaluation.runs import read_eval_rows

    config_file(model)  # before the model is loaded: it may raise
    rows = read_eval_rows(data, name=data_config, split=split, prompt_field=prompt_field, answer_field=answer_field)
    rows = rows[skip:][:limit]
    if not rows:
        raise ValueError(f"no row of {data} is left: --skip {skip}, --limit {limit}")
    loaded, tokenizer = load(Checkpoint(model, device=device, dtype=dtype))
    draft = draft or ("self" if loaded.mrp_head is None else "head")
    if draft == "head" and loaded.mrp_head is None:
        raise ValueError(f"--draft head needs a residual head, but {model} has none: use --draft self")
    prompts = [prompt_ids(tokenizer, row, raw) for row in rows]
    if not as_json:
        print(f"{'candidates':>10} {'depths per head step':>21} {'steps per forward':>18} {'head steps':>11}")
    gains = measure_profile(loaded, prompts, draft, max_new_tokens, **{} if as_json else {"on_gain": _print})
    profile = [asdict(gain) for gain in gains]
    file = store_in_config(model, draft_profile=(loaded.config.draft_profile or {}) | {draft: profile})
    print(json.dumps(profile) if as_json else f"stored draft_profile of {counted(len(rows), 'prompt')} in {file}")


def _print(gain) -> None:
    figures = f"{gain.candidates:10} {gain.drafts_per_head_step:21} {gain.steps:18.2f} {gain.head_steps:11.2f}"
    print(figures, flush=True)
