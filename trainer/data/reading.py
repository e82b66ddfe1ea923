"""Data files, folders and Hub data sets: the one reader of all commands.

JSON is read row by row with Python's parser. Arrow's reader gives all rows of a column one type, so that a key which a
row lacks cannot be told from an explicit null, and text that looks like a date becomes a timestamp. A data set of JSON
files therefore has two columns of text: `json`, one row of the data, and `place`, where that row was found.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from datasets import (
    Dataset,
    DatasetInfo,
    Features,
    GeneratorBasedBuilder,
    IterableDataset,
    ReadInstruction,
    SplitGenerator,
    Value,
    concatenate_datasets,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetsError

from .json_lines import json_rows

AnyDataset = Dataset | IterableDataset

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
WHOLE_SPLIT = re.compile(r"[\w.-]+")
JSON_FEATURES = Features({"json": Value("string"), "place": Value("string")})


def load_source(
    source: str | os.PathLike, *, name: str | None = None, split: str = "train", streaming: bool = False
) -> AnyDataset:
    """Load a data set from a jsonl, json or parquet file, a folder, or the Hub.

    Args:
        source: a file, a folder of such files, a folder written by `save_to_disk`, or the id of a Hub data set.
        name: configuration of a Hub data set.
        split: split to load, or several and parts of them, such as `train[:80%]+test`; a single file has only `train`.
        streaming: read rows when they are used instead of all at once.

    Returns:
        The data set. That of JSON files has the columns `json` and `place`, see `row_of`.

    Raises:
        ValueError: if several sources are given, a file is missing, damaged or of another format, or there is no such
            data set or split. A stream raises the errors of its rows when they are read.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"expected one file, folder or Hub id, got {source!r}: put several files into one folder")
    path = Path(source)
    if streaming and not WHOLE_SPLIT.fullmatch(split):
        raise ValueError(
            f"split {split!r}: a stream can only be read as a whole, so name a single split, without a slice"
        )
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved(path, split, streaming)
    try:
        builder = _builder(path, source, name)
        if streaming:
            return builder.as_streaming_dataset(split)
        builder.download_and_prepare()
        return builder.as_dataset(split)
    except (DatasetsError, OSError, ValueError) as error:
        raise ValueError(_reason(error, source)) from error


class Row(NamedTuple):
    """A row of data.

    Attributes:
        content: its fields.
        place: where it is, for error messages.
        from_json: whether it was read from JSON, where nulls are values of its author; in Arrow's structs they may
            stand for keys that only other rows have.
    """

    content: dict
    place: str
    from_json: bool


def row_of(row: dict, place: str) -> Row:
    """Return a row of `load_source` with its place.

    Args:
        row: the row as the data set holds it.
        place: where it is, unless the row itself says so.
    """
    return Row(json.loads(row["json"]), row["place"], True) if is_json(row) else Row(row, place, False)


def read_rows(source: str | os.PathLike, *, name: str | None = None, split: str = "train") -> list[Row]:
    """Return all rows of a source, see `load_source`."""
    streaming = os.path.exists(source) and WHOLE_SPLIT.fullmatch(split) is not None
    dataset = load_source(source, name=name, split=split, streaming=streaming)
    return [row_of(row, f"{source}, row {number}") for number, row in enumerate(dataset, start=1)]


def is_json(columns: Any) -> bool:
    """Return whether a row with these columns holds JSON."""
    return set(JSON_FEATURES) == set(columns)


def _saved(path: Path, split: str, streaming: bool) -> AnyDataset:
    """Load what `save_to_disk` wrote."""
    saved = load_from_disk(str(path))
    splits = {str(saved.split or "train"): saved, "train": saved} if isinstance(saved, Dataset) else saved
    dataset = splits[split] if split in splits else _parts(path, splits, split)
    return dataset.to_iterable_dataset() if streaming else dataset


def _parts(path: Path, splits: Mapping[str, Dataset], wanted: str) -> Dataset:
    """Return slices and sums of splits, such as `train[:8]+test`, in the syntax of datasets."""
    try:
        parts = ReadInstruction.from_spec(wanted).to_absolute({name: len(part) for name, part in splits.items()})
    except (AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} has no split {wanted!r}, only {', '.join(splits)} ({reason})") from error
    return concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])


def _builder(path: Path, source: str | os.PathLike, name: str | None):
    """The builder of a file, a folder or a Hub data set."""
    if path.is_file():
        if path.suffix not in FILE_FORMATS:
            raise ValueError(f"data file {path} must end in one of {', '.join(FILE_FORMATS)}")
        if FILE_FORMATS[path.suffix] == "json":
            return JsonRows(data_files=str(path))
        return load_dataset_builder(FILE_FORMATS[path.suffix], data_files=str(path))
    if path.suffix in FILE_FORMATS and not path.exists():
        # This cannot be a Hub id; fail without waiting for a timeout.
        raise ValueError(f"data file {path} does not exist")
    builder = load_dataset_builder(str(source), name)
    if builder.name != "json":
        return builder
    return JsonRows(data_files=builder.config.data_files, dataset_name=builder.dataset_name)


def _reason(error: BaseException, source: str | os.PathLike) -> str:
    """The message of an error in one line; where datasets only says that it failed, that of its cause."""
    while isinstance(error, DatasetsError) and error.__cause__ is not None:
        error = error.__cause__
    reason = " ".join(str(error).split())
    return reason if str(source) in reason else f"{source} cannot be read: {reason}"


class JsonRows(GeneratorBasedBuilder):
    """The rows of JSON files, as text and with their places."""

    VERSION = "1.0.0"  # part of the cache's path; increase it when the contents of the columns change

    def _info(self) -> DatasetInfo:
        return DatasetInfo(features=JSON_FEATURES)

    def _split_generators(self, dl_manager) -> list[SplitGenerator]:
        named = self.config.data_files
        files = dl_manager.download_and_extract(named)
        return [
            SplitGenerator(split, gen_kwargs={"files": list(files[split]), "names": list(map(str, named[split]))})
            for split in files
        ]

    def _generate_examples(self, files: list[str], names: list[str]) -> Iterator[tuple[str, dict]]:
        for file_number, (file, name) in enumerate(zip(files, names, strict=True)):
            with open(file, "rb") as stream:  # datasets replaces `open`, so that a stream may be on the Hub
                for number, (place, text) in enumerate(json_rows(stream, name)):
                    yield f"{file_number} {number}", {"json": text, "place": place}
