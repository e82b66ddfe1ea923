"""Training of an embedded checkpoint's backbone: block-causal masked diffusion with noisy and clean streams.

A row is [noisy_1 | ... | noisy_S | clean]. The clean stream holds prompt and answer; a noisy one only the blocks with
answer tokens, some of them masked. A noisy block sees itself and the *clean* blocks before it, the very view that it
has in decoding. The logits at position i predict token i.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from modeling_mrp.masks import CLEAN, attention_mask, join, stream_layout


@dataclass(frozen=True)
class Recipe:
    """Everything that the backbone's weights depend on, beside its config and the samples."""

    seed: int = 0
    steps: int = 1700
    rows: int = 32
    streams: int = 2
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 50
    pool_batches: int = 8  # problems of so many batches are sorted by length, so that a batch holds little padding


@dataclass(frozen=True)
class Batch:
    """clean [R, L]; noisy and weight [R, S, N]: the last N positions of the clean stream; blocks: how many count."""

    clean: torch.Tensor
    noisy: torch.Tensor
    weight: torch.Tensor
    blocks: int


def encode_sample(tokenizer, sample, block_size: int) -> tuple[list[int], int]:
    """Token ids of a sample's prompt and answer, filled with eos to the end of the block, and the prompt's length."""
    prompt = tokenizer(sample.prompt)["input_ids"]
    ids = prompt + tokenizer(sample.answer)["input_ids"] + [tokenizer.eos_token_id]
    return ids + [tokenizer.eos_token_id] * (-len(ids) % block_size), len(prompt)


def add_noise(clean, answer, block_size, streams, mask_id, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask m tokens of every block, m uniform in 1..number of answer tokens in it, each with weight 1/m.

    Args:
        clean, answer: [R, N], token ids, and which of them belong to an answer; N is a multiple of block_size.

    Returns:
        noisy ids [R, streams, N] and weights [R, streams, N], 0 where nothing is masked.
    """
    rows, length = clean.shape
    answer = answer.view(rows, 1, -1, block_size).expand(-1, streams, -1, -1)
    available = answer.sum(-1, keepdim=True)
    wanted = (torch.rand(available.shape, generator=generator) * available).long() + 1
    order = torch.rand(answer.shape, generator=generator).masked_fill(~answer, 2.0)  # answer tokens first
    rank = order.argsort(-1).argsort(-1)
    masked = (answer & (rank < wanted)).view(rows, streams, length)
    weight = (answer & (rank < wanted)) / wanted
    noisy = torch.where(masked, mask_id, clean[:, None])
    return noisy, weight.view(rows, streams, length)


def make_batch(rows: list[tuple[list[int], int]], tokenizer, block_size: int, streams: int, generator) -> Batch:
    """Rows of `encode_sample`, right-padded; the noisy streams start at the first block that holds an answer."""
    length = max(len(ids) for ids, _ in rows)
    start = min(prompt for _, prompt in rows) // block_size * block_size
    clean = torch.tensor([ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids, _ in rows])
    ends = torch.tensor([(prompt, len(ids)) for ids, prompt in rows])
    at = torch.arange(length)
    answer = ((at >= ends[:, :1]) & (at < ends[:, 1:]))[:, start:]
    noisy, weight = add_noise(clean[:, start:], answer, block_size, streams, tokenizer.mask_token_id, generator)
    blocks = answer.view(len(rows), -1, block_size).any(-1).sum().item() * streams
    return Batch(clean, noisy, weight, blocks)


def batches(sample: Callable, tokenizer, recipe: Recipe, block_size: int) -> Iterator[Batch]:
    """The batches of all steps, in order: a pure function of the recipe and of what `sample` makes of 0, 1, ..."""
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


def backbone_loss(model, batch: Batch) -> torch.Tensor:
    """Mean over blocks of the mean cross-entropy of a block's masked tokens."""
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
def bits_per_token(model, tokenizer, rows: list[tuple[list[int], int]], streams: int = 16, seed: int = 0) -> float:
    """Upper bound of the code length of the rows' answer tokens, end of text included, in bits per token.

    The loss with m masked tokens, m uniform in 1..n, times n, is the expected length of a block's n answer tokens when
    they are revealed one by one in random order.

    Args:
        rows: of `encode_sample`.
        streams: draws of the noise per row.
    """
    usual = model.config._attn_implementation
    model.set_attn_implementation("tiny_backbone_streams")
    generator, size = torch.Generator().manual_seed(seed), model.config.block_size
    nats = tokens = 0.0
    for row in rows:
        prompt = row[1]
        batch = make_batch([row], tokenizer, size, streams, generator)
        answers = torch.full(batch.weight.shape[-1:], float(size))
        answers[:size] -= prompt % size  # the first block begins with the prompt's tail
        nats += backbone_loss(model, replace(batch, weight=batch.weight * answers, blocks=streams)).item()
        tokens += len(row[0]) - prompt
    model.set_attn_implementation(usual)
    return nats / tokens / math.log(2)


def stream_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """Attention over [noisy_1 | ... | noisy_S | clean] without the pairs that no mask allows: noisy i to noisy j.

    Args:
        query [R, heads, S * N + L, D]; key, value [R, kv heads, S * N + L, D].
        attention_mask: the masks of a noisy stream [1, 1, N, N + L] and of the clean one [1, 1, L, L].
    """
    noisy_mask, clean_mask = attention_mask
    length, context = noisy_mask.shape[-2], clean_mask.shape[-1]
    streams = (query.shape[2] - context) // length

    def noisy(states):  # one row for every stream: [R * S, heads, N, D]
        return states[:, :, :-context].unflatten(2, (streams, length)).transpose(1, 2).flatten(0, 1)

    def with_context(states):
        clean = states[:, None, :, -context:].expand(-1, streams, -1, -1, -1).flatten(0, 1)
        return torch.cat([noisy(states), clean], dim=2)

    attend = partial(F.scaled_dot_product_attention, scale=scaling, enable_gqa=True)
    out = attend(noisy(query), with_context(key), with_context(value), attn_mask=noisy_mask)
    out = out.unflatten(0, (-1, streams)).permute(0, 1, 3, 2, 4).flatten(1, 2)
    clean = attend(*(s[:, :, -context:] for s in (query, key, value)), attn_mask=clean_mask)
    return torch.cat([out, clean.transpose(1, 2)], dim=1), None


AttentionInterface.register("tiny_backbone_streams", stream_attention)


def optimizers(model, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, Adam for embeddings, lm_head and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in [*model.model.parameters(), *model.lm_head.parameters()] if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay),
        torch.optim.Adam(others, lr=recipe.other_lr, betas=(0.9, 0.98)),
    ]


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Warm-up, constant, and a linear decay to 0 over the last half."""
    return min(1.0, (step + 1) / recipe.warmup_steps, 2 * (recipe.steps - step) / recipe.steps)


def train_backbone(
    model, tokenizer, sample: Callable, recipe: Recipe, state_file: Path, save_seconds: float = 120.0
) -> None:
    """Train in place. A killed run goes on from `state_file`, with the same result as one that was not killed."""
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


def save_state(file: Path, model, optimizing, step: int, seconds: float) -> None:
    """Replace the file at once, so that a kill in between leaves the old one."""
    parts = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizing]}
    torch.save({**parts, "step": step, "seconds": seconds}, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def load_state(file: Path, model, optimizing) -> tuple[int, float]:
    """Steps done and seconds spent so far; (0, 0.0) without a file."""
    if not file.exists():
        return 0, 0.0
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizing, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"], state["seconds"]
