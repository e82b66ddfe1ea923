"""Which token may attend to which: one rule for plain rows, dual streams, packed samples and candidates.

    q sees k  <=>  same segment and ( same stream and same block
                                      or  k in the stream that q takes as context, in an earlier block )

A plain row is one stream that is its own context: block causal. In a dual stream every noisy stream takes the clean
one as context. In decoding the cache is the clean stream and every candidate state of a block is a noisy one.

A stream -s is the shadow of stream s: one more token at each of its positions, which sees itself, the tokens of s at
the other positions of its block, and its context. A shadow of [MASK] tokens asks for every token of a state what the
model would say if this one alone were masked.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

PADDING = -1  # segment of padding: sees itself only, so that no attention row is empty
UNWRITTEN = -2  # segment of cache slots that hold nothing
CLEAN = 0  # the stream of clean tokens
TILE = 128  # tokens on each side of the tiles that flex_attention skips or takes whole


class Tokens(NamedTuple):
    """What the rule needs to know of each token; all are [R, L] integers, `position` only where there are shadows."""

    segment: torch.Tensor
    block: torch.Tensor
    stream: torch.Tensor
    context: torch.Tensor
    position: torch.Tensor | None = None

    def map(self, function) -> "Tokens":
        """The function's result for each field."""
        return Tokens(*(field if field is None else function(field) for field in self))


def join(parts: list[Tokens]) -> Tokens:
    """Tokens of several streams side by side, [R, sum of L]."""
    return Tokens(*(None if field[0] is None else torch.cat(field, dim=1) for field in zip(*parts, strict=True)))


def tokens_of_stream(segment: torch.Tensor, positions: torch.Tensor, block_size: int, stream: int, context: int):
    """`Tokens` of one stream from its segments and positions, both [R, L]."""
    return Tokens(
        segment, positions // block_size, torch.full_like(segment, stream), torch.full_like(segment, context)
    )


def segment_positions(segment: torch.Tensor) -> torch.Tensor:
    """Position of every token inside its own run of equal segment ids, [R, L]."""
    index = torch.arange(segment.shape[1], device=segment.device).expand_as(segment)
    starts = torch.zeros_like(index)
    starts[:, 1:] = torch.where(segment[:, 1:] != segment[:, :-1], index[:, 1:], 0)
    return index - starts.cummax(dim=1).values


def _visible(q: Tokens, k: Tokens) -> torch.Tensor:
    """The rule on fields that broadcast against one another."""
    own_stream = q.stream == k.stream
    if q.position is not None:
        itself, shadow = q.position == k.position, q.stream < 0
        own_stream = own_stream & (itself | ~shadow) | (q.stream == -k.stream) & shadow & ~itself
    own_block = own_stream & (q.block == k.block)
    earlier_context = (k.stream == q.context) & (k.block < q.block)
    return (q.segment == k.segment) & (own_block | earlier_context)


def attention_mask(q: Tokens, k: Tokens, implementation: str, dtype: torch.dtype):
    """The mask in the form that an attention implementation of transformers takes.

    Args:
        q, k: tokens of the queries [R, Q] and of the keys [R, S].
        implementation: "sdpa" (boolean mask [R, 1, Q, S]), "eager" (additive mask of `dtype`, same shape) or
            "flex_attention" (a BlockMask, never dense on a GPU).

    Raises:
        ValueError: for an implementation that cannot take such a mask.
    """
    if implementation == "flex_attention":
        return _block_mask(q, k)
    visible = _visible(q.map(lambda field: field[:, None, :, None]), k.map(lambda field: field[:, None, None, :]))
    if implementation == "sdpa":
        return visible
    if implementation == "eager":
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    raise ValueError(
        f"attn_implementation must be 'sdpa', 'eager' or 'flex_attention' (block-causal masks), got {implementation!r}"
    )


@torch.no_grad()  # one mode for the compiler, whoever calls
def _block_mask(q: Tokens, k: Tokens):
    """The mask as tiles of tokens: nothing visible, all visible, or the rule applied inside the kernel."""
    from torch.nn.attention.flex_attention import BlockMask  # imports the compiler: only when asked for

    rows, queries, keys = *q.segment.shape, k.segment.shape[1]
    q, k = _whole_tiles(q, PADDING), _whole_tiles(k, UNWRITTEN)

    def mask_mod(row, head, q_index, k_index):
        return _visible(q.map(lambda field: field[row, q_index]), k.map(lambda field: field[row, k_index]))

    count = _compiled_pairs_per_tile() if q.segment.is_cuda else _pairs_per_tile
    pairs = count(q, k)[:rows, None, : math.ceil(queries / TILE), : math.ceil(keys / TILE)]
    partly, wholly = _listed((pairs > 0) & (pairs < TILE**2)), _listed(pairs == TILE**2)
    return BlockMask.from_kv_blocks(*partly, *wholly, TILE, mask_mod, seq_lengths=(queries, keys))


def _whole_tiles(tokens: Tokens, padding: int) -> Tokens:
    """Copies, padded to whole tiles, at least 2 of them in at least 2 rows, by tokens out of sight.

    The compiler would make another graph for a size of 1, and for tensors that queries and keys have in common.
    """
    rows, length = tokens.segment.shape
    missing = max(2, math.ceil(length / TILE)) * TILE - length
    return tokens.map(lambda field: F.pad(field, (0, missing, 0, max(0, 2 - rows)), value=padding))


def _pairs_per_tile(q: Tokens, k: Tokens) -> torch.Tensor:
    """How many pairs of each tile see one another, [R, Q / TILE, S / TILE]."""
    return _visible(
        q.map(lambda field: field.unflatten(1, (-1, 1, TILE, 1))),  # [R, Q / TILE, 1, TILE, 1]
        k.map(lambda field: field.unflatten(1, (1, -1, 1, TILE))),
    ).sum((-2, -1))


@cache
def _compiled_pairs_per_tile():
    """On a GPU only the compiler keeps the pairs from being written to memory."""
    return torch.compile(_pairs_per_tile, dynamic=True)


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tiles of keys are true for each tile of queries, and all of their indices, those first; int32."""
    indices = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), indices.int()
