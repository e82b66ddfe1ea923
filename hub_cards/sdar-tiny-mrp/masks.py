"""The attention rule: which token may attend to which, in training and in decoding.

Every forward of this package lays its tokens out as *streams* of *blocks* and follows one rule:

    query q sees key k  <=>  both are in the same segment, and
                             (1) k is in q's own stream and in q's own block, or
                             (2) k is in the stream that q takes as context, and in an earlier block

A plain row is one stream that is its own context, so attention is block causal: full inside a block, causal between
blocks. In a *dual stream* (training) each noisy stream takes the clean one as its context. With blocks of 2 tokens:

                         noisy stream 1   noisy stream 2   clean stream
                         block  0 0 1 1   block  0 0 1 1   block  0 0 1 1
    noisy 1    block 0          x x . .          . . . .          . . . .     x: visible
               block 1          . . x x          . . . .          x x . .     .: hidden
    noisy 2    block 0          . . . .          x x . .          . . . .
               block 1          . . . .          . . x x          x x . .
    clean      block 0          . . . .          . . . .          x x . .
               block 1          . . . .          . . . .          x x x x

So a noisy block sees the clean tokens of all earlier blocks and its own noisy tokens, which is what it sees in
decoding too: there, the cache is the clean stream, and every candidate state of a block is a noisy stream.

A stream with the negative number -s is the *shadow* of stream s. It has one more token at each position of s. A shadow
token sees itself, the tokens of s at the other positions of its block, and its context. For a block of 3 positions:

                    state s         shadow -s
                    0 1 2           0' 1' 2'
    state     0     x x x           .  .  .
    shadow    0'    . x x           x  .  .
              1'    x . x           .  x  .
              2'    x x .           .  .  x

A shadow of [MASK] tokens therefore asks, for every token of a state, what the model would predict at its position if
that token alone were masked.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

AttentionMask: TypeAlias = "torch.Tensor | BlockMask"  # the form depends on the attention implementation

PADDING = -1  # segment of padding tokens; they see each other only, so that no row of attention is empty
UNWRITTEN = -2  # segment of cache slots that hold nothing; no query has it
CLEAN = 0  # number of the stream of clean tokens
TILE = 128  # width and height of the tiles that flex_attention skips or computes as a whole


class TokenLayout(NamedTuple):
    """Where the tokens of a forward belong: all that the attention rule needs to know about them.

    Attributes:
        segment: sample that each token belongs to, or `PADDING`, or `UNWRITTEN`, [R, L].
        block: index of the token's block, [R, L].
        stream: number of the token's stream, [R, L].
        context: number of the stream whose earlier blocks the token sees, [R, L].
        position: position of the token, [R, L]; needed only where there are shadows.
    """

    segment: torch.Tensor
    block: torch.Tensor
    stream: torch.Tensor
    context: torch.Tensor
    position: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "TokenLayout":
        """Apply a function to every field."""
        return TokenLayout(*(field if field is None else function(field) for field in self))


def join(layouts: list[TokenLayout]) -> TokenLayout:
    """Concatenate the layouts of several streams along the token dimension, [R, sum of L]."""
    return TokenLayout(*(None if field[0] is None else torch.cat(field, 1) for field in zip(*layouts, strict=True)))


def stream_layout(
    segment: torch.Tensor, positions: torch.Tensor, block_size: int, stream: int, context: int
) -> TokenLayout:
    """Return the layout of one stream.

    Args:
        segment: segment of each token, [R, L].
        positions: position of each token in its segment, [R, L].
        block_size: tokens per block.
        stream: number of this stream.
        context: number of the stream whose earlier blocks this one sees.
    """
    return TokenLayout(
        segment, positions // block_size, torch.full_like(segment, stream), torch.full_like(segment, context)
    )


def segment_positions(segment: torch.Tensor) -> torch.Tensor:
    """Return the position of every token inside its own run of equal segment ids, [R, L]."""
    index = torch.arange(segment.shape[1], device=segment.device).expand_as(segment)
    starts = torch.zeros_like(index)
    starts[:, 1:] = torch.where(segment[:, 1:] != segment[:, :-1], index[:, 1:], 0)
    return index - starts.cummax(dim=1).values


def _visible(q: TokenLayout, k: TokenLayout) -> torch.Tensor:
    """Apply the attention rule to two layouts whose fields broadcast against one another."""
    own_stream = q.stream == k.stream
    if q.position is not None:
        itself, shadow = q.position == k.position, q.stream < 0
        # a shadow token sees itself alone in its own stream, and all positions but its own in the state it shadows
        own_stream = own_stream & (itself | ~shadow) | (q.stream == -k.stream) & shadow & ~itself
    own_block = own_stream & (q.block == k.block)
    earlier_context = (k.stream == q.context) & (k.block < q.block)
    return (q.segment == k.segment) & (own_block | earlier_context)


def attention_mask(q: TokenLayout, k: TokenLayout, implementation: str, dtype: torch.dtype) -> AttentionMask:
    """Build the mask in the form that an attention implementation of transformers expects.

    Args:
        q: layout of the queries, [R, Q].
        k: layout of the keys, [R, S].
        implementation: "sdpa" (boolean mask [R, 1, Q, S]), "eager" (additive mask [R, 1, Q, S]) or "flex_attention"
            (a BlockMask, which is never dense on a GPU).
        dtype: dtype of the additive mask.

    Raises:
        ValueError: for an implementation that does not support such masks.
    """
    if implementation == "flex_attention":
        return _block_mask(q, k)
    (rows, queries), keys = q.segment.shape, k.segment.shape[1]
    visible = _visible(
        q.map(lambda field: field.view(rows, 1, queries, 1)), k.map(lambda field: field.view(rows, 1, 1, keys))
    )
    if implementation == "sdpa":
        return visible
    if implementation == "eager":
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    raise ValueError(
        f"attn_implementation must be 'sdpa', 'eager' or 'flex_attention' (block-causal masks), got {implementation!r}"
    )


@torch.no_grad()  # the compiler would otherwise make one graph with and one without gradients
def _block_mask(q: TokenLayout, k: TokenLayout):
    """Build the mask as tiles: hidden (skipped), visible (no mask applied), or mixed (rule applied in the kernel)."""
    from torch.nn.attention.flex_attention import BlockMask  # imports the compiler, so only when it is needed

    rows, queries, keys = *q.segment.shape, k.segment.shape[1]
    q, k = _whole_tiles(q, PADDING), _whole_tiles(k, UNWRITTEN)

    def mask_mod(row, head, q_index, k_index):
        return _visible(q.map(lambda field: field[row, q_index]), k.map(lambda field: field[row, k_index]))

    count = compiled_pairs_per_tile() if q.segment.is_cuda else _pairs_per_tile
    pairs = count(q, k)[:rows, None, : math.ceil(queries / TILE), : math.ceil(keys / TILE)]
    mixed, full = _listed((pairs > 0) & (pairs < TILE**2)), _listed(pairs == TILE**2)
    return BlockMask.from_kv_blocks(*mixed, *full, TILE, mask_mod, seq_lengths=(queries, keys))


def _whole_tiles(layout: TokenLayout, padding: int) -> TokenLayout:
    """Copy a layout and pad it with invisible tokens to whole tiles, at least two tiles in at least two rows.

    The compiler specialises on sizes of 1 and on tensors that queries and keys share, and would make another graph
    for each of these cases.
    """
    rows, length = layout.segment.shape
    missing = max(2, math.ceil(length / TILE)) * TILE - length
    return layout.map(lambda field: F.pad(field, (0, missing, 0, max(0, 2 - rows)), value=padding))


def _pairs_per_tile(q: TokenLayout, k: TokenLayout) -> torch.Tensor:
    """Count the visible (query, key) pairs of each tile, [R, Q / TILE, S / TILE]."""
    return _visible(
        q.map(lambda field: field.unflatten(1, (-1, 1, TILE, 1))),  # [R, Q / TILE, 1, TILE, 1]
        k.map(lambda field: field.unflatten(1, (1, -1, 1, TILE))),  # [R, 1, S / TILE, 1, TILE]
    ).sum((-2, -1))


@cache
def compiled_pairs_per_tile() -> Callable[..., torch.Tensor]:
    """Compile the count: without fusion, a GPU would write all pairs of tokens to memory."""
    return torch.compile(_pairs_per_tile, dynamic=True)


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, per tile of queries, how many tiles of keys are set, and all tile indices with those first; int32."""
    indices = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), indices.int()
