"""Which token may attend to which: one rule for plain rows, dual streams, packed samples and candidates.

    q sees k  <=>  same segment and ( same stream and same block
                                      or  k in the stream that q takes as context, in an earlier block )

A plain row is one stream that is its own context: block causal. In a dual stream every noisy stream takes the clean
one as context. In decoding the cache is the clean stream and every candidate state of a block is a noisy one.

A stream -s is the shadow of stream s: one more token at each of its positions, which sees itself, the tokens of s at
the other positions of its block, and its context. A shadow of [MASK] tokens asks for every token of a state what the
model would say if this one alone were masked.
"""

from typing import NamedTuple

import torch

PADDING = -1  # segment of padding: sees itself only, so that no attention row is empty
UNWRITTEN = -2  # segment of cache slots that hold nothing
CLEAN = 0  # the stream of clean tokens


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
        from torch.nn.attention.flex_attention import create_block_mask  # imports the compiler: only when asked for

        def mask_mod(row, head, q_index, k_index):
            at = q.map(lambda field: field[row, q_index])
            to = k.map(lambda field: field[row, k_index])
            return _visible(at, to)

        rows, queries = q.segment.shape
        device = q.segment.device
        return create_block_mask(
            mask_mod, rows, None, queries, k.segment.shape[1], device=device, _compile=device.type == "cuda"
        )
    visible = _visible(q.map(lambda field: field[:, None, :, None]), k.map(lambda field: field[:, None, None, :]))
    if implementation == "sdpa":
        return visible
    if implementation == "eager":
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    raise ValueError(
        f"attn_implementation must be 'sdpa', 'eager' or 'flex_attention' (block-causal masks), got {implementation!r}"
    )
