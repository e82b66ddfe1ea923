"""Configuration of a block-diffusion backbone (SDAR, a Qwen3 architecture) with a residual head."""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3Config
from transformers.activations import ACT2FN

from .draft_vocabulary import unpack_ids

AUTO_MAP = {
    "AutoConfig": "configuration_mrp.MRPConfig",
    "AutoModel": "modeling_mrp.MRPForDiffusionLM",
    "AutoModelForCausalLM": "modeling_mrp.MRPForDiffusionLM",
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "head_dim", "max_position_embeddings")

GAIN_FIELDS = ("candidates", "drafts_per_head_step", "steps", "tokens", "depths", "head_steps", "chain")


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
        draft_profile: what the plans of `mrp_steps="auto"` gain on decoded samples, measured by `mrp calibrate`: a
            dict with a list of the fields of `Gain` (see draft_plan.py) for "head", "self" or both; None when it was
            not measured.
        draft_vocabulary: the tokens among which drafts are chosen, as text (see draft_vocabulary.py), written by
            `mrp calibrate`; None: all tokens.
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
        draft_profile: dict | None = None,
        draft_vocabulary: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.num_mrp_layers = num_mrp_layers
        self.mrp_residual = mrp_residual
        self.calibrated_remask_threshold = calibrated_remask_threshold
        self.trained_acceptance = trained_acceptance
        self.draft_profile = draft_profile
        self.draft_vocabulary = draft_vocabulary
        self._check_own_values()
        rope = kwargs.get("rope_parameters")
        if rope is not None and not isinstance(rope, dict):
            raise ValueError(f"rope_parameters must be a dict, got {rope!r}")
        if rope and "rope_theta" in rope:  # transformers 4 reads only rope_theta, 5 only the nested one
            kwargs.setdefault("rope_theta", rope["rope_theta"])
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        try:
            super().__init__(**kwargs)
        except (StrictDataclassError, TypeError, AttributeError) as error:  # a value of a wrong type
            raise ValueError(" ".join(str(error).split())) from error
        self._check_sizes()
        if mask_token_id is not None and not 0 <= mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id must be below vocab_size {self.vocab_size}, got {mask_token_id}")
        self._check_draft_vocabulary()
        if set(self.layer_types) != {"full_attention"}:
            raise ValueError(
                "use_sliding_window (layer_types other than 'full_attention') is not supported: "
                "a block attends to all earlier blocks"
            )

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs: Any) -> "MRPConfig | tuple[MRPConfig, dict]":
        """Build a config from a dict as in transformers.

        Raises:
            ValueError: for the config of another architecture (`model_type`), or one that does not state the size of
                its blocks.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"model_type {model_type!r}, expected {cls.model_type!r}: load SDAR checkpoints with "
                "MRPForDiffusionLM.from_backbone, or convert them with `mrp convert`"
            )
        if "block_size" in kwargs:
            config_dict = {"block_size": kwargs["block_size"]} | config_dict
        check_block_size(config_dict)
        return super().from_dict(config_dict, **kwargs)

    def _check_own_values(self) -> None:
        if not _is_int(self.block_size) or self.block_size < 1:
            raise ValueError(f"block_size must be an integer of at least 1, got {self.block_size!r}")
        if not _is_int(self.num_mrp_layers) or self.num_mrp_layers < 0:
            raise ValueError(
                f"num_mrp_layers must be an integer of at least 0 (0: no head), got {self.num_mrp_layers!r}"
            )
        if not isinstance(self.mrp_residual, bool):
            raise ValueError(f"mrp_residual must be True or False, got {self.mrp_residual!r}")
        if self.mask_token_id is not None and not _is_int(self.mask_token_id):
            raise ValueError(f"mask_token_id must be an integer, got {self.mask_token_id!r}")
        threshold, acceptance = self.calibrated_remask_threshold, self.trained_acceptance
        if threshold is not None and not isinstance(threshold, int | float):
            raise ValueError(f"calibrated_remask_threshold must be a number, got {threshold!r}")
        if acceptance is not None and (
            not isinstance(acceptance, dict) or set(acceptance) != {"mrp_steps", "low", "high"}
        ):
            raise ValueError(f"trained_acceptance must hold mrp_steps, low and high, got {acceptance!r}")
        if self.draft_profile is not None and not _is_draft_profile(self.draft_profile):
            raise ValueError(
                f"draft_profile must be a dict of lists of dicts with the numbers {', '.join(GAIN_FIELDS)}, the first "
                f"of each list with 1 candidate, got {self.draft_profile!r}: measure it again with `mrp calibrate`"
            )

    def _check_draft_vocabulary(self) -> None:
        if self.draft_vocabulary is None:
            return
        if not isinstance(self.draft_vocabulary, str):
            raise ValueError(
                f"draft_vocabulary must be text that `mrp calibrate` wrote, got {self.draft_vocabulary!r}"
            )
        try:
            ids = unpack_ids(self.draft_vocabulary)
        except ValueError as error:
            raise ValueError(f"draft_vocabulary: {error}; write it again with `mrp calibrate`") from error
        wrong = ids[-1] if ids[-1] >= self.vocab_size else self.mask_token_id
        if wrong in ids:
            raise ValueError(
                f"draft_vocabulary holds the token id {wrong}, but ids must be below vocab_size {self.vocab_size} and "
                f"other than that of the mask token ({self.mask_token_id}): write it again with `mrp calibrate`"
            )

    def _check_sizes(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        theta = (self.rope_parameters or {}).get("rope_theta", 1.0)
        if not isinstance(theta, int | float) or theta <= 0:
            raise ValueError(f"rope_theta must be a number above 0, got {theta!r}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act {self.hidden_act!r} is unknown; expected one of {', '.join(ACT2FN)}")


def check_block_size(values: dict[str, Any]) -> None:
    """Check that the values of a `config.json` state the size of the blocks, which cannot be told from the weights.

    Raises:
        ValueError: when they do not.
    """
    if values.get("block_size") is None:
        raise ValueError(
            "block_size is missing from the config: pass block_size=N (mrp convert --block-size N), the number of "
            "tokens per block that the model was trained with"
        )


def _is_draft_profile(value: Any) -> bool:
    if not isinstance(value, dict) or not set(value) <= {"head", "self"}:
        return False
    for gains in value.values():
        if not isinstance(gains, list) or not gains:
            return False
        for gain in gains:
            if not isinstance(gain, dict) or set(gain) != set(GAIN_FIELDS):
                return False
            if not all(isinstance(number, int | float) for number in gain.values()):
                return False
        if gains[0]["candidates"] != 1:
            return False
    return True


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


MRPConfig.register_for_auto_class()
