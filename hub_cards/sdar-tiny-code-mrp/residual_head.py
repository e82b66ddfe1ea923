"""The residual head: decoder layers that predict how the backbone's hidden states change when tokens are revealed."""

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from .configuration_mrp import MRPConfig
from .masks import AttentionMask
from .packing import Packing, let_attention_unpack


class ResidualHead(nn.Module):
    """Predicts the change of the backbone's hidden states (h_C) once tokens have been revealed.

        token embeddings of the state after the reveal --> enorm --.
                                                                   +--> eh_proj --> decoder layers --> norm --> h_C
        hidden states before the reveal -----------------> hnorm --'

    The decoder layers are of the backbone's own kind. With `config.mrp_residual` False the same layers predict the
    hidden states after the reveal themselves instead of their change.

    Args:
        config: an `MRPConfig` with `num_mrp_layers` of at least 1.
    """

    def __init__(self, config: MRPConfig) -> None:
        super().__init__()
        self.enorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList()
        for index in range(config.num_mrp_layers):
            # built as layer 0, because config.layer_types lists the backbone's layers only, and numbered afterwards:
            # in a cache the head's layers come after the backbone's
            layer = Qwen3DecoderLayer(config, layer_idx=0)
            layer.self_attn.layer_idx = config.num_hidden_layers + index
            self.layers.append(layer)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        let_attention_unpack(self)

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        mask: AttentionMask,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Cache | None = None,
        packing: Packing | None = None,
    ) -> torch.Tensor:
        """Run the head once.

        Args:
            embeddings: token embeddings of the state after the reveal, [R, L, H].
            hidden: hidden states before the reveal, [R, L, H]: the backbone's (h_A), or in a chain of head steps the
                corrected ones of the step before (acc_{k-1}).
            mask: attention mask, in the form that the attention implementation expects.
            position_embeddings: cosines and sines of the L positions.
            cache: cache that the layers write to and read from, or None.
            packing: tells that the tokens are packed, and brings the cache; or None.

        Returns:
            The predicted change of the hidden states (h_C), [R, L, H], in the head's own dtype.
        """
        dtype = self.eh_proj.weight.dtype
        position_embeddings = tuple(part.to(dtype) for part in position_embeddings)
        hidden = self.eh_proj(torch.cat([self.enorm(embeddings.to(dtype)), self.hnorm(hidden.to(dtype))], dim=-1))
        for layer in self.layers:
            # the cache is passed by position: under gradient checkpointing, transformers drops it when it has a name
            hidden = layer(
                hidden, mask, None, cache, position_embeddings=position_embeddings, is_causal=False, packing=packing
            )
        return self.norm(hidden)
