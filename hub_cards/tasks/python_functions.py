"""The embedded code task: functions of Python's standard library, their bodies to be written from the line of `def`.

Every function is read with `ast` and written again by `ast.unparse`, without decorators, docstrings and comments, so
that a small model meets one style. Which files are held out depends on their names alone.
"""

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SPLITS = ("train", "validation", "test")
HELD_OUT = {"validation": range(0, 4), "test": range(4, 8)}  # of 100 shares of the files
LONGEST = 300  # characters of a function


@dataclass(frozen=True)
class Function:
    """One function: `prompt` is its line of `def` without the line's end, `answer` the rest, from that line end on."""

    prompt: str
    answer: str


def split_of(file: Path) -> str:
    """Split of a file, by a hash of its path in the library."""
    share = int(hashlib.sha256(file.as_posix().encode()).hexdigest(), 16) % 100
    return next((name for name, shares in HELD_OUT.items() if share in shares), "train")


def library_files(split: str) -> Iterator[Path]:
    """Python files of the running interpreter's standard library that belong to a split, in order of their paths."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        relative = file.relative_to(root)
        if "site-packages" not in relative.parts and split_of(relative) == split:
            yield file


def functions_of(source: str) -> list[Function]:
    """All functions and methods of a module that are not inside another function; none of what does not parse."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):  # the library tests itself on such files
        return []
    found: list[Function] = []
    _collect(module.body, found)
    return found


def _collect(body: list[ast.stmt], found: list[Function]) -> None:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            function = _function(node)
            if function is not None:
                found.append(function)
        elif isinstance(node, ast.ClassDef | ast.If | ast.Try):
            _collect(node.body, found)


def _function(node: ast.FunctionDef) -> Function | None:
    node.decorator_list = []
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:]
    if not node.body:
        return None
    text = ast.unparse(node)
    head, _, body = text.partition("\n")
    if len(text) > LONGEST or not text.isascii():
        return None
    return Function(head, "\n" + body)


@cache
def functions(split: str) -> tuple[Function, ...]:
    """All different functions of a split. A held-out one whose text stands in a training file too is left out."""
    seen = set() if split == "train" else set(functions("train"))
    found = []
    for file in library_files(split):
        for function in functions_of(file.read_text(encoding="utf-8", errors="replace")):
            if function not in seen:
                seen.add(function)
                found.append(function)
    return tuple(found)


def parses(prompt: str, answer: str) -> bool:
    """Whether prompt and answer are one whole function, and nothing else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model's text is full of what Python warns about
            module = ast.parse(prompt + answer)
    except (SyntaxError, ValueError):
        return False
    return len(module.body) == 1 and isinstance(module.body[0], ast.FunctionDef)
