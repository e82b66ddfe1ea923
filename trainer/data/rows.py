"""Text, chat and prompt-completion data: loading, tokenizing, and fitting into rows.

A prepared row holds one or more whole samples one after another:
    input_ids [S], answer_mask [S] (1 = supervised), lengths [samples], sample_ids [samples] (keys of the noise)
Rows of trajectories.py also hold
    reveal_steps [S], when decoding revealed each token: their noise is a state that decoding visited
"""

import hashlib
import json
import os
from bisect import bisect_left, insort
from collections import Counter
from functools import partial
from pathlib import Path

from datasets import Dataset, Features, IterableDataset, Value, load_dataset, load_from_disk
from transformers.trainer_utils import has_length
from transformers.utils import logging

from .chats import chat_samples, tools_of, without_nulls

logger = logging.get_logger(__name__)

ROW_COLUMNS = ["input_ids", "answer_mask", "lengths", "sample_ids"]
FEATURES = Features({column: [Value("int64")] for column in ROW_COLUMNS} | {"answer_mask": [Value("int8")]})
FORMATS = {"messages": ("messages",), "prompt-completion": ("prompt", "completion"), "text": ("text",)}
LONG_SAMPLES = ("split", "drop")
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
CACHE_VERSION = 2  # counted up when what a row holds changes
NUMBER_BITS = 10  # a sample id is row << 20 | sample within the row << 10 | piece of a split sample


def load_source(source, *, name: str | None = None, split: str = "train", streaming: bool = False):
    """A data set from a jsonl or parquet file, a folder, or a Hub id.

    Args:
        source: a file, a folder of such files, a folder written by `save_to_disk`, or the id of a Hub data set.
        name: configuration of a Hub data set.
        split: which split of it.
        streaming: read as it is used instead of at once.

    Raises:
        ValueError: for several sources, a file that is missing or of another kind, a split that is not there, or a
            folder that cannot be streamed.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"expected one file, folder or Hub id, got {source!r}: put several files into one folder")
    path = Path(source)
    if path.is_file():
        if path.suffix not in FILE_FORMATS:
            raise ValueError(f"data file {path} must end in one of {', '.join(FILE_FORMATS)}")
        return load_dataset(FILE_FORMATS[path.suffix], data_files=str(path), split="train", streaming=streaming)
    if path.suffix in FILE_FORMATS and not path.exists():  # no id looks so: nobody is to wait for the Hub's answer
        raise ValueError(f"there is no data file {path}")
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        dataset = load_from_disk(str(path))
        if not isinstance(dataset, Dataset):
            if split not in dataset:
                raise ValueError(f"{path} has no split {split!r}, only {', '.join(dataset)}")
            dataset = dataset[split]
        return dataset.to_iterable_dataset() if streaming else dataset
    return load_dataset(str(source), name, split=split, streaming=streaming)


def prepare_dataset(
    dataset,
    tokenizer,
    *,
    sequence_length: int | None,
    packing: bool = True,
    long_samples: str = "split",
    append_eos: bool = True,
    num_proc: int | None = None,
):
    """Tokenize a data set and fit its samples into rows of at most `sequence_length` tokens.

    Supervised are: of chats (column `messages`) what the assistant says, of `prompt` and `completion` (text or
    messages) the completion, of `text` everything. Samples with nothing to supervise are left out. The tools of a chat
    may stand beside it in the column `tools`, as a list or JSON.

    Args:
        dataset: a `Dataset` or `IterableDataset` with one of these formats; one that is prepared comes back as it
            is, also one of `mrp trajectories`, except that "drop" drops its long rows.
        tokenizer: with a chat template where there are chats.
        sequence_length: None: 1024, and prepared rows of any length.
        packing: put several samples into one row; nothing is cut to make them fit.
        long_samples: "split" a sample longer than a row into several, or "drop" it.
        append_eos: end texts and completions with the tokenizer's end-of-text token.
        num_proc: processes that tokenize.

    Returns:
        The same kind of data set with the columns `input_ids`, `answer_mask`, `lengths` and `sample_ids`.

    Raises:
        ValueError: unknown columns or options, a row without a value, prepared rows that are too long to be split,
            or nothing to supervise in the whole data set.
    """
    if long_samples not in LONG_SAMPLES:
        raise ValueError(f"long_samples must be one of {', '.join(LONG_SAMPLES)}, got {long_samples!r}")
    if sequence_length is not None and sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")
    columns, streamed = _columns(dataset), is_streamed(dataset)
    if set(ROW_COLUMNS) <= set(columns):
        rows = _fitting(dataset, sequence_length, long_samples)
        if not streamed:  # a look would fill the buffer of a shuffled stream: EndlessStream finds out as it goes
            _require_answers(rows)
        return rows
    sequence_length = sequence_length or 1024
    tokenize = partial(
        _tokenize_batch, tokenizer=tokenizer, kind=_format(columns), append_eos=append_eos, streamed=streamed
    )
    fit = _Fit(sequence_length, packing, long_samples)
    if not streamed:
        options = [_tokenizer_key(tokenizer), append_eos, num_proc, CACHE_VERSION]
        tokens = _map(dataset, tokenize, [dataset._fingerprint, *options], columns, num_proc, with_indices=True)
        rows = _map(tokens, fit, [tokens._fingerprint, sequence_length, packing, long_samples], ROW_COLUMNS, num_proc)
        _report(tokens, rows, fit)
    else:
        tokens = dataset.map(tokenize, batched=True, with_indices=True, remove_columns=columns, features=FEATURES)
        rows = tokens.map(fit, batched=True, remove_columns=ROW_COLUMNS, features=FEATURES)
    _require_answers(rows)
    fit.counting = streamed  # from now on: the look at the first row is none of the training
    return rows


def _fitting(dataset, sequence_length: int | None, long_samples: str):
    """Prepared rows that are not too long; in a stream it is the collator that refuses those not to be dropped."""
    if sequence_length is None:
        return dataset
    drop = long_samples == "drop"
    if is_streamed(dataset):
        return dataset.filter(partial(_fits, sequence_length)) if drop else dataset
    sizes = [sum(lengths) for batch in dataset.select_columns("lengths").iter(1000) for lengths in batch["lengths"]]
    short = [number for number, size in enumerate(sizes) if size <= sequence_length]
    if len(short) < len(sizes):
        found = f"{len(sizes) - len(short)} of {len(sizes)} prepared rows are longer than {sequence_length} tokens"
        if not drop:
            raise ValueError(f"{found}: {remedies(int(max(sizes)))}")
        logger.warning("%s and are dropped", found)
        dataset = dataset.select(short)
    return dataset


def _fits(sequence_length: int, row: dict) -> bool:
    return len(row["input_ids"]) <= sequence_length


def remedies(longest: int) -> str:
    """What to do about a row of so many tokens that does not fit."""
    return f"set sequence_length to at least {longest}, or long_samples to drop"


def _require_answers(rows):
    if not any(any(row["answer_mask"]) for row in rows):
        raise ValueError("no sample has anything to supervise: check the data set's format and its assistant turns")


def _columns(dataset) -> list[str]:
    if dataset.column_names is not None:
        return list(dataset.column_names)
    first = next(iter(dataset), None)  # a stream need not know its columns
    if first is None:
        raise ValueError("the data set is empty")
    return list(first)


def _format(columns: list[str]) -> str:
    for kind, needed in FORMATS.items():
        if set(needed) <= set(columns):
            return kind
    expected = "; ".join(" and ".join(needed) for needed in FORMATS.values())
    raise ValueError(f"the data set has the columns {', '.join(columns)}, expected one of: {expected}")


def _map(dataset: Dataset, function, key: list, columns: list[str], num_proc: int | None, **options) -> Dataset:
    """`Dataset.map` whose cache is found again by `key`, and by nothing that changes from run to run."""
    fingerprint = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    processes = min(num_proc or 1, max(1, len(dataset)))
    return dataset.map(
        function,
        batched=True,
        remove_columns=columns,
        features=FEATURES,
        num_proc=processes if processes > 1 else None,
        new_fingerprint=fingerprint,
        **options,
    )


def _tokenizer_key(tokenizer) -> str:
    """Hash of all that decides about the ids: vocabulary and rules, special tokens, chat template."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for call in ("truncation", "padding"):  # traces of earlier calls
        rules.pop(call, None)
    state = [rules, str(tokenizer.special_tokens_map), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _report(tokens: Dataset, rows: Dataset, fit: "_Fit"):
    counts, length = Counter(), fit.sequence_length
    for batch in tokens.select_columns(["lengths", "answer_mask"]).iter(1000):
        counts.update(_fate(mask, length) for mask in batch["answer_mask"])
    total = sum(counts.values())
    logger.info("%d samples in %d rows of at most %d tokens", total - counts["empty"], len(rows), length)
    for fate in ("empty", "long"):
        if counts[fate]:
            logger.warning("%s, of %d", fit.outcome(fate, counts[fate]), total)


def _fate(answer_mask: list[int], sequence_length: int) -> str:
    if not any(answer_mask):
        return "empty"
    return "long" if len(answer_mask) > sequence_length else "fits"


# --- tokenizing


def _tokenize_batch(
    batch: dict, indices: list[int], *, tokenizer, kind: str, append_eos: bool, streamed: bool = False
) -> dict:
    """One sample or more for each row of the data set; one that has none gives an empty sample, to be counted."""
    rows = {column: [] for column in ROW_COLUMNS}
    for at, index in enumerate(indices):
        row = {column: batch[column][at] for column in (*FORMATS[kind], "tools") if column in batch}
        _require_values(row, kind, index)
        for number, sample in enumerate(_samples_of(row, tokenizer, kind, append_eos) or [[]]):
            ids, mask = [], []
            for part, supervised in sample:
                ids += part
                mask += [int(supervised)] * len(part)
            key = _content_key(ids) if streamed else index
            _append(rows, ids, mask, [len(ids)], [(key << 2 * NUMBER_BITS) + (number << NUMBER_BITS)])
    return rows


def _content_key(ids: list[int]) -> int:
    """Stands for the row's number in a stream, where every worker counts from 0: equal samples share their noise."""
    digest = hashlib.blake2b(json.dumps(ids).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2 * NUMBER_BITS + 1  # 43 bits: the sample id stays within int64


def _require_values(row: dict, kind: str, index: int):
    for column in FORMATS[kind]:
        if row[column] is None:
            raise ValueError(f"row {index} (counted from 0) has no value in column {column}: remove it or fill it in")


def _samples_of(row: dict, tokenizer, kind: str, append_eos: bool) -> list[list[tuple[list[int], bool]]]:
    """The samples of one row of the data set; a sample is a list of (ids, supervised)."""
    first = 0
    if kind == "prompt-completion" and isinstance(row["prompt"], list):
        kind, first = "messages", len(row["prompt"])
        row = row | {"messages": [*row["prompt"], *row["completion"]]}
    if kind == "messages":
        plain = partial(tokenizer, add_special_tokens=False)
        messages = [without_nulls(message, keep="content") for message in row["messages"]]
        turns = chat_samples(messages, tokenizer, first=first, tools=tools_of(row))
        return [[(plain(text)["input_ids"], supervised) for text, supervised in sample] for sample in turns]
    end = [tokenizer.eos_token_id] if append_eos and tokenizer.eos_token_id is not None else []
    if kind == "text":
        return [[(tokenizer(row["text"])["input_ids"] + end, True)]]
    completion = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
    return [[(tokenizer(row["prompt"])["input_ids"], False), (completion + end, True)]]


# --- fitting into rows


class _Fit:
    """Splits or drops what is longer than a row, leaves out what has no answer, packs the rest."""

    def __init__(self, sequence_length: int, packing: bool, long_samples: str):
        self.counting = False
        self.counts = Counter()
        self.sequence_length = sequence_length
        self.packing = packing
        self.long_samples = long_samples

    def __call__(self, batch: dict) -> dict:
        samples = [
            piece
            for ids, mask, sample_ids in zip(
                batch["input_ids"], batch["answer_mask"], batch["sample_ids"], strict=True
            )
            for piece in self._pieces(ids, mask, sample_ids[0])
        ]
        lengths = [len(ids) for ids, _, _ in samples]
        bins = pack(lengths, self.sequence_length) if self.packing else [[i] for i in range(len(samples))]
        rows = {column: [] for column in ROW_COLUMNS}
        for members in bins:
            ids, masks, sample_ids = zip(*(samples[i] for i in members), strict=True)
            _append(rows, sum(ids, []), sum(masks, []), [lengths[i] for i in members], list(sample_ids))
        return rows

    def _pieces(self, ids, mask, sample_id):
        if self.counting:
            self._count(_fate(mask, self.sequence_length))
        if len(ids) > self.sequence_length and self.long_samples == "drop":
            return
        for piece, start in enumerate(range(0, len(ids), self.sequence_length)):
            cut = slice(start, start + self.sequence_length)
            if any(mask[cut]):
                yield ids[cut], mask[cut], sample_id + piece

    def _count(self, fate: str):
        """Report what a stream has lost so far, ever more rarely: nobody knows when it ends."""
        self.counts[fate] += 1
        count, total = self.counts[fate], sum(self.counts.values())
        if fate != "fits" and count == 10 ** (len(str(count)) - 1):
            logger.warning("%s, of %d so far", self.outcome(fate, count), total)

    def outcome(self, fate: str, count: int) -> str:
        """What became of `count` samples that were "long" or "empty"."""
        if fate == "empty":
            return f"{count} samples have nothing to supervise and are left out"
        action = {"split": "split into several", "drop": "dropped"}[self.long_samples]
        return f"{count} samples are longer than {self.sequence_length} tokens and are {action}"


def pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best fit, longest first: bins of indices whose lengths sum to at most `capacity`, in order of appearance."""
    bins, spaces = [], []  # spaces: sorted (room left, bin)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(spaces, (lengths[index], -1))
        if at == len(spaces):
            bins.append([])
            room, number = capacity, len(bins) - 1
        else:
            room, number = spaces.pop(at)
        bins[number].append(index)
        insort(spaces, (room - lengths[index], number))
    return sorted(sorted(members) for members in bins)


def _append(rows: dict, *values):
    for column, value in zip(ROW_COLUMNS, values, strict=True):
        rows[column].append(value)


def is_streamed(dataset) -> bool:
    """Whether a data set is read as it is used, so that nobody knows its length."""
    return isinstance(dataset, IterableDataset)


def length_of(dataset) -> int | None:
    """Rows of a data set, None of a stream."""
    return len(dataset) if has_length(dataset) else None
