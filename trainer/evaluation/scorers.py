"""The scorers of `mrp eval`: functions of (completion, row of the data file) that return a bool or a share in 0..1.

exact            the completion equals the row's `answer`, or one of a list of them, up to white space
numeric          the last number of the completion equals that of the row's `answer`
python           the row's tests pass, run in a process of their own, as human-eval does
module:function  a function of the user
"""

import ast
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path

Scorer = Callable[[str, dict], float]
NAMES = ("exact", "numeric", "python")
TIME_LIMIT = 3.0  # seconds, human-eval's
MEMORY_LIMIT = 4 * 2**30  # bytes of address space

# a minus after a word, a digit or a bracket is an operation, not a sign
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
# where a base model that was asked for the body of a function starts something else
NEXT_TOP_LEVEL = re.compile(r"\n(?=class |def |@|#|if |print\()")

PASSED = 93  # the exit status of a program that ran to its end; sys.exit(0) before the tests does not pass
RUNNER = f"""
import os, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_LIMIT}, {MEMORY_LIMIT}))
except (ImportError, ValueError, OSError):
    pass
source = open(sys.argv[1], encoding="utf-8").read()
exec(compile(source, "program.py", "exec"), {{"__name__": "__main__"}})
os._exit({PASSED})
"""


def load_scorer(name: str, time_limit: float = TIME_LIMIT) -> Scorer:
    """Return the scorer of that name.

    Args:
        name: one of `NAMES`, or "module:function"; modules of the current folder are found too.
        time_limit: seconds that a program may run (`python`).

    Raises:
        ValueError: if there is no such scorer.
    """
    built_in = {"exact": is_exact, "numeric": same_number, "python": partial(passes_tests, time_limit=time_limit)}
    if name in built_in:
        return built_in[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"scorer must be one of {', '.join(NAMES)} or module:function, got {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"scorer {name!r}: cannot import {module!r} ({error})") from error
    finally:
        sys.path.remove(os.getcwd())
    scorer = getattr(found, function, None)
    if not callable(scorer):
        raise ValueError(f"scorer {name!r}: {module!r} has no function {function!r}")
    return scorer


def check_rows(name: str, rows: list[dict]) -> None:
    """Raise a ValueError that names the first row without the fields that the scorer `name` reads."""
    wanted = {"exact": ("answer",), "numeric": ("answer",), "python": ("test", "test_list")}.get(name, ())
    for number, row in enumerate(rows, start=1):
        if wanted and not any(key in row for key in wanted):
            raise ValueError(f"row {number} of the data has no {' or '.join(wanted)}, which scorer {name!r} reads")
        tests = [row.get("test"), *(row.get("test_list") or [])] if name == "python" else []
        if not all(test is None or isinstance(test, str) for test in tests):
            raise ValueError(f"row {number} of the data: test and the parts of test_list must be text")
        if name == "numeric" and _number_of(row["answer"]) is None:
            raise ValueError(f"row {number} of the data: answer {row['answer']!r} holds no number")


def is_exact(text: str, row: dict) -> bool:
    """Return whether the completion is the row's `answer` (or one of them); any white space counts as one blank."""
    answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    return " ".join(text.split()) in [" ".join(str(answer).split()) for answer in answers]


def same_number(text: str, row: dict) -> bool:
    """Return whether the last number of the completion equals the last number of the row's `answer`.

    A number in the last \\boxed{...}, or after the last ####, takes precedence. 1,234.0 equals 1234.
    """
    number = _number_of(text)
    return number is not None and number == _number_of(row["answer"])


def _number_of(text) -> Fraction | None:
    text = str(text)
    for marked in (re.findall(r"\\boxed{([^{}]*)}", text)[-1:], text.rsplit("####", 1)[1:]):
        if marked and NUMBER.search(marked[0]):
            text = marked[0]
            break
    numbers = NUMBER.findall(text)
    return Fraction(numbers[-1].replace(",", "")) if numbers else None


def passes_tests(text: str, row: dict, time_limit: float = TIME_LIMIT) -> bool:
    """Return whether the program of a completion and the row's tests runs to its end within the time limit.

    The program runs in a process group of its own, in an empty folder, with bounded memory. That guards against
    accidents; it is not a sandbox against a hostile program.

    Args:
        text: the completion.
        row: holds `test` (source text, human-eval) or `test_list` (statements, MBPP); with an `entry_point` the
            program ends with `check(entry_point)` if the test defines `check`.
        time_limit: seconds that the program may run.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program_of(text, row), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", RUNNER, str(path)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(time_limit) == PASSED
        except subprocess.TimeoutExpired:
            return False
        finally:  # with the processes that it started
            _kill_group(process)


def _kill_group(process: subprocess.Popen):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # all gone, or only zombies left (macOS)
        process.kill()
    process.wait()


def program_of(text: str, row: dict) -> str:
    """Return the source of the program that tests a completion.

    If the completion has a fenced code block, the first one counts. A prompt that is code is put before its
    continuation; one that is complete by itself (imports and a docstring) is also put before a completion that writes
    the whole function again.
    """
    fenced = FENCED.search(text)
    code = fenced[1] if fenced else text
    entry, prompt = row.get("entry_point"), row.get("prompt")
    prompt = prompt if isinstance(prompt, str) else ""
    if entry and not re.search(rf"^(?:async )?def {re.escape(entry)}\b", code, re.MULTILINE):
        code = prompt + NEXT_TOP_LEVEL.split(code)[0]
    elif entry and _parses(prompt):
        code = f"{prompt}\n{code}"
    tests = row["test"] if "test" in row else "\n".join(row["test_list"])
    call = f"check({entry})" if entry and re.search(r"^def check\b", tests, re.MULTILINE) else ""
    return "\n".join([code, tests, call])


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
