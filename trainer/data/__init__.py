"""Training data: samples, rows, noise and batches."""
