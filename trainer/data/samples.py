"""What a row of raw data means: its format, and the pieces of token ids that it consists of."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from .chats import as_messages, chat_samples, tools_of
from .encoding import TextEncoder

FORMATS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "text": ("text",),
}
CHATS = ("messages", "conversations")

Pieces = list[tuple[list[int], bool]]  # of one sample: token ids, and whether they are supervised


@dataclass(frozen=True)
class RowFormat:
    """The format of the rows of a data set.

    Attributes:
        kind: one of `FORMATS`.
        columns: the columns that hold what the kind needs, in the order of `FORMATS`.
    """

    kind: str
    columns: tuple[str, ...]

    @property
    def is_chat(self) -> bool:
        """Whether every row is a conversation."""
        return self.kind in CHATS


def format_of(columns: Iterable[str], prompt_field: str | None = None, answer_field: str | None = None) -> RowFormat:
    """Return the format of rows with these columns.

    Args:
        columns: names of the columns.
        prompt_field, answer_field: the columns of prompt and completion, if they have other names.

    Raises:
        ValueError: if the columns are those of no format, or a named one is missing.
    """
    columns = list(columns)
    if prompt_field is not None or answer_field is not None:
        names = prompt_field or "prompt", answer_field or "completion"
        for option, name in zip(("prompt_field", "answer_field"), names, strict=True):
            if name not in columns:
                raise ValueError(f"{option}: there is no {name} in the data, which has the columns {_listed(columns)}")
        return RowFormat("prompt-completion", names)
    for kind, needed in FORMATS.items():
        if set(needed) <= set(columns):
            return RowFormat(kind, needed)
    expected = "; ".join(" and ".join(needed) for needed in FORMATS.values())
    raise ValueError(
        f"the data set has the columns {_listed(columns)}, expected one of: {expected}; "
        "prompt_field and answer_field may name others"
    )


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(columns) or "(none)"


def samples_of(
    row: dict, place: str, encoder: TextEncoder, form: RowFormat, *, append_eos: bool, nulls_are_values: bool
) -> list[Pieces]:
    """Return the samples of one row, each as pieces of token ids.

    Args:
        row: the row.
        place: where it is, for error messages.
        encoder: encodes its texts.
        form: its format.
        append_eos: end texts and completions with the end-of-text token.
        nulls_are_values: whether a null was written by the author of the data (JSON), see `as_messages`.

    Raises:
        ValueError: if a value is missing or not what the format needs, naming the place.
    """
    values = [_value(row, column, place) for column in form.columns]
    messages, first = None, 0
    if form.is_chat:
        messages = values[0]
    elif form.kind == "prompt-completion" and isinstance(values[0], list) and isinstance(values[1], list):
        messages, first = values[0] + values[1], len(values[0])
    if messages is not None:
        turns = as_messages(messages, place, nulls_are_values)
        return _chat(turns, first, tools_of(row, place, nulls_are_values), place, encoder)
    for column, value in zip(form.columns, values, strict=True):
        if not isinstance(value, str):
            raise ValueError(f"{place}: {column} must be text, got {value!r:.60}")
    end = encoder.ended if append_eos else list
    if form.kind == "text":
        return [[(end(encoder.opening(values[0])), True)]]
    return [[(encoder.opening(values[0]), False), (end(encoder.following(values[1])), True)]]


def _value(row: dict, column: str, place: str) -> Any:
    if row.get(column) is None:
        raise ValueError(f"{place} has no value in column {column}: remove it or fill it in")
    return row[column]


def _chat(messages: list[dict], first: int, tools: list | None, place: str, encoder: TextEncoder) -> list[Pieces]:
    try:
        samples = chat_samples(messages, encoder.tokenizer, first=first, tools=tools)
    except TemplateError as error:
        raise ValueError(f"{place}: the chat template refuses this conversation: {error}") from error
    return [[(encoder.following(text), supervised) for text, supervised in sample] for sample in samples]
