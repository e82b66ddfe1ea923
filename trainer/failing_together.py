"""Work that all processes of a run do at the same time, and give up together when one of them fails."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


class OtherProcessFailed(RuntimeError):
    """Raised in the processes that did not fail themselves."""


@contextmanager
def failing_together(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Make the block raise on every process when it raises on one of them, instead of leaving the others waiting.

    Before each layer FSDP2 gathers its weights, for which it needs all processes. So they tell each other before each
    layer, and at the end, whether one has failed:

        process 0   layer 1 | all well?  layer 2 | all well?                  raises OtherProcessFailed
        process 1   layer 1 | all well?  layer 2   fails  | "no"              raises its own error

    Args:
        model: the model that runs in the block. Every process must run it equally often.
        device: the process's device.

    Raises:
        OtherProcessFailed: if another process has failed.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    # before FSDP's own hooks, which gather the weights
    hooks = [
        part.register_forward_pre_hook(lambda *_: _tell(False, device), prepend=True)
        for part in model.modules()
        if isinstance(part, FSDPModule)
    ]
    try:
        yield
    except OtherProcessFailed:
        raise
    except Exception:
        _tell(True, device)
        raise
    else:
        _tell(False, device)
    finally:
        for hook in hooks:
            hook.remove()


def _tell(failed: bool, device: torch.device):
    """Tell the other processes whether this one has failed, and raise if only another one has."""
    flag = torch.tensor(int(failed), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if flag.item() and not failed:
        raise OtherProcessFailed("another process failed")
