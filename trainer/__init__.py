"""Training a residual head: the trainer, its arguments and the loss."""

from importlib import import_module
from typing import Any

# Public names and the files they come from. They are imported on first use: they load torch and transformers' training
# code, which `mrp --help` does not need.
_ON_DEMAND = {
    "MRPTrainer": ".mrp_trainer",
    "MRPTrainingArguments": ".arguments",
    "linear_kl": ".losses.linear_kl",
    "linear_kl_and_choice": ".losses.linear_kl",
}

__all__ = ["MRPTrainer", "MRPTrainingArguments", "linear_kl", "linear_kl_and_choice"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_DEMAND[name], __name__), name)
