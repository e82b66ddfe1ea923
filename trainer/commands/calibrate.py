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
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Choose drafts among the N most frequent tokens of DATA and of the answers decoded here, which are "
            "stored as draft_vocabulary; 0: among all tokens.",
            show_default="leave it as it is",
        ),
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

    With a large vocabulary, reading head steps against all of it costs more than a layer of the head. The text stays
    the same when drafts are chosen among frequent tokens alone (--draft-vocabulary); a quarter of the vocabulary is a
    good first try.
    """
    check_at_least(1, limit=limit, max_new_tokens=max_new_tokens)

    from modeling_mrp.draft_vocabulary import pack_ids

    from ..checkpoints.loading import load
    from ..data.wording import counted
    from ..evaluation.calibration import config_file, store_in_config
    from ..evaluation.decoding import prompt_ids
    from ..evaluation.draft_profile import measure_profile
    from ..evaluation.runs import read_eval_rows
    from ..evaluation.token_counts import count_decoded, count_tokens, most_frequent

    config_file(model)  # before the model is loaded: it may raise
    rows = read_eval_rows(data, name=data_config, split=split, prompt_field=prompt_field, answer_field=answer_field)
    decoded_rows = rows[skip:][:limit]
    if not decoded_rows:
        raise ValueError(f"no row of {data} is left: --skip {skip}, --limit {limit}")
    loaded, tokenizer = load(Checkpoint(model, device=device, dtype=dtype))
    draft = draft or ("self" if loaded.mrp_head is None else "head")
    if draft == "head" and loaded.mrp_head is None:
        raise ValueError(f"--draft head needs a residual head, but {model} has none: use --draft self")
    prompts = [prompt_ids(tokenizer, row, raw) for row in decoded_rows]
    if draft_vocabulary:
        counts = count_tokens(tokenizer, rows, raw) + count_decoded(loaded, prompts, max_new_tokens)
        loaded.config.draft_vocabulary = pack_ids(most_frequent(loaded, counts, draft_vocabulary))
    elif draft_vocabulary == 0:
        loaded.config.draft_vocabulary = None
    if not as_json:
        print(f"{'candidates':>16} {'depths per head step':>21} {'steps per forward':>18} {'head steps':>11}")
    gains = measure_profile(loaded, prompts, draft, max_new_tokens, **{} if as_json else {"on_gain": _print})
    profile = [asdict(gain) for gain in gains]
    found = {"draft_profile": (loaded.config.draft_profile or {}) | {draft: profile}}
    if draft_vocabulary is not None:
        found["draft_vocabulary"] = loaded.config.draft_vocabulary
    file = store_in_config(model, **found)
    stored = f"stored {' and '.join(found)} of {counted(len(decoded_rows), 'prompt')} in {file}"
    print(json.dumps(profile) if as_json else stored)


def _print(gain) -> None:
    plan = f"{'chain' if gain.chain else 'graph':>5} {gain.candidates:10} {gain.drafts_per_head_step:21}"
    figures = f"{plan} {gain.steps:18.2f} {gain.head_steps:11.2f}"
    print(figures, flush=True)
