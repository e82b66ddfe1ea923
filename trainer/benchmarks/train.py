"""`mrp bench train`: the training step of MRPTrainer against the forwards and the backward it cannot avoid."""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from modeling_mrp import MRPForDiffusionLM

from ..arguments import MRPTrainingArguments
from ..checkpoints.loading import default_attention, usable_device
from ..checkpoints.weight_files import fetch
from ..commands.cli import command_parser
from ..losses.linear_kl import auto_chunk_rows
from ..mrp_trainer import MRPTrainer
from .shapes import CPU_LAYERS, SHAPES, random_model
from .timing import DTYPES, check_at_least_one, interleaved, machine, median_ratio


@dataclass(frozen=True)
class Result:
    """Medians over the rounds.

    Attributes:
        tokens: of one step, R * L.
        supervised: positions in the loss, over all K steps.
        step_seconds: of a whole step: noise and reveal, loss, backward, optimizer.
        tokens_per_second: tokens / step_seconds.
        bare_seconds: of the bare work, see `BareStep`.
        ratio: step over bare, the median over rounds.
        split: shares of the step's time: "collate", "loss and backward", "optimizer".
        bare_split: shares of the bare time: "backbone", "head", "logits".
    """

    tokens: int
    supervised: int
    step_seconds: float
    tokens_per_second: float
    bare_seconds: float
    ratio: float
    split: dict[str, float]
    bare_split: dict[str, float]


def bench_train(
    model: MRPForDiffusionLM,
    rows: int = 8,
    sequence_length: int = 256,
    unroll_steps: int = 3,
    repeats: int = 5,
    **training_options,
) -> Result:
    """Time steps of `MRPTrainer` on random tokens, and the bare work of the same sizes, in turns.

    Args:
        model: with a head, on its device; the head is trained by the run.
        rows, sequence_length, unroll_steps: R, L, K. The first quarter of each row is a prompt.
        repeats: timed rounds.
        training_options: of `MRPTrainingArguments`.

    Raises:
        ValueError: for a number below 1, or a model without a head.
    """
    check_at_least_one(rows=rows, sequence_length=sequence_length, unroll_steps=unroll_steps, repeats=repeats)
    with tempfile.TemporaryDirectory() as folder:
        step = TrainerStep(model, rows, sequence_length, unroll_steps, folder, **training_options)
        bare = BareStep(model, step.batch, step.half)
        parts = {
            "collate": step.collate,
            "loss and backward": step.loss_and_backward,
            "optimizer": step.optimize,
            "backbone": bare.backbone,
            "head": bare.head,
            "logits": bare.logits,
        }
        seconds = interleaved(parts, repeats, model.device)
    ours, theirs = (
        [sum(parts) for parts in zip(*(seconds[name] for name in names), strict=True)]
        for names in (list(parts)[:3], list(parts)[3:])
    )
    return Result(
        tokens=rows * sequence_length,
        supervised=bare.supervised,
        step_seconds=statistics.median(ours),
        tokens_per_second=rows * sequence_length / statistics.median(ours),
        bare_seconds=statistics.median(theirs),
        ratio=median_ratio(ours, theirs),
        split={name: median_ratio(seconds[name], ours) for name in list(parts)[:3]},
        bare_split={name: median_ratio(seconds[name], theirs) for name in list(parts)[3:]},
    )


class TrainerStep:
    """One training step in its three parts, by the trainer's own methods on a fixed set of rows.

    Attributes:
        batch: of the collator, the same in every call.
        half: the dtype of autocast, or None.
    """

    def __init__(self, model, rows: int, sequence_length: int, unroll_steps: int, folder: str, **options):
        defaults = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        args = MRPTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=rows,
            unroll_steps=unroll_steps,
            use_cpu=model.device.type == "cpu",
            **defaults | options,
        )
        self.rows = random_rows(rows, sequence_length, model.config.vocab_size)
        self.trainer = MRPTrainer(model, args, train_dataset=self.rows, sequence_length=sequence_length)
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        self.trainer.create_optimizer()
        self.half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self.collate()

    def collate(self):
        """Noise and reveal."""
        self.batch = self.trainer.data_collator(self.rows)

    def loss_and_backward(self):
        """Forwards, fused loss, gradients of the head."""
        count = self.trainer._get_num_items_in_batch([self.batch], self.trainer.args.device)
        self.trainer.training_step(self.trainer.model, dict(self.batch), num_items_in_batch=count)

    def optimize(self):
        """Clip, update, clear."""
        trainer = self.trainer
        torch.nn.utils.clip_grad_norm_(trainer.model.mrp_head.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


class BareStep:
    """What no implementation of a step can do without, as plain transformer work with nothing around it.

    The frozen backbone without gradients over the 2 + K streams [x_t | x_1 ... x_K | x_0]; forward and backward of
    the head over K states and, once, the clean stream; three matrix products with `lm_head` for every supervised
    position (teacher, difference, gradient). Attention is dense over each stream alone: less than a step needs.

    Args:
        model: with a head.
        batch: of the collator, for its sizes and its number of supervised positions.
        half: dtype of autocast, or None.
    """

    def __init__(self, model: MRPForDiffusionLM, batch: dict, half: torch.dtype | None = None):
        self.model, device = model, model.device
        clean = batch["clean_ids"].to(device)
        states = batch["revealed_ids"].to(device)
        self.packed = torch.cat([batch["input_ids"].to(device)[:, None], states, clean[:, None]], dim=1).flatten(0, 1)
        self.head_ids = torch.cat([states, clean[:, None]], dim=1).flatten(0, 1)
        self.autocast = partial(torch.autocast, device.type, dtype=half, enabled=half is not None)
        size = model.config.hidden_size
        self.hidden = torch.randn(*self.head_ids.shape, size, device=device)
        self.supervised = int((batch["loss_weight"] > 0).sum())
        weight = model.lm_head.weight
        self.rows = torch.randn(max(1, self.supervised), size, device=device).to(weight.dtype)
        self.chunk = auto_chunk_rows(len(self.rows), weight)

    @torch.no_grad()
    def backbone(self):
        self.model.model(self.packed, attention_mask={"full_attention": None}, use_cache=False)

    def head(self):
        head, backbone = self.model.mrp_head, self.model.model
        positions = torch.arange(self.head_ids.shape[1], device=self.head_ids.device)[None]
        with self.autocast():
            embeddings = backbone.embed_tokens(self.head_ids)
            out = head(embeddings, self.hidden, None, backbone.rotary_emb(embeddings, positions))
        torch.autograd.grad(out.float().sum(), list(head.parameters()))

    @torch.no_grad()
    def logits(self):
        weight = self.model.lm_head.weight
        for rows in self.rows.split(self.chunk):
            logits = rows @ weight.T
            torch.mm(rows, weight.T, out=logits)
            torch.mm(logits, weight)


def random_rows(count: int, length: int, vocab_size: int) -> list[dict]:
    """Prepared rows (see data.py) of random tokens, one sample each, the first quarter of it a prompt."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (count, length), generator=generator)
    prompt = length // 4
    return [
        {
            "input_ids": row,
            "answer_mask": [0] * prompt + [1] * (length - prompt),
            "lengths": [length],
            "sample_ids": [number],
        }
        for number, row in enumerate(ids.tolist())
    ]


# --- the command


def parser() -> argparse.ArgumentParser:
    made = command_parser(
        "bench train",
        "Tokens per second of a training step on random tokens, and the ratio to the work that it cannot avoid:\n"
        "the frozen backbone over [x_t | x_1 ... x_K | x_0], forward and backward of the head over the K states and\n"
        "the clean stream, and three matrix products with lm_head per supervised position; nothing around them.",
        "mrp bench train --shape 1.7b --layers 4 --rows 2 --sequence-length 1024",
    )
    made.add_argument("model", metavar="MODEL", nargs="?", help="embedded checkpoint, folder or Hub id; or --shape")
    made.add_argument("--shape", choices=SHAPES, help="random weights of this size instead of MODEL")
    made.add_argument("--layers", type=int, help=f"of --shape (default: all on a GPU, else {CPU_LAYERS})")
    made.add_argument("--head-layers", type=int, help="of a fresh head (default: the checkpoint's own, or 3)")
    made.add_argument("--block-size", type=int, default=16, help="of --shape (default: 16)")
    made.add_argument("--rows", type=int, default=8, help="rows per step (default: 8)")
    made.add_argument("--sequence-length", type=int, default=256, help="tokens per row (default: 256)")
    made.add_argument("--unroll-steps", type=int, default=3, help="K (default: 3)")
    made.add_argument(
        "--choice-weight", type=float, default=0.0, help="of the term on the chosen position (default: 0)"
    )
    made.add_argument("--gradient-checkpointing", action="store_true", help="recompute the head's activations")
    made.add_argument("--bf16", action="store_true", help="autocast the head to bfloat16")
    made.add_argument("--repeats", type=int, default=5, help="timed rounds (default: 5)")
    made.add_argument("--device", help="default: cuda when there is one")
    made.add_argument("--dtype", choices=DTYPES, help="of the backbone (default: bfloat16 on a GPU, else float32)")
    made.add_argument("--json", action="store_true", help="print machine, settings and result as JSON")
    return made


def build_model(options, device: torch.device, dtype: torch.dtype) -> MRPForDiffusionLM:
    """The checkpoint, or a random model of `--shape`.

    Raises:
        ValueError: unless exactly one of the two is given.
    """
    if (options.model is None) == (options.shape is None):
        raise ValueError("give either MODEL or --shape")
    if options.shape is not None:
        shape = SHAPES[options.shape]
        layers = options.layers or (shape.num_hidden_layers if device.type == "cuda" else CPU_LAYERS)
        head_layers = options.head_layers or 3
        return random_model(shape, layers, head_layers, options.block_size, dtype, device, options.sequence_length)
    source = fetch(options.model)[0]
    return MRPForDiffusionLM.from_backbone(source, num_mrp_layers=options.head_layers, dtype=dtype).to(device)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of `mrp bench train`."""
    options = parser().parse_args(argv)
    device = usable_device(options.device)
    if device.index:
        raise ValueError(
            f"--device must be cpu or cuda, got {device}: training takes the first GPU that it sees, so set "
            f"CUDA_VISIBLE_DEVICES={device.index} and leave --device out"
        )
    dtype = DTYPES[options.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    model = build_model(options, device, dtype)
    model.set_attn_implementation(default_attention(device, options.bf16))
    result = bench_train(
        model,
        rows=options.rows,
        sequence_length=options.sequence_length,
        unroll_steps=options.unroll_steps,
        repeats=options.repeats,
        choice_weight=options.choice_weight,
        gradient_checkpointing=options.gradient_checkpointing,
        bf16=options.bf16,
    )
    about = describe(model, options, device)
    print(json.dumps(about | {"result": asdict(result)}) if options.json else report(about, result))
    return 0


def describe(model: MRPForDiffusionLM, options, device: torch.device) -> dict[str, str]:
    """What was measured on which machine, in words."""
    config = model.config
    head = str(model.mrp_head.eh_proj.weight.dtype).removeprefix("torch.")
    return {
        "machine": machine(device),
        "model": f"{options.model or options.shape}: backbone of {config.num_hidden_layers} layers of "
        f"{config.hidden_size} in {str(model.lm_head.weight.dtype).removeprefix('torch.')}, head of "
        f"{config.num_mrp_layers} in {head}{', autocast to bfloat16' if options.bf16 else ''}, "
        f"vocabulary {config.vocab_size}, attention {config._attn_implementation}",
        "step": f"{options.rows} rows of {options.sequence_length} tokens, K = {options.unroll_steps}"
        f"{f', choice_weight {options.choice_weight}' if options.choice_weight else ''}"
        f"{', gradient checkpointing' if options.gradient_checkpointing else ''}",
        "rounds": f"{options.repeats}, interleaved, after one that is not timed; medians",
    }


def report(about: dict[str, str], result: Result) -> str:
    def shares(split: dict[str, float]) -> str:
        return ", ".join(f"{name} {share:.0%}" for name, share in split.items())

    return "\n".join(
        [
            *(f"{name:9} {value}" for name, value in about.items()),
            "",
            f"training step {result.step_seconds:8.3f} s, {result.tokens_per_second:.0f} tokens/s "
            f"({result.supervised} supervised positions): {shares(result.split)}",
            f"bare work     {result.bare_seconds:8.3f} s: {shares(result.bare_split)}",
            f"ratio         {result.ratio:8.2f}",
        ]
    )
