"""Measure again: run the commands that a result file names, and put the new figures in its place.

    python -m hub_cards.build.renew demo-words demo-code     # some files of hub_cards/results
    python -m hub_cards.build.renew                          # all of them: hours
    python -m hub_cards.build.results                        # then write the documents

Only figures of an idle machine are worth keeping. The commands run in build/figures, where they leave the heads that
they train and the data that they write; a file is replaced when its last command has succeeded.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mrp_trainer.evaluation.results import read_result, save_result

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "hub_cards" / "results"


def renew(path: Path, folder: Path) -> None:
    """Replace a result file by a new measurement with the same commands.

    Args:
        path: the result file.
        folder: folder to run the commands in; made if it is missing.

    Raises:
        subprocess.CalledProcessError: if a command fails; the file is then unchanged.
        ValueError: if `path` is not a result file.
    """
    commands = read_result(path).command
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch) / path.name
        for line in (*commands[:-1], f"{commands[-1]} --record {written}"):
            print(f"$ {line}", flush=True)
            subprocess.run(line, shell=True, check=True, cwd=folder)
        # as it was typed: with variables of the environment, and with the commands that prepare for it
        save_result(path, replace(read_result(written), command=commands))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    known = sorted(path.stem for path in RESULTS.glob("*.json"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"result files (default: all): {', '.join(known)}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"unknown result {unknown[0]!r}; expected one of {', '.join(known)}")
    for name in options.names or known:
        renew(RESULTS / f"{name}.json", ROOT / "build" / "figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
