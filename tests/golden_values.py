"""The golden checkpoints, and the values that an independent implementation computed from them."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from modeling_mrp import MRPForDiffusionLM


def load_golden(folder: Path) -> tuple[MRPForDiffusionLM, dict[str, torch.Tensor]]:
    """The model in float32, and the expected values by key (see golden/README.md)."""
    return MRPForDiffusionLM.from_backbone(folder).eval(), load_file(folder / "expected.safetensors")
