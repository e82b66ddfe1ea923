"""Block-diffusion decoding as published SDAR code does it: the baseline of `mrp bench decode`.

It takes one forward per denoising step and one more per finished block only to store its keys and values. The rows of
a batch run in lock-step: a row that has finished its block waits for the others.
"""

from collections.abc import Collection, Sequence

import torch
from transformers import DynamicCache

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.masks import CLEAN, PADDING, stream_layout
from modeling_mrp.sampling import Sampler
from modeling_mrp.step_rules import StepRule


@torch.no_grad()
def plain_sdar_loop(
    model: MRPForDiffusionLM,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    rule: StepRule,
    eos_token_ids: Collection[int] = (),
) -> list[list[int]]:
    """Decode prompts greedily and return the new tokens of each, up to and including its first end of text.

    Args:
        model: the model; its head is not used.
        prompts: token ids of each prompt, of any lengths.
        max_new_tokens: limit per row.
        rule: decides which positions a denoising step reveals.
        eos_token_ids: ids that end a row.
    """
    size, device = model.config.block_size, model.device
    mask_id = model.config.mask_token_id
    sampler = Sampler(mask_id, shaping=[], truncation=[], with_entropy=rule.needs_entropy)
    # the whole blocks of all prompts are aligned to end in the same column: decoding starts there for every row
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
        """Hidden states of the columns [start, end), [R, Q, H]; their keys and values are appended to the cache."""
        own, seen = tokens.map(lambda field: field[:, start:end]), tokens.map(lambda field: field[:, :end])
        mask = model.attention_mask(own, seen)
        return model.backbone_hidden_states(ids[:, start:end], positions[:, start:end], mask, cache)

    def answers() -> list[list[int]]:
        rows = zip(ids.tolist(), padding, prompts, ends, strict=True)
        return [_cut(row[pad + len(prompt) : end], eos_token_ids) for row, pad, prompt, end in rows]

    if prefill:
        forward(0, prefill)
    for start in range(prefill, ids.shape[1], size):
        block = ids[:, start : start + size]  # a view: writing to it changes `ids`
        steps = torch.zeros(len(prompts), dtype=torch.long, device=device)
        while (masked := block == mask_id).any():
            logits = model.logits(forward(start, start + size))
            cache.crop(-size)  # the block is still changing
            read = sampler.read(logits, positions[:, start : start + size], steps, None)
            reveal = rule(read.confidence, read.entropy, masked)
            block.copy_(torch.where(reveal, read.token, block))
        forward(start, start + size)  # only to store the finished block's keys and values
        if not any(mask_id in answer for answer in answers()):
            break
    return answers()


def _cut(row: list[int], eos_token_ids) -> list[int]:
    """The row up to its first end of text, that included."""
    return row[: next((at + 1 for at, token in enumerate(row) if token in eos_token_ids), len(row))]
