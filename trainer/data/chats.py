"""Conversations: rendered by the tokenizer's chat template, and cut into what the assistant says and the rest."""

import json
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .reading import Row

logger = logging.get_logger(__name__)

SPEAKERS = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "user", "assistant", "tool")}


def chat_samples(
    messages: list[dict], tokenizer: PreTrainedTokenizerBase, *, first: int = 0, tools: list | None = None
) -> list[list[tuple[str, bool]]]:
    """Cut a conversation into samples of (text, supervised) pieces.

    Supervised are the assistant's turns, including their end marks. Some templates render earlier turns differently
    once the conversation goes on (without their reasoning, say). Such a conversation gives one sample per rendering,
    so that every answer is trained after exactly the text that it follows in use.

    Args:
        messages: the turns, with `role`, `content` and whatever else the template reads.
        tokenizer: a tokenizer with a chat template.
        first: first turn whose answer is supervised. Turn 0 never is, because it has no prompt.
        tools: descriptions of tools for the template.

    Returns:
        The samples; joining the texts of a sample gives the rendered conversation.

    Raises:
        ValueError: if the template renders an answer that does not begin with its generation prompt.
    """

    def render(upto: int, **options) -> str:
        return tokenizer.apply_chat_template(messages[:upto], tools=tools, tokenize=False, **options)

    samples = []
    written = None  # the text of the current sample so far
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn < max(first, 1):
            continue
        prompt, full = render(turn, add_generation_prompt=True), render(turn + 1)
        if not full.startswith(prompt):
            raise ValueError(
                "the chat template renders an answer that does not begin with its generation prompt "
                f"({prompt[-40:]!r}), so the assistant's turns cannot be located: use another template, or data with "
                "prompt and completion"
            )
        if written is None or not prompt.startswith(written):  # the template has changed earlier turns
            samples.append([])
            written = ""
        samples[-1] += [(prompt[len(written) :], False), (full[len(prompt) :], True)]
        written = full
    return samples


def conversation(turns: Any, row: Row) -> list[dict]:
    """Return the turns of a row as messages with `role` and `content`.

    The text of a column `system`, which some data sets have beside `conversations`, is the first message.

    Args:
        turns: messages, or turns in from/value form.
        row: the row that holds them.

    Raises:
        ValueError: if it is no list of turns, or the column holds anything else, or another text than the
            conversation's own system message.
    """
    messages = as_messages(turns, row.place, row.from_json)
    system = row.content.get("system")
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise ValueError(f"{row.place}: column system must hold text, got {system!r:.60}")
    first = {"role": "system", "content": system}
    if messages and messages[0]["role"] == "system":
        if messages[0] != first:
            raise ValueError(f"{row.place}: column system and the conversation's system message differ: remove one")
        return messages
    return [first, *messages]


def as_messages(value: Any, place: str, nulls_are_values: bool = True) -> list[dict]:
    """Return the turns of a conversation as messages with `role` and `content`.

    Args:
        value: messages with `role` and `content`, or turns with `from` (human, gpt, system) and `value`.
        place: where they are, for error messages.
        nulls_are_values: keep nulls inside of tool calls. Those of Arrow's structs are no values: Arrow gives all
            structs of a column the same keys, and the value None where a row did not have a key.

    Raises:
        ValueError: if it is no list of such turns.
    """
    if not isinstance(value, list):
        raise ValueError(f"{place}: expected a list of messages, got {value!r:.60}")
    return [_as_message(turn, f"{place}, message {number}", nulls_are_values) for number, turn in enumerate(value, 1)]


def _as_message(turn: Any, place: str, nulls_are_values: bool) -> dict:
    if not isinstance(turn, dict):
        raise ValueError(f'{place}: expected {{"role": ..., "content": ...}}, got {turn!r:.60}')
    if turn.get("from") is not None and turn.get("role") is None:
        if turn["from"] not in SPEAKERS:
            raise ValueError(f"{place}: from must be one of {', '.join(SPEAKERS)}, got {turn['from']!r}")
        turn = {"role": SPEAKERS[turn["from"]], "content": turn.get("value")}
    if not isinstance(turn.get("role"), str):
        raise ValueError(f"{place}: expected role and content, or from and value, got {', '.join(turn) or '{}'}")
    if turn["role"] in ("user", "system") and turn.get("content") is None:
        raise ValueError(f"{place}: the {turn['role']} says nothing (null): remove the message or fill it in")
    turn = {key: item for key, item in turn.items() if item is not None or key == "content"}
    return turn if nulls_are_values else _without_absent(turn, keep="content")


def tools_of(row: dict, place: str, nulls_are_values: bool = True) -> list | None:
    """Return the tools in a row's column `tools`, which holds a list or JSON; None if there are none.

    Args:
        row: the row.
        place: where it is, for error messages.
        nulls_are_values: as in `as_messages`.

    Raises:
        ValueError: if the column holds neither a list nor JSON of one.
    """
    tools = row.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) or None
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: column tools must hold lists or JSON, got {tools[:80]!r}") from error
    elif not nulls_are_values:
        tools = _without_absent(tools)
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{place}: column tools must hold lists or JSON, got {tools!r:.80}")
    return tools


def warn_of_late_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if the chat template ends an assistant's turn only at the start of the next one, so that it is not trained.

    Args:
        tokenizer: a tokenizer with a chat template.
    """
    turns = [("user", "one"), ("assistant", "two"), ("user", "three")]
    chat = [{"role": role, "content": content} for role, content in turns]
    try:
        answered, asked = (tokenizer.apply_chat_template(chat[:upto], tokenize=False) for upto in (2, 3))
    except TemplateError:  # refuses this conversation; those of the data are another matter
        return
    if answered.rstrip().endswith("two") and asked.startswith(answered.rstrip()):
        between = asked[len(answered.rstrip()) :].split("three")[0]
        logger.warning(
            "the chat template writes nothing after the assistant's last answer: %r comes only with the next turn, so "
            "the head is not trained to end an answer; use a template that ends every turn",
            between,
        )


def _without_absent(value: Any, keep: str | None = None) -> Any:
    """Drop nulls of Arrow's structs, and say once that some of them may have been values."""
    kept = without_nulls(value, keep)
    if kept != value:
        logger.warning_once(
            "nulls inside of messages and tools are taken as missing keys: Parquet and Arrow write them for every key "
            "that only other rows have. To keep nulls, use jsonl, or write the objects as JSON text"
        )
    return kept


def without_nulls(value: Any, keep: str | None = None) -> Any:
    """Drop keys whose value is None from nested dicts and lists.

    Arrow gives all structs of a column the same keys, and the value None where a row did not have a key.

    Args:
        value: dicts, lists and plain values.
        keep: key of the outermost dict that is kept even if its value is None.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None or key == keep}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
