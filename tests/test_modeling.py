"""`forward`: equivalences between different ways to ask for the same numbers, and the inputs that it refuses."""

import pytest
import torch
from model_states import SAME, fields, noisy_states


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


def test_bfloat16_differs_by_rounding_only(tiny_model):
    """Relative distance of all logits from float32: bf16 keeps 8 bits, and there are few layers here."""
    model = tiny_model(initializer_range=0.1)
    clean, noisy, revealed = noisy_states(model)
    exact = model(noisy, revealed_ids=revealed, clean_ids=clean).corrected_logits
    rough = model.bfloat16()(noisy, revealed_ids=revealed, clean_ids=clean).corrected_logits
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).norm() < 0.03 * exact.norm()


# -- inputs that do not fit


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


def test_a_mask_with_holes_is_allowed_when_positions_are_given(tiny_model):
    model = tiny_model()
    ids, mask = torch.arange(4, 10)[None], torch.tensor([[1, 1, 0, 1, 1, 1]])
    dense = model(ids[:, [0, 1, 3, 4, 5]]).logits
    holed = model(ids, attention_mask=mask, position_ids=torch.tensor([[0, 1, 2, 2, 3, 4]])).logits
    torch.testing.assert_close(holed[:, [0, 1, 3, 4, 5]], dense, **SAME)
