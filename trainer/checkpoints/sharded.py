"""Gathers tensors that FSDP2 has sharded, and shards whole ones. Tensors that are not sharded pass unchanged."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on its own device. Every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state(state: Any, keep: bool = True) -> Any:
    """Return a state dict with its tensors whole and on the CPU. Every rank must call this.

    Args:
        state: nested dicts and lists of tensors and other values.
        keep: False on ranks that only contribute their shards. They return None and hold one whole tensor at a time.
    """
    if isinstance(state, dict):
        parts = {name: whole_state(value, keep) for name, value in state.items()}
        return parts if keep else None
    if isinstance(state, list):
        parts = [whole_state(value, keep) for value in state]
        return parts if keep else None
    if not isinstance(state, Tensor):
        return state
    tensor = gathered(state.detach())
    return tensor.cpu().contiguous() if keep else None


def sharded_like(tensor: Tensor, target: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor, sharded in the way of `target`. Every rank must call this."""
    if not isinstance(target, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor, target.device_mesh, target.placements)


def shard_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Shard the moments of a whole state dict in the way of their parameters.

    A pre-hook for `Optimizer.register_load_state_dict_pre_hook`.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = {}
    for index, values in state["state"].items():
        parameter = parameters[index]
        sharded[index] = {
            name: sharded_like(value, parameter) if _is_moment(value, parameter) else value
            for name, value in values.items()
        }
    return {**state, "state": sharded}


def _is_moment(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
