"""The collator: noises prepared rows (see data.py) and makes a batch of fixed shapes."""

from dataclasses import dataclass, field

import torch

from .corruption import (
    draw_noise,
    draw_reveals,
    draw_visit,
    loss_normaliser,
    loss_weights,
    revealed_states,
    sample_rng,
)
from .rows import ROW_COLUMNS, remedies

IGNORED = -1  # segment and block of padding


@dataclass
class MRPCollator:
    """Noises prepared rows and makes a batch of fixed shapes.

    Args:
        block_size, mask_token_id, pad_token_id: of the model.
        steps: K, how many reveals follow one another.
        sequence_length: L; None: the longest row of the batch, rounded up to whole blocks.
        seed: the noise of a sample depends on (seed, sample id, epoch) alone.
        reveal_counts: how many tokens a block reveals at a step; drawn when there are several.
        noise_eps: the masking probability p lies in [eps, 1].
        noise_per_block: one p for each block instead of one for each sample.
    """

    block_size: int
    mask_token_id: int
    steps: int
    pad_token_id: int = 0
    sequence_length: int | None = None
    seed: int = 0
    reveal_counts: tuple[int, ...] = (1,)
    noise_eps: float = 1e-3
    noise_per_block: bool = False
    # Shared memory: workers that live through several epochs see the change too.
    _epoch: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long).share_memory_(), repr=False)

    def set_epoch(self, epoch: int):
        """Draw other noise from now on."""
        self._epoch.fill_(epoch)

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """Batch of rows made by `prepare_dataset`; those of an `EndlessStream` bring their epoch.

        Returns:
            input_ids [R, L] (x_t), revealed_ids [R, K, L] (x_1..x_K), clean_ids [R, L], segment_ids [R, L] and
            block_ids [R, L] (counted over the row, -1 = padding), loss_weight [R, K, L], normaliser [R, K],
            reveal_step [R, L] and p_mask [R, L] (see corruption.py).

        Raises:
            ValueError: for rows that were not prepared or are longer than `sequence_length`.
        """
        length = self._length(rows)
        shape = len(rows), length
        clean = torch.full(shape, self.pad_token_id)
        segment, block = torch.full(shape, IGNORED), torch.full(shape, IGNORED)
        answer = torch.zeros(shape, dtype=torch.bool)
        reveal_step, p_mask = torch.zeros(shape, dtype=torch.long), torch.ones(shape)
        for r, row in enumerate(rows):
            used = len(row["input_ids"])
            clean[r, :used] = torch.as_tensor(row["input_ids"])
            answer[r, :used] = torch.as_tensor(row["answer_mask"]).bool()
            start = first_block = 0
            for number, (size, sample) in enumerate(zip(row["lengths"], row["sample_ids"], strict=True)):
                at = slice(start, start + size)
                sample_block = torch.arange(size) // self.block_size
                visited = row.get("reveal_steps")
                visited = None if visited is None else torch.as_tensor(visited[at])
                rng = sample_rng(self.seed, int(sample), int(self._epoch) + row.get("epoch", 0))
                reveal_step[r, at], p_mask[r, at] = self._corrupt(answer[r, at], sample_block, rng, visited)
                segment[r, at] = number
                block[r, at] = first_block + sample_block
                start, first_block = start + size, first_block + int(sample_block[-1]) + 1
        noisy, states = revealed_states(clean, reveal_step, self.steps, self.mask_token_id)
        return {
            "input_ids": noisy,
            "revealed_ids": states,
            "clean_ids": clean,
            "segment_ids": segment,
            "block_ids": block,
            "loss_weight": loss_weights(reveal_step, p_mask, self.steps),
            "normaliser": loss_normaliser(reveal_step, p_mask, answer, self.steps),
            "reveal_step": reveal_step,
            "p_mask": p_mask,
        }

    def _corrupt(self, answer, block, rng, visited=None) -> tuple[torch.Tensor, torch.Tensor]:
        if visited is not None:
            return draw_visit(answer, block, visited, self.steps, rng)
        masked, p = draw_noise(answer, block, rng, eps=self.noise_eps, per_block=self.noise_per_block)
        return draw_reveals(masked, block, self.steps, rng, counts=tuple(self.reveal_counts)), p

    def _length(self, rows: list[dict]) -> int:
        missing = [column for column in ROW_COLUMNS if column not in rows[0]]
        if missing:
            raise ValueError(f"rows lack {', '.join(missing)}: pass the data set through prepare_dataset first")
        longest = max(len(row["input_ids"]) for row in rows)
        if self.sequence_length is None:
            return -(-longest // self.block_size) * self.block_size
        if longest > self.sequence_length:
            raise ValueError(
                f"a row of {longest} tokens does not fit into sequence_length={self.sequence_length}: "
                f"{remedies(longest)}"
            )
        return self.sequence_length
