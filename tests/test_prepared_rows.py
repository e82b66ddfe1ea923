"""Data sets whose rows are already prepared, such as those of `mrp trajectories`."""

import logging
from itertools import islice

import pytest
from datasets import Dataset

from mrp_trainer.data.rows import prepare_dataset
from mrp_trainer.data.streams import EndlessStream
from mrp_trainer.evaluation.acceptance import prompts_of


def rows_of(*lengths, supervised=1):
    return Dataset.from_list(
        [
            {
                "input_ids": [9] * length,
                "answer_mask": [supervised] * length,
                "lengths": [length - 1, 1],
                "sample_ids": [2 * number, 2 * number + 1],
                "reveal_steps": [0] * length,
            }
            for number, length in enumerate(lengths)
        ]
    )


def prepare(rows, **options):
    return prepare_dataset(rows, None, **{"sequence_length": 8} | options)


def test_rows_that_fit_are_returned_unchanged():
    rows = rows_of(8, 3)
    assert prepare(rows) is rows and prepare(rows, long_samples="drop") is rows


def test_long_rows_are_refused_with_both_remedies():
    expected = "2 of 3 prepared rows are longer than 8 tokens: .* at least 12, or long_samples to drop"
    with pytest.raises(ValueError, match=expected):
        prepare(rows_of(9, 8, 12))


def test_long_rows_are_dropped_and_counted(caplog):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    rows = prepare(rows_of(9, 8, 12, 2), long_samples="drop")
    logger.removeHandler(caplog.handler)
    assert list(rows) == [rows_of(9, 8, 12, 2)[number] for number in (1, 3)]
    assert "2 of 4 prepared rows are longer than 8 tokens and are dropped" in caplog.text


def test_without_a_sequence_length_rows_of_any_length_fit():
    rows = rows_of(2000)
    assert prepare(rows, sequence_length=None) is rows


def test_long_rows_of_a_stream_are_dropped_or_left_to_the_collator():
    stream = rows_of(9, 8, 12, 2).to_iterable_dataset()
    dropped = prepare(stream, long_samples="drop")
    assert [len(row["input_ids"]) for row in dropped] == [8, 2]
    assert prepare(stream) is stream
    assert prepare(dropped) is dropped


def test_rows_without_anything_to_supervise_are_refused():
    rows = rows_of(8, 3, supervised=0)
    with pytest.raises(ValueError, match="no sample has anything to supervise"):
        prepare(rows)
    stream = prepare(rows.to_iterable_dataset())  # a stream is not read yet
    with pytest.raises(ValueError, match="a stream with nothing to supervise"):
        list(islice(EndlessStream(stream), 3))


def test_samples_without_a_prompt_or_an_answer_are_not_decoded():
    row = {"input_ids": [5, 6, 7, 8, 9, 10, 11], "answer_mask": [0, 0, 0, 1, 0, 0, 1], "lengths": [3, 1, 3]}
    assert prompts_of([row], 1, 4) == [[9, 10]]
