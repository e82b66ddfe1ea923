"""How far the backbone's logits move from one state of a block to a later one, and how much of it the head predicts.

Both measures are KL divergences in nats per masked token. `kl_by_depth` reads the random states of training, with and
without the head's correction; `kl_by_distance` reads the states that static decoding goes through.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.sampling import Sampler
from modeling_mrp.step_rules import StepRule

from ..data.collator import MRPCollator
from .decoding import pad_token_id
from .head_metrics import HeadMetrics, measure_head

MAX_DISTANCE = 8
REPLAYED_ROWS = 4  # replayed together: the hidden states of every step are kept

Sample = tuple[list[int], list[int]]  # token ids of prompt and answer


@torch.no_grad()
def kl_by_depth(
    model: MRPForDiffusionLM, samples: Sequence[Sample], steps: int, batch_size: int = 16, seed: int = 0
) -> dict[str, list[float]]:
    """Return KL(B || A) and KL(B || A + C) by the number of tokens k = 1..K that were revealed in a block since A.

    A are the backbone's logits on a state, B its logits after the reveals, C the head's correction. Noise and reveals
    are those of training (a random share of the answer is masked, and every step reveals one random token of each
    block), so the figures are comparable with a training log.

    Args:
        model: the model, with a head.
        samples: prompts and answers; those with an empty answer are left out.
        steps: number of reveals K.
        batch_size: samples read together.
        seed: seed of the noise.

    Returns:
        `before` and `after`, [K] each; shorter if no masked token was left at the larger depths.
    """
    config = model.config
    collate = MRPCollator(config.block_size, config.mask_token_id, steps, pad_token_id(model), seed=seed)
    rows = [
        {
            "input_ids": prompt + answer,
            "answer_mask": [0] * len(prompt) + [1] * len(answer),
            "lengths": [len(prompt) + len(answer)],
            "sample_ids": [number],
        }
        for number, (prompt, answer) in enumerate(samples)
        if answer
    ]
    metrics = HeadMetrics.zeros(steps, model.device)
    for start in range(0, len(rows), batch_size):
        batch = {name: value.to(model.device) for name, value in collate(rows[start : start + batch_size]).items()}
        inputs = {name: batch[name] for name in ("input_ids", "revealed_ids", "clean_ids", "segment_ids")}
        out = model(**inputs, logits_to_keep=torch.empty(0, dtype=torch.long, device=model.device), teacher=True)
        metrics += measure_head(
            out.last_hidden_state,
            out.corrected_hidden_states,
            out.revealed_hidden_states,
            model.lm_head.weight,
            batch["loss_weight"],
            batch["block_ids"],
            config.mask_token_id,
        )
    figures = metrics.summary()
    return {"before": figures.kl_before, "after": figures.kl_after}


@torch.no_grad()
def kl_by_distance(
    model: MRPForDiffusionLM, samples: Sequence[Sample], distances: Sequence[int] | None = None
) -> tuple[list[float], list[float]]:
    """Return the KL between the backbone's logits at one masked position, by the number of steps between two states.

    Args:
        model: the model; its head is not used.
        samples: as in `replay`; those with an empty answer are left out.
        distances: numbers of steps (default: 1, 2, ... as the block size allows, at most 8).

    Returns:
        Two lists, one figure per distance (shorter if nothing was left to compare). The mean KL(later || earlier)
        over the positions masked in both states; and, as a yardstick, KL(later || unrelated), where the unrelated
        logits are those of a masked position of another prompt (or, in a last batch of one prompt, of another state).
    """
    size, mask_id = model.config.block_size, model.config.mask_token_id
    distances = range(1, min(MAX_DISTANCE, size - 1) + 1) if distances is None else distances
    metrics = HeadMetrics.zeros(len(distances), model.device)
    samples = [sample for sample in samples if sample[1]]
    for start in range(0, len(samples), REPLAYED_ROWS):
        states, hidden, is_answer = replay(model, samples[start : start + REPLAYED_ROWS])
        masked = (states == mask_id) & is_answer[:, None]  # [R, B, L]
        # Rows are ordered by prompt: rotated by half their number, most are paired with a row of another prompt.
        unrelated, rows = hidden.clone(), hidden[masked]
        unrelated[masked] = rows.roll(len(rows) // 2, 0)
        block_ids = (torch.arange(states.shape[2], device=states.device) // size).expand_as(is_answer)
        for earlier in range(size):
            later = earlier + torch.tensor(distances, device=states.device, dtype=torch.long)
            within, later = later < size, later.clamp(max=size - 1)
            metrics += measure_head(
                hidden[:, earlier],
                unrelated[:, earlier, None].expand(-1, len(distances), -1, -1),
                hidden[:, later],
                model.lm_head.weight,
                (masked[:, later] & within[:, None]).float(),
                block_ids,
                mask_id,
            )
    figures = metrics.summary()
    return figures.kl_before, figures.kl_after


@torch.no_grad()
def replay(model: MRPForDiffusionLM, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Replay greedy static decoding, one token per step, for all blocks of all rows at once.

    Every block sees the clean blocks before it, as in decoding, so one forward over both streams is a step of each
    block.

    Args:
        model: the model; its head is not used.
        samples: prompts with the answers that static decoding gave, end of text included.

    Returns:
        The states x_0 .. x_{B-1} of each block [R, B, L], the backbone's hidden states on them [R, B, L, H], and
        which positions belong to the answer [R, L].
    """
    size, mask_id = model.config.block_size, model.config.mask_token_id
    width = max(-(-len(prompt + answer) // size) * size for prompt, answer in samples)
    first = min(len(prompt) for prompt, _ in samples) // size * size  # nothing is denoised before it
    clean = torch.full((len(samples), width), mask_id)
    is_answer, real = torch.zeros(2, len(samples), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(samples):
        length = len(prompt + answer)
        clean[row, :length] = torch.tensor(prompt + answer)
        is_answer[row, len(prompt) : length] = True
        real[row, : -(-length // size) * size] = True
    clean, is_answer, real = (tensor.to(model.device) for tensor in (clean, is_answer, real))
    sampler, rule = Sampler(mask_id, shaping=[], truncation=[]), StepRule("low_confidence_static")
    state, states, hidden = clean.masked_fill(is_answer, mask_id), [], []
    for step in range(size):
        output = model(state, attention_mask=real, clean_ids=clean, logits_to_keep=width - first)
        states.append(state)
        hidden.append(output.last_hidden_state)
        blocks = state[:, first:].unflatten(1, (-1, size))  # [R, blocks, B]
        read = sampler.read(output.logits.unflatten(1, (-1, size)), None, step, None)
        reveal = rule(read.confidence, None, blocks == mask_id)
        state = torch.cat([state[:, :first], torch.where(reveal, read.token, blocks).flatten(1)], dim=1)
    return torch.stack(states, dim=1), torch.stack(hidden, dim=1), is_answer
