"""Checkpoints on disk and on the Hub: heads, weights, adapters, conversion, cards and uploads."""
