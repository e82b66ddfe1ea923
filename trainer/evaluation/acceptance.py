"""How well the drafts of a head fare on a few held-out prompts, measured during and after training."""

from collections import Counter
from collections.abc import Sequence

import torch

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from modeling_mrp.inputs import check_inputs

from .decoding import Totals, decode_batch, decode_prompts

TAIL = 0.05  # share of the prompts on either side that the acceptance range leaves out


def prompts_of(rows: Sequence[dict], count: int, block_size: int) -> list[list[int]]:
    """Return the prompts of the first samples of prepared rows; of plain text, its first two blocks.

    Args:
        rows: prepared rows, see `mrp_trainer.data.rows`.
        count: largest number of prompts to return.
        block_size: block size of the model.
    """
    prompts = []
    for row in rows:
        start = 0
        for length in row["lengths"]:
            if len(prompts) == count:
                return prompts
            ids, mask = (row[column][start : start + length] for column in ("input_ids", "answer_mask"))
            start += length
            prompt = (list(mask).index(1) or min(2 * block_size, length - 1)) if any(mask) else 0
            if prompt:
                prompts.append(list(ids)[:prompt])
    return prompts


def decodable(prompts: Sequence[list[int]], config: MRPConfig) -> tuple[list[list[int]], Counter[str]]:
    """Separate the prompts that `generate` decodes from those that it refuses: too long, or with a mask token.

    Args:
        prompts: token ids of each prompt.
        config: config of the model that is to decode them.

    Returns:
        The prompts that can be decoded, and how many cannot be for each reason.
    """
    kept, refused = [], Counter()
    for prompt in prompts:
        try:
            check_inputs(torch.tensor([prompt]), None, config)
            kept.append(prompt)
        except ValueError as error:
            refused[str(error)] += 1
    return kept, refused


def decode_figures(
    model: MRPForDiffusionLM, prompts: Sequence[list[int]], drafts: int, max_new_tokens: int
) -> dict[str, float]:
    """Decode all prompts in one batch with `mrp_mode="spec"` and return the figures that a training log shows.

    Args:
        model: the model, in eval mode.
        prompts: token ids of each prompt.
        drafts: drafts per round K.
        max_new_tokens: limit per prompt.

    Returns:
        `tokens_per_forward` (every forward of the backbone counted) and `accepted_k`, the share of the drafts at
        depth k = 1, 2, ... that were accepted, where any were proposed.
    """
    options = {"mrp_mode": "spec", "mrp_steps": drafts, "do_sample": False}
    totals = Totals.of(decode_batch(model, prompts, options, max_new_tokens, checkpoint_defaults=True))
    accepted = {f"accepted_{depth}": share for depth, share in enumerate(totals.acceptance, start=1)}
    return {"tokens_per_forward": totals.tokens_per_forward} | accepted


def acceptance_range(
    model: MRPForDiffusionLM, prompts: Sequence[list[int]], drafts: int, max_new_tokens: int
) -> dict | None:
    """Return what `MRPConfig.trained_acceptance` records for `mrp verify` to compare with.

    Returns:
        `mrp_steps`, and `low` and `high`, the 5 % and 95 % quantiles of `accepted_per_verification` over the prompts;
        None if no prompt had a draft.
    """
    rates = accepted_per_verification(model, prompts, drafts, max_new_tokens)
    if not rates:
        return None
    low, high = torch.tensor(rates, dtype=torch.float64).quantile(torch.tensor([TAIL, 1 - TAIL]).double()).tolist()
    return {"mrp_steps": drafts, "low": low, "high": high}


def accepted_per_verification(
    model: MRPForDiffusionLM,
    prompts: Sequence[list[int]],
    drafts: int,
    max_new_tokens: int,
    batch_size: int = 16,
) -> list[float]:
    """Return how many of the head's drafts one verification accepts on average, in 0..K-1, in greedy static decoding.

    Args:
        model: the model, in eval mode.
        prompts: token ids of each prompt.
        drafts: drafts per round K, at least 2: the first draft is the backbone's own step and needs no verification.
        max_new_tokens: limit per prompt.
        batch_size: prompts decoded together.

    Returns:
        One figure for each prompt that had a draft.

    Raises:
        ValueError: if `drafts` is below 2, so that the head drafts nothing.
    """
    if drafts < 2:
        raise ValueError(f"drafts must be at least 2, or the head drafts nothing; got {drafts}")
    options = {"mrp_mode": "spec", "mrp_steps": drafts, "mrp_draft": "head"}
    answers = decode_prompts(model, prompts, options, max_new_tokens, batch_size)
    # every chain has a draft at depth 1, so these count the verifications
    return [sum(answer.accepted) / answer.proposed[1] for answer in answers if answer.proposed[1]]
