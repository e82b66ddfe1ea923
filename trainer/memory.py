"""An estimate of the memory of a training step, before the first one runs."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling_mrp import MRPForDiffusionLM

from .losses.linear_kl import chunk_bytes

OPTIMIZER_BYTES = 12  # per parameter of the head: a float32 gradient and two float32 Adam moments
# Activations of one decoder layer, counted in hidden vectors (H) or feed-forward vectors (F) per token. A forward
# without gradients holds at its peak the layer's input, its norm, q, k, v and the attention output (6 H), or gate, up
# and product (3 F). A backward pass needs all of them at once, and those of both norms and residuals.
FORWARD_H, FORWARD_F = 6, 3
BACKWARD_H, BACKWARD_F = 14, 4
STEP_H = 8  # hidden vectors per token of a head step outside its layers: both norms, concatenation, residual
LOSS_BUFFERS = 6  # chunks of logits alive at once, in the most demanding of objectives and head metrics


@dataclass
class MemoryEstimate:
    """Bytes on one device.

    Attributes:
        weights: backbone, embeddings and head.
        optimizer: gradients and optimizer states of the head.
        activations: the frozen forward over all streams, or the unrolled head with its backward pass, whichever needs
            more.
        loss: hidden states of the supervised rows, their gradients, and chunks of logits.
    """

    weights: int
    optimizer: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return self.weights + self.optimizer + self.activations + self.loss

    def __str__(self) -> str:
        parts = {"weights": self.weights, "optimizer": self.optimizer, "activations": self.activations}
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in (parts | {"loss": self.loss}).items())
        return f"about {_gib(self.total)} per device ({listed})"


def estimate_memory(
    model: MRPForDiffusionLM, rows: int, length: int, steps: int, checkpointing: bool = False, shards: int = 1
) -> MemoryEstimate:
    """Estimate the memory of one training step.

    Args:
        model: the model, with a head.
        rows: number of rows R per device.
        length: tokens per row L.
        steps: number of reveals K.
        checkpointing: whether the head's layers recompute their activations in the backward pass.
        shards: number of devices that FSDP2 shards the model over.
    """
    config = model.config
    h, f, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    item = model.lm_head.weight.element_size()
    head_parameters = sum(p.numel() for p in model.mrp_head.parameters())
    head_item = model.mrp_head.eh_proj.weight.element_size()
    packed = rows * length * (2 + steps)  # tokens of the frozen forward: clean stream, x_t, x_1..x_K
    forward = packed * (FORWARD_H * h + FORWARD_F * f) * item
    head_tokens = rows * length * (1 + steps)  # tokens of the head: clean stream, x_1..x_K
    layer = (BACKWARD_H * h + BACKWARD_F * f) * head_item  # bytes per token and layer
    if checkpointing:
        head = (STEP_H + config.num_mrp_layers) * head_tokens * h * head_item + 2 * rows * length * layer
    else:
        head = config.num_mrp_layers * head_tokens * layer
    if config._attn_implementation != "flex_attention":  # dense masks, one byte per pair of tokens
        forward += rows * (length * (2 + steps)) ** 2
        head += rows * ((length * 2) ** 2 + length * length * 2)
    supervised = rows * length * steps  # an upper bound
    logits = LOSS_BUFFERS * max(chunk_bytes(model.lm_head.weight), 4 * vocabulary)
    return MemoryEstimate(
        weights=_bytes(model.parameters()) // shards + (_gathered_bytes(model) if shards > 1 else 0),
        optimizer=OPTIMIZER_BYTES * head_parameters // shards,
        activations=packed * h * item + max(forward, head),
        loss=2 * supervised * h * (head_item + item) + logits,
    )


def _gathered_bytes(model: MRPForDiffusionLM) -> int:
    """Return the bytes of sharded weights that are whole at one time: embeddings, the current layer and the next."""
    embeddings = {id(p): p for p in (model.lm_head.weight, model.get_input_embeddings().weight)}
    layers = (*model.model.layers, *model.mrp_head.layers)
    return _bytes(embeddings.values()) + 2 * max(_bytes(layer.parameters()) for layer in layers)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def advice(estimate: MemoryEstimate, available: int) -> str | None:
    """Say what to change if a step does not fit into `available` bytes. Returns None if it fits."""
    if estimate.total <= available:
        return None
    if estimate.weights + estimate.optimizer > available:
        change = "shard the backbone over several devices with FSDP, or load it with backbone_dtype: bfloat16"
    elif estimate.activations > estimate.loss:
        change = (
            "lower per_device_train_batch_size (and raise gradient_accumulation_steps), sequence_length or "
            "unroll_steps, or set activation_checkpointing: true"
        )
    else:
        change = "set kl_chunk_rows to a small number"
    return f"a step needs {estimate}, but only {_gib(available)} are free: {change}"


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of a CUDA device that are free or already reserved by this process; None for other devices."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
