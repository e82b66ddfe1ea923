"""The model: a frozen block-diffusion backbone (Qwen3) and a residual head that predicts how its logits change."""

import inspect
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3Model,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
)
from transformers.utils import ModelOutput

from .block_cache import BlockCache  # noqa: F401  (every sibling: some versions copy direct imports only)
from .block_state import BlockState  # noqa: F401
from .checkpoints import HEAD_PREFIX, read_checkpoint
from .configuration_mrp import MRPConfig
from .context_cache import Context, ContextRecorder
from .decoding import Decoder  # noqa: F401
from .generation_mrp import MRPGenerationMixin
from .inputs import has_holes
from .masks import CLEAN, PADDING, Tokens, attention_mask, join, segment_positions, tokens_of_stream
from .options import DecodingOptions  # noqa: F401
from .sampling import Sampler  # noqa: F401
from .step_rules import StepRule  # noqa: F401

# the layers' argument was called past_key_values before transformers 5.22
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(Qwen3DecoderLayer.forward).parameters else "past_key_values"


@dataclass
class MRPModelOutput(ModelOutput):
    """Output of `MRPForDiffusionLM.forward`.

    Attributes:
        logits: [R, L, V], A = W h_A; no shift: position i predicts token i.
        last_hidden_state: [R, L, H], h_A, after the backbone's last norm.
        corrected_logits: [R, K, L, V], W acc_k, the estimate of the backbone's logits on `revealed_ids[:, k]`.
        corrected_hidden_states: [R, K, L, H], acc_k = h_A + the sum of the first k + 1 residuals; what the head gave
            at step k + 1 where `config.mrp_residual` is False.
        revealed_hidden_states: [R, K, L, H], the backbone's own hidden states on `revealed_ids` (`teacher=True`).
    """

    logits: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    corrected_logits: torch.Tensor | None = None
    corrected_hidden_states: torch.Tensor | None = None
    revealed_hidden_states: torch.Tensor | None = None


class ResidualHead(nn.Module):
    """Predicts h_C, the change of the backbone's hidden states once tokens were revealed.

    With `config.mrp_residual` False the same layers predict the hidden states themselves.

    x = eh_proj([enorm(embeddings); hnorm(hidden)]), decoder layers of the backbone's own kind, norm.
    """

    def __init__(self, config):
        super().__init__()
        self.enorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList()
        for index in range(config.num_mrp_layers):
            layer = Qwen3DecoderLayer(config, layer_idx=0)  # config.layer_types knows the backbone's layers only
            layer.self_attn.layer_idx = config.num_hidden_layers + index
            self.layers.append(layer)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embeddings, hidden, mask, position_embeddings, cache=None):
        """
        Args:
            embeddings: [R, L, H], token embeddings of the state after the reveal.
            hidden: [R, L, H], h_A, or acc_{k-1} in a chain.
            mask: as the attention implementation takes it.
            position_embeddings: (cos, sin) of the L positions.
            cache: a cache that the layers write to and read from, or None.

        Returns:
            h_C, [R, L, H], in the head's own dtype.
        """
        dtype = self.eh_proj.weight.dtype
        position_embeddings = tuple(part.to(dtype) for part in position_embeddings)
        hidden = self.eh_proj(torch.cat([self.enorm(embeddings.to(dtype)), self.hnorm(hidden.to(dtype))], dim=-1))
        for layer in self.layers:
            # the cache by position: by name, transformers takes it away under gradient checkpointing
            hidden = layer(hidden, mask, None, cache, position_embeddings=position_embeddings, is_causal=False)
        return self.norm(hidden)


class MRPForDiffusionLM(Qwen3PreTrainedModel, MRPGenerationMixin):
    """A frozen SDAR backbone with a residual head.

    The backbone and `lm_head` stay frozen and in eval mode whatever `train()` says; only `mrp_head` trains.
    With `config.num_mrp_layers == 0` there is no head: the model is the plain backbone.

    Raises:
        ValueError: when the config lacks `mask_token_id`.
    """

    config_class = MRPConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _supports_flash_attn = False  # block-causal masks: sdpa, eager or flex_attention

    def __init__(self, config):
        if config.mask_token_id is None:
            raise ValueError(
                "mask_token_id is missing from the config: set it to the id of the tokenizer's mask token"
            )
        super().__init__(config)
        self.model = Qwen3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mrp_head = ResidualHead(config) if config.num_mrp_layers else None
        self.backbone_frozen = True
        self.post_init()
        self.generation_config._from_model_config = False
        self.freeze_backbone()

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if self.mrp_head is None:
            return
        # by leaf: for code outside transformers, modules without parameters of their own never come by here
        if module is self.mrp_head.norm:
            # C = 0 at the start: corrected logits equal A; a full distribution starts as one, not as a flat one
            nn.init.constant_(module.weight, self.initial_head_norm)
        elif module is self.mrp_head.eh_proj and not getattr(module.weight, "_is_hf_initialized", False):
            size = module.weight.shape[0]
            # identity on both halves: were the embeddings left out, a head would take long to see what was revealed
            module.weight.zero_()
            module.weight[:, :size].fill_diagonal_(1.0)
            module.weight[:, size:].fill_diagonal_(1.0)

    @property
    def initial_head_norm(self) -> float:
        """What the weight of a new head's last norm is filled with."""
        return 0.0 if self.config.mrp_residual else 1.0

    def freeze_backbone(self, frozen: bool = True):
        """Freeze the backbone and `lm_head` (the state after construction), or let them train too."""
        self.backbone_frozen = frozen
        self.model.requires_grad_(not frozen)
        self.lm_head.requires_grad_(not frozen)
        return self.train(self.training)

    def train(self, mode: bool = True):
        super().train(mode)
        if self.backbone_frozen:
            self.model.eval()
            self.lm_head.eval()
        return self

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        revealed_ids: torch.Tensor | None = None,
        clean_ids: torch.Tensor | None = None,
        segment_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor | None = None,
        teacher: bool = False,
    ) -> MRPModelOutput:
        """Backbone and head on whole rows, without a cache: for training, scoring and parity.

        Args:
            input_ids: [R, L], attention is block causal over the row itself.
            attention_mask: [R, L], 1 for tokens and 0 for padding on either side.
            position_ids: [R, L], default: counted from the start of each segment, padding excluded. Blocks follow
                the positions.
            revealed_ids: [R, K, L], the states x_1..x_K after each reveal. The head runs once per state.
            clean_ids: [R, L]. Blocks of `input_ids` and `revealed_ids` then see earlier blocks of `clean_ids` instead
                of their own row (dual stream).
            segment_ids: [R, L], packed samples: nothing crosses a segment; -1 is padding.
            logits_to_keep: the last n positions, or an index tensor of positions (an empty one: no logits at all).
            teacher: also run the backbone on every revealed state, in the same forward as on `input_ids`.

        Raises:
            ValueError: for a shape that does not fit, or `revealed_ids` where there is no head.
        """
        self._check_shapes(input_ids, attention_mask, position_ids, revealed_ids, clean_ids, segment_ids, teacher)
        segment = torch.zeros_like(input_ids) if segment_ids is None else segment_ids
        if attention_mask is not None:
            segment = torch.where(attention_mask.bool(), segment, PADDING)
        positions = segment_positions(segment) if position_ids is None else position_ids.expand_as(input_ids)

        def stream(number: int) -> Tokens:
            context = number if clean_ids is None else CLEAN
            return tokens_of_stream(segment, positions, self.config.block_size, number, context)

        noisy = input_ids[:, None]  # [R, S, L]
        if teacher:
            noisy = torch.cat([noisy, revealed_ids], dim=1)
        context, clean_hidden = None, None
        if clean_ids is not None:
            recorder = ContextRecorder(clean_ids.shape[1])
            mask = self.attention_mask(stream(CLEAN))
            clean_hidden = self.backbone_hidden_states(clean_ids, positions, mask, recorder)
            context = Context(recorder)
        hidden = self._backbone_on_streams(noisy, positions, stream(1), stream(CLEAN), context)

        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        keep = logits_to_keep if isinstance(logits_to_keep, torch.Tensor) else keep
        output = MRPModelOutput(logits=self.logits(hidden[:, 0, keep]), last_hidden_state=hidden[:, 0])
        if teacher:
            output.revealed_hidden_states = hidden[:, 1:]
        if revealed_ids is not None:
            clean = None if clean_ids is None else (clean_ids, clean_hidden)
            states = revealed_ids.unbind(1)
            corrected = self._unroll_head(states, hidden[:, 0], clean, positions, stream(1), stream(CLEAN))
            output.corrected_hidden_states = corrected
            output.corrected_logits = self.logits(corrected[:, :, keep])
        return output

    def _backbone_on_streams(self, ids, positions, own: Tokens, context: Tokens, cache):
        """h, [R, S, L, H], of S streams [R, S, L] that do not see one another, as rows behind the cached context."""
        streams = ids.shape[1]
        own, context = (part.map(lambda field: field.repeat_interleave(streams, 0)) for part in (own, context))
        mask = self.attention_mask(own, None if cache is None else join([context, own]))
        positions = positions.repeat_interleave(streams, 0)
        hidden = self.backbone_hidden_states(ids.flatten(0, 1), positions, mask, cache)
        return hidden.unflatten(0, (-1, streams))

    def attention_mask(self, tokens: Tokens, keys: Tokens | None = None):
        """The mask of queries `tokens` that see `keys` (default: one another), for the attention in use."""
        keys = tokens if keys is None else keys
        return attention_mask(tokens, keys, self.config._attn_implementation, self.dtype)

    def backbone_hidden_states(self, ids, positions, mask, cache=None):
        """h of the backbone, [R, Q, H], for `ids` [R, Q] under a mask of `attention_mask`."""
        with torch.no_grad() if self.backbone_frozen else nullcontext():
            return self.model(
                ids,
                attention_mask={"full_attention": mask},
                position_ids=positions,
                use_cache=False,
                is_causal=False,
                **{CACHE_ARGUMENT: cache},
            ).last_hidden_state

    def corrected_hidden_states(self, ids, hidden, positions, mask, cache=None):
        """acc_k, [R, Q, H], on the state `ids` [R, Q] and h_A or acc_{k-1}, `hidden` [R, Q, H]: one head step."""
        embeddings = self.model.embed_tokens(ids)
        output = self.mrp_head(embeddings, hidden, mask, self.model.rotary_emb(embeddings, positions), cache)
        return hidden + output if self.config.mrp_residual else output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """W h, [..., V], for hidden states [..., H] of any dtype."""
        return self.lm_head(hidden.to(self.lm_head.weight.dtype))

    def _unroll_head(self, states, hidden, clean, positions, own: Tokens, context: Tokens):
        """acc_1..acc_K, [R, K, L, H]: every step reads the state x_k and acc_{k-1}."""
        accumulated, cache = [], None
        if clean is not None:
            hidden, cache = self._head_with_clean_stream(states[0], hidden, clean, positions, join([own, context]))
            accumulated.append(hidden)
            states = states[1:]
        mask = self.attention_mask(own, None if clean is None else join([context, own])) if states else None
        for state in states:
            hidden = self.corrected_hidden_states(state, hidden, positions, mask, cache)
            accumulated.append(hidden)
        return torch.stack(accumulated, dim=1)

    def _head_with_clean_stream(self, state, hidden, clean, positions, tokens: Tokens):
        """acc_1, and the clean stream as the head's layers saw it, for the later steps: it never changes.

        In one forward: the last layer's output on the clean stream alone would get no gradient, and FSDP gathers the
        weights of a layer when one arrives there.
        """
        clean_ids, clean_hidden = clean
        length = hidden.shape[1]
        recorder = ContextRecorder(length)
        both = self.corrected_hidden_states(
            torch.cat([state, clean_ids], dim=1),
            torch.cat([hidden, clean_hidden], dim=1),
            positions.repeat(1, 2),
            self.attention_mask(tokens),
            recorder,
        )
        return both[:, :length], Context(recorder)

    def _check_shapes(self, ids, attention_mask, position_ids, revealed_ids, clean_ids, segment_ids, teacher):
        if ids.dim() != 2:
            raise ValueError(f"input_ids must be [rows, length], got shape {tuple(ids.shape)}")
        same = {"attention_mask": attention_mask, "clean_ids": clean_ids, "segment_ids": segment_ids}
        for name, tensor in same.items():
            if tensor is not None and tensor.shape != ids.shape:
                raise ValueError(
                    f"{name} must have the shape of input_ids {tuple(ids.shape)}, got {tuple(tensor.shape)}"
                )
        if position_ids is None and attention_mask is not None and has_holes(attention_mask):
            raise ValueError("attention_mask has holes: the ones of each row must be contiguous, or pass position_ids")
        if position_ids is not None and position_ids.shape[-1] != ids.shape[1]:
            raise ValueError(f"position_ids must have {ids.shape[1]} columns, got shape {tuple(position_ids.shape)}")
        if teacher and revealed_ids is None:
            raise ValueError("teacher=True runs the backbone on revealed_ids: pass them")
        if revealed_ids is None:
            return
        if self.mrp_head is None:
            raise ValueError("revealed_ids need a residual head, but this checkpoint has none (num_mrp_layers is 0)")
        if revealed_ids.dim() != 3 or revealed_ids.shape[::2] != ids.shape or revealed_ids.shape[1] == 0:
            expected = (ids.shape[0], "K", ids.shape[1])
            raise ValueError(f"revealed_ids must be [rows, K, length] = {expected}, got {tuple(revealed_ids.shape)}")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """As in transformers, except that a checkpoint that does not hold every tensor is refused.

        Raises:
            ValueError: for tensors that are missing, left over, of a wrong shape or unreadable, naming them: never a
                random head.
        """
        with_info = kwargs.pop("output_loading_info", False)
        optional = kwargs.pop("optional_tensors", "\0")  # prefix of those that from_backbone adds or drops
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path,
                *model_args,
                **kwargs | {"output_loading_info": True, "ignore_mismatched_sizes": True},  # to name them below
            )
        except SafetensorError as error:
            raise ValueError(
                f"the weights of {pretrained_model_name_or_path} cannot be read ({error}): "
                "a file is damaged or cut short, copy or download it again"
            ) from error
        missing = sorted(name for name in info["missing_keys"] if not name.startswith(optional))
        unexpected = sorted(name for name in info["unexpected_keys"] if not name.startswith(optional))
        wrong = [
            f"{name} {list(got)} instead of {list(expected)}"
            for name, got, expected in sorted(info["mismatched_keys"])
        ]
        if missing or unexpected or wrong:
            raise ValueError(
                f"{pretrained_model_name_or_path} does not fit its config: missing tensors: {_some(missing)}; "
                f"left-over tensors: {_some(unexpected)}; tensors of a wrong shape: {_some(wrong)}"
            )
        model.generation_config._from_model_config = False  # else its options are lost on the next reload
        model.freeze_backbone()
        return (model, info) if with_info else model

    @classmethod
    def from_backbone(
        cls,
        source,
        num_mrp_layers: int | None = None,
        head_init: str = "fresh",
        block_size: int | None = None,
        mask_token_id: int | None = None,
        mrp_residual: bool | None = None,
        **kwargs,
    ):
        """Wrap an SDAR checkpoint; a published SDAR-MRP checkpoint or our own keeps the head it has.

        Reads `config.json` and the safetensors only: code of the source is never run.

        Args:
            source: a folder or a Hub id.
            num_mrp_layers: layers of a fresh head (default 3), 0 for none. A head that the source holds fixes it.
            head_init: "fresh" (random layers) or "backbone_layers" (copies of the backbone's last layers). Either
                way a residual head's output is zero at the start.
            block_size, mask_token_id: override the source's, with a warning.
            mrp_residual: False for a head that gives the full next distribution, see `MRPConfig`; default: as the
                source's head, or True. A published head does not say: pass False for one trained without residual.
            kwargs: of `from_pretrained` (dtype, revision, cache_dir, token, device_map, ...).

        Raises:
            ValueError: for another architecture, a tensor that is missing, left over or of a wrong shape, or an option
                out of its range.
        """
        if head_init not in ("fresh", "backbone_layers"):
            raise ValueError(f"head_init must be 'fresh' or 'backbone_layers', got {head_init!r}")
        checkpoint = read_checkpoint(source, num_mrp_layers, block_size, mask_token_id, kwargs, mrp_residual)
        if head_init == "backbone_layers" and checkpoint.config.num_mrp_layers > checkpoint.config.num_hidden_layers:
            raise ValueError(
                f"num_mrp_layers={checkpoint.config.num_mrp_layers} copies more layers than the backbone has "
                f"({checkpoint.config.num_hidden_layers})"
            )
        model = cls.from_pretrained(
            source,
            config=checkpoint.config,
            key_mapping=checkpoint.renames,
            optional_tensors="\0" if checkpoint.has_head else HEAD_PREFIX,
            **kwargs,
        )
        model._weight_conversions = None  # else transformers writes the source's tensor names again on save
        model.generation_config.use_cache = None  # published configs say False, which is about training
        if model.mrp_head is None:
            model.generation_config.mrp_mode = None
        elif vars(model.generation_config).get("mrp_mode") is None:
            model.generation_config.mrp_mode = "spec"
        if head_init == "backbone_layers" and not checkpoint.has_head:
            model.copy_backbone_layers_to_head()
        return model

    @torch.no_grad()
    def copy_backbone_layers_to_head(self):
        """Start the head's layers as copies of as many last layers of the backbone."""
        for ours, theirs in zip(self.mrp_head.layers, self.model.layers[-len(self.mrp_head.layers) :], strict=True):
            ours.load_state_dict(theirs.state_dict())


def _some(names: list[str]) -> str:
    """At most eight names, and how many more."""
    shown = ", ".join(names[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


MRPForDiffusionLM.register_for_auto_class("AutoModel")
