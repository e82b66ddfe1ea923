"""The backbone against transformers' own Qwen3, and every attention implementation against sdpa."""

import shutil

import pytest
import torch
from model_states import assert_same_output, noisy_states
from transformers import Qwen3Config, Qwen3ForCausalLM

from modeling_mrp import MRPForDiffusionLM

CLOSE = {"atol": 1e-4, "rtol": 0}  # the same sums in another order, in float32

BACKBONES = {
    "untied, wide heads": {"tie_word_embeddings": False, "head_dim": 24, "block_size": 4},
    "tied, narrow heads": {"tie_word_embeddings": True, "head_dim": 8, "block_size": 8},
    "another theta": {"tie_word_embeddings": False, "head_dim": 16, "block_size": 3, "theta": 700.0},
    "one key head, biased": {"tie_word_embeddings": True, "head_dim": 16, "block_size": 5, "attention_bias": True},
}


@pytest.mark.parametrize("options", BACKBONES.values(), ids=BACKBONES)
def test_backbone_equals_qwen3_under_a_block_causal_mask(options, tmp_path):
    options = dict(options)
    size, theta = options.pop("block_size"), options.pop("theta", 10_000.0)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1 if options.get("attention_bias") else 2, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": theta}, attn_implementation="eager", **options,
    )  # fmt: skip
    theirs = Qwen3ForCausalLM(config).eval()
    for name, parameter in theirs.named_parameters():  # norms and biases are otherwise all ones and zeros
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
    theirs.save_pretrained(tmp_path)
    ours = MRPForDiffusionLM.from_backbone(tmp_path, num_mrp_layers=0, block_size=size, mask_token_id=3)
    ids = torch.randint(50, (2, 4 * size + 2))
    length = ids.shape[1]
    mask = torch.full((length, length), torch.finfo(torch.float32).min)
    for q in range(length):
        mask[q, : (q // size + 1) * size] = 0
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask.expand(2, 1, -1, -1)).logits
        causal = theirs(ids).logits
    torch.testing.assert_close(ours(ids).logits, expected, **CLOSE)
    assert (expected - causal).abs().max() > 0.01  # the mask matters here


def every_kind_of_forward(model):
    clean, noisy, revealed = noisy_states(model)
    segment = torch.tensor([[0] * 5 + [4] * 8, [2] * 9 + [-1] * 4])
    attended = torch.ones_like(noisy)
    attended[0, :3] = 0
    with torch.no_grad():
        return {
            "plain": model(noisy),
            "padded": model(noisy, attention_mask=attended),
            "revealed": model(noisy, revealed_ids=revealed, teacher=True),
            "dual stream": model(noisy, revealed_ids=revealed, clean_ids=clean, teacher=True),
            "packed": model(noisy, revealed_ids=revealed, clean_ids=clean, segment_ids=segment, teacher=True),
        }


def test_eager_gives_the_numbers_of_sdpa(tiny_model):
    model = tiny_model(num_mrp_layers=2)
    expected = every_kind_of_forward(model)
    model.set_attn_implementation("eager")
    for kind, output in every_kind_of_forward(model).items():
        assert_same_output(output, expected[kind])


@pytest.mark.slow
def test_flex_attention_gives_the_numbers_of_sdpa(tiny_model):
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("flex_attention compiles its CPU kernel, and there is no C++ compiler")
    model = tiny_model(head_dim=16)
    expected = every_kind_of_forward(model)
    model.set_attn_implementation("flex_attention")
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):  # inductor's CPU template knows fixed shapes only
        for kind, output in every_kind_of_forward(model).items():
            assert_same_output(output, expected[kind])


def test_an_attention_that_takes_no_block_mask_is_refused(tiny_model):
    model = tiny_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation must be 'sdpa', 'eager' or 'flex_attention'.*flash"):
        model(torch.tensor([[5, 6]]))
