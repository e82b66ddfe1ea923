"""Numbers with their nouns in messages."""

import pytest

from mrp_trainer.data.wording import counted


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (0, ["row"], "0 rows"),
        (1, ["row"], "1 row"),
        (2, ["row"], "2 rows"),
        (1, ["row is", "rows are"], "1 row is"),
        (3, ["row is", "rows are"], "3 rows are"),
    ],
)
def test_one_thing_is_singular_and_all_other_numbers_plural(number, words, text):
    assert counted(number, *words) == text
