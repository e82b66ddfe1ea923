"""Keys and values of a batch whose rows progress independently."""

import torch
from transformers.cache_utils import Cache

from .masks import CLEAN, UNWRITTEN, Tokens


class BlockCache(Cache):
    """Preallocated keys and values [R, heads, capacity, d] per layer, backbone and head layers alike.

    Slot i of a row holds the token at position i while i is below the row's committed length. A forward writes
    behind that length (scratch) and sees all up to there; `commit` keeps what was written first. Nothing is cropped:
    what was not committed is written over by the next forward.

    Args:
        rows: R.
        capacity: slots per row; a forward of Q tokens needs Q slots behind every row's length.
        block_size: tokens per block.
        device: of the bookkeeping; keys and values follow the layers that write them.
    """

    def __init__(self, rows: int, capacity: int, block_size: int, device: torch.device):
        super().__init__(layers=[])
        self.capacity = capacity
        self.block_size = block_size
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._longest = 0
        self._slots = None
        self._span = 0
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def place(self, queries: Tokens) -> Tokens:
        """Assign slots to the next forward's tokens [R, Q]; returns the keys' tokens [R, S] that it will see.

        Raises:
            ValueError: when they do not fit.
        """
        width = queries.segment.shape[1]
        self._span = self._longest + width
        if self._span > self.capacity:
            raise ValueError(f"BlockCache holds {self.capacity} slots per row, but {self._span} are needed")
        device = self.lengths.device
        self._slots = self.lengths[:, None] + torch.arange(width, device=device)
        slot = torch.arange(self._span, device=device).expand(len(self.lengths), -1)
        scratch = slot - self.lengths[:, None]
        committed = scratch < 0
        written = scratch.clamp(0, width - 1)
        keys = queries.map(lambda field: field.gather(1, written))
        return Tokens(
            segment=torch.where(committed, 0, torch.where(scratch < width, keys.segment, UNWRITTEN)),
            block=torch.where(committed, slot // self.block_size, keys.block),
            stream=torch.where(committed, CLEAN, keys.stream),
            context=torch.where(committed, CLEAN, keys.context),
            position=None if keys.position is None else torch.where(committed, slot, keys.position),
        )

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write [R, heads, Q, d] to the slots assigned by `place`; returns all that this forward may see."""
        if layer_idx not in self._buffers:
            rows, heads, _, size = key_states.shape
            shape = (rows, heads, self.capacity, size)
            # zeros, not uninitialised memory: a masked NaN would still spread through attention
            self._buffers[layer_idx] = (key_states.new_zeros(shape), value_states.new_zeros(shape))
        buffers = self._buffers[layer_idx]
        index = self._slots[:, None, :, None].expand_as(key_states)
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer.scatter_(2, index, states)
        return tuple(buffer[:, :, : self._span] for buffer in buffers)

    def commit(self, counts: torch.Tensor, longest: int):
        """Keep the first `counts` [R] tokens of the last forward; `longest` is the greatest length after that."""
        self.lengths = self.lengths + counts
        self._longest = longest

    def keep(self, rows: torch.Tensor):
        """Forget all rows but these [n]."""
        self.lengths = self.lengths[rows]
        for layer, buffers in self._buffers.items():  # one by one: two copies of a layer at most
            self._buffers[layer] = tuple(buffer[rows] for buffer in buffers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The greatest committed length."""
        return self._longest
