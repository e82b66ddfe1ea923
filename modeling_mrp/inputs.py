"""Validating the inputs of `generate` and of `forward`, and removing the padding of prompts."""

import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from transformers import PretrainedConfig


def check_inputs(ids: torch.Tensor, mask: torch.Tensor | None, config: PretrainedConfig) -> None:
    """Raise unless prompts can be decoded.

    Args:
        ids: token ids of the prompts, [R, P].
        mask: attention mask of the prompts, [R, P], or None.
        config: the model's config.

    Raises:
        ValueError: for ids or a mask that cannot be used; the message names the argument and what is expected.
    """
    _check_ids(ids)
    if mask is not None:
        check_mask(mask, ids)
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    outside = valid & ((ids < 0) | (ids >= config.vocab_size))
    if outside.any():
        raise ValueError(f"input_ids holds {int(ids[outside][0])}, outside the vocabulary of {config.vocab_size} ids")
    if (valid & (ids == config.mask_token_id)).any():
        raise ValueError(f"input_ids holds the mask token {config.mask_token_id}: a prompt must not hold any")
    longest, limit = int(valid.sum(1).max()), config.max_position_embeddings
    if longest > limit:
        raise ValueError(f"input_ids has a prompt of {longest} tokens, more than max_position_embeddings={limit}")


_warned: WeakSet[torch.nn.Module] = WeakSet()  # models whose user knows about the positions


def warn_beyond_positions(model: torch.nn.Module, lengths: torch.Tensor, max_new_tokens: int) -> None:
    """Warn, once per model, when prompts and new tokens may take more positions than the backbone was trained with.

    Args:
        model: the model.
        lengths: number of tokens per prompt, [R].
        max_new_tokens: the most new tokens per row.
    """
    longest, limit = int(lengths.max()) + max_new_tokens, model.config.max_position_embeddings
    if longest > limit and model not in _warned:
        _warned.add(model)
        warnings.warn(
            f"a prompt and max_new_tokens={max_new_tokens} may take {longest} positions, more than "
            f"max_position_embeddings={limit}: text beyond them may be poor",
            stacklevel=2,
        )


def _check_ids(ids):
    if ids is None:
        raise ValueError("input_ids is missing: pass the prompt's token ids, [rows, tokens]")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        got = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ValueError(f"input_ids must be a tensor of shape [rows, tokens], got {got}")
    if ids.dtype not in (torch.long, torch.int):
        raise ValueError(f"input_ids must hold integers (torch.long), got {ids.dtype}")
    if 0 in ids.shape:
        raise ValueError(f"input_ids must hold at least one row and one token, got shape {tuple(ids.shape)}")


def check_mask(mask: torch.Tensor, ids: torch.Tensor) -> None:
    """Raise unless each row of an attention mask is one run of ones with padding on at most one side.

    Args:
        mask: attention mask, [R, P].
        ids: token ids that it belongs to, [R, P].

    Raises:
        ValueError: for a mask of another shape, with an empty row, or with a row that has holes.
    """
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        got = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be a tensor of the same shape as input_ids {tuple(ids.shape)}, got {got}"
        )
    valid = mask.bool()
    empty = ~valid.any(1)
    if empty.any():
        raise ValueError(
            f"attention_mask masks every token of row {int(empty.nonzero()[0])}: a prompt needs at least one token"
        )
    if has_holes(valid) or (~valid[:, 0] & ~valid[:, -1]).any():
        raise ValueError(
            "attention_mask has holes: the ones of each row must be contiguous, with padding on one side "
            "(without an attention_mask, every pad token in input_ids counts as padding)"
        )


def check_forward_inputs(
    ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    revealed_ids: torch.Tensor | None,
    clean_ids: torch.Tensor | None,
    segment_ids: torch.Tensor | None,
    teacher: bool,
) -> None:
    """Raise unless the inputs of `MRPForDiffusionLM.forward`, which explains them, fit one another.

    Raises:
        ValueError: for an input that does not fit; the message names it and what is expected.
    """
    if ids.dim() != 2:
        raise ValueError(f"input_ids must be [rows, length], got shape {tuple(ids.shape)}")
    same = {"attention_mask": attention_mask, "clean_ids": clean_ids, "segment_ids": segment_ids}
    for name, tensor in same.items():
        if tensor is not None and tensor.shape != ids.shape:
            raise ValueError(f"{name} must have the shape of input_ids {tuple(ids.shape)}, got {tuple(tensor.shape)}")
    if position_ids is None and attention_mask is not None and has_holes(attention_mask):
        raise ValueError("attention_mask has holes: the ones of each row must be contiguous, or pass position_ids")
    if position_ids is not None and position_ids.shape[-1] != ids.shape[1]:
        raise ValueError(f"position_ids must have {ids.shape[1]} columns, got shape {tuple(position_ids.shape)}")
    if teacher and revealed_ids is None:
        raise ValueError("teacher=True runs the backbone on revealed_ids: pass them")
    if revealed_ids is None:
        return
    if revealed_ids.dim() != 3 or revealed_ids.shape[::2] != ids.shape or revealed_ids.shape[1] == 0:
        expected = (ids.shape[0], "K", ids.shape[1])
        raise ValueError(f"revealed_ids must be [rows, K, length] = {expected}, got {tuple(revealed_ids.shape)}")


def check_unsupported(arguments: Mapping[str, Any]) -> None:
    """Raise a TypeError that names the first argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise TypeError(f"forward() does not take {name}: omit it, or pass None")


def check_vocabulary(size: int, config: PretrainedConfig) -> None:
    """Raise unless a vocabulary holds the special ids of a config.

    Args:
        size: number of embeddings.
        config: the model's config.

    Raises:
        ValueError: for a mask, padding or end-of-text id without an embedding.
    """
    for name in ("mask_token_id", "pad_token_id", "eos_token_id"):
        value = getattr(config, name)
        for index in value if isinstance(value, (list, tuple)) else [value]:
            if index is not None and index >= size:
                raise ValueError(
                    f"{size} token embeddings leave none for {name}={index}: keep at least {index + 1}, or change "
                    f"{name} in the config first"
                )


def has_holes(mask: torch.Tensor) -> bool:
    """Return whether any row of a mask [R, P] has zeros between its ones."""
    valid = mask.bool()
    starts = (valid[:, 1:] & ~valid[:, :-1]).sum(1) + valid[:, 0].long()
    return bool((starts > 1).any())


def left_align(ids: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the tokens of every row to the left.

    Args:
        ids: token ids, [R, P].
        valid: True for tokens and False for padding, [R, P]; one run of True per row.

    Returns:
        The token ids with all padding on the right [R, P], and the number of tokens per row [R].
    """
    lengths = valid.sum(1)
    index = torch.arange(ids.shape[1], device=ids.device) + valid.long().argmax(1)[:, None]
    return ids.gather(1, index.clamp(max=ids.shape[1] - 1)), lengths


def right_align(ids: torch.Tensor, lengths: torch.Tensor, pad_token_id: int) -> torch.Tensor:
    """Move the tokens of every row to the right: the reverse of `left_align`, with all padding on the left, [R, P].

    Args:
        ids: token ids with all padding on the right, [R, P].
        lengths: number of tokens per row, [R].
        pad_token_id: id of the padding.
    """
    index = torch.arange(ids.shape[1], device=ids.device) - (ids.shape[1] - lengths[:, None])
    return torch.where(index >= 0, ids.gather(1, index.clamp(min=0)), pad_token_id)
