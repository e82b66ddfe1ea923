"""Packed rows: in a ragged batch, only the real tokens go through the linear layers.

The rows of a forward are as wide as the widest of them, so with one row that opens a block all rows have a group more.
Packing leaves the padding out. Only attention needs rows, because every row has keys and values of its own:

        rows [R, Q]      row 0  [ clean 0     | candidate 0 ]        row 1  [ candidate 0 | (padding)   ]

        packed [1, N]           [ row 0, clean 0 | row 0, candidate 0 | row 1, candidate 0 ]

        embeddings, norms, projections, MLPs      packed
        attention                                 queries as rows, against the keys and values in each row's cache

The layers are transformers' own. They look up their attention function by name, in a registry, and each `Attention`
module takes the name from its config. `let_attention_unpack` gives these modules a config of their own that names
`attend` below, which calls the attention function of the model's config. The model's config stays as it is.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, eager_attention_forward

from .block_cache import BlockCache
from .masks import AttentionMask

# the module's own name is part of it: checkpoints may bring this file in several versions into one process
NAME = f"{__name__}.attend"


class Packing(NamedTuple):
    """Which tokens of a forward [R, Q] are real.

    Attributes:
        index: places of the N real tokens among all R * Q tokens, in order, [N].
        slots: the cache slots that they are written to, [N].
        rows: number of rows R.
        cache: the cache, in which slots have been assigned to all R * Q tokens.
    """

    index: torch.Tensor
    slots: torch.Tensor
    rows: int
    cache: BlockCache

    @classmethod
    def of(cls, real: torch.Tensor, count: int, cache: BlockCache) -> "Packing":
        """Return the packing of the real tokens.

        Args:
            real: which tokens are real, boolean [R, Q].
            count: how many of them are, or a bound on that: padding fills the packed tokens then. The host has to know
                it, since counting would make it wait for the device.
            cache: the cache, in which slots have been assigned to all R * Q tokens.
        """
        index = real.flatten().argsort(descending=True, stable=True)[:count]
        return cls(index, cache.slots.index.index_select(0, index), len(real), cache)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the real tokens [1, N, ...] of rows [R, Q, ...]."""
        return rows.flatten(0, 1).index_select(0, self.index)[None]

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Return packed tokens [1, N, ...] as rows [R, Q, ...] with zeros in the place of padding."""
        rows = packed.new_zeros(len(self.cache.slots.index), *packed.shape[2:])
        return rows.index_copy_(0, self.index, packed[0]).unflatten(0, (self.rows, -1))


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: AttentionMask,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the attention function of the model's config, on rows if the tokens are packed.

    Args:
        module: attention module of a layer.
        query: queries, [R, heads, Q, d], or packed [1, heads, N, d].
        key: keys [R, key heads, S, d]; if packed, those of the N tokens alone, which are written to the cache here.
        value: values, as the keys.
        attention_mask: mask of the queries of all rows and their keys.
        packing: which tokens are real if they are packed, otherwise None.
        kwargs: further arguments of the attention function.

    Returns:
        The result for every query, [R, Q, heads, d] or packed [1, N, heads, d], and the attention weights or None.
    """
    function = ALL_ATTENTION_FUNCTIONS.get_interface(module.config.implementation, eager_attention_forward)
    if packing is None:
        return function(module, query, key, value, attention_mask, **kwargs)
    key, value = packing.cache.write(key, value, module.layer_idx, packing.slots)
    query = packing.unpack(query.transpose(1, 2)).transpose(1, 2)
    output, weights = function(module, query, key, value, attention_mask, **kwargs)
    return packing.pack(output), weights


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


class AttentionConfig:
    """A model's config as its attention modules see it: their attention function is `attend`.

    Args:
        config: the model's config, which has all other attributes.
    """

    _attn_implementation = NAME

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config

    @property
    def implementation(self) -> str:
        """Name of the attention function of the model's config, at present."""
        return self.config._attn_implementation

    def __getattr__(self, name: str) -> Any:
        if name == "config" or name.startswith("__"):  # a copy in the making has no config yet
            raise AttributeError(name)
        return getattr(self.config, name)


def let_attention_unpack(model: nn.Module) -> None:
    """Let the attention modules of a model take packed tokens."""
    for module in model.modules():
        if isinstance(module, Qwen3Attention):
            module.config = AttentionConfig(module.config)
