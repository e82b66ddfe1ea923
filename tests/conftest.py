"""Tiny models for the tests: random weights, float32, one thread."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test looks anything up

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"
WORDS = [
    "what",
    "is",
    "one",
    "two",
    "three",
    "four",
    "five",
    "plus",
    "minus",
    "and",
    "the",
    "so",
    "then",
    "ok",
    ".",
    "?",
]
SPECIAL = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]", "mask_token": "[MASK]"}


@pytest.fixture(params=["block4", "block8-tied"])
def golden_folder(request) -> Path:
    """Each of the two published-layout checkpoints with values of an independent implementation."""
    return GOLDEN / request.param


@pytest.fixture
def tiny_model():
    """A function that builds a random model, its head's output included: `tiny_model(seed=0, **config)`."""

    from modeling_mrp import MRPConfig, MRPForDiffusionLM

    def build(seed: int = 0, **options) -> MRPForDiffusionLM:
        values = {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "block_size": 4,
            "mask_token_id": 3,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
            "num_mrp_layers": 1,
            "initializer_range": 0.4,  # spread logits: choices do not hang on rounding
            "tie_word_embeddings": False,
        }
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = MRPForDiffusionLM(MRPConfig(**values | options)).eval()
            if model.mrp_head is not None:  # a fresh head answers zero
                torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.5)
                torch.nn.init.normal_(model.mrp_head.eh_proj.weight, std=0.4)  # and does not look at the tokens
        return model

    return build


@pytest.fixture
def word_tokenizer():
    """A word-level tokenizer of at most 61 ids with the special ids of `tiny_model`, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    fast.chat_template = (
        "{% for m in messages %}{{ m['content'] }} . {% endfor %}{% if add_generation_prompt %}so {% endif %}"
    )
    return fast
