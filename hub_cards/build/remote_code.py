"""Update the copies of the model code in the embedded checkpoints.

    python -m hub_cards.build.remote_code

An embedded checkpoint is a complete Hub folder, which includes a copy of the code that loads it. A test fails if a
copy differs from `modeling_mrp/`.
"""

from pathlib import Path

import modeling_mrp

CARDS = Path(__file__).parents[1]


def code_files() -> dict[str, str]:
    """Text of every code file of a checkpoint, by name: all of `modeling_mrp/` except its `__init__.py`."""
    files = sorted(Path(modeling_mrp.__file__).parent.glob("*.py"))
    return {file.name: file.read_text(encoding="utf-8") for file in files if file.name != "__init__.py"}


def embedded_checkpoints() -> list[Path]:
    """Folders of the embedded checkpoints, sorted by name."""
    return sorted(config.parent for config in CARDS.glob("*/config.json"))


def main() -> None:
    """Write the copies."""
    for folder in embedded_checkpoints():
        for name, text in code_files().items():
            (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
