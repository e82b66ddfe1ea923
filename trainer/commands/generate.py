"""`mrp generate`: decode prompts with a checkpoint."""

import json
from typing import Annotated

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
    Revision,
    Seed,
)
from .parsing import generate_options
from .prompts import read_prompts


def generate(
    context: typer.Context,
    model: Model,
    prompt: Prompts = None,
    prompt_file: PromptFile = None,
    head: Head = None,
    revision: Revision = None,
    raw: Raw = False,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "auto",
    stream: Annotated[
        bool, typer.Option("--stream", help="Print blocks of text as they finish; for a single prompt.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Decode prompts with a checkpoint.

    All prompts are decoded in one batch. Any option of `generate` may follow as --name value, such as --mrp-mode spec,
    --mrp-steps 4, --remasking-strategy low_confidence_dynamic or --do-sample true.
    """
    options = {"max_new_tokens": max_new_tokens} | generate_options(context.args)
    prompts = read_prompts(prompt, prompt_file)
    if stream and (len(prompts) != 1 or as_json):
        raise ValueError("--stream shows a single prompt as text: give one --prompt and leave --json out")

    import torch
    from transformers import TextStreamer

    from ..checkpoints.loading import load
    from ..evaluation.decoding import encode

    loaded, tokenizer = load(Checkpoint(model, revision, head, device, dtype))
    inputs = encode(tokenizer, prompts, raw=raw).to(loaded.device)
    torch.manual_seed(seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    output = loaded.generate(**inputs, **options, tokenizer=tokenizer, streamer=streamer, return_dict_in_generate=True)
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    if as_json:
        print(json.dumps({"results": _results(prompts, texts, output), "options": options}))
    elif not stream:
        print("\n".join(texts))


def _results(prompts: list[str], texts: list[str], output) -> list[dict]:
    """The prompt, the text, the tokens per forward and the statistics of each row."""
    stats = {name: value.tolist() for name, value in vars(output.stats).items()}
    return [
        {
            "prompt": prompt,
            "text": text,
            "tokens_per_forward": output.tokens_per_forward[row].item(),
            **{name: values[row] for name, values in stats.items()},
        }
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
