"""The tasks that the embedded checkpoints solve."""
