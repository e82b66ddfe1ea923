"""Block-diffusion decoding as published SDAR code does it: the baseline of `mrp bench decode`.

One forward per denoising step, one more per finished block only to store its keys and values, and rows of a batch in
lock-step: a row that has finished its block waits until all have.
"""

import torch
from transformers import DynamicCache

from modeling_mrp.masks import CLEAN, PADDING, stream_layout
from modeling_mrp.sampling import Sampler
from modeling_mrp.step_rules import StepRule


@torch.no_grad()
def plain_sdar_loop(
    model, prompts: list[list[int]], max_new_tokens: int, *, rule: StepRule, eos_token_ids=()
) -> list[list[int]]:
    """New tokens of every prompt, greedily; each row is cut behind its first end of text.

    Args:
        model: an `MRPForDiffusionLM`; its head is not used.
        prompts: token ids, of any lengths.
        max_new_tokens: at most so many per row.
        rule: which positions a denoising step reveals.
        eos_token_ids: ids that end a row.
    """
    size, device = model.config.block_size, model.device
    mask_id = model.config.mask_token_id
    sampler = Sampler(mask_id, shaping=[], truncation=[], with_entropy=rule.needs_entropy)
    # whole blocks of the prompts end in the same column, so that blocks of all rows start together behind it
    prefill = max(len(prompt) // size * size for prompt in prompts)
    padding = [prefill - len(prompt) // size * size for prompt in prompts]
    ends = [pad + len(prompt) + max_new_tokens for pad, prompt in zip(padding, prompts, strict=True)]
    ids = torch.full((len(prompts), -(-max(ends) // size) * size), mask_id, device=device)
    for row, (pad, prompt) in enumerate(zip(padding, prompts, strict=True)):
        ids[row, :pad] = 0
        ids[row, pad : pad + len(prompt)] = torch.tensor(prompt, device=device)
    positions = torch.arange(ids.shape[1], device=device) - torch.tensor(padding, device=device)[:, None]
    segment = torch.where(positions < 0, PADDING, 0)
    positions = positions.clamp(min=0)
    tokens = stream_layout(segment, positions, size, stream=CLEAN, context=CLEAN)
    cache = DynamicCache()

    def forward(start: int, end: int) -> torch.Tensor:
        """h of the columns [start, end), [R, Q, H]; their keys and values are appended to the cache."""
        own, seen = tokens.map(lambda field: field[:, start:end]), tokens.map(lambda field: field[:, :end])
        mask = model.attention_mask(own, seen)
        return model.backbone_hidden_states(ids[:, start:end], positions[:, start:end], mask, cache)

    def answers() -> list[list[int]]:
        rows = zip(ids.tolist(), padding, prompts, ends, strict=True)
        return [_cut(row[pad + len(prompt) : end], eos_token_ids) for row, pad, prompt, end in rows]

    if prefill:
        forward(0, prefill)
    for start in range(prefill, ids.shape[1], size):
        block = ids[:, start : start + size]  # a view
        steps = torch.zeros(len(prompts), dtype=torch.long, device=device)
        while (masked := block == mask_id).any():
            logits = model.logits(forward(start, start + size))
            cache.crop(-size)
            read = sampler.read(logits, positions[:, start : start + size], steps, None)
            reveal = rule(read.confidence, read.entropy, masked)
            block.copy_(torch.where(reveal, read.token, block))
        forward(start, start + size)  # only to store
        if not any(mask_id in answer for answer in answers()):
            break
    return answers()


def _cut(row: list[int], eos_token_ids) -> list[int]:
    """The row up to its first end of text, that included."""
    return row[: next((at + 1 for at, token in enumerate(row) if token in eos_token_ids), len(row))]
