"""Whole tensors of a model and an optimizer that FSDP2 has sharded, and back; what is not sharded passes unchanged."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on its own device. Every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state(state, keep: bool = True):
    """A state dict with its tensors whole and on the CPU. Every rank must call it.

    Args:
        state: nested dicts and lists of tensors and other values.
        keep: False on ranks that only take part: nothing is returned there, and never more than one tensor held.
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
    """This rank's part of a whole tensor, sharded as `target` is. Every rank must call it."""
    if not isinstance(target, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor, target.device_mesh, target.placements)


def shard_optimizer_state(optimizer: torch.optim.Optimizer, state: dict) -> dict:
    """A pre-hook of `load_state_dict`: shards the moments in a whole state dict as their parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = {}
    for index, values in state["state"].items():
        parameter = parameters[index]
        sharded[index] = {
            name: sharded_like(value, parameter) if _is_moment(value, parameter) else value
            for name, value in values.items()
        }
    return {**state, "state": sharded}


def _is_moment(value, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
