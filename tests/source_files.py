"""The Python files of this repository by module name, and the imports between them, read with `ast`."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"modeling_mrp": "modeling_mrp", "mrp_trainer": "trainer", "hub_cards": "hub_cards"}  # name: folder


def source_files() -> dict[str, Path]:
    """All modules of the three packages, without the code copies in the embedded checkpoints."""
    return {
        module_name(package, file.relative_to(ROOT / folder)): file
        for package, folder in PACKAGES.items()
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not file.relative_to(ROOT).parts[1].startswith("sdar-")
    }


def module_name(package: str, file: Path) -> str:
    """Dotted name of a file in a package's folder; that of an `__init__.py` is its folder's."""
    return ".".join([package, *file.with_suffix("").parts]).removesuffix(".__init__")


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[str, str]]:
    """Every import of a file, including those inside functions, as (absolute module, imported name or "")."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")
            base = parents[: len(parents) - node.level + is_package] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((name, alias.name) for alias in node.names)


def resolved(imports: Iterable[tuple[str, str]], modules: Iterable[str]) -> set[str]:
    """The modules that imports lead to: the imported name if it is a module itself, else the module it comes from."""
    known = set(modules)
    targets = (f"{module}.{name}" if f"{module}.{name}" in known else module for module, name in imports)
    return {target for target in targets if target in known}


def import_graph() -> dict[str, set[str]]:
    """For each module of the three packages, those that it imports."""
    files = source_files()
    return {
        module: resolved(imports_of(file.read_text("utf-8"), module, file.name == "__init__.py"), files) - {module}
        for module, file in files.items()
    }
