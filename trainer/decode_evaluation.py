"""True speed while training: decode a few held-out prompts with the head as it is."""

import torch


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
            first_answer = list(mask).index(1)
            prompts.append(list(ids)[: first_answer or min(2 * block_size, length - 1)])
            start += length
    return [prompt for prompt in prompts if prompt]


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
    longest = max(len(prompt) for prompt in prompts)
    pad = model.config.pad_token_id or 0
    ids = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    device = model.lm_head.weight.device
    out = model.generate(
        torch.tensor(ids, device=device),
        attention_mask=torch.tensor(mask, device=device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
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
