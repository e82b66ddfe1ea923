"""Training a residual head: the trainer, its arguments and the loss."""

from importlib import import_module

# Imported when first asked for: they bring torch and all of transformers' training code with them, which
# `mrp --help` does not need.
_ON_DEMAND = {
    "MRPTrainer": ".mrp_trainer",
    "MRPTrainingArguments": ".arguments",
    "linear_kl": ".losses.linear_kl",
    "linear_kl_and_choice": ".losses.linear_kl",
}

__all__ = ["MRPTrainer", "MRPTrainingArguments", "linear_kl", "linear_kl_and_choice"]


def __getattr__(name: str):
    """Import a public name from its own file."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_DEMAND[name], __name__), name)
