"""KL between the states of decoding: by depth with the head, and by distance along what static decoding visits."""

import statistics

import pytest
import torch

from mrp_trainer.data.collator import MRPCollator
from mrp_trainer.evaluation.decoding import decode_batch
from mrp_trainer.evaluation.kl_between_states import kl_by_depth, kl_by_distance, replay

PROMPTS = [[5, 9, 12], [7, 30, 8, 41, 6, 22, 13]]


def static_samples(model, prompts=PROMPTS, **options):
    answers = decode_batch(model, prompts, {"mrp_mode": None} | options, max_new_tokens=21)
    return [(prompt, answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]


def test_kl_by_depth_is_that_of_whole_distributions(tiny_model):
    model, steps = tiny_model(), 2
    samples = [([5, 9, 12], [20, 21, 22, 23, 24, 25]), ([7, 30, 8, 41, 6], [33, 34, 35, 36]), ([5], [])]
    figures = kl_by_depth(model, samples, steps, seed=4)
    rows = [
        {"input_ids": p + a, "answer_mask": [0] * len(p) + [1] * len(a), "lengths": [len(p + a)], "sample_ids": [i]}
        for i, (p, a) in enumerate(samples[:2])
    ]
    batch = MRPCollator(4, 3, steps, seed=4)(rows)
    shared = {"clean_ids": batch["clean_ids"], "segment_ids": batch["segment_ids"]}
    with torch.no_grad():
        out = model(batch["input_ids"], revealed_ids=batch["revealed_ids"], **shared)
        for k in range(steps):
            weight = batch["loss_weight"][:, k]
            b = model(batch["revealed_ids"][:, k], **shared).logits.log_softmax(-1)
            for name, logits in (("before", out.logits), ("after", out.corrected_logits[:, k])):
                kl = torch.nn.functional.kl_div(logits.log_softmax(-1), b, log_target=True, reduction="none").sum(-1)
                assert figures[name][k] == pytest.approx(float((kl * weight).sum() / weight.sum()), rel=1e-4)


@pytest.mark.parametrize("end", [None, "own"])
def test_a_replay_goes_through_the_states_that_decoding_went_through(tiny_model, end):
    """The engine with its cache says at which step of its block each token was revealed; so does the replay."""
    model = tiny_model(block_size=8)
    if end == "own":  # an end of text in the middle of a block
        end = static_samples(model, eos_token_id=None)[0][1][9]
    samples = static_samples(model, eos_token_id=end)
    states, _, is_answer = replay(model, samples)
    for row, (prompt, answer) in enumerate(samples):
        ids = torch.tensor([prompt])
        output = model.generate(ids, mrp_mode=None, eos_token_id=end, max_new_tokens=21, return_dict_in_generate=True)
        whole = slice(len(prompt), len(prompt) + len(answer))
        assert is_answer[row].nonzero()[:, 0].tolist() == list(range(whole.start, whole.stop))
        hidden_for = (states[row, :, whole] == model.config.mask_token_id).sum(0)
        assert (hidden_for - 1).tolist() == output.reveal_steps[0, whole].tolist()
        shown = torch.where(hidden_for == 8, torch.tensor(answer), states[row, -1, whole])  # the last step is not kept
        assert shown.tolist() == answer


def test_kl_is_zero_at_distance_zero_but_not_between_unrelated_positions(tiny_model):
    model = tiny_model(block_size=8)
    same, unrelated = kl_by_distance(model, static_samples(model, eos_token_id=None), distances=[0])
    assert same == pytest.approx([0], abs=1e-6)
    assert unrelated[0] > 0.1


def test_kl_by_distance_equals_that_of_states_read_one_by_one(tiny_model):
    """Plain block-causal forwards of whole rows, cut off after the block, and PyTorch's own KL."""
    model = tiny_model(block_size=4)
    samples = [*static_samples(model, eos_token_id=None), ([5, 6], [])]
    expected = {1: [], 2: [], 3: []}
    for prompt, answer in samples[:2]:
        steps = model.generate(
            torch.tensor([prompt]), mrp_mode=None, eos_token_id=None, max_new_tokens=21, return_dict_in_generate=True
        ).reveal_steps[0]
        text = torch.tensor(prompt + answer)
        for start in range(len(prompt) // 4 * 4, len(text), 4):
            block = slice(start, start + 4)
            if len(text[block]) < 4:  # what comes after the limit is not in the output
                continue
            read, masked = [], []
            for step in range(4):
                hides = steps[block] >= step
                row = torch.cat([text[:start], text[block].masked_fill(hides, 3)])
                read.append(model(row[None]).logits[0, block].log_softmax(-1))
                masked.append(hides)
            for distance, found in expected.items():
                for later in range(distance, 4):
                    divergence = torch.nn.functional.kl_div(
                        read[later - distance], read[later], log_target=True, reduction="none"
                    ).sum(-1)
                    found += divergence[masked[later]].tolist()
    whole_blocks = [(prompt, answer[: len(answer) - len(prompt + answer) % 4]) for prompt, answer in samples[:2]]
    kl, _ = kl_by_distance(model, [*whole_blocks, samples[2]])
    assert kl == pytest.approx([statistics.mean(expected[d]) for d in (1, 2, 3)], rel=1e-4)
