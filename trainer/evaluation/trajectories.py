"""`mrp trajectories`: the states that decoding visits, as data for the head.

The backbone decodes the prompts by itself. Its text, and the denoising step at which each token was revealed, give
every state of every block on the way; `spec` accepts a draft only where it is the next of them.
"""

from collections.abc import Iterator, Sequence

import torch

from ..data.rows import pack
from .acceptance import left_padded


@torch.no_grad()
def trajectories(
    model, prompts: Sequence[list[int]], *, max_new_tokens: int, batch_size: int = 64, **options
) -> Iterator[dict]:
    """Rows for `MRPTrainer` with the model's own answers, in the order of the prompts.

    Args:
        model: an `MRPForDiffusionLM` in eval mode; its backbone alone decides.
        prompts: token ids of each.
        max_new_tokens: per prompt.
        batch_size: prompts decoded together.
        options: of `generate`, such as the step rule; `mrp_mode="spec"` gives the same rows in fewer forwards.

    Yields:
        `input_ids`, `answer_mask`, `lengths` and `sample_ids` as in data.py, and `reveal_steps` [S]: the denoising
        step, within its block, at which decoding revealed each token, -1 in the prompt. A last block goes on with
        end of text behind its first one; what decoding left masked there has -1 too.
    """
    size, eos = model.config.block_size, _eos(model)
    for start in range(0, len(prompts), batch_size):
        group = prompts[start : start + batch_size]
        inputs = left_padded(group, model)
        out = model.generate(
            **inputs,
            **{"mrp_mode": "spec", "mrp_draft": "self", "mrp_steps": 2, "do_sample": False} | options,
            max_new_tokens=max_new_tokens,
            pad_token_id=model.config.pad_token_id or 0,
            return_dict_in_generate=True,
        )
        width = inputs["input_ids"].shape[1]
        lengths = out.stats.tokens_by_backbone + out.stats.tokens_by_head
        for number, (prompt, length) in enumerate(zip(group, lengths.tolist(), strict=True)):
            answer = out.sequences[number, width : width + length].tolist()
            steps = out.reveal_steps[number, width:].tolist()
            if answer[-1] in eos:
                answer += [answer[-1]] * (-(len(prompt) + len(answer)) % size)
            steps = (steps + [-1] * size)[: len(answer)]
            yield {
                "input_ids": prompt + answer,
                "answer_mask": [0] * len(prompt) + [1] * len(answer),
                "lengths": [len(prompt) + len(answer)],
                "sample_ids": [start + number],
                "reveal_steps": [-1] * len(prompt) + steps,
            }


def packed(rows: Sequence[dict], sequence_length: int) -> list[dict]:
    """Several rows of `trajectories` in one, up to `sequence_length` tokens; longer ones stay by themselves."""
    lengths = [min(row["lengths"][0], sequence_length) for row in rows]
    return [
        {column: [value for member in members for value in rows[member][column]] for column in rows[0]}
        for members in pack(lengths, sequence_length)
    ]


def with_room(
    prompts: Sequence[list[int]], max_new_tokens: int, block_size: int, sequence_length: int
) -> list[list[int]]:
    """The prompts whose longest answer, up to the end of its last block, stays within `sequence_length` tokens.

    Raises:
        ValueError: when there is none.
    """
    room = sequence_length // block_size * block_size - max_new_tokens
    kept = [prompt for prompt in prompts if len(prompt) <= room]
    if not kept:
        raise ValueError(
            f"none of {len(prompts)} prompts leaves room for {max_new_tokens} new tokens within {sequence_length}: "
            "raise --sequence-length or lower --max-new-tokens"
        )
    return kept


def _eos(model) -> set[int]:
    eos = model.generation_config.eos_token_id
    return {eos} if isinstance(eos, int) else set(eos or ())
