"""True speed while training: decode a few held-out prompts with the head as it is."""

from contextlib import contextmanager

import torch

from .runs import decode_batch

TAIL = 0.05  # share of the prompts on either side that the range of acceptance leaves out


def prompts_of(rows, count: int, block_size: int) -> list[list[int]]:
    """The prompts of the first samples of prepared rows; of plain text, its first two blocks.

    Args:
        rows: prepared rows, see data.py.
        count: how many at most.
        block_size: of the model.
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


def left_padded(prompts: list[list[int]], model) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` [R, longest] for the model's `generate`."""
    longest = max(len(prompt) for prompt in prompts)
    pad = model.config.pad_token_id or 0
    ids = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    device = model.lm_head.weight.device
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


@contextmanager
def decoding_attention(model):
    """sdpa in place of flex_attention, which compiles for its shapes: decoding has small and ever new ones."""
    usual = model.config._attn_implementation
    if usual == "flex_attention":
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if usual == "flex_attention":
            model.set_attn_implementation(usual)


@torch.no_grad()
def decode_figures(model, prompts: list[list[int]], drafts: int, max_new_tokens: int) -> dict[str, float]:
    """Decode all prompts in one batch by `spec` and say what it took.

    Args:
        model: an `MRPForDiffusionLM` in eval mode.
        prompts: token ids of each.
        drafts: K, drafts per round.
        max_new_tokens: per prompt.

    Returns:
        `tokens_per_forward` (all backbone forwards counted) and `accepted_k`, the share of drafts at depth k = 1..
        that were accepted, where any were proposed.
    """
    with decoding_attention(model):
        out = model.generate(
            **left_padded(prompts, model),
            max_new_tokens=max_new_tokens,
            pad_token_id=model.config.pad_token_id or 0,
            do_sample=False,
            mrp_mode="spec",
            mrp_steps=drafts,
            return_dict_in_generate=True,
        )
    tokens = out.stats.tokens_by_backbone.sum() + out.stats.tokens_by_head.sum()
    figures = {"tokens_per_forward": float(tokens / out.stats.backbone_forwards.sum())}
    proposed, accepted = out.stats.drafts_proposed.sum(0), out.stats.drafts_accepted.sum(0)
    for depth in range(1, len(proposed)):
        if proposed[depth]:
            figures[f"accepted_{depth}"] = float(accepted[depth] / proposed[depth])
    return figures


def acceptance_range(model, prompts: list[list[int]], drafts: int, max_new_tokens: int) -> dict | None:
    """What `MRPConfig.trained_acceptance` records, for `mrp verify` to compare with.

    Returns:
        mrp_steps; low and high, the 5 % and 95 % quantiles over the prompts of `accepted_per_verification`. None
        where no prompt had a draft.
    """
    rates = accepted_per_verification(model, prompts, drafts, max_new_tokens)
    if not rates:
        return None
    low, high = torch.tensor(rates, dtype=torch.float64).quantile(torch.tensor([TAIL, 1 - TAIL]).double()).tolist()
    return {"mrp_steps": drafts, "low": low, "high": high}


def accepted_per_verification(
    model, prompts: list[list[int]], drafts: int, max_new_tokens: int, batch_size: int = 16
) -> list[float]:
    """Drafts of the head that one verification accepts on average, 0..K - 1, in greedy static decoding.

    Args:
        model: an `MRPForDiffusionLM` in eval mode.
        prompts: token ids of each.
        drafts: K of `spec`, at least 2: the first draft is the backbone's own step, which needs no verification.
        max_new_tokens: per prompt.

    Returns:
        One figure for every prompt that had a draft.

    Raises:
        ValueError: for a K that leaves the head nothing to draft.
    """
    if drafts < 2:
        raise ValueError(f"drafts must be at least 2, or the head drafts nothing; got {drafts}")
    options = {"mrp_mode": "spec", "mrp_steps": drafts, "mrp_draft": "head"}
    rates = []
    with decoding_attention(model):
        for start in range(0, len(prompts), batch_size):
            for row in decode_batch(model, prompts[start : start + batch_size], options, max_new_tokens):
                verifications = row["proposed"][1]  # every chain has a draft at depth 1
                if verifications:
                    rates.append(sum(row["accepted"]) / verifications)
    return rates
