"""The task of the embedded code checkpoint: write the body of a standard library function, given its `def` line.

Every function is parsed with `ast` and written back by `ast.unparse`, without decorators, docstrings and comments, so
that a small model sees a single style. The text is read from the running interpreter's standard library; nothing of
it is stored here. Whether a file is held out depends on its path alone.
"""

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath

SPLITS = ("train", "validation", "test")
HELD_OUT = {"validation": range(0, 4), "test": range(4, 8)}  # which hundredths of the files each split gets
LONGEST = 300  # characters of a function


@dataclass(frozen=True)
class Function:
    """A function of the standard library in normalised text, split into a prompt and its answer.

    Two functions are equal when their texts are, wherever they were found.

    Attributes:
        prompt: the `def` line, without its line break.
        answer: the rest of the function, starting with that line break.
        file: path of the source file, relative to the standard library.
        name: qualified name within the file, such as `JSONDecoder.decode`.
    """

    prompt: str
    answer: str
    file: str = field(default="", compare=False)
    name: str = field(default="", compare=False)

    @property
    def sha256(self) -> str:
        """Hash of the normalised text, in hexadecimal."""
        return hashlib.sha256((self.prompt + self.answer).encode()).hexdigest()


def library_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def split_of(file: PurePath) -> str:
    """Split that a file belongs to, computed from a hash of its path relative to the standard library."""
    share = int(hashlib.sha256(file.as_posix().encode()).hexdigest(), 16) % 100
    return next((name for name, shares in HELD_OUT.items() if share in shares), "train")


def library_files(split: str) -> Iterator[Path]:
    """Yield the standard library's Python files that belong to a split, in the order of their paths.

    Raises:
        ValueError: if there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    root = library_root()
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        relative = file.relative_to(root)
        if "site-packages" not in relative.parts and split_of(relative) == split:
            yield file


def functions_in(file: Path) -> list[Function]:
    """The functions of one file of the standard library, as `functions_of` finds them."""
    source = file.read_text(encoding="utf-8", errors="replace")
    return functions_of(source, file.relative_to(library_root()).as_posix())


def functions_of(source: str, file: str = "") -> list[Function]:
    """All functions and methods of a module that are not nested in another function.

    Functions that are longer than `LONGEST`, not ASCII, or empty without their docstring are left out.

    Args:
        source: text of the module. If it does not parse, the result is empty.
        file: path to record in the functions.
    """
    try:
        module = _parse_quietly(source)
    except (SyntaxError, ValueError):  # the library's own tests include such files
        return []
    return list(_functions_in_body(module.body, file, prefix=""))


def _functions_in_body(body: list[ast.stmt], file: str, prefix: str) -> Iterator[Function]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            function = _normalised(node, file, prefix + node.name)
            if function is not None:
                yield function
        elif isinstance(node, ast.ClassDef):
            yield from _functions_in_body(node.body, file, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions_in_body(node.body, file, prefix)


def _normalised(node: ast.FunctionDef, file: str, name: str) -> Function | None:
    node.decorator_list = []
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:]
    if not node.body:
        return None
    text = ast.unparse(node)
    if len(text) > LONGEST or not text.isascii():
        return None
    head, _, body = text.partition("\n")
    return Function(head, "\n" + body, file, name)


@cache
def functions(split: str) -> tuple[Function, ...]:
    """The distinct functions of a split; a held-out function that also occurs in a training file is left out."""
    seen = set() if split == "train" else set(functions("train"))
    found = []
    for file in library_files(split):
        for function in functions_in(file):
            if function not in seen:
                seen.add(function)
                found.append(function)
    return tuple(found)


def parses(prompt: str, answer: str) -> bool:
    """Whether prompt and answer together are exactly one complete function."""
    try:
        module = _parse_quietly(prompt + answer)
    except (SyntaxError, ValueError):
        return False
    return len(module.body) == 1 and isinstance(module.body[0], ast.FunctionDef)


def _parse_quietly(text: str) -> ast.Module:
    """`ast.parse` without warnings, which the library's tests and the text that a model writes often cause."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)
