"""`mrp bench train`: tokens per second of a training step, against the work that it cannot avoid."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from .options import AsJson, Device, RandomDtype, Record, Repeats, check_at_least, flag
from .recording import Measurement

if TYPE_CHECKING:
    import torch

    from modeling_mrp import MRPForDiffusionLM

    from ..benchmarks.train import Result

BLOCK_SIZE = 16


@dataclass
class ModelChoice:
    """A checkpoint, or a shape of random weights; `layers` and `block_size` are those of the shape."""

    model: str | None
    shape: str | None
    layers: int | None
    head_layers: int | None
    block_size: int | None


@dataclass
class StepChoice:
    """The sizes and options of the training step."""

    rows: int
    sequence_length: int
    unroll_steps: int
    choice_weight: float
    gradient_checkpointing: bool
    bf16: bool
    repeats: int


def train(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="Embedded checkpoint, folder or Hub id; or give --shape.", show_default=False
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE", help="Random weights of SDAR's size 1.7b, 4b or 8b instead of MODEL.", show_default=False
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of layers of --shape.", show_default="all on a GPU, else 2"),
    ] = None,
    head_layers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of layers of a fresh head.", show_default="the checkpoint's own, or 3"),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(metavar="N", help="Block size of --shape.", show_default=str(BLOCK_SIZE))
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", help="Number of rows per step.")] = 8,
    sequence_length: Annotated[int, typer.Option(metavar="N", help="Number of tokens per row.")] = 256,
    unroll_steps: Annotated[int, typer.Option(metavar="K", help="Number of reveals K.")] = 3,
    choice_weight: Annotated[
        float, typer.Option(metavar="WEIGHT", help="Weight of the term on the chosen position.")
    ] = 0.0,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute the head's activations.")
    ] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Autocast the head to bfloat16.")] = False,
    repeats: Repeats = 5,
    device: Device = None,
    dtype: RandomDtype = None,
    as_json: AsJson = False,
    record: Record = None,
) -> Measurement:
    """Measure a training step against the work it cannot avoid.

    The step runs on random tokens. The work that it cannot avoid is the frozen backbone over the streams
    x_t, x_1 ... x_K and x_0; forward and backward of the head over the K states and the clean stream; and three matrix
    products with lm_head per supervised position; with nothing around them.
    """
    check_at_least(1, layers=layers, head_layers=head_layers, block_size=block_size)

    from ..benchmarks.timing import DTYPES
    from ..benchmarks.train import bench_train
    from ..checkpoints.loading import default_attention, usable_device

    on = usable_device(device)
    if on.index:
        raise ValueError(
            f"--device must be cpu or cuda, got {on}: training takes the first GPU that it sees, so set "
            f"CUDA_VISIBLE_DEVICES={on.index} and leave --device out"
        )
    step = StepChoice(rows, sequence_length, unroll_steps, choice_weight, gradient_checkpointing, bf16, repeats)
    choice = ModelChoice(model, shape, layers, head_layers, block_size)
    dtype = dtype or ("bfloat16" if on.type == "cuda" else "float32")
    loaded = build_model(choice, sequence_length, on, DTYPES[dtype])
    loaded.set_attn_implementation(default_attention(on, bf16))
    result = bench_train(loaded, **asdict(step))
    about = _settings(loaded, model or shape, step, on)
    print(json.dumps(about | {"result": asdict(result)}) if as_json else _report(about, result))
    return Measurement({"rows": [asdict(result)]}, about, device=str(on))


def build_model(
    choice: ModelChoice, sequence_length: int, device: "torch.device", dtype: "torch.dtype"
) -> "MRPForDiffusionLM":
    """Load the checkpoint, or make a random model of the shape.

    Args:
        choice: the checkpoint or the shape.
        sequence_length: number of positions that a random model must have.
        device: device to put it on.
        dtype: dtype of its weights.

    Raises:
        ValueError: unless exactly one of the checkpoint and a known shape is given, or if sizes of a shape are given
            of a checkpoint.
    """
    from modeling_mrp import MRPForDiffusionLM
    from modeling_mrp.options import one_of

    from ..benchmarks.shapes import CPU_LAYERS, SHAPES, random_model
    from ..checkpoints.weight_files import fetch

    if (choice.model is None) == (choice.shape is None):
        raise ValueError("give either MODEL or --shape")
    for name in ("layers", "block_size"):
        if choice.model is not None and getattr(choice, name) is not None:
            raise ValueError(f"{flag(name)} is for --shape, and MODEL {choice.model} has its own: leave it out")
    if choice.shape is not None:
        one_of("--shape", choice.shape, SHAPES)
        shape = SHAPES[choice.shape]
        layers = choice.layers or (shape.num_hidden_layers if device.type == "cuda" else CPU_LAYERS)
        head_layers = choice.head_layers or 3
        block_size = choice.block_size or BLOCK_SIZE
        return random_model(shape, layers, head_layers, block_size, dtype, device, sequence_length)
    source = fetch(choice.model)[0]
    return MRPForDiffusionLM.from_backbone(source, num_mrp_layers=choice.head_layers, dtype=dtype).to(device)


def _settings(model: "MRPForDiffusionLM", name: str, step: StepChoice, device: "torch.device") -> dict[str, str]:
    """What was measured on which machine, in words, by names that no parameter of the command has."""
    from ..benchmarks.timing import machine
    from ..data.wording import counted

    config = model.config
    head = str(model.mrp_head.eh_proj.weight.dtype).removeprefix("torch.")
    return {
        "machine": machine(device),
        "network": f"{name}: backbone of {counted(config.num_hidden_layers, 'layer')} of "
        f"{config.hidden_size} in {str(model.lm_head.weight.dtype).removeprefix('torch.')}, head of "
        f"{config.num_mrp_layers} in {head}{', autocast to bfloat16' if step.bf16 else ''}, "
        f"vocabulary {config.vocab_size}, attention {config._attn_implementation}",
        "step": f"{counted(step.rows, 'row')} of {counted(step.sequence_length, 'token')}, K = {step.unroll_steps}"
        f"{f', choice_weight {step.choice_weight}' if step.choice_weight else ''}"
        f"{', gradient checkpointing' if step.gradient_checkpointing else ''}",
        "rounds": f"{step.repeats}, interleaved, after one that is not timed; medians",
    }


def _report(about: dict[str, str], result: "Result") -> str:
    from ..data.wording import counted

    def shares(split: dict[str, float]) -> str:
        return ", ".join(f"{name} {share:.0%}" for name, share in split.items())

    return "\n".join(
        [
            *(f"{name:9} {value}" for name, value in about.items()),
            "",
            f"training step {result.step_seconds:8.3f} s, {result.tokens_per_second:.0f} tokens/s "
            f"({counted(result.supervised, 'supervised position')}): {shares(result.split)}",
            f"bare work     {result.bare_seconds:8.3f} s: {shares(result.bare_split)}",
            f"ratio         {result.ratio:8.2f}",
        ]
    )
