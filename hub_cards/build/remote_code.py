"""Bring the model code inside the embedded checkpoints up to date with `modeling_mrp/`.

    python -m hub_cards.build.remote_code

A checkpoint is a Hub folder: it holds a copy of the code that loads it. A test compares the copies.
"""

from pathlib import Path

import modeling_mrp

CARDS = Path(__file__).parents[1]


def code_files() -> dict[str, str]:
    """Name and text of every file that a checkpoint carries: all of `modeling_mrp/` but its registration."""
    files = sorted(Path(modeling_mrp.__file__).parent.glob("*.py"))
    return {file.name: file.read_text(encoding="utf-8") for file in files if file.name != "__init__.py"}


def embedded_checkpoints() -> list[Path]:
    """Folders of the embedded checkpoints."""
    return sorted(config.parent for config in CARDS.glob("*/config.json"))


def main() -> None:
    for folder in embedded_checkpoints():
        for name, text in code_files().items():
            (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
