"""Conversations: rendered by the tokenizer's chat template, and cut into what the assistant says and the rest."""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase


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


def tools_of(row: dict) -> list | None:
    """Return the tools in a row's column `tools`, which holds a list or JSON; None if there are none.

    Raises:
        ValueError: if the column holds a string that is not valid JSON.
    """
    tools = row.get("tools") or None
    if not isinstance(tools, str):
        return without_nulls(tools)
    try:
        return json.loads(tools) or None
    except json.JSONDecodeError as error:
        raise ValueError(f"column tools must hold lists or JSON, got {tools[:80]!r}") from error


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
