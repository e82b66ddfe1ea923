"""Training a residual head: the trainer, its arguments and the loss."""

from importlib import import_module

# Imported at once, not on demand: it shares its name with its module, which would otherwise take its place here.
from .linear_kl import linear_kl, linear_kl_and_choice

# Imported when first asked for, because they bring all of transformers' training code with them.
_ON_DEMAND = {"MRPTrainer": ".mrp_trainer", "MRPTrainingArguments": ".arguments"}

__all__ = ["MRPTrainer", "MRPTrainingArguments", "linear_kl", "linear_kl_and_choice"]


def __getattr__(name: str):
    """Import a public name from its own file."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(_ON_DEMAND[name], __name__))[name]
