"""The files of a tokenizer, and copying them from one checkpoint to another."""

import json
import shutil
from pathlib import Path

from modeling_mrp.checkpoint_files import read_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def check_tokenizer_files(folder: str | Path) -> None:
    """Check that the JSON files of a tokenizer can be read.

    Raises:
        ValueError: naming the one that is damaged.
    """
    for name in TOKENIZER_FILES:
        if name.endswith(".json") and (Path(folder) / name).is_file():
            read_json(Path(folder) / name)


def copy_tokenizer(source: str | Path, destination: str | Path) -> None:
    """Copy the tokenizer's files unchanged, except for references to tokenizer code, which is not copied.

    Raises:
        ValueError: naming a JSON file that is damaged.
    """
    check_tokenizer_files(source)
    for name in TOKENIZER_FILES:
        if (Path(source) / name).exists():
            shutil.copyfile(Path(source) / name, Path(destination) / name)
    path = Path(source) / "tokenizer_config.json"
    if path.exists():
        values = read_json(path)
        if values.pop("auto_map", None) is not None:
            text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
            (Path(destination) / path.name).write_text(text, encoding="utf-8")
