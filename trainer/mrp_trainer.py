"""MRPTrainer: transformers' Trainer for the residual head alone, over a frozen backbone."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import ProgressCallback, TrainerCallback

from .arguments import MRPTrainingArguments
from .checkpoints.head_files import backbone_note
from .checkpoints.lora import without_peft
from .checkpoints.resume import check_resumable, last_checkpoint, run_settings
from .checkpoints.sharded import gathered, shard_optimizer_state
from .console import HeadProgress
from .data.collator import MRPCollator
from .data.corruption import loss_weights, order_reveals, revealed_states
from .data.rows import is_streamed, length_of, prepare_dataset
from .data.streams import EndlessStream
from .evaluation.acceptance import acceptance_range, decode_figures, prompts_of
from .evaluation.head_metrics import HeadMetrics, measure_head
from .head_checkpoints import HeadCheckpoints
from .losses.acceptance import chosen_position_loss, chosen_positions, linear_total_variation
from .losses.linear_kl import Choice, auto_chunk_rows, linear_kl, linear_kl_and_choice
from .muon import MuonWithAdamW

MODEL_INPUTS = ("input_ids", "revealed_ids", "clean_ids", "segment_ids")
NO_LOGITS = torch.empty(0, dtype=torch.long)


class MRPTrainer(HeadCheckpoints):
    """Trains `model.mrp_head` so that h_A + h_C gives the logits the backbone has after the reveal.

    Args:
        model: an `MRPForDiffusionLM` with a head, or one under `lora_head`. Its backbone is frozen and stays in eval
            mode; a backbone in half precision keeps its dtype while the head is trained in float32.
        args: `MRPTrainingArguments`.
        train_dataset, eval_dataset: rows of `prepare_dataset`, or raw text, chat or prompt-completion data together
            with `processing_class`, which are then prepared with `sequence_length` tokens a row.
        processing_class: the tokenizer.
        data_collator: an `MRPCollator`; default: one made from `args` and the model's config.
        sequence_length: tokens per row; None: rows as long as the longest of a batch needs (raw data: 1024).

    The rest is as in `Trainer`. Checkpoints hold the head, the optimizer and the state of the training, never the
    backbone, and are refused by another backbone.

    Raises:
        ValueError: a model without a head or with a backbone that is not frozen.
    """

    def __init__(
        self,
        model=None,
        args: MRPTrainingArguments | None = None,
        data_collator=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        sequence_length: int | None = None,
        callbacks: list | None = None,
        **kwargs,
    ):
        args = MRPTrainingArguments() if args is None else args
        args._n_gpu = min(1, args.n_gpu)  # one device per process: torchrun for more, never DataParallel
        _check_model(model)
        model.mrp_head.float()
        # transformers sets it on configs that come from the Hub only; head checkpoints state it.
        model.config._commit_hash = vars(model.config).get("_commit_hash")
        train_dataset, eval_dataset = (
            _prepared(dataset, processing_class, sequence_length) for dataset in (train_dataset, eval_dataset)
        )
        if data_collator is None:
            data_collator = collator_for(model, args, sequence_length)
        noise = [_EpochOfNoise(data_collator)]
        if is_streamed(train_dataset):
            train_dataset, noise = EndlessStream(train_dataset), []
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[*noise, *(callbacks or [])],
            **kwargs,
        )
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(HeadProgress)
        self.model_accepts_loss_kwargs = True  # the loss is already divided by that of the whole optimizer step
        self._metrics = self._no_metrics()
        self._measure_always = False
        self._note = backbone_note(self.model)  # while it is whole
        if self.is_fsdp_enabled:
            _check_fsdp(self.accelerator.state.fsdp_plugin)

    def create_optimizer(self, model=None):
        if self.optimizer is not None:
            return self.optimizer
        args = self.args
        if args.muon_learning_rate is None:
            parts = [super().create_optimizer(model)]
        else:
            self.optimizer = MuonWithAdamW(
                self.model, args.muon_learning_rate, args.learning_rate, weight_decay=args.weight_decay
            )
            parts = self.optimizer.parts
        for part in parts:
            part.register_load_state_dict_pre_hook(shard_optimizer_state)
        return self.optimizer

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """As in transformers; then the model's config notes what held-out prompts accept (`trained_acceptance`).

        Args:
            resume_from_checkpoint: a checkpoint, or True for the last complete one of `output_dir`.

        Raises:
            ValueError: a checkpoint that is incomplete, of another backbone, or of a run with other settings.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir) or True  # transformers names the folder
        if isinstance(resume_from_checkpoint, str | Path):
            check_resumable(resume_from_checkpoint, run_settings(self.args, length_of(self.train_dataset)))
        model = self.accelerator.unwrap_model(self.model)
        model.config.trained_acceptance = None
        output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        prompts = self._held_out_prompts()
        if prompts:
            model.eval()
            drafts, new_tokens = self.args.unroll_steps + 1, self.args.decode_new_tokens
            model.config.trained_acceptance = acceptance_range(model, prompts, drafts, new_tokens)
            model.train()
        return output

    def _run_epoch(self, *args, **kwargs):
        """Transformers counts after each step, and would take one more than all of a finished run."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    # --- the loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Mean over the K steps of sum(loss * weight) / normaliser, on the positions still masked at each step.

        Args:
            model: the model, wrapped or not.
            inputs: a batch of `MRPCollator`.
            return_outputs: also return the model's output.
            num_items_in_batch: [K], the normaliser of the whole optimizer step over all ranks; None: of this batch.

        Returns:
            The loss, a scalar with a gradient even where nothing is supervised.
        """
        if num_items_in_batch is None:
            num_items_in_batch, ranks = _floored(_normaliser_and_rows(inputs)), 1
        else:
            ranks = self.accelerator.num_processes  # they are averaged, and each holds its share of the sum
        sums, out = self._loss_sums(model, inputs)
        loss = (sums / num_items_in_batch.to(sums.device)).mean() * ranks
        return (loss, out) if return_outputs else loss

    def _loss_sums(self, model, inputs: dict):
        """sum(loss * weight) of each of the K steps, [K], and the model's output."""
        lm_head = self._lm_head()
        if self.args.reveal == "confident":
            inputs = self._reveal_confident(inputs, lm_head)
        with self.accelerator.autocast():  # accelerate wraps the model in it, but not under FSDP2
            out = model(**{name: inputs[name] for name in MODEL_INPUTS}, logits_to_keep=NO_LOGITS, teacher=True)
        weight = inputs["loss_weight"]  # [R, K, L]
        supervised = (weight > 0).nonzero(as_tuple=True)  # once: it waits for the device
        losses = self._losses(out, supervised, inputs, lm_head) * weight[supervised]
        if self._wants_metrics():
            self._metrics += measure_head(
                out.last_hidden_state,
                out.corrected_hidden_states,
                out.revealed_hidden_states,
                lm_head,
                weight,
                inputs["block_ids"],
                self.model.config.mask_token_id,
            )
        # not by index_add, whose order of adding is another every time on a GPU
        return torch.zeros_like(weight).index_put(supervised, losses.to(weight.dtype)).sum((0, 2)), out

    def _losses(self, out, supervised: tuple[Tensor, ...], inputs: dict, lm_head: Tensor) -> Tensor:
        """The objective at each of N supervised positions, [N]; `supervised` holds row, step and position of each."""
        hidden = out.corrected_hidden_states[supervised], out.revealed_hidden_states[supervised], lm_head
        losses, choice = self._divergence(*hidden)
        if choice is not None:
            row, step, position = supervised
            block_ids = inputs["block_ids"]
            block = (row * inputs["loss_weight"].shape[1] + step) * (block_ids.max() + 1) + block_ids[row, position]
            chosen = chosen_positions(block, choice.score)
            losses = losses + self.args.choice_weight * chosen_position_loss(choice.log_prob, block, chosen)
        return losses

    def _divergence(self, *hidden: Tensor) -> tuple[Tensor, Choice | None]:
        """The divergence at each position, [N], and the teacher's choice where it has a weight."""
        args = self.args
        if args.divergence == "total_variation":
            return linear_total_variation(*hidden), None
        options = {
            "temperature": args.kl_temperature,
            "chunk_rows": self._chunk_rows(),
            "backend": args.kl_backend,
        }
        if args.choice_weight:
            return linear_kl_and_choice(*hidden, self.model.config.mask_token_id, **options)
        return linear_kl(*hidden, **options), None

    def _get_num_items_in_batch(self, batch_samples: list[dict], device) -> Tensor | None:
        """The normaliser [K] of one optimizer step: all its batches, all ranks."""
        if not batch_samples:
            return None
        self._leave_out_repeats(batch_samples[-1], length_of(self.train_dataset), self.args.train_batch_size)
        counts = sum(_normaliser_and_rows(batch) for batch in batch_samples).to(device)
        return _floored(self.accelerator.reduce(counts, reduction="sum"))

    def _leave_out_repeats(self, batch: dict, rows: int | None, batch_size: int):
        """Where the last batch of a pass over `rows` is not full, ranks fill it with rows that others have seen."""
        over = 0 if rows is None or self.args.dataloader_drop_last else rows % (batch_size * self.args.world_size)
        if over and self.args.world_size > 1 and self.accelerator.gradient_state.end_of_dataloader:
            own = max(0, over - batch_size * self.args.process_index)
            for name in ("reveal_step", "loss_weight", "normaliser"):
                batch[name][own:] = 0

    @torch.no_grad()
    def _reveal_confident(self, inputs: dict, lm_head: Tensor) -> dict:
        """Reveal as many tokens as the batch says, but those that the backbone is surest of on x_t."""
        model = self.accelerator.unwrap_model(self.model)
        masked = inputs["reveal_step"] > 0
        hidden = model(
            inputs["input_ids"],
            clean_ids=inputs["clean_ids"],
            segment_ids=inputs["segment_ids"],
            logits_to_keep=NO_LOGITS,
        ).last_hidden_state[masked]
        mask_token_id = model.config.mask_token_id
        scores = []
        for rows in hidden.split(auto_chunk_rows(len(hidden), lm_head, torch.float32)):
            logits = (rows @ lm_head.T).float()
            logits[:, mask_token_id] = -torch.inf
            scores.append(logits.amax(-1) - logits.logsumexp(-1))
        row, position = masked.nonzero(as_tuple=True)
        block = row * (inputs["block_ids"].max() + 1) + inputs["block_ids"][row, position]
        reveal_step = inputs["reveal_step"].clone()
        if scores:
            reveal_step[masked] = order_reveals(reveal_step[masked], block, torch.cat(scores))
        steps = self.args.unroll_steps
        _, states = revealed_states(inputs["clean_ids"], reveal_step, steps, mask_token_id)
        weight = loss_weights(reveal_step, inputs["p_mask"], steps)
        return {**inputs, "reveal_step": reveal_step, "revealed_ids": states, "loss_weight": weight}

    def _lm_head(self) -> Tensor:
        return gathered(self.accelerator.unwrap_model(self.model).lm_head.weight)

    def _chunk_rows(self) -> int | str:
        return "auto" if self.args.kl_chunk_rows == "auto" else int(self.args.kl_chunk_rows)

    # --- figures

    def _no_metrics(self) -> HeadMetrics:
        return HeadMetrics.zeros(self.args.unroll_steps, self.args.device)

    def _wants_metrics(self) -> bool:
        """In an evaluation, and in the training step whose end is logged."""
        if not self.model.training:
            return self._measure_always
        every = self.state.logging_steps
        return self.args.head_metrics and bool(every) and (self.state.global_step + 1) % every == 0

    def _take_metrics(self) -> dict[str, float]:
        sums = self.accelerator.reduce(self._metrics.stacked(), reduction="sum")
        self._metrics = self._no_metrics()
        return HeadMetrics(*sums).summary()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.args.head_metrics:
            logs.update(self._take_metrics())
        super().log(logs, start_time)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss alone: no logits exist that could be returned."""
        inputs = self._prepare_inputs(inputs)
        self._leave_out_repeats(inputs, self._evaluated_rows, self.args.eval_batch_size)
        counts = _normaliser_and_rows(inputs)
        with torch.no_grad():
            sums, _ = self._loss_sums(model, inputs)
        self._evaluated += torch.cat([sums[None].to(counts), counts])
        return (sums / _floored(counts)).mean(), None, None

    def evaluation_loop(self, dataloader, *args, metric_key_prefix: str = "eval", **kwargs):
        training_metrics, self._metrics = self._metrics, self._no_metrics()
        self._measure_always = True
        self._evaluated_rows = length_of(dataloader.dataset)
        self._evaluated = torch.zeros(3, self.args.unroll_steps, device=self.args.device)
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        self._measure_always = False
        # the mean over the whole set, however it was cut into batches
        sums, *counts = self.accelerator.reduce(self._evaluated, reduction="sum")
        loss = (sums / _floored(torch.stack(counts))).mean().item()
        figures = {"loss": loss} | self._take_metrics() | self._decode_some()
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        self._metrics = training_metrics
        return output

    def _decode_some(self) -> dict[str, float]:
        """Decode some held-out prompts with the head as it is, K head steps deep."""
        args, model = self.args, self.accelerator.unwrap_model(self.model)
        prompts = self._held_out_prompts()
        return decode_figures(model, prompts, args.unroll_steps + 1, args.decode_new_tokens) if prompts else {}

    def _held_out_prompts(self) -> list[list[int]]:
        rows = self.eval_dataset
        if isinstance(rows, dict):
            rows = next(iter(rows.values()))
        block_size = self.model.config.block_size
        return [] if rows is None else prompts_of(rows, self.args.decode_prompts, block_size)

    def get_eval_dataloader(self, eval_dataset=None):
        """Evaluations see the same noise every time."""
        with self._collator(replace(self.data_collator, _epoch=torch.zeros(1, dtype=torch.long))):
            return super().get_eval_dataloader(eval_dataset)

    @contextmanager
    def _collator(self, collator):
        usual, self.data_collator = self.data_collator, collator
        try:
            yield
        finally:
            self.data_collator = usual


class _EpochOfNoise(TrainerCallback):
    """Tells the collator which epoch it is."""

    def __init__(self, collator: MRPCollator):
        self.collator = collator

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.collator.set_epoch(int(state.epoch or 0))


def _normaliser_and_rows(batch: dict) -> Tensor:
    """[2, K]: the sum of the normalisers, and how many positions are supervised."""
    return torch.stack([batch["normaliser"].sum(0), (batch["loss_weight"] > 0).sum((0, 2)).float()])


def _floored(counts: Tensor) -> Tensor:
    """The normaliser [K], but at least the number of supervised positions, and 1.

    By chance a small batch may hold so many early reveals at a low p that its normaliser is near zero or below.
    """
    return counts.amax(0).clamp(min=1)


def collator_for(model, args: MRPTrainingArguments, sequence_length: int | None = None) -> MRPCollator:
    """The collator that these arguments describe for this model."""
    config = model.config
    return MRPCollator(
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        pad_token_id=config.pad_token_id or 0,
        steps=args.unroll_steps,
        sequence_length=sequence_length,
        seed=args.noise_seed,
        reveal_counts=tuple(args.reveal_counts),
        noise_eps=args.noise_eps,
        noise_per_block=args.noise_per_block,
    )


def _check_model(model):
    if model is None:
        raise ValueError("model must be an MRPForDiffusionLM with a head, got None")
    if model.config.num_mrp_layers == 0:
        raise ValueError("the model has no head to train: load it with from_backbone(..., num_mrp_layers=3)")
    trained = [name for name, p in without_peft(model).named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError(
            "nothing of the model trains: load a head's adapter with is_trainable=True, and a backbone's with "
            "apply_backbone_adapter"
        )
    thawed = [name for name in trained if not name.startswith("mrp_head.")]
    if thawed:
        raise ValueError(f"only the head trains, but {thawed[0]} requires a gradient: call model.freeze_backbone()")


def _check_fsdp(plugin):
    if plugin.fsdp_version != 2:
        raise ValueError(f"fsdp_version must be 2, got {plugin.fsdp_version}: see accelerate-fsdp2.yaml")
    if plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading must be false: every process reads the backbone to tell which it is"
        )
    # Otherwise bf16 would also round gradients and the model's output, whose small differences are the loss.
    plugin.mixed_precision_policy = MixedPrecisionPolicy()


def _prepared(dataset, tokenizer, sequence_length: int | None):
    if isinstance(dataset, dict):
        return {name: _prepared(part, tokenizer, sequence_length) for name, part in dataset.items()}
    if isinstance(dataset, Dataset | IterableDataset):
        return prepare_dataset(dataset, tokenizer, sequence_length=sequence_length)
    return dataset
