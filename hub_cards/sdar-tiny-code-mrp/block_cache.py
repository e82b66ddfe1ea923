"""Keys and values of a batch whose rows progress independently of one another."""

from typing import Any

import torch
from transformers.cache_utils import Cache

from .masks import CLEAN, UNWRITTEN, TokenLayout


class BlockCache(Cache):
    """Preallocated keys and values [R, heads, capacity, d] per layer, for the backbone and for the head.

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
        self.longest = 0  # the greatest of them or a bound on it, known without asking the device
        self._slots = None  # slots that the current forward writes to, [R, Q]
        self._span = 0  # slots that the current forward may see
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def assign_slots(self, queries: TokenLayout) -> TokenLayout:
        """Assign scratch slots to the tokens of the next forward.

        Args:
            queries: layout of these tokens, [R, Q].

        Returns:
            The layout of the keys that the forward will get from `update`, [R, S]: committed tokens and its own.

        Raises:
            ValueError: when the tokens do not fit into the capacity.
        """
        width = queries.segment.shape[1]
        self._span = self.longest + width
        if self._span > self.capacity:
            raise ValueError(f"BlockCache holds {self.capacity} slots per row, but {self._span} are needed")
        device = self.lengths.device
        self._slots = self.lengths[:, None] + torch.arange(width, device=device)
        slot = torch.arange(self._span, device=device).expand(len(self.lengths), -1)  # [R, S]
        scratch = slot - self.lengths[:, None]  # index into the queries; negative in committed slots
        committed = scratch < 0
        written = scratch.clamp(0, width - 1)
        keys = queries.map(lambda field: field.gather(1, written))
        return TokenLayout(
            segment=torch.where(committed, 0, torch.where(scratch < width, keys.segment, UNWRITTEN)),
            block=torch.where(committed, slot // self.block_size, keys.block),
            stream=torch.where(committed, CLEAN, keys.stream),
            context=torch.where(committed, CLEAN, keys.context),
            position=None if keys.position is None else torch.where(committed, slot, keys.position),
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values [R, heads, Q, d] to the assigned slots.

        Returns:
            The layer's keys and values in all slots that this forward may see, [R, heads, S, d] each.
        """
        if layer_idx not in self._buffers:
            rows, heads, _, size = key_states.shape
            shape = (rows, heads, self.capacity, size)
            # zeros, not uninitialised memory: a NaN spreads through attention even where it is masked
            self._buffers[layer_idx] = (key_states.new_zeros(shape), value_states.new_zeros(shape))
        buffers = self._buffers[layer_idx]
        index = self._slots[:, None, :, None].expand_as(key_states)
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer.scatter_(2, index, states)
        return tuple(buffer[:, :, : self._span] for buffer in buffers)

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
        target = self.lengths[:, None] + within  # [R, B]
        source = target + offsets[:, None]
        for buffers in self._buffers.values():
            for buffer in buffers:
                shape = (-1, buffer.shape[1], -1, buffer.shape[3])
                block = buffer.gather(2, source[:, None, :, None].expand(shape))
                buffer.scatter_(2, target[:, None, :, None].expand(shape), block)

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop all rows but those with the given indices [n]."""
        self.lengths = self.lengths[rows]
        for layer, buffers in self._buffers.items():  # layer by layer, so that only one layer exists twice
            self._buffers[layer] = tuple(buffer[rows] for buffer in buffers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the greatest committed length."""
        return self.longest
