"""Keys and values of a clean stream that several noisy streams take as their context."""

import torch
from transformers.cache_utils import Cache


class ContextRecorder(Cache):
    """Keeps the keys and values of the last `length` tokens of one forward, layer by layer."""

    def __init__(self, length: int):
        super().__init__(layers=[])
        self.length = length
        self.recorded: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Keys and values [R, heads, L, d] of a layer, as they are."""
        if self.recorded is not None:
            self.recorded[layer_idx] = key_states[:, :, -self.length :], value_states[:, :, -self.length :]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """What the forward finds in front of its own tokens: nothing."""
        return 0


class Context(Cache):
    """Shows what was recorded with rows R to noisy streams with rows R * S, in front of their own tokens.

    So S streams cost S times [L x 2L] of attention instead of one square over all of them.
    """

    def __init__(self, recorder: ContextRecorder):
        super().__init__(layers=[])
        self.recorded, self.length = recorder.recorded, recorder.length
        # gradient checkpointing comes by the recorder again, and until then would keep what it holds in a cycle
        recorder.recorded = None

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Keys and values [R * S, heads, length + L, d] of a layer; nothing of the streams is kept."""
        recorded = self.recorded[layer_idx]
        streams = len(key_states) // len(recorded[0])
        return tuple(
            torch.cat([context[:, None].expand(-1, streams, -1, -1, -1).flatten(0, 1), own], dim=2)
            for context, own in zip(recorded, (key_states, value_states), strict=True)
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of recorded tokens."""
        return self.length
