"""What training and decoding load alike."""

import json

import pytest
import torch
from torch.torch_version import TorchVersion

from modeling_mrp import MRPConfig
from mrp_trainer.checkpoints.loading import default_attention, load_tokenizer


@pytest.mark.parametrize(
    ("device", "autocast", "version", "attention"),
    [
        ("cpu", False, "2.13.0+cpu", "sdpa"),
        ("cpu", True, "2.13.0+cpu", "sdpa"),
        ("cuda", False, "2.6.0+cu124", "flex_attention"),
        ("cuda", True, "2.10.1+cu128", "sdpa"),
        ("cuda", True, "2.11.0+cu128", "flex_attention"),
        ("cuda:1", True, "2.13.0", "flex_attention"),
    ],
)
def test_flex_attention_trains_on_gpus_unless_it_would_refuse_the_dtypes(
    monkeypatch, device, autocast, version, attention
):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    assert default_attention(torch.device(device), autocast) == attention


def test_a_tokenizer_never_runs_the_code_of_its_folder(tmp_path, word_tokenizer):
    word_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenization_theirs.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "theirs", "auto_map": {"AutoConfig": "tokenization_theirs.Config"}})
    )
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    values["auto_map"] = {"AutoTokenizer": ["tokenization_theirs.Tokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path, MRPConfig(), padding_side="left")
    assert tokenizer("what is one").input_ids == word_tokenizer("what is one").input_ids
    assert tokenizer.padding_side == "left"
    assert not (tmp_path / "sprung").exists()
