"""`mrp bench shapes`: what a step costs at the sizes of SDAR-1.7B, 4B and 8B, on random weights."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from modeling_mrp.block_cache import BlockCache
from modeling_mrp.masks import CLEAN, TokenLayout
from modeling_mrp.sampling import Sampler

from .step_costs import Costs
from .timing import check_at_least_one, interleaved


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
CPU_LAYERS = 2  # layers measured on a CPU; the full depth is extrapolated


def random_model(
    shape: Shape,
    layers: int,
    head_layers: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    context: int = 4096,
) -> MRPForDiffusionLM:
    """A model with random weights, whose embedding and `lm_head` are tied.

    Args:
        shape: sizes of the backbone.
        layers: number of layers of the backbone.
        head_layers: number of layers of the head.
        block_size: tokens per block.
        dtype: dtype of the weights.
        device: device to create them on.
        context: number of positions that the model must have.
    """
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
    """The parts of a step of one batch, each a call, with the decoding engine's own cache, masks and sampler.

    Args:
        model: see `random_model`.
        batch_size: number of rows R.
        context: number of committed positions before the block, rounded down to whole blocks. Their keys and values
            are zeros, which takes attention as long as any other values.
        candidates: largest number of blocks per row in a forward.
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
    def backbone(self, candidates: int) -> torch.Tensor:
        """One forward of the backbone over `candidates` states of the block, which do not attend to one another."""
        ids = self.ids[:, :candidates].flatten(1)
        return self.model.backbone_hidden_states(ids, *self._place(candidates))

    @torch.no_grad()
    def head(self) -> torch.Tensor:
        """One head step on one state of the block."""
        return self.model.corrected_hidden_states(self.ids[:, 0], self.hidden[:, 0], *self._place(1))

    @torch.no_grad()
    def logits(self, candidates: int) -> tuple:
        """`lm_head` on `candidates` states, and the sampler's reading of the logits."""
        logits = self.model.logits(self.hidden[:, :candidates])
        positions = self._positions(candidates).view(self.rows, candidates, self.size)
        return self.sampler.read(logits, positions, positions[..., 0], None)

    def _positions(self, candidates: int):
        block = self.start + torch.arange(self.size, device=self.ids.device)
        return block.repeat(candidates).expand(self.rows, -1)

    def _place(self, candidates: int):
        """Positions, mask and cache of the tokens."""
        positions = self._positions(candidates)
        stream = torch.arange(1, candidates + 1, device=positions.device).repeat_interleave(self.size)
        zero = torch.zeros_like(positions)
        layout = TokenLayout(zero, positions // self.size, stream.expand_as(positions), zero + CLEAN)
        return positions, self.model.attention_mask(layout, self.cache.assign_slots(layout)), self.cache


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
    """Time the parts of a step with some of the shape's layers, and extrapolate to all of them.

    Each part is timed with `layers` layers (of the head at most as many as it has) and with none: the line through
    these two gives the time at full depth.

    Args:
        name: name of the shape, for the results.
        shape: sizes of the backbone.
        batch_sizes: numbers of rows to measure.
        candidates: numbers of blocks per forward to measure; 1 and 2 are always measured.
        layers: number of layers of the backbone to measure.
        head_layers: number of layers of the head.
        block_size: tokens per block.
        context: number of positions before the block.
        dtype: dtype of the weights.
        device: device to run on.
        repeats: number of timed rounds, of which medians are taken.

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
        seconds = _seconds(model, StepParts(model, batch_size, context, counts[-1]), counts, repeats)
        backbone = {
            c: extrapolate(seconds["bare", c], seconds["full", c], layers, shape.num_hidden_layers) for c in counts
        }
        logits = {c: seconds["logits", c] for c in counts}
        head = extrapolate(seconds["bare", "head"], seconds["full", "head"], measured_head, head_layers)
        costs.append(Costs(name, batch_size, backbone, logits, head))
    return costs


def _seconds(model: MRPForDiffusionLM, parts: StepParts, counts: Sequence[int], repeats: int) -> dict[tuple, float]:
    """Median time of each part: ("logits", c), and with no layers ("bare") or all ("full") c candidates and "head"."""
    steps = {("logits", c): partial(parts.logits, c) for c in counts}
    for depth in ("bare", "full"):
        steps |= {(depth, c): partial(at_depth, model, depth, partial(parts.backbone, c)) for c in counts}
        steps[depth, "head"] = partial(at_depth, model, depth, parts.head)
    return {key: statistics.median(runs) for key, runs in interleaved(steps, repeats, model.device).items()}


def extrapolate(bare: float, measured: float, layers: int, full_layers: int) -> float:
    """Extrapolate a time to full depth.

    Args:
        bare: seconds without any layer.
        measured: seconds with `layers` layers.
        layers: number of layers measured.
        full_layers: number of layers at full depth.
    """
    return bare + (measured - bare) * full_layers / layers


def at_depth(model: MRPForDiffusionLM, depth: str, step: Callable[[], object]) -> None:
    """Run `step` with all layers of backbone and head, or with none.

    Args:
        model: the model that `step` runs.
        depth: "full", or "bare" for no layers.
        step: the function to run.
    """
    if depth == "full":
        step()
        return
    backbone, head = model.model.layers, model.mrp_head.layers
    model.model.layers, model.mrp_head.layers = nn.ModuleList(), nn.ModuleList()
    try:
        step()
    finally:
        model.model.layers, model.mrp_head.layers = backbone, head
