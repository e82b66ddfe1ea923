"""Muon for the head's matrices and AdamW for its norms, as one optimizer."""

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Steps two optimizers of torch together; schedulers and checkpoints see one.

    A small head trained for a few hundred steps learns several times faster so than by AdamW alone.

    Args:
        module: its parameters that require a gradient are trained; matrices by Muon, the rest by AdamW.
        muon_learning_rate, learning_rate: of the matrices and of the rest.
        weight_decay: of both.

    Raises:
        ValueError: when there is no matrix to train, or this torch has no Muon (it came with 2.9).
    """

    def __init__(self, module: nn.Module, muon_learning_rate: float, learning_rate: float, weight_decay: float = 0.0):
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"muon_learning_rate needs torch 2.9 or newer, this is {torch.__version__}: leave it out")
        trained = [p for p in module.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() == 2]
        others = [p for p in trained if p.dim() != 2]
        if not matrices:
            raise ValueError("muon_learning_rate is set, but the head has no matrix that trains")
        self.parts = [torch.optim.Muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay)]
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=learning_rate, weight_decay=weight_decay))
        super().__init__(trained, {"lr": learning_rate})
        self._share_groups()

    def _share_groups(self):
        """A scheduler changes the rates in our groups: they are those of the parts."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict):
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()
