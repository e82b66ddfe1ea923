"""The model: a frozen block-diffusion backbone (Qwen3) and a residual head that predicts how its logits change.

A block is decoded through a sequence of *states*: some of its tokens are revealed, the others are [MASK]. The backbone
gives logits on a state; a step rule reveals some tokens; and the backbone has to read the new state to give logits
again. The head estimates those next logits without the backbone.

Notation of formulas and comments, here and in the other files:

    x_t          a state of a row; x_1, x_2, ..., x_K are the states after each of K reveals
    W            weight of lm_head, [V, H]
    h_A, A       hidden states and logits of the backbone on x_t:    A = W h_A
    h_B, B       the same on a state after a reveal:                 B = W h_B
    h_C, C       what the head adds, so that A + C estimates B:      C = W h_C
    acc_k        corrected hidden states after k head steps:         acc_0 = h_A,  acc_k = acc_{k-1} + h_C of step k
                 W acc_k estimates the backbone's logits on x_k. With `mrp_residual` False, acc_k is the head's output.
    K            look-ahead: how many steps in a row the head estimates

    [R, L, V]    the shape of a tensor. R: rows of a batch, L: tokens of a row, B: tokens of a block, C: candidate
                 states of a row, G: groups of B tokens, Q and S: queries and keys, V: vocabulary, H: hidden size.
                 Inside such brackets B and C are sizes, elsewhere they are the logits above.

The dual stream of training: `clean_ids` is the finished text, `input_ids` (x_t) and `revealed_ids` (x_1 ... x_K) are
noisy versions of it. Block b of a noisy stream sees its own tokens and the clean blocks before it, as in decoding:

    clean        [ block 0 | block 1 | block 2 ]       read once; its keys and values are the context below
    x_t          [ block 0'| block 1'| block 2']       2' sees 2' and the clean blocks 0 and 1
    x_1          [ block 0"| block 1"| block 2"]       2" sees 2" and the clean blocks 0 and 1

The exact rule, with a picture of the mask, is in masks.py.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3Model, Qwen3PreTrainedModel
from transformers.utils import ModelOutput

from .block_cache import BlockCache  # noqa: F401  (all siblings: some versions copy the files imported here only)
from .block_state import BlockState  # noqa: F401
from .cached_forwards import CachedForwards  # noqa: F401
from .checkpoint_files import checkpoint_folder  # noqa: F401
from .checkpoints import CheckpointMixin
from .column_emitter import ColumnEmitter  # noqa: F401
from .configuration_mrp import MRPConfig
from .context_cache import CleanContext, ContextRecorder
from .decoding import Decoder  # noqa: F401
from .draft_graph import DraftGraph  # noqa: F401
from .draft_plan import DraftPlan  # noqa: F401
from .draft_vocabulary import DraftVocabulary  # noqa: F401
from .drafting import Drafter  # noqa: F401
from .generation_mrp import MRPGenerationMixin
from .inputs import check_forward_inputs, check_unsupported, check_vocabulary
from .keyed_noise import row_keys  # noqa: F401
from .masks import (
    CLEAN,
    PADDING,
    AttentionMask,
    TokenLayout,
    attention_mask,
    join,
    segment_positions,
    stream_layout,
)
from .ops import read_logits  # noqa: F401
from .ops_triton import read_logits_triton  # noqa: F401
from .options import DecodingOptions  # noqa: F401
from .packing import Packing, let_attention_unpack
from .reader import Reader  # noqa: F401
from .remasking import HeadRemasker  # noqa: F401
from .residual_head import ResidualHead
from .sampling import Sampler  # noqa: F401
from .step_rules import StepRule  # noqa: F401
from .verification import Verifier  # noqa: F401

# name of the layers' cache argument: past_key_values before transformers 5.22, cache since
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(Qwen3DecoderLayer.forward).parameters else "past_key_values"


@dataclass
class MRPModelOutput(ModelOutput):
    """Output of `MRPForDiffusionLM.forward`.

    Attributes:
        logits: the backbone's logits (A), [R, L, V]. Position i predicts token i: there is no shift.
        last_hidden_state: the backbone's hidden states after its last norm (h_A), [R, L, H].
        corrected_logits: the head's estimates of the backbone's logits on each state of `revealed_ids` (W acc_1 ...
            W acc_K), [R, K, L, V].
        corrected_hidden_states: the hidden states that give these estimates (acc_1 ... acc_K), [R, K, L, H].
        revealed_hidden_states: the backbone's own hidden states on `revealed_ids`, [R, K, L, H]; only with
            `teacher=True`.
    """

    logits: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    corrected_logits: torch.Tensor | None = None
    corrected_hidden_states: torch.Tensor | None = None
    revealed_hidden_states: torch.Tensor | None = None


class MRPForDiffusionLM(CheckpointMixin, Qwen3PreTrainedModel, MRPGenerationMixin):
    """A frozen SDAR backbone with a residual head.

    The backbone and `lm_head` stay frozen and in eval mode even after `train()`; only `mrp_head` is trained.
    With `config.num_mrp_layers == 0` there is no head, and the model is the plain backbone.

    Args:
        config: an `MRPConfig`.

    Raises:
        ValueError: when the config has no `mask_token_id`.
    """

    config_class = MRPConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _supports_flash_attn = False  # block-causal masks: sdpa, eager or flex_attention

    def __init__(self, config: MRPConfig) -> None:
        if config.mask_token_id is None:
            raise ValueError(
                "mask_token_id is missing from the config: set it to the id of the tokenizer's mask token"
            )
        super().__init__(config)
        self.model = Qwen3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mrp_head = ResidualHead(config) if config.num_mrp_layers else None
        let_attention_unpack(self.model)
        self.backbone_frozen = True
        self.post_init()
        self.generation_config._from_model_config = False
        self.freeze_backbone()

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if self.mrp_head is None:
            return
        # initialised leaf by leaf: in remote code, transformers skips modules without parameters of their own
        if module is self.mrp_head.norm:
            # a residual head starts with C = 0: corrected logits equal A. A head without the residual starts at the
            # usual scale of hidden states
            nn.init.constant_(module.weight, self.initial_head_norm)
        elif module is self.mrp_head.eh_proj and not getattr(module.weight, "_is_hf_initialized", False):
            size = module.weight.shape[0]
            # identity on both halves: with zeros for the embeddings, a head takes long to learn what was revealed
            module.weight.zero_()
            module.weight[:, :size].fill_diagonal_(1.0)
            module.weight[:, size:].fill_diagonal_(1.0)

    @property
    def initial_head_norm(self) -> float:
        """Initial value of the weight of the head's last norm."""
        return 0.0 if self.config.mrp_residual else 1.0

    def freeze_backbone(self, frozen: bool = True) -> "MRPForDiffusionLM":
        """Freeze the backbone and `lm_head` (as they are after construction), or unfreeze them; return the model."""
        self.backbone_frozen = frozen
        self.model.requires_grad_(not frozen)
        self.lm_head.requires_grad_(not frozen)
        return self.train(self.training)

    def train(self, mode: bool = True) -> "MRPForDiffusionLM":
        """Set training mode, except that a frozen backbone stays in eval mode."""
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
        **unsupported: Any,
    ) -> MRPModelOutput:
        """Run backbone and head on whole rows without a cache, as training and scoring do.

        Args:
            input_ids: token ids of the state x_t, [R, L]. Attention is block causal over the row itself.
            attention_mask: 1 for tokens and 0 for padding on either side, [R, L].
            position_ids: positions, [R, L]; by default counted from the start of each segment without padding. A
                token's block follows from its position.
            revealed_ids: token ids of the states x_1 ... x_K after each reveal, [R, K, L]. The head runs once per
                state.
            clean_ids: token ids of the finished text, [R, L]. Blocks of `input_ids` and `revealed_ids` then see
                earlier blocks of `clean_ids` instead of their own row (dual stream).
            segment_ids: number of the sample that each token belongs to, [R, L], for packed samples; tokens see their
                own segment only. -1 marks padding.
            logits_to_keep: number of last positions to return logits for, or an index tensor of positions (an empty
                tensor: no logits at all).
            teacher: whether to run the backbone on every revealed state too, in the same forward as on `input_ids`.
            unsupported: arguments of other models (`inputs_embeds`, `labels`, ...). Wrappers such as PEFT's pass them
                as None; any other value is an error.

        Raises:
            TypeError: for an unsupported argument that is not None.
            ValueError: for a shape that does not fit, for `revealed_ids` when there is no head, or for `clean_ids`
                when a thawed backbone is trained with gradient checkpointing.
        """
        check_unsupported(unsupported)
        check_forward_inputs(input_ids, attention_mask, position_ids, revealed_ids, clean_ids, segment_ids, teacher)
        if revealed_ids is not None and self.mrp_head is None:
            raise ValueError("revealed_ids need a residual head, but this checkpoint has none (num_mrp_layers is 0)")
        segment = torch.zeros_like(input_ids) if segment_ids is None else segment_ids
        if attention_mask is not None:
            segment = torch.where(attention_mask.bool(), segment, PADDING)
        positions = segment_positions(segment) if position_ids is None else position_ids.expand_as(input_ids)

        def stream(number: int) -> TokenLayout:
            context = number if clean_ids is None else CLEAN
            return stream_layout(segment, positions, self.config.block_size, number, context)

        noisy = input_ids[:, None]  # S noisy streams, [R, S, L]: x_t, and with a teacher x_1 ... x_K
        if teacher:
            noisy = torch.cat([noisy, revealed_ids], dim=1)
        context, clean_hidden = None, None
        if clean_ids is not None:
            self._check_layers_take_cache()
            recorder = ContextRecorder(clean_ids.shape[1])
            mask = self.attention_mask(stream(CLEAN))
            clean_hidden = self.backbone_hidden_states(clean_ids, positions, mask, recorder)
            context = CleanContext(recorder)
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

    def _backbone_on_streams(self, ids, positions, own: TokenLayout, context: TokenLayout, cache):
        """Run the backbone on S streams per row that do not see one another.

        The streams become rows [R * S, L] of their own. Each sees the cached context of its row, if there is one.

        Returns:
            Hidden states, [R, S, L, H].
        """
        streams = ids.shape[1]
        own, context = (layout.map(lambda field: field.repeat_interleave(streams, 0)) for layout in (own, context))
        mask = self.attention_mask(own, None if cache is None else join([context, own]))
        positions = positions.repeat_interleave(streams, 0)
        hidden = self.backbone_hidden_states(ids.flatten(0, 1), positions, mask, cache)
        return hidden.unflatten(0, (-1, streams))

    def attention_mask(self, queries: TokenLayout, keys: TokenLayout | None = None) -> AttentionMask:
        """Build the mask of queries and keys (by default the queries themselves) for the attention in use."""
        keys = queries if keys is None else keys
        return attention_mask(queries, keys, self.config._attn_implementation, self.dtype)

    def backbone_hidden_states(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: AttentionMask,
        cache: Cache | None = None,
        packing: Packing | None = None,
    ) -> torch.Tensor:
        """Run the backbone.

        Args:
            ids: token ids, [R, Q], or packed [1, N].
            positions: their positions, of the same shape.
            mask: result of `attention_mask` for all R * Q tokens.
            cache: cache that the layers write to and read from, or None.
            packing: tells that the tokens are packed, and brings the cache; or None.

        Returns:
            Hidden states after the last norm (h_A), [R, Q, H], or packed [1, N, H].
        """
        with torch.no_grad() if self.backbone_frozen else nullcontext():
            return self.model(
                ids,
                attention_mask={"full_attention": mask},
                position_ids=positions,
                use_cache=False,
                is_causal=False,
                packing=packing,
                **{CACHE_ARGUMENT: cache},
            ).last_hidden_state

    def corrected_hidden_states(
        self,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: AttentionMask,
        cache: Cache | None = None,
        packing: Packing | None = None,
    ) -> torch.Tensor:
        """Run one head step.

        Args:
            ids: token ids of the state after the reveal, [R, Q], or packed [1, N].
            hidden: hidden states before the reveal (h_A, or acc_{k-1} in a chain), [R, Q, H], or packed [1, N, H].
            positions, mask, cache, packing: as in `backbone_hidden_states`.

        Returns:
            Corrected hidden states (acc_k), of the shape of `hidden`.
        """
        embeddings = self.model.embed_tokens(ids)
        rotary = self.model.rotary_emb(embeddings, positions)
        output = self.mrp_head(embeddings, hidden, mask, rotary, cache, packing)
        return hidden + output if self.config.mrp_residual else output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (W h) [..., V] of hidden states [..., H] of any dtype."""
        return self.lm_head(hidden.to(self.lm_head.weight.dtype))

    def _unroll_head(self, states, hidden, clean, positions, own: TokenLayout, context: TokenLayout):
        """Run the head on x_1 ... x_K, each step on the result of the one before: acc_1 ... acc_K, [R, K, L, H]."""
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

    def _head_with_clean_stream(self, state, hidden, clean, positions, layout: TokenLayout):
        """Run the first head step with the clean stream beside the noisy one.

        The clean stream is the same at every step, so later steps read its recorded keys and values. It does not get
        a forward of its own: its output would receive no gradient, and FSDP gathers a layer's weights in backward
        when a gradient reaches the layer's output.

        Returns:
            Corrected hidden states of the noisy stream (acc_1), [R, L, H], and the context for the later steps.
        """
        clean_ids, clean_hidden = clean
        length = hidden.shape[1]
        recorder = ContextRecorder(length)
        both = self.corrected_hidden_states(
            torch.cat([state, clean_ids], dim=1),
            torch.cat([hidden, clean_hidden], dim=1),
            positions.repeat(1, 2),
            self.attention_mask(layout),
            recorder,
        )
        return both[:, :length], CleanContext(recorder)

    def _check_layers_take_cache(self):
        checkpointed = any(layer.gradient_checkpointing and layer.training for layer in self.model.layers)
        if checkpointed and torch.is_grad_enabled():
            raise ValueError(
                "clean_ids cannot be used while a thawed backbone is trained with gradient checkpointing, under which "
                "its layers take no cache: call freeze_backbone() or gradient_checkpointing_disable()"
            )

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, **kwargs: Any
    ):
        if enable:
            if getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
                raise ValueError(
                    "use_reentrant=True loses gradients where the steps of a chain share the clean stream: pass "
                    "{'use_reentrant': False} as gradient_checkpointing_kwargs"
                )
            gradient_checkpointing_func = partial(gradient_checkpointing_func, use_reentrant=False)
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Embedding:
        """Resize the token embeddings, as in transformers.

        Raises:
            ValueError: when a special id of the config, such as the mask token's, would be left without an embedding.
        """
        if new_num_tokens is not None:
            multiple = pad_to_multiple_of or 1
            check_vocabulary(-(-new_num_tokens // multiple) * multiple, self.config)
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    @torch.no_grad()
    def copy_backbone_layers_to_head(self) -> None:
        """Copy the weights of the backbone's last layers into the head's layers."""
        last_layers = self.model.layers[-len(self.mrp_head.layers) :]
        for own, backbone in zip(self.mrp_head.layers, last_layers, strict=True):
            own.load_state_dict(backbone.state_dict())


MRPForDiffusionLM.register_for_auto_class("AutoModel")
