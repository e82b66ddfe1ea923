"""A hash of the contents of a data set, whatever its source, its cache or its batches."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

BATCH = 1000


def content_hash(dataset: Any) -> str | dict[str, str]:
    """Return a hash of all rows of a data set in their order.

    Args:
        dataset: a `Dataset`, another sequence of rows, or a dict of them, which gives a dict of hashes.
    """
    if isinstance(dataset, dict):
        return {str(name): content_hash(part) for name, part in dataset.items()}
    digest = hashlib.sha256()
    for part in _arrow_parts(dataset) if isinstance(dataset, Dataset) else _json_parts(dataset):
        digest.update(part)
    return digest.hexdigest()


def _arrow_parts(dataset: Dataset) -> Iterable[bytes]:
    """Yield the rows in batches, column by column: for lists of numbers the lengths and the numbers."""
    columns = sorted(dataset.column_names)
    yield json.dumps(columns).encode()
    for batch in dataset.with_format("arrow").iter(BATCH):
        for column in columns:
            values = batch.column(column).combine_chunks()
            if pa.types.is_list(values.type) and pa.types.is_integer(values.type.value_type):
                yield _as_bytes(values.value_lengths())
                yield _as_bytes(values.flatten())
            else:
                yield json.dumps(values.to_pylist(), default=str).encode()


def _as_bytes(numbers: pa.Array) -> bytes:
    return numbers.to_numpy(zero_copy_only=False).astype(np.int64).tobytes()


def _json_parts(rows: Any) -> Iterable[bytes]:
    for index in range(len(rows)):
        yield json.dumps(rows[index], default=_as_list, sort_keys=True).encode()


def _as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
