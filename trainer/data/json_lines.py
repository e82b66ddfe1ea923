"""UTF-8 text and JSON, read strictly: what cannot be read right is refused with its file, line and column."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

UTF8_MARK = b"\xef\xbb\xbf"
OTHER_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
# The escapes of a JSON string: a surrogate pair, half a pair (group 1), or any other.
ESCAPE = re.compile(r"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(u[dD][89a-fA-F]\w\w)|.)")


def text_lines(stream: Iterable[bytes], name: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file that are not blank, with their numbers, without what ends them.

    Only line feeds end a line: U+2028, U+2029 and U+0085 may be part of a JSON string. A byte-order mark is skipped.

    Args:
        stream: the lines of the file, as bytes.
        name: its name, for error messages.

    Raises:
        ValueError: if the file has another encoding, naming line and column.
    """
    for number, line in enumerate(stream, start=1):
        if number == 1:
            other = next((encoding for mark, encoding in OTHER_MARKS.items() if line.startswith(mark)), None)
            if other is not None:
                raise ValueError(f"{name} is {other}: {_convert(other)}")
            line = line.removeprefix(UTF8_MARK)
        if b"\0" in line:  # a character of two or four bytes, in a file without a byte-order mark
            column = line.index(b"\0") + 1
            raise ValueError(f"{name}, line {number}, column {column}: a NUL byte; {_convert('UTF-16')}")
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            column = len(line[: error.start].decode("utf-8")) + 1
            found = f"byte 0x{line[error.start]:02x} is not UTF-8"
            raise ValueError(f"{name}, line {number}, column {column}: {found}; {_convert('LATIN1')}") from error
        if text.strip():
            yield number, text.rstrip("\r\n")


def _convert(encoding: str) -> str:
    return f"data must be UTF-8, so convert the file (iconv -f {encoding} -t UTF-8)"


def json_rows(stream: Iterable[bytes], name: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the JSON text of each row of a file with one object per line, or an array of objects.

    An array is read as a whole, lines one at a time.

    Args:
        stream: the lines of the file, as bytes.
        name: its name, for error messages.

    Raises:
        ValueError: if a row is not a JSON object, or there is none, naming line and column.
    """
    lines = text_lines(stream, name)
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{name} holds no rows")
    if first[1].lstrip().startswith("["):
        yield from _rows_of_array(first, lines, name)
        return
    for number, text in chain([first], lines):
        place = f"{name}, line {number}"
        _check_object(parse_json(text, name, number), place)
        yield place, text


def _rows_of_array(first: tuple[int, str], lines: Iterator[tuple[int, str]], name: str) -> Iterator[tuple[str, str]]:
    """Yield the rows of a file that holds one array."""
    written, last = [], 0
    for number, text in chain([first], lines):
        written += [""] * (number - last - 1) + [text]  # blank lines count
        last = number
    array = parse_json("\n".join(written), name, 1)
    if not array:
        raise ValueError(f"{name} holds no rows")
    for number, row in enumerate(array, start=1):
        _check_object(row, f"{name}, row {number}")
        yield f"{name}, row {number}", json.dumps(row)


def _check_object(row: Any, place: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f'{place}: expected an object such as {{"prompt": ...}}, got {json.dumps(row)[:40]}')


def parse_json(text: str, name: str, line: int) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the text.
        name: the file that it is from, for error messages.
        line: number of its first line in that file.

    Raises:
        ValueError: if it is not valid JSON, or holds half of a surrogate pair, naming line and column.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        place = f"{name}, line {line + error.lineno - 1}, column {error.colno}"
        raise ValueError(f"{place}: not valid JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:  # NaN, a number of thousands of digits, thousands of brackets
        raise ValueError(f"{name}, line {line}: not valid JSON ({error})") from error
    half = next((escape for escape in ESCAPE.finditer(text) if escape[1]), None)
    if half is not None:
        at = half.start()
        place = f"{name}, line {line + text.count(chr(10), 0, at)}, column {at - text.rfind(chr(10), 0, at)}"
        raise ValueError(f"{place}: \\{half[1]} is half of a surrogate pair, which no text can hold")
    return value


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")
