"""Where the prompts of a command come from."""

import io

import pytest
from transformers import AutoTokenizer

from hub_cards.tasks.tasks import TASKS
from mrp_trainer.commands.prompts import QUESTIONS, built_in_prompts, read_prompts


def test_prompts_come_from_arguments_and_files_without_blank_lines(tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("two\n\n  \nthree\n")
    assert read_prompts(["one"], str(tmp_path / "prompts.txt")) == ["one", "two", "three"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"four\nfive\n")))
    assert read_prompts(None, "-") == ["four", "five"]


def test_no_prompt_is_an_error_only_where_one_is_required():
    assert read_prompts(None, required=False) == []
    with pytest.raises(ValueError, match="there is no prompt: give --prompt TEXT or --prompt-file FILE"):
        read_prompts([])


@pytest.mark.parametrize("required", [True, False])
def test_blank_input_is_an_error(tmp_path, monkeypatch, required):
    """Otherwise the built-in prompts would silently take the place of a pipe that produced nothing."""
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="--prompt-file .*blank.txt holds no prompt"):
        read_prompts([], str(tmp_path / "blank.txt"), required)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(ValueError, match="standard input holds no prompt"):
        read_prompts([], "-", required)
    with pytest.raises(ValueError, match="--prompt holds no prompt"):
        read_prompts([" "], None, required)


def test_built_in_prompts_consist_of_words_that_the_tokenizer_knows():
    words, code = (AutoTokenizer.from_pretrained(TASKS[name].folder) for name in ("words", "code"))
    assert tuple(built_in_prompts(code)) == QUESTIONS
    assert words.unk_token_id not in sum(words(list(built_in_prompts(words, 3)))["input_ids"], [])
