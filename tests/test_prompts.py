"""Where the prompts of a command come from."""

import argparse
import io

import pytest
from transformers import AutoTokenizer

from hub_cards.tasks.tasks import TASKS
from mrp_trainer.commands.prompts import QUESTIONS, built_in_prompts, read_prompts


def arguments(*prompts, file=None):
    return argparse.Namespace(prompt=list(prompts), prompt_file=file)


def test_prompts_come_from_arguments_and_files_without_blank_lines(tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("two\n\n  \nthree\n")
    assert read_prompts(arguments("one", file=str(tmp_path / "prompts.txt"))) == ["one", "two", "three"]
    monkeypatch.setattr("sys.stdin", io.StringIO("four\nfive\n"))
    assert read_prompts(arguments(file="-")) == ["four", "five"]


def test_no_prompt_is_an_error_only_where_one_is_required():
    assert read_prompts(arguments(), required=False) == []
    with pytest.raises(ValueError, match="there is no prompt: give --prompt TEXT or --prompt-file FILE"):
        read_prompts(arguments())


@pytest.mark.parametrize("required", [True, False])
def test_what_was_given_without_a_prompt_in_it_is_an_error(tmp_path, monkeypatch, required):
    """Else a pipe that produced nothing would have built-in prompts checked in its stead."""
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="--prompt-file .*blank.txt holds no prompt"):
        read_prompts(arguments(file=str(tmp_path / "blank.txt")), required)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(ValueError, match="standard input holds no prompt"):
        read_prompts(arguments(file="-"), required)
    with pytest.raises(ValueError, match="--prompt holds no prompt"):
        read_prompts(arguments(" "), required)


def test_built_in_prompts_are_of_words_that_the_tokenizer_knows():
    words, code = (AutoTokenizer.from_pretrained(TASKS[name].folder) for name in ("words", "code"))
    assert tuple(built_in_prompts(code)) == QUESTIONS
    assert words.unk_token_id not in sum(words(list(built_in_prompts(words, 3)))["input_ids"], [])
