"""The prompts of a decoding call: checked at the boundary, padding removed."""

import torch


def check_inputs(ids, mask, config):
    """Refuse prompts that decoding cannot take.

    Raises:
        ValueError: naming the argument, what is wrong, and what is expected.
    """
    _check_ids(ids)
    if mask is not None:
        check_mask(mask, ids)
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    outside = valid & ((ids < 0) | (ids >= config.vocab_size))
    if outside.any():
        raise ValueError(f"input_ids holds {int(ids[outside][0])}, outside the vocabulary of {config.vocab_size} ids")
    if (valid & (ids == config.mask_token_id)).any():
        raise ValueError(f"input_ids holds the mask token {config.mask_token_id}: a prompt must be all revealed")
    longest, limit = int(valid.sum(1).max()), config.max_position_embeddings
    if longest > limit:
        raise ValueError(f"input_ids has a prompt of {longest} tokens, more than max_position_embeddings={limit}")


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


def check_mask(mask, ids):
    """Refuse an attention mask [R, P] whose rows are not one run of ones, with padding on one side.

    Raises:
        ValueError: saying what is wrong.
    """
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        got = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be a tensor of the shape of input_ids {tuple(ids.shape)}, got {got}")
    valid = mask.bool()
    empty = ~valid.any(1)
    if empty.any():
        raise ValueError(
            f"attention_mask leaves no token in row {int(empty.nonzero()[0])}: a prompt needs at least one"
        )
    if has_holes(valid) or (~valid[:, 0] & ~valid[:, -1]).any():
        raise ValueError(
            "attention_mask has holes: the ones of each row must be contiguous, with padding on one side "
            "(without an attention_mask, every pad token in input_ids is taken for padding)"
        )


def has_holes(mask: torch.Tensor) -> bool:
    """Whether a row of a mask [R, P] has zeros between its ones."""
    valid = mask.bool()
    starts = (valid[:, 1:] & ~valid[:, :-1]).sum(1) + valid[:, 0].long()
    return bool((starts > 1).any())


def left_align(ids: torch.Tensor, valid: torch.Tensor):
    """Prompts [R, P] without padding on the left, and their lengths [R]."""
    lengths = valid.sum(1)
    index = torch.arange(ids.shape[1], device=ids.device) + valid.long().argmax(1)[:, None]
    return ids.gather(1, index.clamp(max=ids.shape[1] - 1)), lengths
