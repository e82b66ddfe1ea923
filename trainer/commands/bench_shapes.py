"""`mrp bench shapes`: what a decoding step costs at SDAR's sizes, and the speed-up to expect."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .options import AsJson, Device, RandomDtype, Record, Repeats, check_at_least
from .recording import Measurement

if TYPE_CHECKING:
    from ..benchmarks.step_costs import Costs

SHAPE_NAMES = ["1.7b", "4b", "8b"]
BATCH_SIZES = [1, 4, 16]
CANDIDATES = [1, 2, 3, 4, 8]


def shapes(
    shapes: Annotated[list[str], typer.Option(metavar="SHAPES", help="Sizes of SDAR.")] = SHAPE_NAMES,
    batch_sizes: Annotated[list[int], typer.Option(metavar="NUMBERS", help="Batch sizes.")] = BATCH_SIZES,
    candidates: Annotated[
        list[int], typer.Option(metavar="NUMBERS", help="Numbers of candidates K to verify.")
    ] = CANDIDATES,
    accepted: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="JSON file of acceptance rates; without it only times are shown.", show_default=False
        ),
    ] = None,
    free_within: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of a step within which a verification counts as free.")
    ] = 0.1,
    block_size: Annotated[int, typer.Option(metavar="N", help="Block size.")] = 16,
    context: Annotated[int, typer.Option(metavar="N", help="Number of positions before the block.")] = 512,
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="Number of layers to measure.", show_default="all on a GPU, else 2")
    ] = None,
    head_layers: Annotated[int, typer.Option(metavar="N", help="Number of layers of the head.")] = 3,
    dtype: RandomDtype = None,
    device: Device = None,
    repeats: Repeats = 5,
    as_json: AsJson = False,
    record: Record = None,
) -> Measurement:
    """Measure a decoding step at real sizes, predict the gain.

    Times a backbone step, the packed verification of K candidates and a head step on random weights of SDAR's sizes. A
    few layers are measured and extrapolated to all; on a GPU the full stack is measured.

    With --accepted FILE the speed-up over K is predicted. FILE is the output of `mrp bench decode MODEL --modes spec-8
    --json`, or holds {"accepted": [0.8, 0.6, ...]}: the shares of the drafts 1, 2, ... steps after the backbone's own
    certain one that were accepted (a draft after a rejected one counts as rejected). The prediction is for the static
    rule with one token a step, and opens every block by a forward of its own: drafts that cross the block border save
    more. The rows of a batch are assumed to need the same rounds, so it is an upper bound for batches.
    """
    check_at_least(0, free_within=free_within, context=context)
    check_at_least(1, layers=layers, head_layers=head_layers, block_size=block_size, repeats=repeats)
    for size in batch_sizes:
        check_at_least(1, batch_sizes=size)
    for count in candidates:
        check_at_least(1, candidates=count)

    from modeling_mrp.options import one_of

    from ..benchmarks.shapes import SHAPES
    from ..benchmarks.step_costs import read_accepted, result_rows
    from ..benchmarks.timing import machine
    from ..checkpoints.loading import usable_device

    for name in shapes:
        one_of("--shapes", name, SHAPES)
        if layers is not None and layers > SHAPES[name].num_hidden_layers:
            raise ValueError(f"--layers {layers} is more than {name} has ({SHAPES[name].num_hidden_layers})")
    rates = None if accepted is None else read_accepted(accepted)
    on = usable_device(device)
    settings = {
        "shapes": shapes, "batch_sizes": batch_sizes, "candidates": candidates, "accepted": accepted,
        "free_within": free_within, "block_size": block_size, "context": context, "layers": layers,
        "head_layers": head_layers, "dtype": dtype or ("bfloat16" if on.type == "cuda" else "float32"),
        "device": str(on), "repeats": repeats,
    }  # fmt: skip
    about = {"machine": machine(on), "settings": settings}
    if not as_json:
        print(_heading(about, rates))
    measured, rows = [], []
    for costs, depth in _measure(settings, announce=not as_json):
        table = result_rows(costs, sorted(candidates), rates, block_size)
        free = costs.free_up_to(free_within)
        measured.append(asdict(costs) | {"layers_measured": depth, "verification_free_up_to": free})
        rows += table
        if not as_json:
            print(report(costs, table, free_within), flush=True)
    if as_json:
        print(json.dumps({**about, "costs": measured, "rows": rows}))
    return Measurement({"rows": rows, "accepted": rates, "costs": measured}, settings, device=str(on))


def _measure(settings: dict, announce: bool) -> Iterator[tuple["Costs", int]]:
    """The costs of each shape and batch size, and the number of layers that were measured for them."""
    from ..benchmarks.shapes import CPU_LAYERS, SHAPES, measure_costs
    from ..benchmarks.timing import DTYPES
    from ..data.wording import counted

    for name in settings["shapes"]:
        shape = SHAPES[name]
        on_gpu = settings["device"].startswith("cuda")
        layers = settings["layers"] or (shape.num_hidden_layers if on_gpu else CPU_LAYERS)
        if announce:
            print(f"{name}: {layers} of {counted(shape.num_hidden_layers, 'layer')} measured", flush=True)
        for costs in measure_costs(
            name,
            shape,
            settings["batch_sizes"],
            settings["candidates"],
            layers=layers,
            head_layers=settings["head_layers"],
            block_size=settings["block_size"],
            context=settings["context"],
            dtype=DTYPES[settings["dtype"]],
            device=settings["device"],
            repeats=settings["repeats"],
        ):
            yield costs, layers


def _heading(about: dict, rates: Sequence[float] | None) -> str:
    from ..data.wording import counted

    settings = about["settings"]
    heading = (
        f"{about['machine']}, {settings['dtype']}; blocks of {settings['block_size']} after "
        f"{counted(settings['context'], 'position')}; head of {counted(settings['head_layers'], 'layer')}; "
        f"{counted(settings['repeats'], 'round')}, interleaved, medians"
    )
    if rates is not None:
        heading += f"\nacceptance rates of {counted(len(rates), 'draft')}: predictions up to K = {len(rates) + 1}"
    return heading


def report(costs: "Costs", rows: list[dict], tolerance: float) -> str:
    """The table of one shape and batch size, and up to which K a verification is free.

    Args:
        costs: what was measured.
        rows: `result_rows` of it.
        tolerance: share of a step within which a verification counts as free.
    """
    step = costs.verification(1)
    lines = [
        f"\n{costs.shape}, batch {costs.batch_size}: a step {1e3 * step:.2f} ms (of it logits "
        f"{1e3 * costs.logits[1]:.2f}), a head step {1e3 * costs.head:.2f} ms = {costs.head / step:.1%} of a step",
        f"{'K':>4}{'verification':>15}{'/ step':>9}{'K-1 drafts':>13}{'forwards':>11}{'speed-up':>10}",
    ]
    for row in rows:
        saved, speedup = ("-" if row[key] is None else f"{row[key]:.2f}x" for key in ("forwards_saved", "speedup"))
        lines.append(
            f"{row['candidates']:4d}{1e3 * row['verification_seconds']:12.2f} ms{row['verification_ratio']:9.2f}"
            f"{1e3 * row['drafting_seconds']:10.2f} ms{saved:>11}{speedup:>10}"
        )
    free = costs.free_up_to(tolerance)
    beyond = next((k for k in sorted(costs.backbone) if k > free), None)
    lines.append(
        f"verification is free (within {tolerance:.0%} of a step) up to K = {free}"
        + (", the most that was measured" if beyond is None else f" and no longer at K = {beyond}")
    )
    return "\n".join(lines)
