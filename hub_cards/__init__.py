"""The embedded checkpoints, their tasks and their build scripts, the training recipes and the card template."""
