"""Keys and values of a batch whose rows progress independently of one another."""

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from .masks import CLEAN, UNWRITTEN, TokenLayout


class Slots(NamedTuple):
    """Cache slots of a forward.

    Attributes:
        index: slot of each token, counted over all rows' slots, [R * Q].
        span: how many slots of a row the forward may see, S.
    """

    index: torch.Tensor
    span: int


class BlockCache(Cache):
    """Preallocated keys and values of `capacity` slots per row and layer, for the backbone and for the head.

    The slots of a row, after a forward of Q tokens:

        slot      0 ...... length - 1 | length ... length + Q - 1 | length + Q ... capacity - 1
        holds     committed tokens    | scratch: the last forward | leftovers (segment UNWRITTEN)

    Invariant: slot i below a row's committed length holds the clean token at position i. A forward writes its tokens
    to the scratch slots after the row's own length, and the mask decides what it sees of all slots up to there.
    `commit` keeps the first scratch slots by raising the length. Nothing is ever cropped: the next forward overwrites
    what was not committed.

    Args:
        rows: number of rows R.
        capacity: slots per row; a forward of Q tokens needs Q slots after the longest row's length.
        block_size: tokens per block.
        device: device of the lengths; keys and values are on the device of the layers that write them.
    """

    def __init__(self, rows: int, capacity: int, block_size: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.block_size = block_size
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)  # committed tokens per row, [R]
        # counted over all rows' slots, [R]; one more than the capacity belongs to each row, for padding
        self._first_slots = torch.arange(rows, device=device) * (capacity + 1)
        # the fields of a TokenLayout for committed tokens, [fields, capacity]
        slot = torch.arange(capacity, device=device)
        clean = torch.full_like(slot, CLEAN)
        self._committed = torch.stack(TokenLayout(torch.zeros_like(slot), slot // block_size, clean, clean, slot))
        self.longest = 0  # the greatest of them or a bound on it, known without asking the device
        self.slots: Slots | None = None  # of the next forward; may be set again to those of an earlier one
        # keys and values per layer, each [R, capacity, heads, d], so that a token's numbers are in one piece
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def assign_slots(
        self, queries: TokenLayout, behind: torch.Tensor | None = None, after: int | None = None
    ) -> TokenLayout:
        """Assign slots to the tokens of the next forward (`slots`): the scratch slots of their row.

        The head reads committed blocks later than the backbone does. Its tokens begin with those that its layers have
        not seen yet, and these take their committed slots.

        Args:
            queries: layout of these tokens, [R, Q].
            behind: how many committed tokens of each row are read now, [R]; None: none.
            after: the most other tokens of a row that are read; None: Q. A token that would be farther from the end of
                the longest row is padding, and goes to a slot of its own that nothing sees.

        Returns:
            The layout of the keys that the forward will get from `update`, [R, S]: committed tokens and its own.

        Raises:
            ValueError: when the tokens do not fit into the capacity.
        """
        width = queries.segment.shape[1]
        span = self.longest + (width if after is None else after)
        if span > self.capacity:
            raise ValueError(f"BlockCache holds {self.capacity} slots per row, but {span} are needed")
        slot = torch.arange(max(span, width), device=self.lengths.device)
        first = self.lengths if behind is None else self.lengths - behind  # slot of each row's first query
        own = first[:, None] + slot[:width]
        if behind is not None:
            own = own.clamp(max=self.capacity)
        self.slots = Slots((self._first_slots[:, None] + own).flatten(), span)
        scratch = slot[:span] - first[:, None]  # index into the queries; negative in earlier slots, [R, S]
        # all fields in one piece, [fields, R, S]: these operations are small, and their number counts
        written = torch.stack([field for field in queries if field is not None])
        written = written.gather(2, scratch.clamp(0, width - 1).expand(len(written), -1, -1))
        committed = self._committed[: len(written), None, :span]
        keys = TokenLayout(*torch.where(scratch < 0, committed, written).unbind())
        return keys._replace(segment=keys.segment.masked_fill(scratch >= width, UNWRITTEN))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values [R, heads, Q, d] to the assigned slots.

        Returns:
            The layer's keys and values in all slots that this forward may see, [R, heads, S, d] each.
        """
        return self.write(key_states, value_states, layer_idx, self.slots.index)

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of some tokens, R * Q = N in all, to given slots.

        Args:
            key_states: a layer's keys, [R, heads, Q, d].
            value_states: its values, [R, heads, Q, d].
            layer_idx: number of the layer.
            slots: where they are written, counted over all rows' slots, [N].

        Returns:
            The layer's keys and values in all slots that this forward may see, [R, heads, S, d] each.
        """
        if layer_idx not in self._buffers:
            heads, size = key_states.shape[1], key_states.shape[3]
            shape = (len(self.lengths), self.capacity + 1, heads, size)
            # zeros, not uninitialised memory: a NaN spreads through attention even where it is masked
            self._buffers[layer_idx] = (key_states.new_zeros(shape), value_states.new_zeros(shape))
        buffers = self._buffers[layer_idx]
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer.flatten(0, 1).index_copy_(0, slots, states.transpose(1, 2).flatten(0, 1))
        return tuple(buffer[:, : self.slots.span].transpose(1, 2) for buffer in buffers)

    def commit(self, counts: torch.Tensor, longest: int) -> None:
        """Keep the first tokens of the last forward.

        Args:
            counts: how many tokens each row keeps, [R].
            longest: the greatest committed length after that, known to the host.
        """
        self.lengths = self.lengths + counts
        self.longest = longest

    def move_to_front(self, offsets: torch.Tensor) -> None:
        """Copy a block of the last forward to the first scratch slots of every row, in all layers.

        Args:
            offsets: where the block starts among the tokens of that forward, [R].
        """
        within = torch.arange(self.block_size, device=offsets.device)
        target = ((self._first_slots + self.lengths)[:, None] + within).flatten()  # [R * B]
        source = target + offsets.repeat_interleave(self.block_size)
        for buffers in self._buffers.values():
            for buffer in buffers:
                slots = buffer.flatten(0, 1)
                slots.index_copy_(0, target, slots.index_select(0, source))

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop all rows but those with the given indices [n]."""
        self.lengths = self.lengths[rows]
        self._first_slots = self._first_slots[: len(rows)]
        for layer, buffers in self._buffers.items():  # layer by layer, so that only one layer exists twice
            self._buffers[layer] = tuple(buffer[rows] for buffer in buffers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the greatest committed length."""
        return self.longest
