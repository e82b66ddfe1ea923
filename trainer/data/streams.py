"""A stream that never ends, so that its position is a number of batches and nothing else."""

from itertools import count

import torch


class EndlessStream(torch.utils.data.IterableDataset):
    """Passes over a stream of rows, one after another, each shuffled anew where the stream is shuffled.

    A trainer that resumes skips as many batches as it has seen, which the end of a stream would cut short. Here there
    is no end: every row says in `epoch` which pass it belongs to, and a batch may reach over the border of two. Only
    a dataloader's worker beyond the last shard ends, at once.

    Args:
        rows: a `datasets.IterableDataset` of prepared rows, see data.py.

    Raises:
        ValueError: when a pass has no row, or none with an answer.
    """

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def __iter__(self):
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
                raise ValueError("train_dataset is a stream without a row: check its source and filters")
            if not answers:
                raise ValueError("train_dataset is a stream without anything to supervise: check its answer_mask")
