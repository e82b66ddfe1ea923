"""`mrp bench train`: the training step of MRPTrainer against the forwards and the backward it cannot avoid."""

import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from modeling_mrp import MRPForDiffusionLM

from ..arguments import MRPTrainingArguments
from ..losses.linear_kl import auto_chunk_rows
from ..mrp_trainer import MRPTrainer
from .timing import check_at_least_one, interleaved, median_ratio


@dataclass(frozen=True)
class Result:
    """Medians over the rounds.

    Attributes:
        tokens: number of tokens of one step, R * L.
        supervised: number of positions in the loss, over all K steps.
        step_seconds: time of a whole step: noise and reveal, loss, backward, optimizer.
        tokens_per_second: tokens / step_seconds.
        bare_seconds: time of the bare work, see `BareStep`.
        ratio: time of the step over that of the bare work, the median over rounds.
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
    **training_options: Any,
) -> Result:
    """Time steps of `MRPTrainer` on random tokens, and the bare work of the same sizes, in interleaved rounds.

    Args:
        model: a model with a head, on its device; the run trains the head.
        rows: number of rows R.
        sequence_length: number of tokens per row L, the first quarter of which is a prompt.
        unroll_steps: number of reveals K.
        repeats: number of timed rounds.
        training_options: further options of `MRPTrainingArguments`.

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
    """One training step in its three parts, each a call of the trainer's own methods on a fixed set of rows.

    Args:
        model: a model with a head.
        rows: number of rows R.
        sequence_length: number of tokens per row L.
        unroll_steps: number of reveals K.
        folder: folder for the trainer's output.
        options: further options of `MRPTrainingArguments`.

    Attributes:
        batch: batch of the collator, the same in every call.
        half: dtype of autocast, or None.
    """

    def __init__(
        self,
        model: MRPForDiffusionLM,
        rows: int,
        sequence_length: int,
        unroll_steps: int,
        folder: str,
        **options: Any,
    ):
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

    def collate(self) -> None:
        """Add the noise and draw the reveals."""
        self.batch = self.trainer.data_collator(self.rows)

    def loss_and_backward(self) -> None:
        """Run the forwards, the fused loss and the backward of the head."""
        count = self.trainer._get_num_items_in_batch([self.batch], self.trainer.args.device)
        self.trainer.training_step(self.trainer.model, dict(self.batch), num_items_in_batch=count)

    def optimize(self) -> None:
        """Clip the gradients, update the head and clear the gradients."""
        trainer = self.trainer
        torch.nn.utils.clip_grad_norm_(trainer.model.mrp_head.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


class BareStep:
    """The work that no implementation of a step can avoid, as plain transformer calls.

    The frozen backbone without gradients over the 2 + K streams [x_t | x_1 ... x_K | x_0]; forward and backward of
    the head over K states and, once, the clean stream; three matrix products with `lm_head` for every supervised
    position (teacher, difference, gradient). Attention is dense within each stream only: a step needs more.

    Args:
        model: a model with a head.
        batch: batch of the collator, for its sizes and its number of supervised positions.
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
    def backbone(self) -> None:
        """One forward of the backbone over all streams."""
        self.model.model(self.packed, attention_mask={"full_attention": None}, use_cache=False)

    def head(self) -> None:
        """Forward and backward of the head over the K states and the clean stream."""
        head, backbone = self.model.mrp_head, self.model.model
        positions = torch.arange(self.head_ids.shape[1], device=self.head_ids.device)[None]
        with self.autocast():
            embeddings = backbone.embed_tokens(self.head_ids)
            out = head(embeddings, self.hidden, None, backbone.rotary_emb(embeddings, positions))
        torch.autograd.grad(out.float().sum(), list(head.parameters()))

    @torch.no_grad()
    def logits(self) -> None:
        """Three matrix products with `lm_head` for every supervised position."""
        weight = self.model.lm_head.weight
        for rows in self.rows.split(self.chunk):
            logits = rows @ weight.T
            torch.mm(rows, weight.T, out=logits)
            torch.mm(logits, weight)


def random_rows(count: int, length: int, vocab_size: int) -> list[dict]:
    """Prepared rows (see data/rows.py) of random tokens, one sample each, whose first quarter is a prompt.

    Args:
        count: number of rows.
        length: number of tokens per row.
        vocab_size: tokens are drawn below this id.
    """
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
