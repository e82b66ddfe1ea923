"""Conversations: rendered by the tokenizer's template and cut into what the assistant says and the rest."""

import json


def chat_samples(
    messages: list[dict], tokenizer, *, first: int = 0, tools: list | None = None
) -> list[list[tuple[str, bool]]]:
    """Cut a conversation into (text, supervised) pieces: supervised is what the assistant says, its end included.

    A template that shows earlier turns differently later on (without their reasoning, say) gives one sample for each
    rendering, so that every answer is trained behind the very text that it will see in use.

    Args:
        messages: with `role` and `content`, and what else the template reads.
        tokenizer: with a chat template.
        first: the turn from which on answers are supervised; turn 0 never is, as no prompt stands before it.
        tools: descriptions for the template.

    Raises:
        ValueError: when the template's prompt is not how its own answer begins.
    """

    def render(upto: int, **options) -> str:
        return tokenizer.apply_chat_template(messages[:upto], tools=tools, tokenize=False, **options)

    samples, written = [], None
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn < max(first, 1):
            continue
        prompt, full = render(turn, add_generation_prompt=True), render(turn + 1)
        if not full.startswith(prompt):
            raise ValueError(
                "the chat template writes an answer that does not begin with its generation prompt "
                f"({prompt[-40:]!r}): assistant turns cannot be told apart, use another template or prompt/completion"
            )
        if written is None or not prompt.startswith(written):
            samples.append([])
            written = ""
        samples[-1] += [(prompt[len(written) :], False), (full[len(prompt) :], True)]
        written = full
    return samples


def tools_of(row: dict) -> list | None:
    """What stands in the column `tools` of a row, a list or JSON; None where there is nothing.

    Raises:
        ValueError: for a string that is no JSON.
    """
    tools = row.get("tools") or None
    if not isinstance(tools, str):
        return without_nulls(tools)
    try:
        return json.loads(tools) or None
    except json.JSONDecodeError as error:
        raise ValueError(f"column tools must hold lists or JSON, got {tools[:80]!r}") from error


def without_nulls(value, keep: str | None = None):
    """Drop the keys that Arrow invents: it gives all structs of a column the same keys, None where there were none."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None or key == keep}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
