"""Every parameter and return value of a public function has a type hint."""

import ast
from collections.abc import Iterator

from source_files import ROOT, source_files


def missing_hints(source: str) -> Iterator[str]:
    """The gaps in a file's public functions and methods, as `function: parameter`, in order."""
    yield from _missing_in(ast.parse(source).body, prefix="")


def _missing_in(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _missing_in(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__init__"):
            yield from (f"{prefix}{node.name}: {gap}" for gap in _gaps(node, is_method=bool(prefix)))


def _gaps(function: ast.FunctionDef, is_method: bool) -> Iterator[str]:
    arguments = function.args
    is_static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)
    named = [*arguments.posonlyargs, *arguments.args][1 if is_method and not is_static else 0 :]
    collecting = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    yield from (one.arg for one in [*named, *arguments.kwonlyargs, *collecting] if one.annotation is None)
    if function.returns is None and function.name != "__init__":
        yield "return"


def test_gaps_are_found():
    source = """
def f(a, b: int, *c, d=1, **e: int) -> None: ...
def _private(a): ...
class Thing:
    def __init__(self, a): ...
    def method(self, a: int): ...
    @staticmethod
    def static(a) -> int: ...
class _Hidden:
    def method(self, a): ...
"""
    expected = ["f: a", "f: d", "f: c", "Thing.__init__: a", "Thing.method: return", "Thing.static: a"]
    assert list(missing_hints(source)) == expected


def test_public_functions_have_type_hints():
    gaps = [
        f"{file.relative_to(ROOT)}: {gap}"
        for file in source_files().values()
        for gap in missing_hints(file.read_text("utf-8"))
    ]
    assert gaps == []
