"""The losses of the residual head, each straight from hidden states."""
