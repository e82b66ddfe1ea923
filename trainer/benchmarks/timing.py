"""Shared by the benchmarks: interleaved timing, a clock for the stages of a run, and a description of the machine."""

import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from unittest.mock import patch

import torch
import transformers

from ..data.wording import counted

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Seconds that one call of `step` takes, including the work that it has queued on a GPU.

    Args:
        step: the function to time.
        device: device that it works on.
    """
    synchronise(device)
    start = time.perf_counter()
    step()
    synchronise(device)
    return time.perf_counter() - start


def interleaved(
    steps: dict[str, Callable[[], object]], repeats: int, device: torch.device, warm_up: bool = True
) -> dict[str, list[float]]:
    """Time several steps in rounds, so that a change in the machine's load affects all of them.

    Args:
        steps: functions to time, by name.
        repeats: number of timed rounds.
        device: device that the steps work on.
        warm_up: whether to call each step once before, untimed.

    Returns:
        The seconds of every repetition, by name.

    Raises:
        ValueError: when `repeats` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    if warm_up:
        for step in steps.values():
            step()
    seconds = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            seconds[name].append(timed(step, device))
    return seconds


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over the rounds of above / below, both from the same round, so that a slow round affects both.

    Args:
        above: seconds of each round.
        below: seconds of each round, in the same order.
    """
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished the work that is queued; do nothing on other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StageClock:
    """Context manager that adds up the time spent inside given methods, and counts their calls.

    Args:
        methods: (owner, name of its method, stage); an owner is a module, or a class for all its instances. None of
            the methods may call another one of them, or its time would be counted twice.
        device: device that they work on. A GPU is synchronised before and after each call, which slows the run down.

    Attributes:
        seconds: time by stage.
        calls: number of calls by stage.
    """

    def __init__(self, methods: Sequence[tuple[object, str, str]], device: torch.device):
        self.methods = methods
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def __enter__(self):
        with ExitStack() as patches:
            for owner, name, stage in self.methods:
                patches.enter_context(patch.object(owner, name, self._clocked(owner, name, stage)))
            self._patches = patches.pop_all()
        return self

    def __exit__(self, *exception):
        self._patches.close()

    def _clocked(self, owner, name, stage):
        method = getattr(owner, name)

        def clocked(*args, **kwargs):
            synchronise(self.device)
            start = time.perf_counter()
            result = method(*args, **kwargs)
            synchronise(self.device)
            self.seconds[stage] += time.perf_counter() - start
            self.calls[stage] += 1
            return result

        return clocked


def machine(device: torch.device) -> str:
    """Describe the machine: device, threads, versions."""
    if device.type == "cuda":
        what = torch.cuda.get_device_name(device)
    else:
        what = f"{platform.processor() or platform.machine()} CPU, {counted(torch.get_num_threads(), 'thread')}"
    return f"{what}, torch {torch.__version__}, transformers {transformers.__version__}"


def check_at_least_one(**values: int | Sequence[int]) -> None:
    """Check that numbers are at least 1.

    Raises:
        ValueError: naming the first value that is an empty sequence, is below 1 or holds a number below 1.
    """
    for name, value in values.items():
        numbers = [value] if isinstance(value, int) else list(value)
        if not numbers or min(numbers) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
