"""How much memory a training step takes, before it is taken."""

from dataclasses import dataclass

import torch

from .losses.linear_kl import chunk_bytes

OPTIMIZER_BYTES = 12  # float32 gradient and two Adam moments for each parameter of the head
# Activations of one decoder layer, in units of one hidden vector (h) or one feed-forward vector (f) per token:
# forward alone keeps the layer's input, its norm, q, k, v and the attention output (6 h) or gate, up and product
# (3 f); a backward pass needs all of them, and those of both norms and residuals, at once.
FORWARD_H, FORWARD_F = 6, 3
BACKWARD_H, BACKWARD_F = 14, 4
STEP_H = 8  # what a head step keeps beside its layers: both norms, their concatenation, the residual
LOSS_BUFFERS = 6  # of a chunk of logits, at one time: of the objectives and of the head's metrics; the KL takes fewer


@dataclass
class MemoryEstimate:
    """Bytes on one device.

    Attributes:
        weights: backbone, embeddings and head.
        optimizer: gradients and optimizer states of the head.
        activations: of the packed frozen forward, or of the head unrolled with its backward pass, whichever is more.
        loss: hidden states of the supervised rows, their gradients, and chunks of logits.
    """

    weights: int
    optimizer: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.activations + self.loss

    def __str__(self) -> str:
        parts = {"weights": self.weights, "optimizer": self.optimizer, "activations": self.activations}
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in (parts | {"loss": self.loss}).items())
        return f"about {_gib(self.total)} per device ({listed})"


def estimate_memory(
    model, rows: int, length: int, steps: int, checkpointing: bool = False, shards: int = 1
) -> MemoryEstimate:
    """Memory of one training step of R `rows` of L `length` tokens with K `steps`.

    Args:
        model: an `MRPForDiffusionLM` with a head.
        checkpointing: the head recomputes its activations layer by layer in the backward pass.
        shards: devices that FSDP2 shards the model over.
    """
    config = model.config
    h, f, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    item = model.lm_head.weight.element_size()
    head_parameters = sum(p.numel() for p in model.mrp_head.parameters())
    head_item = model.mrp_head.eh_proj.weight.element_size()
    packed = rows * length * (2 + steps)
    forward = packed * (FORWARD_H * h + FORWARD_F * f) * item
    head_tokens = rows * length * (1 + steps)  # the clean stream once
    layer = (BACKWARD_H * h + BACKWARD_F * f) * head_item  # of one token
    if checkpointing:
        head = (STEP_H + config.num_mrp_layers) * head_tokens * h * head_item + 2 * rows * length * layer
    else:
        head = config.num_mrp_layers * head_tokens * layer
    if config._attn_implementation != "flex_attention":  # a mask of one byte for each pair of tokens
        forward += rows * (length * (2 + steps)) ** 2
        head += rows * ((length * 2) ** 2 + length * length * 2)
    supervised = rows * length * steps  # at most
    logits = LOSS_BUFFERS * max(chunk_bytes(model.lm_head.weight), 4 * vocabulary)
    return MemoryEstimate(
        weights=_bytes(model.parameters()) // shards + (_gathered(model) if shards > 1 else 0),
        optimizer=OPTIMIZER_BYTES * head_parameters // shards,
        activations=packed * h * item + max(forward, head),
        loss=2 * supervised * h * (head_item + item) + logits,
    )


def _gathered(model) -> int:
    """Bytes that stand whole at one time where the weights are sharded: embeddings, a layer, and the next one."""
    embeddings = {id(p): p for p in (model.lm_head.weight, model.get_input_embeddings().weight)}
    layers = (*model.model.layers, *model.mrp_head.layers)
    return _bytes(embeddings.values()) + 2 * max(_bytes(layer.parameters()) for layer in layers)


def _bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def advice(estimate: MemoryEstimate, available: int) -> str | None:
    """What to change when a step does not fit into `available` bytes; None when it does."""
    if estimate.total <= available:
        return None
    if estimate.weights + estimate.optimizer > available:
        change = "shard the backbone over several devices with FSDP, or load it with backbone_dtype: bfloat16"
    elif estimate.activations > estimate.loss:
        change = (
            "lower per_device_train_batch_size (and raise gradient_accumulation_steps), sequence_length or "
            "unroll_steps, or set gradient_checkpointing: true"
        )
    else:
        change = "set kl_chunk_rows to a small number"
    return f"a step needs {estimate}, but {_gib(available)} are free: {change}"


def free_memory(device: torch.device) -> int | None:
    """Bytes free on a CUDA device together with those its tensors hold already; None elsewhere."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
