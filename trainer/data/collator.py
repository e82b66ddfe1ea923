"""The collator: adds noise to prepared rows (see rows.py) and makes a batch of fixed shapes."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

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

PADDING = -1  # segment, block and sample id of padding


@dataclass
class MRPCollator:
    """Masks tokens of prepared rows, draws the reveals, and makes a batch of fixed shapes.

    Args:
        block_size: tokens per block of the model.
        mask_token_id: id of the mask token.
        steps: number of successive reveals K.
        pad_token_id: id of the padding token.
        sequence_length: tokens per row L; None means the longest row of the batch, rounded up to whole blocks.
        seed: seed of the noise. The noise of a sample depends on (seed, sample id, epoch) alone.
        reveal_counts: numbers of tokens that a block may reveal at a step; one of them is drawn for each block and
            step.
        noise_eps: lower end eps of the masking probability p, which lies in [eps, 1].
        noise_per_block: draw p for each block instead of once for each sample.
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
    # In shared memory, so that data loader workers that live through several epochs see it change.
    _epoch: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long).share_memory_(), repr=False)

    def set_epoch(self, epoch: int) -> None:
        """Draw the noise of this epoch from now on."""
        self._epoch.fill_(epoch)

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        """Make a batch of R rows.

        Args:
            rows: rows made by `prepare_dataset`. Rows of an `EndlessStream` also hold their epoch.

        Returns:
            A dict of
                input_ids [R, L]: the noisy ids x_t,
                revealed_ids [R, K, L]: the states x_1..x_K after each reveal,
                clean_ids [R, L]: the original ids,
                segment_ids [R, L] and block_ids [R, L]: sample and block of each token, counted over the row, -1 for
                    padding,
                sample_ids [R, L]: id of the sample that each token belongs to, -1 for padding,
                loss_weight [R, K, L] and normaliser [R, K]: see `loss_weights` and `loss_normaliser`,
                reveal_step [R, L] and p_mask [R, L]: the noise they follow from, see corruption.py.

        Raises:
            ValueError: if the rows were not prepared, or one is longer than `sequence_length`.
        """
        length = self._length(rows)
        shape = len(rows), length
        clean = torch.full(shape, self.pad_token_id)
        segment, block = torch.full(shape, PADDING), torch.full(shape, PADDING)
        answer = torch.zeros(shape, dtype=torch.bool)
        reveal_step, p_mask = torch.zeros(shape, dtype=torch.long), torch.ones(shape)
        sample_ids = torch.full(shape, PADDING)
        for r, row in enumerate(rows):
            used = len(row["input_ids"])
            clean[r, :used] = torch.as_tensor(row["input_ids"])
            answer[r, :used] = torch.as_tensor(row["answer_mask"]).bool()
            start = first_block = 0  # of the current sample
            for number, (size, sample) in enumerate(zip(row["lengths"], row["sample_ids"], strict=True)):
                at = slice(start, start + size)
                sample_block = torch.arange(size) // self.block_size
                visited = row.get("reveal_steps")
                visited = None if visited is None else torch.as_tensor(visited[at])
                rng = sample_rng(self.seed, int(sample), int(self._epoch) + row.get("epoch", 0))
                reveal_step[r, at], p_mask[r, at] = self._corrupt(answer[r, at], sample_block, rng, visited)
                segment[r, at], sample_ids[r, at] = number, int(sample)
                block[r, at] = first_block + sample_block
                start, first_block = start + size, first_block + int(sample_block[-1]) + 1
        noisy, states = revealed_states(clean, reveal_step, self.steps, self.mask_token_id)
        return {
            "input_ids": noisy,
            "revealed_ids": states,
            "clean_ids": clean,
            "segment_ids": segment,
            "block_ids": block,
            "sample_ids": sample_ids,
            "loss_weight": loss_weights(reveal_step, p_mask, self.steps),
            "normaliser": loss_normaliser(reveal_step, p_mask, answer, self.steps),
            "reveal_step": reveal_step,
            "p_mask": p_mask,
        }

    def _corrupt(
        self, answer: Tensor, block: Tensor, rng: np.random.Generator, visited: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw reveal_step and p_mask of one sample, each [S]."""
        if visited is not None:
            return draw_visit(answer, block, visited, self.steps, rng)
        masked, p = draw_noise(answer, block, rng, eps=self.noise_eps, per_block=self.noise_per_block)
        return draw_reveals(masked, block, self.steps, rng, counts=tuple(self.reveal_counts)), p

    def _length(self, rows: list[dict]) -> int:
        missing = [column for column in ROW_COLUMNS if column not in rows[0]]
        if missing:
            raise ValueError(f"the rows have no {', '.join(missing)}: pass the data set through prepare_dataset first")
        longest = max(len(row["input_ids"]) for row in rows)
        if self.sequence_length is None:
            return -(-longest // self.block_size) * self.block_size  # rounded up
        if longest > self.sequence_length:
            raise ValueError(
                f"a row of {longest} tokens does not fit into sequence_length={self.sequence_length}: "
                f"{remedies(longest)}"
            )
        return self.sequence_length
