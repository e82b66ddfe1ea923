"""The losses of the residual head, computed from hidden states without keeping logits."""
