"""References to held-out functions of Python's standard library, so that their text need not be stored.

A reference names the file and the function, and holds a hash of the function's normalised text. The text itself comes
from the running interpreter. Another Python version may lack some of the functions, or have changed them.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from .python_functions import Function, functions_in, library_root


@dataclass(frozen=True)
class Reference:
    """Where one function is found, and the hash that its normalised text must have.

    Attributes:
        file: path of the source file, relative to the standard library.
        name: qualified name within the file. If the file defines several functions of this name, the hash selects one.
        sha256: hash of the normalised text, in hexadecimal.
    """

    file: str
    name: str
    sha256: str

    def find(self) -> Function | None:
        """The function in the running interpreter's library, or None if it is missing or its text differs."""
        candidates = _functions_in(library_root() / self.file)
        return next((one for one in candidates if (one.name, one.sha256) == (self.name, self.sha256)), None)


@dataclass(frozen=True)
class References:
    """The references of a checkpoint's held-out functions.

    Attributes:
        python: version of the Python whose library the functions were drawn from.
        splits: the references of each split, in the order of the samples.
    """

    python: str
    splits: dict[str, tuple[Reference, ...]]

    @classmethod
    def of(cls, splits: Mapping[str, Sequence[Function]]) -> "References":
        """References to functions that were drawn from the running interpreter's library."""
        return cls(
            platform.python_version(),
            {
                split: tuple(Reference(one.file, one.name, one.sha256) for one in functions)
                for split, functions in splits.items()
            },
        )

    @classmethod
    def read(cls, file: Path) -> "References":
        """Read what `to_json` wrote."""
        stored = json.loads(file.read_text(encoding="utf-8"))
        splits = {split: tuple(Reference(**row) for row in rows) for split, rows in stored["splits"].items()}
        return cls(stored["python"], splits)

    def to_json(self) -> str:
        """The content of the references file, with one reference per line."""
        splits = [
            f"  {json.dumps(split)}: [\n" + ",\n".join(f"   {json.dumps(asdict(row))}" for row in rows) + "\n  ]"
            for split, rows in self.splits.items()
        ]
        lines = ["{", f' "python": {json.dumps(self.python)},', ' "splits": {', ",\n".join(splits), " }", "}", ""]
        return "\n".join(lines)


@cache
def _functions_in(file: Path) -> tuple[Function, ...]:
    return tuple(functions_in(file)) if file.is_file() else ()
