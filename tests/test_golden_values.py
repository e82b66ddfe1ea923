"""The model and its decoding against values that an independent implementation computed (golden/README.md)."""

import pytest
import torch
from generation_calls import DraftRecorder
from golden_values import load_golden

from modeling_mrp.masks import stream_layout

CLOSE = {"atol": 1e-4, "rtol": 0}  # the golden values' tolerance in float32


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
    tokens = stream_layout(torch.zeros_like(positions), positions, size, stream=1, context=1)
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


@pytest.mark.parametrize("mode", [None, "spec"])
def test_the_golden_sequence(golden_folder, mode):
    model, golden = load_golden(golden_folder)
    prompt, sequence = golden["greedy.prompt"], golden["greedy.sequence"]
    count = len(sequence) - len(prompt)
    new = model.generate(prompt[None], max_new_tokens=count, eos_token_id=None, mrp_mode=mode)
    assert new[0].tolist() == sequence.tolist()


def test_the_golden_reveal_order(golden_folder):
    """One token a step, seen through the drafts: the position that changes between one and the next."""
    model, golden = load_golden(golden_folder)
    prompt, sequence, mask = golden["greedy.prompt"], golden["greedy.sequence"], model.config.mask_token_id
    streamer, row = DraftRecorder(), [mask] * len(sequence)
    row[: len(prompt)] = prompt.tolist()
    count = len(sequence) - len(prompt)
    model.generate(prompt[None], max_new_tokens=count, eos_token_id=None, mrp_mode=None, streamer=streamer)
    order, done = [], 0
    for kind, value in streamer.events:
        if kind == "draft":
            shown = row[:done] + value[0].tolist()
        elif kind == "put":
            done += value.numel()
            shown = row[: done - value.numel()] + value.flatten().tolist()
        changed = [at for at in range(len(prompt), len(shown)) if kind != "end" and shown[at] != row[at]]
        assert len(changed) <= 1
        for at in changed:
            assert row[at] == mask
            row[at] = shown[at]
            order.append(at)
    assert row == sequence.tolist()
    assert order == golden["greedy.reveal_order"].tolist()
