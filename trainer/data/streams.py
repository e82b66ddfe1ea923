"""A stream that never ends, so that a position in it is simply a number of batches."""

from collections.abc import Iterator
from itertools import count

import torch
from datasets import IterableDataset


class EndlessStream(torch.utils.data.IterableDataset):
    """Repeats a stream of rows without end; a shuffled stream is shuffled differently in every pass.

    A trainer that resumes skips as many batches as it has already seen, and would stop early if the stream ended while
    skipping. Every row holds its pass in `epoch`, and a batch may hold rows of two passes. A data loader worker that
    has no shard of the stream yields nothing.

    Args:
        rows: a stream of prepared rows, see rows.py.

    Raises:
        ValueError: while iterating, if a pass has no rows, or no row with anything to supervise.
    """

    def __init__(self, rows: IterableDataset):
        super().__init__()
        self.rows = rows

    def __iter__(self) -> Iterator[dict]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.id >= self.rows.num_shards:
            return
        for epoch in count():
            self.rows.set_epoch(epoch)
            row, answers = None, False
            for row in self.rows:
                answers = answers or any(row["answer_mask"])
                yield {**row, "epoch": epoch}
            if row is None:
                raise ValueError("train_dataset is a stream without rows: check its source and filters")
            if not answers:
                raise ValueError("train_dataset is a stream with nothing to supervise: check its answer_mask")
