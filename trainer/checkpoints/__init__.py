"""Checkpoints as files: heads, weights, adapters, conversion, cards and uploads."""
