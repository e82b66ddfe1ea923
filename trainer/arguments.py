"""Options of training: model, data, and the trainer's own on top of transformers' TrainingArguments; one flat YAML."""

from argparse import SUPPRESS
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from .data.rows import LONG_SAMPLES
from .losses.acceptance import DIVERGENCES
from .losses.linear_kl import BACKENDS
from .refused_options import LOWER_IS_BETTER, refuse_accelerator_options, refuse_unsupported

REVEALS = ("random", "confident")
HEAD_INITS = ("fresh", "backbone_layers")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def option(default: Any, help: str) -> Any:
    """A dataclass field with help text; a list or dict is copied for each instance."""
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class ModelArguments:
    """The backbone, and how the head on it is initialised."""

    base_model: str | None = option(
        None,
        "Folder or Hub id of an SDAR, SDAR-MRP or own checkpoint, or the name of an embedded one (words, code). "
        "Required.",
    )
    base_revision: str | None = option(None, "Revision of base_model on the Hub.")
    head: str | None = option(None, "Folder or Hub id of a head to start from, as this trainer saves it.")
    num_mrp_layers: int | None = option(
        None, "Number of layers of the head; default: those of the checkpoint's own head, or 3 where it has none."
    )
    head_init: str = option(
        "fresh",
        f"How the layers of a new head are initialised, one of {', '.join(HEAD_INITS)}: at random, or as copies of "
        "the backbone's last layers.",
    )
    mrp_residual: bool | None = option(
        None,
        "Whether the head predicts the change of the logits; false: the full next distribution (an ablation). "
        "Default: as the checkpoint's own head does, or true.",
    )
    lora_rank: int | None = option(
        None,
        "Train LoRA updates of this rank on the head's layers; needs head_init: backbone_layers, or the checkpoint's "
        "head.",
    )
    lora_alpha: float | None = option(
        None, "LoRA updates are scaled by lora_alpha / lora_rank; default: 2 * lora_rank."
    )
    lora_dropout: float = option(0.0, "Dropout on the input of the LoRA updates.")
    base_adapter: str | None = option(
        None, "Folder or Hub id of a LoRA adapter of the backbone; it is merged into the backbone first."
    )
    block_size: int | None = option(
        None, "Number of tokens per block, if the checkpoint's config does not state it or is wrong."
    )
    mask_token_id: int | None = option(None, "Id of the mask token, if the checkpoint's config does not state it.")
    backbone_dtype: str = option("auto", f"Dtype of the frozen backbone, one of {', '.join(DTYPES)}.")
    attn_implementation: str | None = option(
        None,
        "sdpa, eager or flex_attention; default: flex_attention on CUDA (with bf16 or fp16: from torch 2.11), else "
        "sdpa.",
    )

    def __post_init__(self):
        _one_of("head_init", self.head_init, HEAD_INITS)
        _one_of("backbone_dtype", self.backbone_dtype, DTYPES)
        _at_least("num_mrp_layers", self.num_mrp_layers, 1)
        _at_least("lora_rank", self.lora_rank, 1)
        if self.lora_rank is not None and self.head is not None:
            raise ValueError(
                "lora_rank cannot be combined with head: merge that head into base_model with mrp convert"
            )
        _at_least("block_size", self.block_size, 1)
        _at_least("mask_token_id", self.mask_token_id, 0)


@dataclass
class DataArguments:
    """Where the samples come from, and how they become rows."""

    train_data: str | None = option(
        None,
        "jsonl, json or parquet file, folder, or Hub data set with messages, conversations (from and value), prompt "
        "and completion, or text. Required.",
    )
    eval_data: str | None = option(
        None,
        "Held-out data, in the same forms; evaluated every eval_steps steps unless eval_strategy says otherwise.",
    )
    data_config: str | None = option(None, "Name of the configuration of the Hub data sets.")
    prompt_field: str | None = option(None, "Name of the field that holds the prompt; default: prompt.")
    answer_field: str | None = option(None, "Name of the field that holds the completion; default: completion.")
    train_split: str = option("train", "Split to train on.")
    eval_split: str = option("train", "Split of eval_data to evaluate on.")
    streaming: bool = option(False, "Read train_data while training instead of preparing it first; needs max_steps.")
    shuffle_buffer: int = option(1000, "Size of the buffer that a stream is shuffled in; 0 does not shuffle.")
    sequence_length: int = option(1024, "Number of tokens per row.")
    packing: bool = option(True, "Put several samples into one row.")
    long_samples: str = option(
        "split", f"What to do with samples longer than a row, one of {', '.join(LONG_SAMPLES)}."
    )
    append_eos: bool = option(True, "End texts and completions with the end-of-text token.")
    preprocessing_processes: int = option(1, "Number of processes that tokenize.")

    def __post_init__(self):
        _one_of("long_samples", self.long_samples, LONG_SAMPLES)
        if self.eval_data is not None and (self.eval_data, self.eval_split) == (self.train_data, self.train_split):
            raise ValueError(
                f"eval_data {self.eval_data} with eval_split {self.eval_split!r} is the training data: name held-out "
                "data or another split"
            )
        _at_least("sequence_length", self.sequence_length, 1)
        _at_least("shuffle_buffer", self.shuffle_buffer, 0)
        _at_least("preprocessing_processes", self.preprocessing_processes, 1)


@dataclass
class MRPTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments with other defaults, and the options of the corruption and the loss."""

    output_dir: str | None = option("mrp-head", "Folder for checkpoints and the trained head.")
    learning_rate: float = option(1e-3, "Peak learning rate.")
    lr_scheduler_type: str = option("cosine_with_min_lr", "Learning rate schedule.")
    lr_scheduler_kwargs: dict | str | None = option(
        None, 'Options of the schedule; default for cosine_with_min_lr: {"min_lr_rate": 0.1}.'
    )
    num_train_epochs: float = option(1.0, "Number of passes over the data.")
    logging_steps: float = option(10, "Number of steps between log lines.")
    per_device_eval_batch_size: int | None = option(
        None, "Number of rows per device in an evaluation; default: per_device_train_batch_size."
    )
    eval_steps: float | None = option(None, "Number of steps between evaluations of eval_data; default: save_steps.")
    resume_from_checkpoint: str | None = option(
        None,
        "Checkpoint folder to resume from; auto resumes the run in output_dir from its last whole checkpoint, if any.",
    )
    resume_with_changes: bool = option(
        False,
        "Allow a resumed run to change its length, its learning rate, schedule and weight decay, and what is logged, "
        "evaluated and saved. Data, seed, loss, noise and model must stay.",
    )
    overwrite_output_dir: bool = option(
        False, "Start a new run in an output_dir that holds another one: its checkpoints and its head are deleted."
    )
    logging_nan_inf_filter: bool = option(False, "Must stay false: a loss that is not finite is never hidden.")
    remove_unused_columns: bool = field(default=False, metadata={"help": SUPPRESS})  # the collator needs its columns
    # Recent releases of transformers call gradient checkpointing so. Declared here, older releases know the name too.
    activation_checkpointing: bool | None = field(
        default=None,
        metadata={
            "help": "Recompute the head's activations in the backward pass: less memory, slower steps.",
            "nargs": "?",
            "const": True,
        },
    )
    activation_checkpointing_kwargs: dict | str | None = option(None, "Options of activation_checkpointing.")

    muon_learning_rate: float | None = option(
        None, "Train the head's matrices with Muon at this peak rate, and the rest with AdamW; default: AdamW for all."
    )
    unroll_steps: int = option(3, "K: number of successive reveals, each followed by one step of the head.")
    reveal: str = option(
        "random",
        f"Which masked tokens a reveal shows, one of {', '.join(REVEALS)}: any, or those with the backbone's highest "
        "confidence (one more frozen forward).",
    )
    reveal_counts: list[int] = option(
        [1], "Number of tokens that a block reveals at a step; drawn at random from several numbers."
    )
    noise_eps: float = option(1e-3, "Lower bound of the masking probability.")
    noise_per_block: bool = option(False, "Draw one masking probability per block instead of one per sample.")
    divergence: str = option("kl", f"Loss at each masked position, one of {', '.join(DIVERGENCES)}.")
    choice_weight: float = option(
        0.0,
        "Weight of an additional term: the probability of the token, at the position, that the backbone reveals next.",
    )
    kl_temperature: float = option(1.0, "Temperature of both distributions in the loss.")
    kl_chunk_rows: str = option("auto", "Number of rows whose logits exist at one time in the loss, or auto.")
    kl_backend: str = option("auto", f"Implementation of the loss, one of {', '.join(BACKENDS)}.")
    skip_nonfinite_batches: bool = option(
        False,
        "Skip and count the steps whose loss or gradient is not finite; default: stop at the first one, which names "
        "its samples.",
    )
    decode_prompts: int = option(
        8, "Number of prompts that each evaluation decodes, to measure tokens per forward and acceptance."
    )
    decode_new_tokens: int = option(64, "Number of tokens decoded for each of these prompts.")
    head_metrics: bool = option(
        True, "Log the KL with and without the head, and the agreement per depth, at logging steps."
    )

    def __post_init__(self):
        refuse_unsupported(self, muon=self.muon_learning_rate is not None)
        self._fill_in()
        super().__post_init__()
        refuse_accelerator_options(self.accelerator_config)
        _above_zero("muon_learning_rate", self.muon_learning_rate)
        _at_least("save_total_limit", self.save_total_limit, 1)
        if self.max_grad_norm is not None and not 0 <= self.max_grad_norm < float("inf"):
            raise ValueError(f"max_grad_norm must be at least 0 (0: no clipping), got {self.max_grad_norm}")
        _at_least("unroll_steps", self.unroll_steps, 1)
        _at_least("decode_prompts", self.decode_prompts, 0)
        _at_least("decode_new_tokens", self.decode_new_tokens, 1)
        _one_of("reveal", self.reveal, REVEALS)
        self._check_checkpointing()
        if not self.reveal_counts:
            raise ValueError("reveal_counts must hold at least one number")
        for count in self.reveal_counts:
            _at_least("reveal_counts", count, 1)
        if not 0 < self.noise_eps < 1:
            raise ValueError(f"noise_eps must lie between 0 and 1, got {self.noise_eps}")
        self._check_loss()

    def _check_loss(self):
        """Check the options of the loss."""
        _one_of("divergence", self.divergence, DIVERGENCES)
        if not 0 <= self.choice_weight < float("inf"):
            raise ValueError(f"choice_weight must be at least 0, got {self.choice_weight}")
        for name, unused in (("kl_temperature", 1), ("choice_weight", 0)):
            if self.divergence != "kl" and getattr(self, name) != unused:
                raise ValueError(f"{name}={getattr(self, name)} needs divergence: kl, got {self.divergence}")
        _one_of("kl_backend", self.kl_backend, BACKENDS)
        _above_zero("kl_temperature", self.kl_temperature)
        if self.kl_chunk_rows != "auto":
            if not str(self.kl_chunk_rows).isdigit():
                raise ValueError(f"kl_chunk_rows must be auto or a whole number, got {self.kl_chunk_rows!r}")
            _at_least("kl_chunk_rows", int(self.kl_chunk_rows), 1)

    def _fill_in(self):
        """Set the defaults that depend on other options."""
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.save_steps
        if self.lr_scheduler_kwargs is None and self.lr_scheduler_type == "cosine_with_min_lr":
            self.lr_scheduler_kwargs = {"min_lr_rate": 0.1}
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = LOWER_IS_BETTER.fullmatch(self.metric_for_best_model) is None
        if self.per_device_eval_batch_size is None:
            self.per_device_eval_batch_size = self.per_device_train_batch_size
        # `gradient_checkpointing` is the older name of the same option. Give both names one value before transformers
        # looks at them: current releases warn when only the older name is set, and older ones read no other.
        if self.activation_checkpointing is None:
            self.activation_checkpointing = bool(self.gradient_checkpointing)
        if self.activation_checkpointing_kwargs is None:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        if self.activation_checkpointing and self.activation_checkpointing_kwargs is None:
            self.activation_checkpointing_kwargs = {"use_reentrant": False}
        self.gradient_checkpointing = self.activation_checkpointing
        self.gradient_checkpointing_kwargs = self.activation_checkpointing_kwargs
        if isinstance(self.reveal_counts, int):
            self.reveal_counts = [self.reveal_counts]

    def _check_checkpointing(self):
        # transformers parses JSON given on the command line; releases without the newer name parse the older one only.
        self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        options = self.activation_checkpointing_kwargs
        if options and options.setdefault("use_reentrant", False):
            raise ValueError(
                "use_reentrant must be false in activation_checkpointing_kwargs (gradient_checkpointing_kwargs): "
                "reentrant checkpointing loses gradients where the steps of a chain share the clean stream"
            )

    @property
    def noise_seed(self) -> int:
        """Seed of the noise: `data_seed`, or `seed` when that is not set."""
        return self.seed if self.data_seed is None else self.data_seed


def _one_of(name: str, value, allowed: tuple):
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _above_zero(name: str, value):
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")


def _at_least(name: str, value, least: int):
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
