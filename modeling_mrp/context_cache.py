"""Keys and values of a clean stream, recorded in one forward and read as the context of noisy streams in others."""

from typing import Any

import torch
from transformers.cache_utils import Cache


class ContextRecorder(Cache):
    """Records the keys and values of the last `length` tokens of one forward, layer by layer."""

    def __init__(self, length: int) -> None:
        super().__init__(layers=[])
        self.length = length
        self.recorded: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record a layer's keys and values [R, heads, L, d] and return them unchanged."""
        if self.recorded is not None:
            self.recorded[layer_idx] = key_states[:, :, -self.length :], value_states[:, :, -self.length :]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: the forward that is recorded has no tokens before its own."""
        return 0


class CleanContext(Cache):
    """Puts the recorded keys and values of R rows before those of R * S rows, S noisy streams per recorded row.

        layer's keys for stream s of row r:   [ recorded clean tokens of row r | own tokens of the stream ]

    S streams as rows cost S times [L x 2L] of attention, whereas all streams side by side in one row would cost the
    square of (S + 1) L.
    """

    def __init__(self, recorder: ContextRecorder) -> None:
        super().__init__(layers=[])
        self.recorded, self.length = recorder.recorded, recorder.length
        # gradient checkpointing replays the recorded forward during backward and keeps the recorder until then:
        # without its reference to these tensors there is no cycle that would keep them alive
        recorder.recorded = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values with the context before them, [R * S, heads, length + L, d].

        The tokens of the streams themselves are not stored.
        """
        recorded = self.recorded[layer_idx]
        streams = len(key_states) // len(recorded[0])
        return tuple(
            torch.cat([context[:, None].expand(-1, streams, -1, -1, -1).flatten(0, 1), own], dim=2)
            for context, own in zip(recorded, (key_states, value_states), strict=True)
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of recorded tokens."""
        return self.length
