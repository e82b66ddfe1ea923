"""Training of an embedded checkpoint's backbone: block-causal masked diffusion with noisy and clean streams.

A row is [noisy_1 | ... | noisy_S | clean]. The clean stream holds prompt and answer. A noisy stream holds only the
blocks with answer tokens, and some of those tokens are masked in it. A noisy block attends to itself and to the
*clean* blocks before it, as it does in decoding. The logits at position i predict token i (no shift).

                      keys
             | noisy_1 | noisy_2 |     clean      |
    noisy_1  |  same   |         | earlier blocks |
    noisy_2  |         |  same   | earlier blocks |
    clean    |         |         | block-causal   |
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedTokenizerBase

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.masks import CLEAN, attention_mask, join, stream_layout

from ..tasks.tasks import Sample


@dataclass(frozen=True)
class BackboneRecipe:
    """Settings of the backbone's training. With its config and the samples, they determine the weights.

    Attributes:
        seed: seed of the noise and of the order of the batches.
        steps: number of training steps.
        rows: number of samples per batch.
        streams: number of noisy streams per sample.
        matrix_lr: learning rate of Muon, for the matrices of the layers.
        other_lr: learning rate of Adam, for all other parameters.
        weight_decay: weight decay of Muon.
        warmup_steps: number of steps over which the learning rates rise.
        pool_batches: number of batches whose samples are sorted by length together, to keep padding small.
    """

    seed: int = 0
    steps: int = 1700
    rows: int = 32
    streams: int = 2
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 50
    pool_batches: int = 8


@dataclass(frozen=True)
class Batch:
    """One batch of R samples with S noisy streams.

    Attributes:
        clean: token ids of the clean stream [R, L].
        noisy: token ids of the noisy streams [R, S, N], at the last N positions of the clean stream.
        weight: weights of the loss [R, S, N], zero where nothing is masked.
        blocks: number of noisy blocks with answer tokens, over which the loss is averaged.
    """

    clean: Tensor
    noisy: Tensor
    weight: Tensor
    blocks: int


def encode_sample(tokenizer: PreTrainedTokenizerBase, sample: Sample, block_size: int) -> tuple[list[int], int]:
    """Return the token ids of prompt and answer, filled up with eos to a whole block, and the prompt's length."""
    prompt = tokenizer(sample.prompt)["input_ids"]
    ids = prompt + tokenizer(sample.answer)["input_ids"] + [tokenizer.eos_token_id]
    return ids + [tokenizer.eos_token_id] * (-len(ids) % block_size), len(prompt)


def add_noise(
    clean: Tensor, answer: Tensor, block_size: int, streams: int, mask_id: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mask m answer tokens of every block, with m uniform in 1..number of its answer tokens, each with weight 1/m.

    Args:
        clean: token ids [R, N], where N is a multiple of block_size.
        answer: which tokens belong to an answer, boolean [R, N].
        block_size: number of tokens per block.
        streams: number of noisy copies of each row.
        mask_id: id of the mask token.
        generator: source of the randomness.

    Returns:
        Noisy token ids [R, streams, N], and weights [R, streams, N] that are 0 where nothing is masked.
    """
    rows, length = clean.shape
    answer = answer.view(rows, 1, -1, block_size).expand(-1, streams, -1, -1)
    available = answer.sum(-1, keepdim=True)
    wanted = (torch.rand(available.shape, generator=generator) * available).long() + 1
    order = torch.rand(answer.shape, generator=generator).masked_fill(~answer, 2.0)  # sorts the answer tokens first
    rank = order.argsort(-1).argsort(-1)
    masked = (answer & (rank < wanted)).view(rows, streams, length)
    weight = (answer & (rank < wanted)) / wanted
    noisy = torch.where(masked, mask_id, clean[:, None])
    return noisy, weight.view(rows, streams, length)


def make_batch(
    rows: list[tuple[list[int], int]],
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    streams: int,
    generator: torch.Generator,
) -> Batch:
    """Pad encoded samples on the right and add noisy streams, from the first block with an answer token on.

    Args:
        rows: results of `encode_sample`.
        tokenizer: tokenizer that encoded them.
        block_size: number of tokens per block.
        streams: number of noisy streams per row.
        generator: source of the noise.
    """
    length = max(len(ids) for ids, _ in rows)
    start = min(prompt for _, prompt in rows) // block_size * block_size
    clean = torch.tensor([ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids, _ in rows])
    ends = torch.tensor([(prompt, len(ids)) for ids, prompt in rows])
    at = torch.arange(length)
    answer = ((at >= ends[:, :1]) & (at < ends[:, 1:]))[:, start:]
    noisy, weight = add_noise(clean[:, start:], answer, block_size, streams, tokenizer.mask_token_id, generator)
    blocks = answer.view(len(rows), -1, block_size).any(-1).sum().item() * streams
    return Batch(clean, noisy, weight, blocks)


def batches(
    sample: Callable[[int], Sample], tokenizer: PreTrainedTokenizerBase, recipe: BackboneRecipe, block_size: int
) -> Iterator[Batch]:
    """Yield the batches of all steps, in order. They depend on the arguments alone.

    Args:
        sample: returns the training sample of a number 0, 1, 2, ...
        tokenizer: tokenizer of the backbone.
        recipe: settings of the training.
        block_size: number of tokens per block.
    """
    for pool in range(-(-recipe.steps // recipe.pool_batches)):
        size = recipe.rows * recipe.pool_batches
        encoded = [
            encode_sample(tokenizer, sample(number), block_size) for number in range(pool * size, (pool + 1) * size)
        ]
        encoded.sort(key=lambda row: (row[1] // block_size, len(row[0])))
        groups = [encoded[i : i + recipe.rows] for i in range(0, size, recipe.rows)]
        random.Random(f"{recipe.seed} {pool}").shuffle(groups)
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + pool)
        for rows in groups:
            yield make_batch(rows, tokenizer, block_size, recipe.streams, generator)


def backbone_loss(model: MRPForDiffusionLM, batch: Batch) -> Tensor:
    """Cross-entropy of the masked tokens, averaged within each block and then over the blocks."""
    streams, length = batch.noisy.shape[1:]
    at = torch.arange(batch.clean.shape[1])[None]
    clean = stream_layout(torch.zeros_like(at), at, model.config.block_size, CLEAN, CLEAN)
    noisy = stream_layout(torch.zeros_like(at), at, model.config.block_size, 1, CLEAN)
    noisy = noisy.map(lambda field: field[:, -length:])
    masks = (attention_mask(q, k, "sdpa", model.dtype) for q, k in ((noisy, join([noisy, clean])), (clean, clean)))
    hidden = model.model(
        torch.cat([batch.noisy.flatten(1), batch.clean], dim=1),
        attention_mask={"full_attention": tuple(masks)},
        position_ids=torch.cat([at[:, -length:].repeat(1, streams), at], dim=1),
        use_cache=False,
    ).last_hidden_state[:, : streams * length]
    weight = batch.weight.flatten(1)
    masked = weight > 0
    target = batch.clean[:, None, -length:].expand_as(batch.noisy).flatten(1)
    losses = F.cross_entropy(model.logits(hidden[masked]), target[masked], reduction="none")
    return (losses * weight[masked]).sum() / batch.blocks


@torch.no_grad()
def bits_per_token(
    model: MRPForDiffusionLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[tuple[list[int], int]],
    streams: int = 16,
    seed: int = 0,
) -> float:
    """Upper bound of the code length of the rows' answer tokens, end of text included, in bits per token.

    With m masked tokens, m uniform in 1..n, the loss times n is the expected code length of a block's n answer tokens
    when they are revealed one by one in random order.

    Args:
        model: model whose backbone is measured.
        tokenizer: tokenizer that encoded the rows.
        rows: results of `encode_sample`.
        streams: number of draws of the noise per row.
        seed: seed of the noise.
    """
    usual = model.config._attn_implementation
    model.set_attn_implementation("tiny_backbone_streams")
    generator, size = torch.Generator().manual_seed(seed), model.config.block_size
    nats = tokens = 0.0
    for row in rows:
        prompt = row[1]
        batch = make_batch([row], tokenizer, size, streams, generator)
        answers = torch.full(batch.weight.shape[-1:], float(size))
        answers[:size] -= prompt % size  # the first block begins with the end of the prompt
        nats += backbone_loss(model, replace(batch, weight=batch.weight * answers, blocks=streams)).item()
        tokens += len(row[0]) - prompt
    model.set_attn_implementation(usual)
    return nats / tokens / math.log(2)


def stream_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: tuple[Tensor, Tensor],
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over [noisy_1 | ... | noisy_S | clean] that never computes the scores between two noisy streams.

    Every noisy stream becomes a row of its own, with the clean stream's keys and values after its own.

    Args:
        module: the calling attention layer; unused, as are the keyword arguments.
        query: [R, heads, S * N + L, D].
        key: [R, kv heads, S * N + L, D].
        value: [R, kv heads, S * N + L, D].
        attention_mask: the mask of a noisy stream [1, 1, N, N + L], and that of the clean stream [1, 1, L, L].
        scaling: factor of the scores.

    Returns:
        The output [R, S * N + L, heads, D], and None in place of the attention weights.
    """
    noisy_mask, clean_mask = attention_mask
    length, context = noisy_mask.shape[-2], clean_mask.shape[-1]
    streams = (query.shape[2] - context) // length

    def noisy(states: Tensor) -> Tensor:  # one row per stream: [R * S, heads, N, D]
        return states[:, :, :-context].unflatten(2, (streams, length)).transpose(1, 2).flatten(0, 1)

    def with_context(states: Tensor) -> Tensor:  # [R * S, heads, N + L, D]
        clean = states[:, None, :, -context:].expand(-1, streams, -1, -1, -1).flatten(0, 1)
        return torch.cat([noisy(states), clean], dim=2)

    attend = partial(F.scaled_dot_product_attention, scale=scaling, enable_gqa=True)
    out = attend(noisy(query), with_context(key), with_context(value), attn_mask=noisy_mask)
    out = out.unflatten(0, (-1, streams)).permute(0, 1, 3, 2, 4).flatten(1, 2)
    clean = attend(*(s[:, :, -context:] for s in (query, key, value)), attn_mask=clean_mask)
    return torch.cat([out, clean.transpose(1, 2)], dim=1), None


AttentionInterface.register("tiny_backbone_streams", stream_attention)


def optimizers(model: MRPForDiffusionLM, recipe: BackboneRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, and Adam for the embeddings, the lm_head and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in [*model.model.parameters(), *model.lm_head.parameters()] if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay),
        torch.optim.Adam(others, lr=recipe.other_lr, betas=(0.9, 0.98)),
    ]


def learning_rate_factor(step: int, recipe: BackboneRecipe) -> float:
    """Factor of the learning rates at a step: linear warm-up, constant, then linear decay to 0 over the last half."""
    return min(1.0, (step + 1) / recipe.warmup_steps, 2 * (recipe.steps - step) / recipe.steps)


def train_backbone(
    model: MRPForDiffusionLM,
    tokenizer: PreTrainedTokenizerBase,
    sample: Callable[[int], Sample],
    recipe: BackboneRecipe,
    state_file: Path,
    save_seconds: float = 120.0,
) -> None:
    """Train the backbone in place. A run that was killed resumes from `state_file`, with the same final weights.

    Args:
        model: model whose backbone is trained.
        tokenizer: tokenizer of the backbone.
        sample: returns the training sample of a number 0, 1, 2, ...
        recipe: settings of the training.
        state_file: file for the state of the training.
        save_seconds: how often the state is saved.
    """
    model.freeze_backbone(False).train()
    model.set_attn_implementation("tiny_backbone_streams")
    optimizing = optimizers(model, recipe)
    first, seconds = load_state(state_file, model, optimizing)
    began = saved = time.monotonic()
    running = None
    drawn = batches(sample, tokenizer, recipe, model.config.block_size)
    for step, batch in enumerate(islice(drawn, first, None), first):
        if step == recipe.steps:
            break
        for optimizer in optimizing:
            base = recipe.matrix_lr if isinstance(optimizer, torch.optim.Muon) else recipe.other_lr
            optimizer.param_groups[0]["lr"] = base * learning_rate_factor(step, recipe)
        loss = backbone_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizing:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        now = time.monotonic()
        done = step + 1
        if done % 50 == 0:
            print(f"  step {done}/{recipe.steps}  loss {running:.4f}  {seconds + now - began:.0f} s", flush=True)
        if now - saved > save_seconds or done == recipe.steps:
            save_state(state_file, model, optimizing, done, seconds + now - began)
            saved = now
    model.set_attn_implementation("sdpa")
    model.freeze_backbone().eval()


def save_state(
    file: Path, model: MRPForDiffusionLM, optimizing: list[torch.optim.Optimizer], step: int, seconds: float
) -> None:
    """Write the state of the training. The file is replaced atomically, so a killed run leaves a complete one."""
    parts = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizing]}
    torch.save({**parts, "step": step, "seconds": seconds}, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def load_state(file: Path, model: MRPForDiffusionLM, optimizing: list[torch.optim.Optimizer]) -> tuple[int, float]:
    """Load the state of the training in place, and return the number of steps and seconds so far.

    Without a file nothing is loaded, and the result is (0, 0.0).
    """
    if not file.exists():
        return 0, 0.0
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizing, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"], state["seconds"]
