"""Writing files so that a kill or a power cut leaves the old content or the new one; checksums that reveal damage."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

MANIFEST = "mrp_manifest.json"  # sha256 of every other file of a folder
STAGING = ".saving"


class WriteError(OSError):
    """A folder could not be written; what it held before is still there."""


@contextmanager
def writing(folder: str | Path) -> Iterator[None]:
    """Turn any error of writing in the block into a `WriteError` that names the folder.

    On a full disk, Python, torch and safetensors raise errors of three kinds, most of which do not name the file.
    """
    try:
        yield
    except WriteError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        hint = "" if isinstance(error, OSError) else " (is the disk full?)"  # torch's own message does not say
        raise WriteError(f"{folder} could not be written{hint}: {error}") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, through a temporary file in the same folder.

    Args:
        path: file to write or to replace. The target of a link is replaced, not the link; a device or a pipe is
            written to directly.
        text: its content.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        _flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _flush(path.parent)


@contextmanager
def staged(folder: str | Path) -> Iterator[Path]:
    """Yield an empty folder whose files move into `folder` when the block ends, whole and flushed to the disk.

    They move in the order of their names. If the block raises an error, `folder` stays as it was.

    Args:
        folder: where the files belong, created if missing.
    """
    folder = Path(folder)
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)  # left by a process that was killed
    try:
        with writing(folder):
            staging.mkdir(parents=True)
            yield staging
            _move(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move(staging: Path, folder: Path):
    """Flush the files of one folder to the disk, then move them to the other."""
    names = sorted(path.relative_to(staging) for path in staging.rglob("*") if path.is_file())
    for name in names:
        _flush(staging / name)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / name, folder / name)
    for changed in {(folder / name).parent for name in names}:
        _flush(changed)


def seal(folder: str | Path) -> None:
    """Flush a folder's files to the disk, then write their checksums into `mrp_manifest.json`.

    A folder without this file was not written to the end.
    """
    folder = Path(folder)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    for name in names:
        _flush(folder / name)
    files = {name: checksum(folder / name) for name in names if name != MANIFEST}
    _flush(folder)
    write_text(folder / MANIFEST, json.dumps({"sha256": files}, indent=2) + "\n")
    _flush(folder.parent)


def unseal(folder: str | Path) -> None:
    """Remove a folder and what it holds, the manifest first: what a kill leaves of it counts as unfinished."""
    folder = Path(folder)
    if folder.exists():
        (folder / MANIFEST).unlink(missing_ok=True)
        _flush(folder)
        shutil.rmtree(folder)


def damaged_files(folder: str | Path) -> list[str]:
    """Return the files of a sealed folder that are missing or differ from their checksums, by name.

    If the manifest itself is missing or cannot be read, it alone is returned.
    """
    folder = Path(folder)
    try:
        expected = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return [MANIFEST]
    return wrong_files(folder, expected)


def wrong_files(folder: str | Path, expected: dict[str, str]) -> list[str]:
    """Return the names of the files that are missing from a folder or have another checksum.

    Args:
        folder: the folder.
        expected: checksum of each file by its name.
    """
    found = ((name, Path(folder) / name, value) for name, value in expected.items())
    return [name for name, path, value in found if not path.is_file() or checksum(path) != value]


def checksum(path: str | Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _flush(path: Path):
    """Flush a file, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
