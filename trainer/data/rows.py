"""Raw data (text, chats, prompts with completions) as rows of token ids: tokenizing, and fitting samples into rows.

A prepared row holds one or more samples one after another, in the columns
    input_ids [S]           token ids
    answer_mask [S]         1 for supervised tokens, else 0
    lengths [samples]       tokens of each sample
    sample_ids [samples]    number that, with seed and epoch, determines the noise of the sample
Rows of `mrp trajectories` also have
    reveal_steps [S]        the step at which decoding revealed each token: their noise is a state that decoding
                            went through
"""

import hashlib
import json
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from datasets import Dataset, Features, IterableDataset, Value
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import has_length
from transformers.utils import logging

from .chats import warn_of_late_ends
from .encoding import TextEncoder
from .reading import AnyDataset, is_json, row_of
from .samples import RowFormat, format_of, samples_of
from .wording import counted

logger = logging.get_logger(__name__)

ROW_COLUMNS = ["input_ids", "answer_mask", "lengths", "sample_ids"]
FEATURES = Features({column: [Value("int64")] for column in ROW_COLUMNS} | {"answer_mask": [Value("int8")]})
LONG_SAMPLES = ("split", "drop")
CACHE_VERSION = 4  # increase it when the contents of rows change
NUMBER_BITS = 10  # a sample id is row << 20 | sample within the row << 10 | piece of a split sample


def prepare_dataset(
    dataset: AnyDataset,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    sequence_length: int | None,
    packing: bool = True,
    long_samples: str = "split",
    append_eos: bool = True,
    num_proc: int | None = None,
    prompt_field: str | None = None,
    answer_field: str | None = None,
) -> AnyDataset:
    """Tokenize a data set and fit its samples into rows of at most `sequence_length` tokens.

    Three formats are known, by their columns. Of chats (`messages`, or `conversations` in from/value form) the
    assistant's turns are supervised, of `prompt` and `completion` (text or messages) the completion, and of `text`
    everything. A chat may have tools in the column `tools`, as a list or JSON, and its system message in the column
    `system`. Samples with nothing to supervise are left out.

    In Parquet and Arrow, nulls inside of messages and tools are taken as missing keys, since a column of structs has
    one for every key that only other rows have. JSON keeps them.

    Args:
        dataset: a data set in one of these formats. A prepared one, such as those of `mrp trajectories`, is returned
            unchanged, except that `long_samples="drop"` drops its long rows.
        tokenizer: the tokenizer, with a chat template for chats. Prepared rows do not need one.
        sequence_length: largest number of tokens per row. None means 1024 for raw data and no limit for prepared rows.
        packing: put several samples into one row. Samples are not cut to make them fit.
        long_samples: "split" a sample longer than a row into several, or "drop" it.
        append_eos: end texts and completions with the tokenizer's end-of-text token.
        num_proc: number of processes that tokenize.
        prompt_field, answer_field: columns of prompt and completion, if they have other names.

    Returns:
        A data set of the same kind with the columns `input_ids`, `answer_mask`, `lengths` and `sample_ids`.

    Raises:
        ValueError: if the columns or an option are unknown, a row lacks a value, a prepared row is too long, or
            nothing in the whole data set is supervised.
    """
    if long_samples not in LONG_SAMPLES:
        raise ValueError(f"long_samples must be one of {', '.join(LONG_SAMPLES)}, got {long_samples!r}")
    if sequence_length is not None and sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")
    columns, streamed = _columns(dataset), is_streamed(dataset)
    if set(ROW_COLUMNS) <= set(columns):
        rows = _fitting(_prepared(dataset, columns), sequence_length, long_samples)
        if not streamed:  # reading a shuffled stream would fill its buffer; EndlessStream checks as it goes
            _require_answers(rows)
        return rows
    sequence_length = sequence_length or 1024
    form = format_of(columns, prompt_field, answer_field)
    if tokenizer.chat_template is not None and _starts_with_chat(dataset, form):
        warn_of_late_ends(tokenizer)
    tokenize = partial(_tokenize_batch, tokenizer=tokenizer, form=form, append_eos=append_eos, streamed=streamed)
    fit = _Fit(sequence_length, packing, long_samples)
    if not streamed:
        options = [_tokenizer_key(tokenizer), form.columns, append_eos, num_proc, CACHE_VERSION]
        names = dataset.column_names
        tokens = _map(dataset, tokenize, [dataset._fingerprint, *options], names, num_proc, with_indices=True)
        rows = _map(tokens, fit, [tokens._fingerprint, sequence_length, packing, long_samples], ROW_COLUMNS, num_proc)
        _log_counts(tokens, rows, fit)
    else:
        names = dataset.column_names or columns
        tokens = dataset.map(tokenize, batched=True, with_indices=True, remove_columns=names, features=FEATURES)
        rows = tokens.map(fit, batched=True, remove_columns=ROW_COLUMNS, features=FEATURES)
    _require_answers(rows)
    fit.counting = streamed  # only from now on: the check above has read the first rows of a stream
    return rows


def _fitting(dataset: AnyDataset, sequence_length: int | None, long_samples: str) -> AnyDataset:
    """Drop or refuse prepared rows that are too long. In a stream, the collator refuses those that are not dropped."""
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
    """Return what to do about a row of `longest` tokens that does not fit, for an error message."""
    return f"set sequence_length to at least {longest}, or long_samples to drop"


def _require_answers(rows: Iterable[dict]):
    if not any(any(row["answer_mask"]) for row in rows):
        raise ValueError("no sample has anything to supervise: check the data set's format and its assistant turns")


def _columns(dataset: AnyDataset) -> list[str]:
    """Return the columns of a data set, or the keys of its first row where that holds JSON."""
    names = dataset.column_names
    if names is not None and not is_json(names):
        return list(names)
    first = next(iter(dataset), None)  # some streams do not know their columns
    if first is None:
        raise ValueError("the data set is empty")
    return list(row_of(first, "row 0").content)


def _starts_with_chat(dataset: AnyDataset, form: RowFormat) -> bool:
    """Return whether the first row is a conversation; prompt and completion may be one too."""
    first = next(iter(dataset), None)
    return form.is_chat or (first is not None and isinstance(row_of(first, "").content[form.columns[0]], list))


def _prepared(dataset: AnyDataset, columns: list[str]) -> AnyDataset:
    """Return a data set of prepared rows with these columns, in columns of numbers where they are written as JSON."""
    if not is_json(dataset.column_names or ()):
        return dataset
    kept = {name: FEATURES[name] for name in ROW_COLUMNS} | {"reveal_steps": [Value("int64")]}
    features = Features({name: kept[name] for name in kept if name in columns})
    read = partial(_read_prepared, columns=list(features))
    return dataset.map(read, remove_columns=dataset.column_names, features=features)


def _read_prepared(row: dict, columns: list[str]) -> dict:
    content, place, _ = row_of(row, "")
    for column in columns:
        if not isinstance(content.get(column), list):
            raise ValueError(f"{place} has no list of numbers in column {column}: remove it or fill it in")
    return {column: content[column] for column in columns}


def _map(
    dataset: Dataset, function: Callable, key: list, columns: list[str], num_proc: int | None, **options: Any
) -> Dataset:
    """Call `Dataset.map` with a cache that depends on `key` alone.

    The default key hashes the pickled function, and so the state of the tokenizer, which changes when it is used.
    """
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


def _tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all that determines the ids: vocabulary and rules, special tokens, chat template."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for setting in ("truncation", "padding"):  # left over from earlier calls of the tokenizer
        rules.pop(setting, None)
    state = [rules, str(tokenizer.special_tokens_map), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _log_counts(tokens: Dataset, rows: Dataset, fit: "_Fit"):
    counts, length = Counter(), fit.sequence_length
    for batch in tokens.select_columns(["lengths", "answer_mask"]).iter(1000):
        counts.update(_fate(mask, length) for mask in batch["answer_mask"])
    total = sum(counts.values())
    samples, limit = counted(total - counts["empty"], "sample"), counted(length, "token")
    logger.info("%s in %s of at most %s", samples, counted(len(rows), "row"), limit)
    for fate in ("empty", "long"):
        if counts[fate]:
            logger.warning("%s, of %d", fit.outcome(fate, counts[fate]), total)


def _fate(answer_mask: list[int], sequence_length: int) -> str:
    """Return what becomes of a sample: "empty" (nothing to supervise), "long" or "fits"."""
    if not any(answer_mask):
        return "empty"
    return "long" if len(answer_mask) > sequence_length else "fits"


# --- tokenizing


def _tokenize_batch(
    batch: dict,
    indices: list[int],
    *,
    tokenizer: PreTrainedTokenizerBase,
    form: RowFormat,
    append_eos: bool,
    streamed: bool = False,
) -> dict:
    """Tokenize rows of the data set into samples, one or more for each row.

    A row without a sample gives an empty one, so that it is counted.
    """
    rows = {column: [] for column in ROW_COLUMNS}
    encoder = TextEncoder(tokenizer)
    for at, index in enumerate(indices):
        raw = {column: values[at] for column, values in batch.items()}
        row = row_of(raw, f"row {index} (counted from 0)")
        for number, sample in enumerate(samples_of(row, encoder, form, append_eos) or [[]]):
            ids, mask = [], []
            for part, supervised in sample:
                ids += part
                mask += [int(supervised)] * len(part)
            key = _content_key(ids) if streamed else index
            _append(rows, ids, mask, [len(ids)], [(key << 2 * NUMBER_BITS) + (number << NUMBER_BITS)])
    return rows


def _content_key(ids: list[int]) -> int:
    """Return a hash of a sample that replaces the row's number in a stream, where every worker counts from 0.

    Equal samples share their noise.
    """
    digest = hashlib.blake2b(json.dumps(ids).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2 * NUMBER_BITS + 1  # 43 bits: the sample id stays within int64


# --- fitting into rows


class _Fit:
    """Splits or drops samples that are longer than a row, leaves out those without an answer, and packs the rest.

    A function for `Dataset.map` over batches of tokenized samples.

    Attributes:
        counting: whether to count samples and to log what is lost, as a stream is read.
    """

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

    def _pieces(self, ids: list[int], mask: list[int], sample_id: int) -> Iterator[tuple[list[int], list[int], int]]:
        """Yield (ids, answer mask, sample id) of the rows that a sample needs."""
        if self.counting:
            self._count(_fate(mask, self.sequence_length))
        if len(ids) > self.sequence_length and self.long_samples == "drop":
            return
        for piece, start in enumerate(range(0, len(ids), self.sequence_length)):
            cut = slice(start, start + self.sequence_length)
            if any(mask[cut]):
                yield ids[cut], mask[cut], sample_id + piece

    def _count(self, fate: str):
        """Log what a stream has lost so far, after 1, 10, 100, ... samples: a stream has no known end."""
        self.counts[fate] += 1
        count, total = self.counts[fate], sum(self.counts.values())
        if fate != "fits" and count == 10 ** (len(str(count)) - 1):
            logger.warning("%s, of %d so far", self.outcome(fate, count), total)

    def outcome(self, fate: str, count: int) -> str:
        """Return in words what became of `count` samples whose fate is "long" or "empty"."""
        if fate == "empty":
            samples = counted(count, "sample has", "samples have")
            return f"{samples} nothing to supervise and {'is' if count == 1 else 'are'} left out"
        action = {"split": "split into several", "drop": "dropped"}[self.long_samples]
        samples, limit = counted(count, "sample is", "samples are"), counted(self.sequence_length, "token")
        return f"{samples} longer than {limit} and {'is' if count == 1 else 'are'} {action}"


def pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack samples into bins by best fit, the longest sample first.

    Args:
        lengths: length of each sample.
        capacity: largest sum of lengths in a bin.

    Returns:
        The indices of the samples in each bin, in ascending order; bins are sorted by their first sample.
    """
    bins, spaces = [], []  # spaces: (room left, bin) of every bin, sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(spaces, (lengths[index], -1))  # the bin with the least room that is enough
        if at == len(spaces):
            bins.append([])
            room, number = capacity, len(bins) - 1
        else:
            room, number = spaces.pop(at)
        bins[number].append(index)
        insort(spaces, (room - lengths[index], number))
    return sorted(sorted(members) for members in bins)


def _append(rows: dict[str, list], *values: Any):
    for column, value in zip(ROW_COLUMNS, values, strict=True):
        rows[column].append(value)


def is_streamed(dataset: Any) -> bool:
    """Return whether a data set is a stream, which is read as it is used and has no known length."""
    return isinstance(dataset, IterableDataset)


def length_of(dataset: Any) -> int | None:
    """Return the number of rows of a data set, or None for a stream."""
    return len(dataset) if has_length(dataset) else None
