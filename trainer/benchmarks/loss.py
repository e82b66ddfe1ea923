"""`mrp bench loss`: the residual loss against plain PyTorch, torch.compile and Liger, in time and peak memory."""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType

from ..losses.linear_kl import auto_chunk_rows, linear_kl, linear_kl_and_choice

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def bench_loss(
    rows: int = 512,
    vocab_size: int = 151936,
    hidden_size: int = 256,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    repeats: int = 5,
    chunk_rows: int | str = "auto",
) -> list[dict]:
    """Measure time and peak memory of one forward and backward of each implementation, on the same random input.

    Runs are interleaved, so that a change in the machine's load affects all of them.

    Args:
        rows: number of rows N.
        vocab_size: size of the vocabulary V.
        hidden_size: hidden size H.
        dtype: dtype of the hidden states and the weight.
        device: device to run on.
        repeats: number of timed runs of each, after one that is not timed.
        chunk_rows: as in `linear_kl`; also the chunk size of the bare matrix products.

    Returns:
        One dict for each of "naive", "compile", "liger", "ours", "ours+choice" (the loss together with what
        `choice_weight` needs), "gemms" (the three matrix products alone, chunked as ours) and "gemms whole" (all rows
        in one chunk): `name`; `seconds`, the median; `peak_bytes`, beyond the inputs; `time_ratio` and `memory_ratio`
        to naive; `gemm_ratio`, the time relative to the chunked products. Where one cannot run, these are None and
        `note` says why.

    Raises:
        ValueError: for a number below 1.
    """
    sizes = {"rows": rows, "vocab_size": vocab_size, "hidden_size": hidden_size, "repeats": repeats}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    inputs = _random_inputs(rows, vocab_size, hidden_size, dtype, device)
    if chunk_rows == "auto":
        chunk_rows = auto_chunk_rows(rows, inputs[2])
    steps = {
        "naive": partial(_forward_backward, naive_linear_kl, *inputs),
        "compile": partial(_forward_backward, torch.compile(naive_linear_kl), *inputs),
        "liger": partial(_forward_backward, _liger_mean_kl, *inputs),
        "ours": partial(_forward_backward, partial(linear_kl, chunk_rows=chunk_rows), *inputs),
        "ours+choice": partial(_forward_backward, partial(_kl_and_log_prob, chunk_rows=chunk_rows), *inputs),
        "gemms": partial(_three_products, *inputs, chunk_rows),
        "gemms whole": partial(_three_products, *inputs, rows),
    }
    results = {name: _warm_up(name, step) for name, step in steps.items()}
    seconds = {name: [] for name, result in results.items() if result["note"] is None}
    for _ in range(repeats):
        for name, runs in seconds.items():
            runs.append(_timed(steps[name]))
    for name, runs in seconds.items():
        results[name]["seconds"] = statistics.median(runs)
    for result in results.values():
        result["time_ratio"] = _ratio(result["seconds"], results["naive"]["seconds"])
        result["memory_ratio"] = _ratio(result["peak_bytes"], results["naive"]["peak_bytes"])
        result["gemm_ratio"] = _ratio(result["seconds"], results["gemms"]["seconds"])
    return list(results.values())


def naive_linear_kl(h_student: Tensor, h_teacher: Tensor, weight: Tensor) -> Tensor:
    """The same loss, computed from two full sets of logits.

    Args:
        h_student: hidden states of the student, [N, H].
        h_teacher: hidden states of the teacher, [N, H].
        weight: weight of the output layer, [V, H].

    Returns:
        The loss of each row, [N].
    """
    teacher = F.log_softmax((h_teacher @ weight.t()).float(), dim=-1)
    student = F.log_softmax((h_student @ weight.t()).float(), dim=-1)
    return F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)


def peak_memory(step: Callable[[], object]) -> int:
    """Peak bytes of tensor memory during `step`, beyond what was allocated before it.

    On a CPU this sums the allocation events of the profiler, since tracemalloc does not see tensors.

    Args:
        step: the function to measure.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler writes its progress to stderr otherwise
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    if torch.cuda.is_available():
        peak = max(peak, torch.cuda.max_memory_allocated() - before)
    return peak


def _liger_mean_kl(h_student: Tensor, h_teacher: Tensor, weight: Tensor) -> Tensor:
    """Liger's closest operation: one scalar, the mean of the rows (its generalized JSD at beta = 0)."""
    if not weight.is_cuda:
        raise RuntimeError("its kernels need a CUDA device")
    from liger_kernel.transformers import LigerFusedLinearJSD

    return LigerFusedLinearJSD(jsd_beta=0.0)(h_student, weight, h_teacher, weight, None)


def _kl_and_log_prob(h_student: Tensor, h_teacher: Tensor, weight: Tensor, chunk_rows: int) -> Tensor:
    """The loss, and the log-probability of the teacher's choice with a gradient of its own."""
    kl, choice = linear_kl_and_choice(h_student, h_teacher, weight, mask_token_id=0, chunk_rows=chunk_rows)
    return kl + choice.log_prob


def _three_products(h_student: Tensor, h_teacher: Tensor, weight: Tensor, chunk_rows: int) -> None:
    """Only the three matrix products that no implementation can avoid."""
    size, hidden_size = min(chunk_rows, len(h_student)), weight.shape[1]
    stacked = torch.cat([h_teacher[:size], h_student.detach()[:size]])
    logits = weight.new_empty(2 * size, weight.shape[0])
    gradient = weight.new_empty(size, hidden_size)
    for start in range(0, len(h_student), size):
        n = min(size, len(h_student) - start)
        torch.mm(stacked[: 2 * n], weight.t(), out=logits[: 2 * n])
        torch.mm(logits[:n], weight, out=gradient[:n])


def _random_inputs(rows, vocab_size, hidden_size, dtype, device) -> tuple[Tensor, Tensor, Tensor]:
    """Random h_student [N, H], h_teacher [N, H] and weight [V, H], with a KL of a few hundredths."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab_size, hidden_size, generator=generator) * 3 / hidden_size**0.5
    h_teacher = torch.randn(rows, hidden_size, generator=generator)
    h_student = h_teacher + 0.1 * torch.randn(rows, hidden_size, generator=generator)
    h_student, h_teacher, weight = (tensor.to(device, dtype) for tensor in (h_student, h_teacher, weight))
    return h_student.requires_grad_(), h_teacher, weight


def _forward_backward(loss: Loss, h_student: Tensor, h_teacher: Tensor, weight: Tensor) -> Tensor:
    return torch.autograd.grad(loss(h_student, h_teacher, weight).sum(), h_student)[0]


def _warm_up(name: str, step: Callable[[], object]) -> dict:
    """Run the step once for compilers and caches, and once to measure its memory."""
    result = {"name": name, "seconds": None, "peak_bytes": None, "note": None}
    try:
        step()
        result["peak_bytes"] = peak_memory(step)
    except Exception as error:  # from a compiler, a full device or another version of a package
        result["note"] = str(error).strip().split("\n")[0] or type(error).__name__
    return result


def _timed(step: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base is not None else None
