"""`mrp trajectories`: the states that decoding visits, as training data for the head.

The backbone decodes the prompts by itself. Its text, and the denoising step at which each token was revealed, give
every state that each block went through; `spec` accepts a draft only if it leads to the next of these states.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from modeling_mrp import MRPForDiffusionLM

from ..data.rows import pack
from ..data.wording import counted
from .decoding import decode_prompts, end_of_text_ids

# the same text as by the backbone alone, in fewer forwards
LOSSLESS = {"mrp_mode": "spec", "mrp_draft": "self", "mrp_steps": 2, "do_sample": False}


def trajectories(
    model: MRPForDiffusionLM,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    **options: Any,
) -> Iterator[dict]:
    """Yield rows for `MRPTrainer` with the model's own answers, in the order of the prompts.

    Args:
        model: the model, in eval mode; only its backbone decides what is revealed.
        prompts: token ids of each prompt.
        max_new_tokens: limit per prompt.
        batch_size: prompts decoded together.
        **options: options of `generate`, such as the step rule; those not named are the checkpoint's own.

    Yields:
        A row with `input_ids`, `answer_mask`, `lengths` and `sample_ids` as in `mrp_trainer.data.rows`, and
        `reveal_steps` [S]: the denoising step, within its block, that revealed each token, -1 in the prompt. When a
        text ends within a block, the rest of that block is filled with the end-of-text token, with the step -1 where
        decoding left a mask.
    """
    size, options = model.config.block_size, LOSSLESS | options
    ends = end_of_text_ids(model, options)
    answers = decode_prompts(model, prompts, options, max_new_tokens, batch_size, checkpoint_defaults=True)
    for number, (prompt, decoded) in enumerate(zip(prompts, answers, strict=True)):
        answer = decoded.token_ids
        if answer[-1] in ends:
            answer = answer + [answer[-1]] * (-(len(prompt) + len(answer)) % size)
        steps = (decoded.reveal_steps + [-1] * size)[: len(answer)]
        yield {
            "input_ids": prompt + answer,
            "answer_mask": [0] * len(prompt) + [1] * len(answer),
            "lengths": [len(prompt) + len(answer)],
            "sample_ids": [number],
            "reveal_steps": [-1] * len(prompt) + steps,
        }


def packed(rows: Sequence[dict], sequence_length: int) -> list[dict]:
    """Join rows of `trajectories` into rows of up to `sequence_length` tokens; longer ones stay by themselves."""
    lengths = [min(row["lengths"][0], sequence_length) for row in rows]
    return [
        {column: [value for member in members for value in rows[member][column]] for column in rows[0]}
        for members in pack(lengths, sequence_length)
    ]


def with_room(
    prompts: Sequence[list[int]], max_new_tokens: int, block_size: int, sequence_length: int
) -> list[list[int]]:
    """Return the prompts whose longest answer, up to the end of its last block, fits into `sequence_length` tokens.

    Raises:
        ValueError: if no prompt does.
    """
    room = sequence_length // block_size * block_size - max_new_tokens
    kept = [prompt for prompt in prompts if len(prompt) <= room]
    if not kept:
        raise ValueError(
            f"none of {counted(len(prompts), 'prompt')} leaves room for {counted(max_new_tokens, 'new token')} within "
            f"{sequence_length}: "
            "raise --sequence-length or lower --max-new-tokens"
        )
    return kept
