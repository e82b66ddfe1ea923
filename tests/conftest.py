"""Tiny models for the tests: random weights, float32, one thread."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test connects to the Hub

from pathlib import Path

import pytest
import torch
import yaml
from train_runs import write_data

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
NUMBERS = WORDS[2:7]
SPECIAL = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]", "mask_token": "[MASK]"}


@pytest.fixture(autouse=True)
def one_thread():
    """Set the number of threads back to one after a test of a command that changes it.

    Other tests compare with processes that run on one thread, bit for bit.
    """
    yield
    torch.set_num_threads(1)


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
            "initializer_range": 0.4,  # spread logits: choices do not depend on rounding
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


@pytest.fixture
def project(tiny_model, word_tokenizer, tmp_path):
    """A folder with a backbone without a head, data, and a config; returns a function that writes the config."""
    tiny_model(num_mrp_layers=0).save_pretrained(tmp_path / "base")
    word_tokenizer.save_pretrained(tmp_path / "base")
    records = [
        {"prompt": f"what is {a} plus {b} ?", "completion": f"so {b} and {a} . {a}"} for a in NUMBERS for b in NUMBERS
    ]
    write_data(tmp_path / "data.jsonl", records)

    def write(name="run", **options):
        values = {
            "base_model": str(tmp_path / "base"),
            "num_mrp_layers": 1,
            "train_data": str(tmp_path / "data.jsonl"),
            "output_dir": str(tmp_path / name),
            "sequence_length": 16,
            "packing": False,
            "per_device_train_batch_size": 4,
            "max_steps": 6,
            "save_steps": 2,
            "logging_steps": 1,
            "unroll_steps": 2,
            "use_cpu": True,
            "disable_tqdm": True,
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values | options))
        return str(path)

    return write
