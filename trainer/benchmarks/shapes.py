"""`mrp bench shapes`: what a step costs at the sizes of SDAR-1.7B, 4B and 8B, on random weights."""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from modeling_mrp.block_cache import BlockCache
from modeling_mrp.cached_forwards import Placement
from modeling_mrp.masks import CLEAN, TokenLayout
from modeling_mrp.sampling import Sampler

from ..checkpoints.loading import usable_device
from ..commands.cli import command_parser
from .step_costs import Costs, forwards_saved
from .timing import DTYPES, check_at_least_one, interleaved, machine


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 backbone."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936


SHAPES = {
    "1.7b": Shape(28, 2048, 6144, 16),
    "4b": Shape(36, 2560, 9728, 32),
    "8b": Shape(36, 4096, 12288, 32),
}
CPU_LAYERS = 2  # measured on a CPU, from which the full depth is extrapolated


def random_model(
    shape: Shape,
    layers: int,
    head_layers: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    context: int = 4096,
) -> MRPForDiffusionLM:
    """A model of `layers` random layers of this shape and a head of `head_layers`; its embedding is its `lm_head`."""
    sizes = vars(shape) | {"num_hidden_layers": layers}
    config = MRPConfig(
        **sizes,
        block_size=block_size,
        mask_token_id=shape.vocab_size - 1,
        num_mrp_layers=head_layers,
        max_position_embeddings=context + block_size,
        tie_word_embeddings=True,
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return MRPForDiffusionLM(config).eval()
    finally:
        torch.set_default_dtype(usual)


class StepParts:
    """The parts of a step of one batch, each a call, on the engine's own cache, masks and sampler.

    Args:
        model: as of `random_model`.
        batch_size: rows R.
        context: committed positions before the block, whole blocks; their keys and values are zeros, which takes
            attention as long as any others.
        candidates: the most blocks per row that a forward will hold.
    """

    def __init__(self, model: MRPForDiffusionLM, batch_size: int, context: int, candidates: int):
        config, device = model.config, model.device
        self.model, self.rows, self.size = model, batch_size, config.block_size
        self.start = context // self.size * self.size
        self.cache = BlockCache(batch_size, self.start + candidates * self.size, self.size, device)
        self.cache.commit(torch.full((batch_size,), self.start, device=device), self.start)
        self.sampler = Sampler(config.mask_token_id, shaping=[], truncation=[])
        shape = batch_size, candidates, self.size
        self.ids = torch.randint(config.vocab_size, shape, device=device)
        self.hidden = torch.randn(*shape, config.hidden_size, device=device).to(model.dtype)

    @torch.no_grad()
    def backbone(self, candidates: int):
        """One forward of the backbone over `candidates` states of the block that do not see one another."""
        ids = self.ids[:, :candidates].flatten(1)
        return self.model.backbone_hidden_states(ids, *self._place(candidates), self.cache)

    @torch.no_grad()
    def head(self):
        """One head step on one state of the block."""
        return self.model.corrected_hidden_states(self.ids[:, 0], self.hidden[:, 0], *self._place(1), self.cache)

    @torch.no_grad()
    def logits(self, candidates: int):
        """`lm_head` on `candidates` states, and what is read off the logits."""
        logits = self.model.logits(self.hidden[:, :candidates])
        positions = self._positions(candidates).view(self.rows, candidates, self.size)
        return self.sampler.read(logits, positions, positions[..., 0], None)

    def _positions(self, candidates: int):
        block = self.start + torch.arange(self.size, device=self.ids.device)
        return block.repeat(candidates).expand(self.rows, -1)

    def _place(self, candidates: int) -> Placement:
        positions = self._positions(candidates)
        stream = torch.arange(1, candidates + 1, device=positions.device).repeat_interleave(self.size)
        zero = torch.zeros_like(positions)
        layout = TokenLayout(zero, positions // self.size, stream.expand_as(positions), zero + CLEAN)
        return Placement(positions, self.model.attention_mask(layout, self.cache.assign_slots(layout)))


def measure_costs(
    name: str,
    shape: Shape,
    batch_sizes: Sequence[int],
    candidates: Sequence[int],
    *,
    layers: int,
    head_layers: int = 3,
    block_size: int = 16,
    context: int = 512,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    repeats: int = 5,
) -> list[Costs]:
    """Time the parts of a step with `layers` of the shape's layers, extrapolated to all of them.

    Both depths that a line needs are measured: `layers` (of the head: at most as many as it has) and none.

    Args:
        name: of the shape, for the results.
        candidates: blocks per forward to measure; 1 and 2 always are.
        context: positions before the block.
        repeats: timed rounds; medians are taken.

    Returns:
        One `Costs` for each batch size.

    Raises:
        ValueError: for a number below 1, or more layers than the shape has.
    """
    check_at_least_one(
        batch_sizes=batch_sizes, candidates=candidates, layers=layers, head_layers=head_layers, block_size=block_size
    )
    if layers > shape.num_hidden_layers:
        raise ValueError(f"layers={layers} is more than {name} has ({shape.num_hidden_layers})")
    counts = sorted({1, 2, *candidates})
    measured_head = min(layers, head_layers)
    model = random_model(shape, layers, measured_head, block_size, dtype, torch.device(device), context)
    costs = []
    for batch_size in batch_sizes:
        parts = StepParts(model, batch_size, context, counts[-1])
        steps = {("logits", c): partial(parts.logits, c) for c in counts}
        for depth in ("bare", "full"):
            steps |= {(depth, c): partial(_at_depth, model, depth, partial(parts.backbone, c)) for c in counts}
            steps[depth, "head"] = partial(_at_depth, model, depth, parts.head)
        seconds = {
            key: statistics.median(runs) for key, runs in interleaved(steps, repeats, torch.device(device)).items()
        }
        costs.append(
            Costs(
                shape=name,
                batch_size=batch_size,
                backbone={
                    c: extrapolate(seconds["bare", c], seconds["full", c], layers, shape.num_hidden_layers)
                    for c in counts
                },
                logits={c: seconds["logits", c] for c in counts},
                head=extrapolate(seconds["bare", "head"], seconds["full", "head"], measured_head, head_layers),
            )
        )
    return costs


def extrapolate(bare: float, measured: float, layers: int, full_layers: int) -> float:
    """Seconds at full depth from those without any layer and with `layers` of them."""
    return bare + (measured - bare) * full_layers / layers


def _at_depth(model: MRPForDiffusionLM, depth: str, step: Callable[[], None]):
    """Run `step` with all layers of backbone and head, or with none."""
    if depth == "full":
        return step()
    backbone, head = model.model.layers, model.mrp_head.layers
    model.model.layers, model.mrp_head.layers = nn.ModuleList(), nn.ModuleList()
    try:
        step()
    finally:
        model.model.layers, model.mrp_head.layers = backbone, head


# --- the command


def read_accepted(path: str) -> list[float]:
    """The rates of an acceptance file, or of the deepest `spec-K` row in the output of `mrp bench decode --json`.

    Raises:
        ValueError: when the file does not hold {"accepted": [rates between 0 and 1]}, nor such a row.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if isinstance(values, dict) and "rows" in values:
        rows = values["rows"] if isinstance(values["rows"], list) else []
        rows = [row for row in rows if isinstance(row, dict) and re.fullmatch(r"spec-\d+", str(row.get("mode")))]
        found = [row["accepted"] for row in rows if isinstance(row.get("accepted"), list)]
        values = {"accepted": max(found, key=len, default=None)}
    rates = values.get("accepted") if isinstance(values, dict) else None
    if not isinstance(rates, list) or not all(isinstance(r, int | float) and 0 <= r <= 1 for r in rates):
        raise ValueError(
            f'{path} must hold {{"accepted": [rates between 0 and 1]}}, or what `mrp bench decode MODEL --modes spec-8'
            f" --json` prints, got {str(values)[:80]}"
        )
    return [float(rate) for rate in rates]


def result_rows(costs: Costs, candidates: Sequence[int], accepted: list[float] | None, block_size: int) -> list[dict]:
    """What the table shows, one dict for each K; predictions are None without rates for all its K - 1 drafts."""
    rows = []
    for k in candidates:
        known = accepted is not None and len(accepted) >= k - 1
        rows.append(
            {
                "shape": costs.shape,
                "batch_size": costs.batch_size,
                "candidates": k,
                "verification_seconds": costs.verification(k),
                "verification_ratio": costs.ratio(k),
                "drafting_seconds": (k - 1) * costs.draft,
                "forwards_saved": forwards_saved(k, accepted, block_size) if known else None,
                "speedup": costs.speedup(k, accepted, block_size) if known else None,
            }
        )
    return rows


def report(costs: Costs, rows: list[dict], tolerance: float) -> str:
    """The table of one shape and batch size, and where verification stops being free."""
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


def parser() -> argparse.ArgumentParser:
    made = command_parser(
        "bench shapes",
        "Time a backbone step, the packed verification of K candidates and a head step on random weights of SDAR's\n"
        "sizes. A few layers are measured and extrapolated to all, on a GPU the full stack.\n\n"
        "With --accepted FILE the speed-up over K is predicted. FILE is the output of `mrp bench decode MODEL\n"
        '--modes spec-8 --json`, or holds {"accepted": [0.8, 0.6, ...]}: the shares of the drafts 1, 2, ... steps\n'
        "behind the backbone's own certain one that were accepted (a draft after one that was refused counts as\n"
        "refused). The prediction is for the static rule with one token a step; rows of a batch are taken to need\n"
        "the same rounds, so it is an upper bound for batches.",
        "mrp bench shapes --shapes 4b --batch-sizes 1 8 --candidates 1 2 4 8 --accepted accepted.json",
    )
    cuda = torch.cuda.is_available()
    made.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    made.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4, 16], help="default: 1 4 16")
    made.add_argument("--candidates", nargs="+", type=int, default=[1, 2, 3, 4, 8], help="K (default: 1 2 3 4 8)")
    made.add_argument("--accepted", metavar="FILE", help="JSON file of acceptance rates; without it: times only")
    made.add_argument("--free-within", type=float, default=0.1, help="what counts as free (default: 0.1 of a step)")
    made.add_argument("--block-size", type=int, default=16, help="default: 16")
    made.add_argument("--context", type=int, default=512, help="positions before the block (default: 512)")
    made.add_argument("--layers", type=int, help=f"layers to measure (default: all on a GPU, else {CPU_LAYERS})")
    made.add_argument("--head-layers", type=int, default=3, help="default: 3")
    made.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32", help="default: %(default)s"
    )
    made.add_argument("--device", default="cuda" if cuda else "cpu", help="default: %(default)s")
    made.add_argument("--repeats", type=int, default=5, help="timed rounds (default: 5)")
    made.add_argument("--json", action="store_true", help="print machine, settings, costs and rows as JSON")
    return made


def _check(options):
    """Raise a ValueError for an option out of its range."""
    if options.free_within < 0:
        raise ValueError(f"--free-within must be at least 0, got {options.free_within}")
    if options.context < 0:
        raise ValueError(f"--context must be at least 0, got {options.context}")
    if options.layers is not None:
        check_at_least_one(layers=options.layers)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of `mrp bench shapes`."""
    options = parser().parse_args(argv)
    _check(options)
    accepted = None if options.accepted is None else read_accepted(options.accepted)
    device = usable_device(options.device)
    about = {"machine": machine(device), "settings": vars(options)}
    if not options.json:
        print(
            f"{about['machine']}, {options.dtype}; blocks of {options.block_size} behind {options.context} positions; "
            f"head of {options.head_layers} layers; {options.repeats} rounds, interleaved, medians"
        )
        if accepted is not None:
            print(f"acceptance rates of {len(accepted)} drafts: predictions up to K = {len(accepted) + 1}")
    measured, rows = [], []
    for name in options.shapes:
        layers = options.layers or (SHAPES[name].num_hidden_layers if device.type == "cuda" else CPU_LAYERS)
        if not options.json:
            print(f"{name}: {layers} of {SHAPES[name].num_hidden_layers} layers measured", flush=True)
        for costs in measure_costs(
            name,
            SHAPES[name],
            options.batch_sizes,
            options.candidates,
            layers=layers,
            head_layers=options.head_layers,
            block_size=options.block_size,
            context=options.context,
            dtype=DTYPES[options.dtype],
            device=options.device,
            repeats=options.repeats,
        ):
            table = result_rows(costs, sorted(options.candidates), accepted, options.block_size)
            free = costs.free_up_to(options.free_within)
            measured.append(asdict(costs) | {"layers_measured": layers, "verification_free_up_to": free})
            rows += table
            if not options.json:
                print(report(costs, table, options.free_within), flush=True)
    if options.json:
        print(json.dumps({**about, "costs": measured, "rows": rows}))
    return 0
