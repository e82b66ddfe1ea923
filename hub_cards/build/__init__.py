"""Scripts that build the embedded checkpoints and keep their files up to date."""
