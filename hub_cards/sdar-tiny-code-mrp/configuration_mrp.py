"""Configuration of a block-diffusion backbone (SDAR, a Qwen3 architecture) with a residual head."""

from typing import Any

from transformers import Qwen3Config

AUTO_MAP = {
    "AutoConfig": "configuration_mrp.MRPConfig",
    "AutoModel": "modeling_mrp.MRPForDiffusionLM",
    "AutoModelForCausalLM": "modeling_mrp.MRPForDiffusionLM",
}


class MRPConfig(Qwen3Config):
    """A `Qwen3Config` for the backbone, plus what block diffusion and the residual head need.

    Args:
        block_size: tokens per diffusion block; a token attends to all of its own block and to all earlier blocks.
        mask_token_id: id of `[MASK]`, which is required to build a model.
        num_mrp_layers: number of decoder layers of the residual head; 0 means a backbone without a head.
        mrp_residual: whether the head predicts the change of the backbone's hidden states, which is added to them.
            With False it predicts the next hidden states themselves, and so the full next distribution (an ablation).
        calibrated_remask_threshold: absolute residual logit above which `remask_criterion="residual"` masks a token
            again, found by calibration on this checkpoint; None when it was not calibrated.
        trained_acceptance: how many drafts a verification accepted on held-out prompts after training: a dict with
            `mrp_steps` (K) and `low` and `high`, the range over the prompts; None when it was not recorded.
        kwargs: arguments of `Qwen3Config`.

    Raises:
        ValueError: for a value that is out of range.
    """

    model_type = "sdar_mrp"

    def __init__(
        self,
        block_size: int = 4,
        mask_token_id: int | None = None,
        num_mrp_layers: int = 3,
        mrp_residual: bool = True,
        calibrated_remask_threshold: float | None = None,
        trained_acceptance: dict | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size must be an integer of at least 1, got {block_size!r}")
        if not isinstance(num_mrp_layers, int) or num_mrp_layers < 0:
            raise ValueError(f"num_mrp_layers must be an integer of at least 0 (0: no head), got {num_mrp_layers!r}")
        if not isinstance(mrp_residual, bool):
            raise ValueError(f"mrp_residual must be True or False, got {mrp_residual!r}")
        if trained_acceptance is not None and set(trained_acceptance) != {"mrp_steps", "low", "high"}:
            raise ValueError(f"trained_acceptance must hold mrp_steps, low and high, got {trained_acceptance!r}")
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.num_mrp_layers = num_mrp_layers
        self.mrp_residual = mrp_residual
        self.calibrated_remask_threshold = calibrated_remask_threshold
        self.trained_acceptance = trained_acceptance
        rope = kwargs.get("rope_parameters")
        if rope and "rope_theta" in rope:  # transformers 4 reads only rope_theta, 5 only the nested one
            kwargs.setdefault("rope_theta", rope["rope_theta"])
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        super().__init__(**kwargs)
        if mask_token_id is not None and not 0 <= mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id must be below vocab_size {self.vocab_size}, got {mask_token_id}")
        if set(self.layer_types) != {"full_attention"}:
            raise ValueError(
                "use_sliding_window (layer_types other than 'full_attention') is not supported: "
                "a block attends to all earlier blocks"
            )

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs: Any) -> "MRPConfig | tuple[MRPConfig, dict]":
        """Build a config from a dict as in transformers.

        Raises:
            ValueError: for the config of another architecture (`model_type`).
        """
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"model_type {model_type!r}, expected {cls.model_type!r}: load SDAR checkpoints with "
                "MRPForDiffusionLM.from_backbone, or convert them with `mrp convert`"
            )
        return super().from_dict(config_dict, **kwargs)


MRPConfig.register_for_auto_class()
