"""Model cards, training recipes and the embedded checkpoints, as package data."""
