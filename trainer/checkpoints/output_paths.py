"""Checking that what a command will write can be written, before it works for hours."""

import tempfile
from os import PathLike
from pathlib import Path


def check_output(name: str, path: str | PathLike | None, *, folder: bool = False) -> None:
    """Check that a file or a folder can be written, by trying it in the nearest folder that exists.

    Nothing is left behind, and an existing file is not changed.

    Args:
        name: the option that names the path, for the message.
        path: the file or the folder that will be written; None is not checked.
        folder: whether it is a folder.

    Raises:
        ValueError: naming the option, the path and the reason.
    """
    if path is None:
        return
    path = Path(path)
    if path.exists() and path.is_dir() != folder:
        found, expected = ("a folder", "a file") if path.is_dir() else ("a file", "a folder")
        raise ValueError(f"{name}: {path} is {found}, expected {expected} to write")
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    try:
        if nearest.is_file() and nearest == path:
            nearest.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be written ({nearest}: {error.strerror})") from error
