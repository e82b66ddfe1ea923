"""The model's numbers: golden values, transformers' own Qwen3, and equivalences between ways to ask for the same."""

import gc
import shutil
import weakref

import pytest
import torch
from golden_values import load_golden
from transformers import Qwen3Config, Qwen3ForCausalLM

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from modeling_mrp.context_cache import ContextRecorder
from modeling_mrp.masks import CLEAN, join, tokens_of_stream

CLOSE = {"atol": 1e-4, "rtol": 0}  # the golden values' tolerance in float32
SAME = {"atol": 1e-4, "rtol": 1e-5}  # the same sums in another order, on logits of about 10


def noisy_states(model, rows=2, length=13, steps=2, seed=0):
    """Clean ids [R, L], x_t [R, L], and x_1..x_K [R, K, L], each with fewer masks than the one before."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(4, model.config.vocab_size, (rows, length), generator=generator)
    levels = torch.rand(rows, length, generator=generator)
    masked = [levels < bound for bound in torch.linspace(0.8, 0.2, steps + 1).tolist()]
    states = [torch.where(where, model.config.mask_token_id, clean) for where in masked]
    return clean, states[0], torch.stack(states[1:], dim=1)


def fields(output):
    return {name: value for name, value in output.items() if value is not None}


def assert_same_output(actual, expected, **tolerance):
    assert fields(actual).keys() == fields(expected).keys()
    for name, value in fields(expected).items():
        torch.testing.assert_close(actual[name], value, **(tolerance or SAME), msg=lambda text, n=name: f"{n}: {text}")


# -- golden values


def test_step_logits_match_the_golden_values(golden_folder):
    model, golden = load_golden(golden_folder)
    prefix, block, revealed = (golden[f"step.{name}"][None] for name in ("prefix", "block", "revealed_block"))
    row, after = torch.cat([prefix, block], 1), torch.cat([prefix, revealed], 1)
    last = slice(prefix.shape[1], None)
    output = model(row, revealed_ids=after[:, None], teacher=True)
    corrected = output.corrected_logits[0, 0, last]
    expected = {
        "step.backbone_hidden": output.last_hidden_state[0, last],
        "step.backbone_logits": output.logits[0, last],
        "step.next_backbone_logits": model.logits(output.revealed_hidden_states[0, 0, last]),
        "step.corrected_logits.full_context": corrected,
        "step.residual_logits.full_context": corrected - output.logits[0, last],
    }
    for name, value in expected.items():
        torch.testing.assert_close(value, golden[name], **CLOSE, msg=lambda text, n=name: f"{n}: {text}")


def test_a_head_without_context_matches_the_golden_values(golden_folder):
    """The published speculative mode keeps no head cache: its head sees the block alone."""
    model, golden = load_golden(golden_folder)
    size, start = model.config.block_size, len(golden["step.prefix"])
    positions = torch.arange(start, start + size)[None]
    hidden = model(torch.cat([golden["step.prefix"], golden["step.block"]])[None]).last_hidden_state[:, start:]
    tokens = tokens_of_stream(torch.zeros_like(positions), positions, size, stream=1, context=1)
    mask = model.attention_mask(tokens)
    residual = model.corrected_hidden_states(golden["step.revealed_block"][None], hidden, positions, mask) - hidden
    torch.testing.assert_close(model.logits(residual)[0], golden["step.residual_logits.block_context"], **CLOSE)


def test_dual_stream_matches_the_golden_values(golden_folder):
    model, golden = load_golden(golden_folder)
    clean, masked, reveal = golden["train.input_ids"], golden["train.masked"].bool(), golden["train.reveal"].bool()
    before = torch.where(masked, model.config.mask_token_id, clean)
    after = torch.where(reveal, clean, before)
    with torch.no_grad():
        output = model(before, revealed_ids=after[:, None], clean_ids=clean, teacher=True)
    residual = output.corrected_hidden_states[:, 0] - output.last_hidden_state
    torch.testing.assert_close(output.last_hidden_state, golden["train.hidden_t"], **CLOSE)
    torch.testing.assert_close(output.revealed_hidden_states[:, 0], golden["train.hidden_next"], **CLOSE)
    torch.testing.assert_close(residual, golden["train.residual_hidden"], **CLOSE)

    supervised = masked & ~reveal & (golden["train.labels"] != -100)
    target = model.logits(output.revealed_hidden_states[:, 0]).log_softmax(-1)
    for name, logits in (("", output.corrected_logits[:, 0]), ("_uncorrected", output.logits)):
        kl = (target.exp() * (target - logits.log_softmax(-1))).sum(-1) * supervised
        torch.testing.assert_close(kl, golden[f"train.kl{name}_per_token"], **CLOSE)
        assert kl[supervised].min() > 0


# -- parity with transformers

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


# -- attention implementations


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


# -- one forward against several


@pytest.mark.parametrize("dual", [False, True])
def test_teacher_equals_a_forward_on_every_revealed_state(tiny_model, dual):
    model = tiny_model()
    clean, noisy, revealed = noisy_states(model, steps=3)
    streams = {"clean_ids": clean} if dual else {}
    output = model(noisy, revealed_ids=revealed, teacher=True, **streams)
    for k in range(3):
        alone = model(revealed[:, k], **streams)
        torch.testing.assert_close(output.revealed_hidden_states[:, k], alone.last_hidden_state, **SAME)
    without = model(noisy, revealed_ids=revealed, **streams)
    torch.testing.assert_close(output.corrected_logits, without.corrected_logits, **SAME)
    torch.testing.assert_close(output.logits, without.logits, **SAME)
    assert without.revealed_hidden_states is None


def test_a_longer_unroll_begins_like_a_shorter_one(tiny_model):
    """acc_k is what the head makes of acc_{k-1}: each step of a K = 3 unroll against a chain of single steps."""
    model = tiny_model(num_mrp_layers=2)
    clean, noisy, revealed = noisy_states(model, steps=3)
    with torch.no_grad():
        long = model(noisy, revealed_ids=revealed, clean_ids=clean).corrected_hidden_states
        short = model(noisy, revealed_ids=revealed[:, :1], clean_ids=clean).corrected_hidden_states
        torch.testing.assert_close(long[:, :1], short, **SAME)
        positions = torch.arange(13).expand(2, -1)
        tokens = tokens_of_stream(torch.zeros_like(noisy), positions, model.config.block_size, stream=1, context=1)
        mask = model.attention_mask(tokens)
        first_block = slice(0, 4)  # no context: the stream does not matter there
        for k in (1, 2):
            step = model.corrected_hidden_states(revealed[:, k], long[:, k - 1], positions, mask)
            torch.testing.assert_close(long[:, k, first_block], step[:, first_block], **SAME)
    assert (long[:, 1] - long[:, 0]).abs().max() > 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_head_reads_the_clean_stream_once_and_learns_as_if_at_every_step(tiny_model, checkpointing):
    model = tiny_model(num_mrp_layers=2).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    clean, noisy, revealed = noisy_states(model, steps=3)
    read = []
    hook = model.mrp_head.eh_proj.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    once = model(noisy, revealed_ids=revealed, clean_ids=clean, teacher=True)
    hook.remove()
    assert read == [2 * 13, 13, 13]

    positions = torch.arange(13).expand(2, -1)
    streams = [
        tokens_of_stream(torch.zeros_like(noisy), positions, model.config.block_size, stream, CLEAN)
        for stream in (1, CLEAN)
    ]
    mask = model.attention_mask(join(streams))
    clean_hidden = model(clean).last_hidden_state  # a plain row is its own context
    hidden, again = once.last_hidden_state, []
    for state in revealed.unbind(1):
        both = torch.cat([hidden, clean_hidden], dim=1)
        ids = torch.cat([state, clean], dim=1)
        hidden = model.corrected_hidden_states(ids, both, positions.repeat(1, 2), mask)[:, :13]
        again.append(hidden)
    again = torch.stack(again, dim=1)
    torch.testing.assert_close(once.corrected_hidden_states, again, **SAME)

    parameters = dict(model.mrp_head.named_parameters())
    gradients = [
        torch.autograd.grad((accumulated * torch.linspace(-1, 1, 13)[:, None]).sum(), list(parameters.values()))
        for accumulated in (once.corrected_hidden_states, again)
    ]
    for name, ours, theirs in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item(), msg=name)


def test_a_forward_without_a_backward_leaves_nothing_behind(tiny_model, monkeypatch):
    """Gradient checkpointing keeps what it needs for a replay that never comes, after an error say."""
    model = tiny_model(num_mrp_layers=2).train()
    model.gradient_checkpointing_enable()
    clean, noisy, revealed = noisy_states(model, steps=2)
    recorded, update = [], ContextRecorder.update

    def watch(self, keys, values, *args, **kwargs):
        recorded.extend(weakref.ref(tensor) for tensor in (keys, values) if tensor.requires_grad)
        return update(self, keys, values, *args, **kwargs)

    monkeypatch.setattr(ContextRecorder, "update", watch)
    model(noisy, revealed_ids=revealed, clean_ids=clean)
    gc.collect()
    assert len(recorded) == 4 and not any(reference() is not None for reference in recorded)


def test_a_dual_stream_reads_the_clean_prefix_and_its_own_block(tiny_model):
    """Block b of a noisy stream = the last block of the row [clean blocks before b | noisy block b]."""
    model = tiny_model()
    clean, noisy, revealed = noisy_states(model, length=12, steps=1)
    dual = model(noisy, revealed_ids=revealed, clean_ids=clean, teacher=True)
    for start in (0, 4, 8):
        now = slice(start, start + 4)
        row = torch.cat([clean[:, :start], noisy[:, now]], dim=1)
        after = torch.cat([clean[:, :start], revealed[:, 0, now]], dim=1)
        plain = model(row, revealed_ids=after[:, None], teacher=True)
        torch.testing.assert_close(dual.logits[:, now], plain.logits[:, now], **SAME)
        torch.testing.assert_close(dual.corrected_logits[:, :, now], plain.corrected_logits[:, :, now], **SAME)
        torch.testing.assert_close(
            dual.revealed_hidden_states[:, :, now], plain.revealed_hidden_states[:, :, now], **SAME
        )


@pytest.mark.parametrize("dual", [False, True])
def test_packed_samples_equal_each_sample_alone(tiny_model, dual):
    """Samples that begin in the middle of a block of their row: blocks are counted from each sample's start."""
    model = tiny_model()
    clean, noisy, revealed = noisy_states(model, rows=1, length=20)
    segment = torch.tensor([[7] * 5 + [2] * 9 + [5] * 3 + [-1] * 3])
    packed = model(noisy, revealed_ids=revealed, clean_ids=clean if dual else None, segment_ids=segment, teacher=True)
    for part in (slice(0, 5), slice(5, 14), slice(14, 17)):
        alone = model(
            noisy[:, part],
            revealed_ids=revealed[:, :, part],
            clean_ids=clean[:, part] if dual else None,
            teacher=True,
        )
        for name, value in fields(alone).items():
            torch.testing.assert_close(fields(packed)[name][..., part, :], value, **SAME)
    assert torch.isfinite(packed.corrected_logits).all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_padded_row_equals_the_row_alone(tiny_model, implementation):
    model = tiny_model()
    model.set_attn_implementation(implementation)
    _, noisy, revealed = noisy_states(model, rows=1, length=9)
    alone = model(noisy, revealed_ids=revealed, teacher=True)
    for left, right in ((6, 0), (0, 6), (3, 2)):
        pad = (left, right)
        padded = model(
            torch.nn.functional.pad(noisy, pad),
            revealed_ids=torch.nn.functional.pad(revealed, pad),
            attention_mask=torch.nn.functional.pad(torch.ones_like(noisy), pad),
            teacher=True,
        )
        for name, value in fields(alone).items():
            torch.testing.assert_close(fields(padded)[name][..., left : left + 9, :], value, **SAME)
        assert all(torch.isfinite(value).all() for value in fields(padded).values())


def test_position_ids_place_the_blocks(tiny_model):
    """A row without its first 4 tokens but with their positions counted: same blocks, rotated by 4."""
    model = tiny_model()
    ids = torch.randint(4, 61, (1, 8), generator=torch.Generator().manual_seed(0))
    shifted = model(ids, position_ids=torch.arange(4, 12)[None]).logits
    torch.testing.assert_close(shifted, model(ids).logits, atol=1e-4, rtol=1e-4)  # rotary: only differences count
    misaligned = model(ids, position_ids=torch.arange(2, 10)[None]).logits
    assert (misaligned - shifted).abs().max() > 0.01


def test_logits_to_keep(tiny_model):
    model = tiny_model()
    _, noisy, revealed = noisy_states(model)
    full = model(noisy, revealed_ids=revealed)
    for keep, where in (
        (3, slice(-3, None)),
        (0, slice(None)),
        (torch.tensor([1, 7, 12]), [1, 7, 12]),
        (torch.empty(0, dtype=torch.long), []),
    ):
        output = model(noisy, revealed_ids=revealed, logits_to_keep=keep)
        torch.testing.assert_close(output.logits, full.logits[:, where])
        torch.testing.assert_close(output.corrected_logits, full.corrected_logits[:, :, where])
        torch.testing.assert_close(output.corrected_hidden_states, full.corrected_hidden_states)


# -- the head and the frozen backbone


@pytest.mark.parametrize("dual", [False, True])
def test_a_head_of_zeros_leaves_the_logits_as_they_are(tiny_model, dual):
    model = tiny_model()
    torch.nn.init.zeros_(model.mrp_head.norm.weight)
    clean, noisy, revealed = noisy_states(model)
    output = model(noisy, revealed_ids=revealed, clean_ids=clean if dual else None)
    assert torch.equal(output.corrected_logits, output.logits[:, None].expand_as(output.corrected_logits))


def test_a_fresh_head_starts_at_no_correction_and_can_learn():
    torch.manual_seed(0)
    model = MRPForDiffusionLM(MRPConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, mask_token_id=3, num_mrp_layers=2,
    ))  # fmt: skip
    _, noisy, revealed = noisy_states(model, steps=1)
    output = model(noisy, revealed_ids=revealed)
    assert torch.equal(output.corrected_logits[:, 0], output.logits)
    projection = model.mrp_head.eh_proj.weight
    assert torch.equal(projection, torch.cat([torch.eye(16), torch.eye(16)], dim=1))  # sees both halves
    (output.corrected_logits * torch.randn_like(output.corrected_logits)).sum().backward()
    assert model.mrp_head.norm.weight.grad.abs().max() > 0
    assert [name for name, p in model.named_parameters() if p.grad is not None and not name.startswith("mrp_")] == []


def test_only_the_head_trains_whatever_train_says(tiny_model):
    model = tiny_model().train()
    assert model.training and model.mrp_head.training
    assert not any(module.training for part in (model.model, model.lm_head) for module in part.modules())
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"mrp_head"}
    clean, noisy, revealed = noisy_states(model)
    output = model(noisy, revealed_ids=revealed, clean_ids=clean, teacher=True)
    assert not output.last_hidden_state.requires_grad and not output.revealed_hidden_states.requires_grad
    assert output.corrected_hidden_states.requires_grad

    model.freeze_backbone(False)
    assert all(module.training for module in model.modules()) and all(p.requires_grad for p in model.parameters())
    assert model(noisy).last_hidden_state.requires_grad
    model.freeze_backbone()
    assert not model.model.training and not model.lm_head.weight.requires_grad


def test_a_model_without_a_head_is_the_backbone(tiny_model):
    with_head, without = tiny_model(), tiny_model(num_mrp_layers=0)
    missing = without.load_state_dict(with_head.state_dict(), strict=False)
    assert missing.missing_keys == [] and all(name.startswith("mrp_head.") for name in missing.unexpected_keys)
    _, noisy, revealed = noisy_states(with_head)
    assert torch.equal(without(noisy).logits, with_head(noisy).logits)
    with pytest.raises(ValueError, match="revealed_ids need a residual head"):
        without(noisy, revealed_ids=revealed)


def test_bfloat16_differs_by_rounding_only(tiny_model):
    """Relative distance of all logits from float32: bf16 keeps 8 bits, and there are few layers here."""
    model = tiny_model(initializer_range=0.1)
    clean, noisy, revealed = noisy_states(model)
    exact = model(noisy, revealed_ids=revealed, clean_ids=clean).corrected_logits
    rough = model.bfloat16()(noisy, revealed_ids=revealed, clean_ids=clean).corrected_logits
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).norm() < 0.03 * exact.norm()


def test_a_float32_head_on_a_bfloat16_backbone_trains(tiny_model):
    model = tiny_model().bfloat16()
    model.mrp_head.float()
    clean, noisy, revealed = noisy_states(model)
    output = model(noisy, revealed_ids=revealed, clean_ids=clean, teacher=True)
    assert output.corrected_hidden_states.dtype == torch.float32
    output.corrected_hidden_states.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.mrp_head.parameters() if p.grad is not None)


# -- what forward refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.tensor([5, 6])}, r"input_ids must be \[rows, length\], got shape \(2,\)"),
        ({"attention_mask": torch.ones(1, 5)}, r"attention_mask must have the shape of input_ids \(1, 6\)"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]])}, "attention_mask has holes"),
        ({"clean_ids": torch.ones(2, 6)}, "clean_ids must have the shape of input_ids"),
        ({"segment_ids": torch.ones(1, 7)}, "segment_ids must have the shape of input_ids"),
        ({"position_ids": torch.ones(1, 7)}, "position_ids must have 6 columns"),
        ({"revealed_ids": torch.ones(1, 6)}, r"revealed_ids must be \[rows, K, length\] = \(1, 'K', 6\)"),
        ({"revealed_ids": torch.ones(1, 0, 6)}, r"revealed_ids must be .*got \(1, 0, 6\)"),
        ({"revealed_ids": torch.ones(2, 1, 6)}, r"revealed_ids must be .*got \(2, 1, 6\)"),
        ({"teacher": True}, "teacher=True runs the backbone on revealed_ids: pass them"),
    ],
)
def test_forward_names_the_argument_that_does_not_fit(tiny_model, arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(**{"input_ids": torch.arange(4, 10)[None]} | arguments)


def test_a_hole_in_the_mask_is_fine_when_the_positions_are_given(tiny_model):
    model = tiny_model()
    ids, mask = torch.arange(4, 10)[None], torch.tensor([[1, 1, 0, 1, 1, 1]])
    dense = model(ids[:, [0, 1, 3, 4, 5]]).logits
    holed = model(ids, attention_mask=mask, position_ids=torch.tensor([[0, 1, 2, 2, 3, 4]])).logits
    torch.testing.assert_close(holed[:, [0, 1, 3, 4, 5]], dense, **SAME)
