"""The Python functions: reading them from the standard library, splits, tokenizer, and the parsing check."""

import ast
from pathlib import PurePosixPath

import pytest

from hub_cards.tasks.code_tokenizer import EOS, MASK, PAD, build_tokenizer
from hub_cards.tasks.python_functions import (
    LONGEST,
    SPLITS,
    Function,
    functions,
    functions_of,
    library_files,
    parses,
    split_of,
)

SOURCE = '''
import os

@decorator
def first(a, b=1):
    """Docstring."""
    # comment
    if a: return  b
    return {"x" : a}

class Thing(Base):
    def method(self):
        """Only a docstring."""
    def other(self): return [ i for i in self ]
    async def waits(self): pass

def outer():
    def inner(): pass
    return inner

def umlaut(): return "ä"
'''


def test_functions_are_normalised_without_docstrings_and_comments():
    assert functions_of(SOURCE) == [
        Function("def first(a, b=1):", "\n    if a:\n        return b\n    return {'x': a}"),
        Function("def other(self):", "\n    return [i for i in self]"),
        Function("def outer():", "\n\n    def inner():\n        pass\n    return inner"),
    ]


def test_functions_record_their_file_and_qualified_name():
    found = functions_of(SOURCE, "folder/module.py")
    assert [(one.file, one.name) for one in found] == [
        ("folder/module.py", name) for name in ("first", "Thing.other", "outer")
    ]


def test_file_that_does_not_parse_yields_no_functions():
    assert functions_of("def broken(:") == []
    assert functions_of("x = '\0'") == []


def test_splits_share_no_file_and_depend_on_the_path_alone():
    files = {split: set(library_files(split)) for split in SPLITS}
    assert files["train"] and files["test"] and files["validation"]
    assert not files["train"] & files["test"] and not files["test"] & files["validation"]
    assert split_of(PurePosixPath("json/decoder.py")) == split_of(PurePosixPath("json/decoder.py"))
    with pytest.raises(ValueError, match="dev"):
        next(library_files("dev"))


def test_held_out_functions_are_complete_short_and_not_in_the_training_files():
    train, test = set(functions("train")), functions("test")
    assert len(train) > 5000 and len(test) > 300
    assert not train & set(test) and len(set(test)) == len(test)
    for function in test[:200]:
        text = function.prompt + function.answer
        assert parses(function.prompt, function.answer) and len(text) <= LONGEST
        assert ast.unparse(ast.parse(text)) == text


@pytest.mark.parametrize(
    "answer, whole",
    [
        ("\n    return 1", True),
        ("\n    return (1", False),
        ("\n    return 1\nx = 2", False),
        ("", False),
        ("\n    return '\0'", False),
    ],
)
def test_completion_must_be_exactly_one_complete_function(answer, whole):
    assert parses("def f(x):", answer) is whole


def test_tokenizer_decodes_to_the_same_text_and_never_merges_prompt_and_answer():
    tokenizer = build_tokenizer(f.prompt + f.answer for f in functions_of(SOURCE) * 20)
    for text in (SOURCE, "naïve = 'ß∂'\n\tif x:\n\t\tpass", "a__b = 1234"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for one in functions_of(SOURCE):
        parts = [tokenizer(part)["input_ids"] for part in (one.prompt, one.answer)]
        assert tokenizer(one.prompt + one.answer)["input_ids"] == parts[0] + parts[1]
    assert [tokenizer.convert_tokens_to_ids(t) for t in (MASK, PAD, EOS)] == [0, 1, 2]
