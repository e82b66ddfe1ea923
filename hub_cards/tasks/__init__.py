"""The tasks that the embedded checkpoints are trained on and measured with."""
