"""`mrp bench loss`: the fused loss against PyTorch's ways to compute it."""

import json
from typing import Annotated, Literal

import typer

from .options import AsJson, Device, Record, Repeats, check_at_least
from .recording import Measurement


def loss(
    rows: Annotated[int, typer.Option(metavar="N", help="Number of supervised positions N.")] = 512,
    vocab_size: Annotated[int, typer.Option(metavar="V", help="Size of the vocabulary V.")] = 151936,
    hidden_size: Annotated[int, typer.Option(metavar="H", help="Hidden size H.")] = 256,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="Dtype of the hidden states and the weight."),
    ] = "float32",
    device: Device = None,
    repeats: Repeats = 5,
    chunk_rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of rows whose logits exist at one time.", show_default="auto"),
    ] = None,
    as_json: AsJson = False,
    record: Record = None,
) -> Measurement:
    """Compare the fused loss with PyTorch's ways to compute it.

    Measures time and peak memory of one forward and backward of plain PyTorch, torch.compile, Liger and ours, on the
    same random input, in interleaved rounds; and of the three matrix products that none of them can avoid.
    """
    check_at_least(1, chunk_rows=chunk_rows)

    from ..benchmarks.loss import bench_loss
    from ..benchmarks.timing import DTYPES
    from ..checkpoints.loading import usable_device

    results = bench_loss(
        rows=rows,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        dtype=DTYPES[dtype],
        device=usable_device(device),
        repeats=repeats,
        chunk_rows=chunk_rows or "auto",
    )
    print(json.dumps({"rows": results}) if as_json else _table(results))
    return Measurement({"rows": results}, device=str(usable_device(device)))


def _table(results: list[dict]) -> str:
    lines = [f"{'':11} {'seconds':>9} {'MB':>9} {'time/naive':>11} {'memory/naive':>13} {'time/gemms':>11}"]
    for row in results:
        if row["note"] is not None:
            lines.append(f"{row['name']:11} cannot run: {row['note']}")
            continue
        ratios = [row["time_ratio"], row["memory_ratio"], row["gemm_ratio"]]
        cells = ["-" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        lines.append(
            f"{row['name']:11} {row['seconds']:9.4f} {row['peak_bytes'] / 1e6:9.1f} "
            f"{cells[0]:>11} {cells[1]:>13} {cells[2]:>11}"
        )
    return "\n".join(lines)
