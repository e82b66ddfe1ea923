"""Keys and values of a clean stream that several noisy streams take as their context."""

import torch
from transformers.cache_utils import Cache


class ContextCache(Cache):
    """Records the first forward; every later one sees it in front of its own tokens, and is not recorded.

    The clean stream runs first, with rows R. The noisy streams follow as rows R * S, each behind the keys and values
    of its row, so that S streams cost S times [L x 2L] of attention instead of one square over all of them.
    """

    def __init__(self):
        super().__init__(layers=[])
        self._context: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Keys and values [R, heads, L, d] of a layer, or [R * S, heads, 2L, d] once there is a context."""
        if layer_idx not in self._context:
            self._context[layer_idx] = (key_states, value_states)
            return key_states, value_states
        streams = len(key_states) // len(self._context[layer_idx][0])
        return tuple(
            torch.cat([context.repeat_interleave(streams, dim=0), own], dim=2)
            for context, own in zip(self._context[layer_idx], (key_states, value_states), strict=True)
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Length of the recorded stream, 0 before it ran."""
        return self._context[layer_idx][0].shape[2] if layer_idx in self._context else 0
