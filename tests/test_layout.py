"""The order of the packages: imports go downwards only, and there are no circles."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_files import PACKAGES, ROOT, import_graph, imports_of, resolved, source_files

# Lowest first. A module imports from its own package and from lower levels, never from another package of its level.
LEVELS = (
    ("modeling_mrp", "hub_cards"),  # hub_cards itself only marks the folder as a package
    ("hub_cards.tasks",),
    ("mrp_trainer.losses", "mrp_trainer.data"),
    ("mrp_trainer.checkpoints",),
    ("mrp_trainer.evaluation",),
    ("mrp_trainer",),
    ("mrp_trainer.benchmarks",),
    ("mrp_trainer.commands", "hub_cards.build"),
)
LEVEL_OF = {package: level for level, packages in enumerate(LEVELS) for package in packages}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph()


def package_of(module: str) -> str:
    """The innermost package of `LEVELS` that a module belongs to."""
    return max((name for name in LEVEL_OF if module == name or module.startswith(f"{name}.")), key=len)


def circle_in(graph: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def importers(graph: dict[str, set[str]], package: str) -> set[str]:
    """The modules outside a package that import from it."""
    return {
        module
        for module, targets in graph.items()
        if package_of(module) != package and any(package_of(target) == package for target in targets)
    }


def test_imports_are_resolved_at_every_depth_and_inside_functions():
    source = "import a.b\nfrom . import c\nfrom ..d import e as f\ndef g():\n    from .h import i\n"
    in_module = [("a.b", ""), ("p.q", "c"), ("p.d", "e"), ("p.q.h", "i")]
    assert list(imports_of(source, "p.q.r", is_package=False)) == in_module
    assert list(imports_of(source, "p.q", is_package=True)) == in_module
    assert resolved(in_module, ["a", "a.b", "p.q.c", "p.d", "p.q"]) == {"a.b", "p.q.c", "p.d"}


def test_circles_are_recognised():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert set(circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_every_sub_package_has_a_level(graph):
    packages = {module for module, file in source_files().items() if file.name == "__init__.py"}
    assert packages == set(LEVEL_OF) == {package_of(module) for module in graph}


def test_no_circle_among_files(graph):
    assert circle_in(graph) is None


def test_no_circle_among_packages(graph):
    packages = {name: set() for name in LEVEL_OF}
    for module, targets in graph.items():
        packages[package_of(module)] |= {package_of(target) for target in targets} - {package_of(module)}
    assert circle_in(packages) is None


def test_imports_go_downwards_only(graph):
    upward = [
        f"{module} imports {target}"
        for module, targets in graph.items()
        for target in sorted(targets)
        if package_of(target) != package_of(module) and LEVEL_OF[package_of(target)] >= LEVEL_OF[package_of(module)]
    ]
    assert upward == []


def test_nothing_imports_the_commands(graph):
    assert importers(graph, "mrp_trainer.commands") == set()


def test_modeling_mrp_imports_none_of_the_other_packages(graph):
    targets = {target for module, targets in graph.items() if module.startswith("modeling_mrp") for target in targets}
    assert targets and all(target.startswith("modeling_mrp.") for target in targets)


def test_tasks_import_neither_the_build_scripts_nor_the_trainer(graph):
    targets = {target for module in graph if package_of(module) == "hub_cards.tasks" for target in graph[module]}
    assert targets and {package_of(target) for target in targets} <= {"hub_cards.tasks", "modeling_mrp"}


def test_no_file_imports_a_top_level_trainer():
    files = [file for folder in (*PACKAGES.values(), "tests") for file in (ROOT / folder).rglob("*.py")]
    found = [
        str(file.relative_to(ROOT))
        for file in files
        if any(name.split(".")[0] == "trainer" for name, _ in imports_of(file.read_text("utf-8"), "", False))
    ]
    assert len(files) > 100 and found == []


def private_names(file: Path, module: str) -> list[str]:
    """Private names of other files of this repository that a file imports or reads off an imported module."""
    source, modules = file.read_text("utf-8"), source_files()
    imported = list(imports_of(source, module, file.name == "__init__.py"))
    own = {name: origin for origin, name in imported if resolved([(origin, name)], modules)}
    from_imports = [name for name, origin in own.items() if is_private(name)]
    aliases = {name for name, origin in own.items() if f"{origin}.{name}" in modules}
    attributes = [
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in aliases and is_private(node.attr)
    ]
    return from_imports + attributes


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_file_uses_private_names_of_another():
    files = source_files() | {f"tests.{file.stem}": file for file in (ROOT / "tests").glob("*.py")}
    found = {module: names for module, file in files.items() if (names := private_names(file, module))}
    assert found == {}
