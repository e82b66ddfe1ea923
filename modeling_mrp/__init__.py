"""Block-diffusion language models with a residual head: model, configuration and decoding."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_mrp import MRPConfig
from .generation_mrp import GenerationStats, MRPGenerateOutput
from .modeling_mrp import MRPForDiffusionLM, MRPModelOutput, ResidualHead

AutoConfig.register(MRPConfig.model_type, MRPConfig)
AutoModel.register(MRPConfig, MRPForDiffusionLM)
AutoModelForCausalLM.register(MRPConfig, MRPForDiffusionLM)

__all__ = [
    "GenerationStats",
    "MRPConfig",
    "MRPForDiffusionLM",
    "MRPGenerateOutput",
    "MRPModelOutput",
    "ResidualHead",
]
