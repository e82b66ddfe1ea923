"""`mrp bench shapes`: what a step costs at the sizes of SDAR-1.7B, 4B and 8B, on random weights."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from modeling_mrp.block_cache import BlockCache
from modeling_mrp.decoding import Place
from modeling_mrp.masks import CLEAN, Tokens
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

    def _place(self, candidates: int) -> Place:
        positions = self._positions(candidates)
        stream = torch.arange(1, candidates + 1, device=positions.device).repeat_interleave(self.size)
        zero = torch.zeros_like(positions)
        tokens = Tokens(zero, positions // self.size, stream.expand_as(positions), zero + CLEAN)
        return Place(positions, self.model.attention_mask(tokens, self.cache.place(tokens)))


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
