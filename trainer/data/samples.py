"""What a row of raw data means: its format, and the pieces of token ids that it consists of."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from .chats import chat_samples, conversation, tools_of
from .encoding import TextEncoder
from .reading import Row

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


def samples_of(row: Row, encoder: TextEncoder, form: RowFormat, append_eos: bool = True) -> list[Pieces]:
    """Return the samples of one row, each as pieces of token ids.

    Args:
        row: the row.
        encoder: encodes its texts.
        form: its format.
        append_eos: end texts and completions with the end-of-text token.

    Raises:
        ValueError: if a value is missing or not what the format needs, naming the place.
    """
    values = [_value(row, column) for column in form.columns]
    if form.is_chat:
        return _chat(values[0], 0, row, encoder)
    if form.kind == "prompt-completion" and all(isinstance(value, list) for value in values):
        return _chat(values[0] + values[1], len(values[0]), row, encoder)
    for column, value in zip(form.columns, values, strict=True):
        if not isinstance(value, str):
            raise ValueError(f"{row.place}: {column} must be text, got {value!r:.60}")
    end = encoder.ended if append_eos else list
    if form.kind == "text":
        return [[(end(encoder.opening(values[0])), True)]]
    return [[(encoder.opening(values[0]), False), (end(encoder.following(values[1])), True)]]


def _value(row: Row, column: str) -> Any:
    if row.content.get(column) is None:
        raise ValueError(f"{row.place} has no value in column {column}: remove it or fill it in")
    return row.content[column]


def _chat(turns: list, first: int, row: Row, encoder: TextEncoder) -> list[Pieces]:
    """The samples of a conversation whose answers are supervised from turn `first` on."""
    messages = conversation(turns, row)
    first += len(messages) - len(turns)
    tools = tools_of(row.content, row.place, row.from_json)
    try:
        samples = chat_samples(messages, encoder.tokenizer, first=first, tools=tools)
    except TemplateError as error:
        raise ValueError(f"{row.place}: the chat template refuses this conversation: {error}") from error
    return [[(encoder.following(text), supervised) for text, supervised in sample] for sample in samples]
