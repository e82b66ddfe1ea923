"""Muon for the head's matrices and AdamW for its norms, as one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Runs torch's Muon and AdamW as if they were one optimizer, for schedulers and checkpoints.

    In a few hundred steps a small head learns several times faster this way than with AdamW alone.

    Args:
        module: module whose parameters that require a gradient are trained: matrices by Muon, the rest by AdamW.
        muon_learning_rate: learning rate of the matrices.
        learning_rate: learning rate of the rest.
        weight_decay: weight decay of both.

    Raises:
        ValueError: if there is no matrix to train, or this torch is older than 2.9, which introduced Muon.
    """

    def __init__(self, module: nn.Module, muon_learning_rate: float, learning_rate: float, weight_decay: float = 0.0):
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(
                f"muon_learning_rate requires torch 2.9 or newer, found {torch.__version__}: remove the option"
            )
        trained = [p for p in module.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() == 2]
        others = [p for p in trained if p.dim() != 2]
        if not matrices:
            raise ValueError("muon_learning_rate is set, but the head has no matrix that requires a gradient")
        self.parts = [torch.optim.Muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay)]
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=learning_rate, weight_decay=weight_decay))
        super().__init__(trained, {"lr": learning_rate})
        self._share_groups()

    def _share_groups(self):
        """Make our groups those of the two optimizers: a scheduler changes learning rates in our groups."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Take one step with both optimizers. Returns the loss of `closure`, if it is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both optimizers."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of both optimizers."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()
