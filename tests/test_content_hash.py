"""The hash of a data set depends on its rows alone."""

import pytest
from datasets import Dataset, List, Value, concatenate_datasets

from mrp_trainer.data.content_hash import content_hash

ROWS = [{"input_ids": [i, i + 1], "answer_mask": [0, 1], "lengths": [2], "sample_ids": [i]} for i in range(2500)]


def changed(row, **values):
    return [*ROWS[:row], ROWS[row] | values, *ROWS[row + 1 :]]


def test_order_of_storage_and_dtype_do_not_matter():
    whole = Dataset.from_list(ROWS)
    parts = concatenate_datasets([Dataset.from_list(ROWS[:700]), Dataset.from_list(ROWS[700:])])
    picked = Dataset.from_list(ROWS[::-1]).select(range(len(ROWS) - 1, -1, -1))
    narrow = whole.cast_column("answer_mask", List(Value("int8")))
    assert len({content_hash(rows) for rows in (whole, parts, picked, narrow)}) == 1


@pytest.mark.parametrize(
    "rows",
    [
        ROWS[:-1],
        [*ROWS[1:], ROWS[0]],
        changed(1200, input_ids=[7, 7]),
        changed(2499, answer_mask=[1, 1]),
        changed(0, sample_ids=[9]),
        [*ROWS[:5], ROWS[5] | {"input_ids": [5, 6, 6]}, ROWS[6] | {"input_ids": [7]}, *ROWS[7:]],
        [row | {"reveal_steps": [0, 1]} for row in ROWS],
    ],
)
def test_every_change_of_a_row_matters(rows):
    assert content_hash(Dataset.from_list(rows)) != content_hash(Dataset.from_list(ROWS))
    assert content_hash(rows) != content_hash(ROWS)


def test_other_columns_and_dicts_of_data_sets_are_hashed_too():
    texts = [Dataset.from_dict({"text": texts}) for texts in (["a", "b"], ["a", "c"])]
    hashes = content_hash({"one": texts[0], "two": texts[1]})
    assert hashes == {"one": content_hash(texts[0]), "two": content_hash(texts[1])}
    assert hashes["one"] != hashes["two"]
