"""Chats: which turns are supervised, and what the chat template receives."""

import json

import pytest
from datasets import Dataset

from mrp_trainer.data.chats import chat_samples, without_nulls
from mrp_trainer.data.rows import prepare_dataset
from mrp_trainer.evaluation.acceptance import prompts_of

CHAT = (
    "{% for t in tools or [] %}{{ t['name'] }} {{ t['parameters'] | join(' ') }} . {% endfor %}"
    "{% for m in messages %}{{ 'so ' if m['role'] == 'assistant' }}{{ m['content'] or 'then' }} "
    "{% for c in m['tool_calls'] or [] %}{{ c['name'] }} {{ c['arguments'] | join(' ') }} {% endfor %}[EOS] "
    "{% endfor %}{% if add_generation_prompt %}so {% endif %}"
)
TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture
def tokenizer(word_tokenizer):
    word_tokenizer.chat_template = CHAT
    return word_tokenizer


def prepare(records, tokenizer):
    return prepare_dataset(Dataset.from_list(records), tokenizer, sequence_length=64, packing=False)


def texts(rows, tokenizer):
    return [tokenizer.decode(row["input_ids"]) for row in rows]


@pytest.mark.parametrize("turns, answers", [(1, "two [EOS] four [EOS]"), (2, "four [EOS]"), (3, "four [EOS]")])
def test_only_the_completion_is_supervised_if_prompt_and_completion_are_messages(tokenizer, turns, answers):
    rows = prepare([{"prompt": TURNS[:turns], "completion": TURNS[turns:]}], tokenizer)
    [row] = rows
    marked = zip(row["input_ids"], row["answer_mask"], strict=True)
    assert tokenizer.decode([token for token, supervised in marked if supervised]) == answers
    [prompt] = prompts_of(rows, 1, 4)
    assert tokenizer.decode(prompt) == ("one [EOS] so" if turns == 1 else "one [EOS] so two [EOS] three [EOS] so")


def test_first_turn_of_an_assistant_without_a_prompt_is_not_supervised(tokenizer):
    [sample] = chat_samples(TURNS[1:], tokenizer)
    assert sample == [("so two [EOS] three [EOS] so ", False), ("four [EOS] ", True)]


# --- tools

ONE = {"name": "plus", "parameters": {"one": "int", "two": "int"}}
OTHER = {"name": "minus", "parameters": {"three": "int", "four": "int"}}


@pytest.mark.parametrize("write", [list, json.dumps])
def test_template_receives_the_tools(tokenizer, write):
    records = [{"messages": TURNS[:2], "tools": write([ONE])}, {"messages": TURNS[:2], "tools": write([ONE, OTHER])}]
    expected = ["plus one two . one [EOS] so two [EOS]", "plus one two . minus three four . one [EOS] so two [EOS]"]
    assert texts(prepare(records, tokenizer), tokenizer) == expected
    pairs = [{"prompt": TURNS[:1], "completion": TURNS[1:2], "tools": record["tools"]} for record in records]
    assert texts(prepare(pairs, tokenizer), tokenizer) == expected


@pytest.mark.parametrize("none", [None, [], "", "null", "[]"])
def test_chat_may_have_no_tools(tokenizer, none):
    assert texts(prepare([{"messages": TURNS[:2], "tools": none}], tokenizer), tokenizer) == ["one [EOS] so two [EOS]"]


def test_tools_that_are_not_json_are_refused(tokenizer):
    with pytest.raises(ValueError, match="column tools must hold lists or JSON, got 'plus'"):
        prepare([{"messages": TURNS[:2], "tools": "plus"}], tokenizer)


def test_keys_that_arrow_adds_do_not_reach_the_template(tokenizer):
    """A column has one type, so every call and tool used to show the arguments of all others with the value None."""

    def chat(tool):
        call = {"name": tool["name"], "arguments": dict.fromkeys(tool["parameters"], 1)}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"messages": [TURNS[0], answer], "tools": [tool]}

    records = [chat(ONE), chat(OTHER)]
    unified = Dataset.from_list(records)[0]
    assert unified["tools"][0]["parameters"] == ONE["parameters"] | {"three": None, "four": None}
    assert texts(prepare(records, tokenizer), tokenizer) == [
        "plus one two . one [EOS] so then plus one two [EOS]",
        "minus three four . one [EOS] so then minus three four [EOS]",
    ]


def test_content_of_a_message_may_be_none():
    """A template may test `content is none`, which fails for a message without the key."""
    call = {"name": "plus", "arguments": {"content": None, "one": 1}}
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": [call]}
    assert without_nulls(message, keep="content") == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"name": "plus", "arguments": {"one": 1}}],
    }
