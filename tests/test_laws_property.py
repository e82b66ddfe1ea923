"""The laws of decoding on random models and random calls (`make fuzz` draws them for an hour).

A failure prints the `Setting` that hypothesis has reduced it to. Once it is understood, it becomes an `@example`.
"""

import warnings
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import transformers
from decoding_calls import batch
from generation_calls import Recorder
from hypothesis import HealthCheck, example, given, settings
from law_settings import LETTERS, PAD, PROCESSORS, Setting, StopRows, TinyModel, generate_calls, letter_tokenizer
from plain_head_loop import direct, remask
from plain_loop import plain_decode
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from modeling_mrp import reader

settings.register_profile(
    "ci", max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("ci")

TOKEN_COUNTS = ("tokens_by_backbone", "tokens_by_head")
COSTS = ("backbone_forwards", "head_forwards", "drafts_proposed", "drafts_accepted")


def decode(model, setting: Setting, rows, **changes):
    """Output and streamed columns of `generate` on some of the rows, and on all copies of them."""
    prompts = [list(setting.prompts[row]) for row in rows]
    inputs = batch(prompts, "left" if setting.left else "right")
    options = {
        **setting.mode, **setting.rule, **setting.sampling, "max_new_tokens": setting.max_new_tokens,
        "eos_token_id": list(setting.ends) or None, "pad_token_id": PAD, "num_return_sequences": setting.copies,
        "output_scores": setting.scores, "block_size": setting.block_size,
        "suppress_tokens": list(setting.suppressed) or None,
        "bad_words_ids": [[token] for token in setting.bad_words] or None,
        "logits_processor": [PROCESSORS[name] for name in setting.processors],
    }  # fmt: skip
    if setting.sampling:
        options = {"top_k": 0} | options
    if setting.stop_lengths or setting.stop_tokens:
        lengths = setting.stop_lengths or [setting.max_new_tokens] * len(setting.prompts)
        lengths = torch.tensor([lengths[row] for row in rows]).repeat_interleave(setting.copies)
        options["stopping_criteria"] = [StopRows(lengths, setting.stop_tokens, inputs["input_ids"].shape[1])]
    if setting.stop_strings:
        options |= {"stop_strings": list(setting.stop_strings), "tokenizer": letter_tokenizer(model.config.vocab_size)}
    torch.manual_seed(setting.seed)
    streamer = Recorder()
    chunk = reader.CHUNK_NUMBERS if setting.chunk is None else setting.chunk * model.config.vocab_size
    worth = 0 if setting.selects else reader.WORTH_SELECTING["cpu"]
    with patch.object(reader, "CHUNK_NUMBERS", chunk), patch.dict(reader.WORTH_SELECTING, cpu=worth):
        output = model.generate(**inputs, **options | changes, streamer=streamer, return_dict_in_generate=True)
    return output, torch.stack(streamer.values("put")[1:], dim=1)


class Calls:
    """Counts the calls of backbone and head."""

    def __init__(self, model):
        self.backbone = self.head = 0
        model.model.register_forward_hook(lambda *_: setattr(self, "backbone", self.backbone + 1))
        model.mrp_head.register_forward_hook(lambda *_: setattr(self, "head", self.head + 1))


def new_tokens(output, index):
    """The new tokens of a row without padding."""
    length = int(output.stats.lengths[index])
    row = output.sequences[index, prompt_columns(output) :].tolist()
    assert set(row[length:]) <= {PAD}
    return row[:length]


def prompt_columns(output):
    return output.sequences.shape[1] - int(output.stats.lengths.max())


def is_stopped(setting, row, tokens):
    """Whether a criterion or a stop string, rather than end of text or the limit, ended a row."""
    return len(tokens) < setting.max_new_tokens and tokens[-1] not in setting.ends


def assert_row_equals_row_alone(setting, together, index, alone, copy):
    tokens = new_tokens(together, index)
    assert tokens == new_tokens(alone, copy)
    steps, expected = (
        output.reveal_steps[number, prompt_columns(output) :][: len(tokens)].tolist()
        for output, number in ((together, index), (alone, copy))
    )
    assert steps == expected
    if setting.scores:
        for at in range(len(tokens)):
            torch.testing.assert_close(together.scores[at][index], alone.scores[at][copy], atol=1e-5, rtol=1e-5)
    stopped = is_stopped(setting, index // setting.copies, tokens)
    for name, value in vars(together.stats).items():
        if setting.mode.get("mrp_steps") == "auto" and name != "prefill_forwards":
            continue  # how far a round drafts depends on the clock and on the number of rows
        own, expected = value[index].tolist(), vars(alone.stats)[name][copy].tolist()
        if stopped and name in COSTS:
            assert torch.tensor(own).ge(torch.tensor(expected)).all(), name
        else:
            assert own == expected, name


def stop_of(setting, row, tokens):
    """How many of a row's unstopped tokens it keeps, by a plain reading of what ends a row."""
    text = "".join(LETTERS[token] for token in setting.prompts[row])
    for count, token in enumerate(tokens, start=1):
        text += LETTERS[token]
        if token in setting.ends or token in setting.stop_tokens or text.endswith(setting.stop_strings or ("?",)):
            return count
        if setting.stop_lengths and count >= setting.stop_lengths[row]:
            return count
    return len(tokens)


def truncation(sampling):
    warpers = [
        warper(sampling[name])
        for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper))
        if name in sampling
    ]

    def truncate(scores):
        for warper in warpers:
            scores = warper(None, scores)
        return scores

    return truncate


def plain_tokens(model, setting, row, copy):
    """New tokens of a row by a plain loop without a cache, or None where there is no plain loop for the setting.

    The model's own block size is that of the setting.
    """
    prompt, mode, rule, count = list(setting.prompts[row]), setting.mode, setting.rule, setting.max_new_tokens
    size = model.config.block_size
    per_step = -(-size // rule.get("denoising_steps", size))
    # law 4: with a head of zeros, head steps read the logits of the backbone step before them
    stale = mode["mrp_mode"] == "direct" and setting.model.head_scale == 0 and setting.model.residual
    if stale or mode["mrp_mode"] is None or (mode["mrp_mode"] == "spec" and mode.get("mrp_acceptance") != "token"):
        torch.manual_seed(setting.seed)
        return plain_decode(
            model, prompt, count, rule=rule["remasking_strategy"], tokens_per_step=per_step,
            threshold=rule.get("confidence_threshold"), bound=rule.get("eb_threshold"), eos=setting.ends,
            temperature=setting.sampling.get("temperature"), truncate=truncation(setting.sampling),
            seed=torch.randint(2**62, ()).item(), copy=copy, shape=setting.shape,
            stale_steps=mode["mrp_steps"] if stale else 0,
        )  # fmt: skip
    if setting.sampling:
        return None
    if mode["mrp_mode"] == "direct" and rule["remasking_strategy"] == "low_confidence_static" and per_step == 1:
        return direct(model, prompt, count, mode["mrp_steps"], setting.shape)
    if mode["mrp_mode"] == "remask" and mode["remask_criterion"] != "backbone":
        values = (mode[name] for name in ("confidence_threshold", "remask_criterion", "remask_threshold"))
        return remask(model, prompt, count, *values, setting.shape)
    return None


@pytest.fixture(autouse=True)
def quiet():
    """Without transformers' advice against padding on the right, and ours against another block size."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="block_size=")
        yield
    transformers.logging.set_verbosity(level)


def check_laws(setting: Setting):
    """Decode the setting in all the ways that must agree, and compare them."""
    model = setting.model.build()
    reference = replace(setting.model, block_size=setting.block_size or setting.model.block_size).build()
    every_row = range(len(setting.prompts))
    together, columns = decode(model, setting, every_row)
    assert torch.equal(columns, together.sequences[:, prompt_columns(together) :])
    assert not together.sequences[:, prompt_columns(together) :].eq(model.config.mask_token_id).any()

    calls = Calls(model)
    for row in every_row:  # law 2: a row in a batch equals the row alone
        calls.backbone = calls.head = 0
        alone, _ = decode(model, setting, [row])
        if setting.copies == 1:  # law 5: every forward is counted
            assert alone.stats.backbone_forwards.tolist() == [calls.backbone]
            assert alone.stats.head_forwards.tolist() == [calls.head]
        for copy in range(setting.copies):
            index = row * setting.copies + copy
            assert_row_equals_row_alone(setting, together, index, alone, copy)
            plain = plain_tokens(reference, setting, row, copy)  # law 3: the plain loop
            if plain is not None:
                assert new_tokens(together, index) == plain[: stop_of(setting, row, plain)]

    if setting.mode["mrp_mode"] == "spec":
        if setting.mode.get("mrp_acceptance") != "token":  # law 1: spec is lossless
            expected, _ = decode(model, setting, every_row, mrp_mode=None)
            assert torch.equal(together.sequences, expected.sequences)
            assert torch.equal(together.reveal_steps, expected.reveal_steps)
        if setting.model.head_scale == 0 and setting.model.residual:  # law 4: a head of zeros drafts as none
            draft = {"head": "self", "self": "head"}[setting.mode["mrp_draft"]]
            other, _ = decode(model, setting, every_row, mrp_draft=draft)
            assert torch.equal(together.sequences, other.sequences)
            if setting.mode["mrp_steps"] != "auto":
                assert torch.equal(together.stats.drafts_accepted, other.stats.drafts_accepted)


@given(generate_calls())
@example(  # row 0 ends in its first block, and a criterion stops row 1 while the columns of row 0 wait for it
    Setting(
        model=TinyModel(vocab_size=5, mask_token_id=2, residual=False),
        prompts=((0,), (0,) * 7),
        mode={"mrp_mode": None},
        rule={"remasking_strategy": "low_confidence_static", "denoising_steps": 1},
        max_new_tokens=2,
        sampling={"do_sample": True, "temperature": 1.0},
        stop_tokens=(0,),
    )
)
@example(  # law 4: a head of zeros reveals from stale logits, under every option of the choice of tokens
    Setting(
        model=TinyModel(block_size=5, head_scale=0.0),
        mode={"mrp_mode": "direct", "mrp_steps": 2},
        rule={"remasking_strategy": "low_confidence_static", "denoising_steps": 6},
        sampling={"do_sample": True, "temperature": 0.8, "top_k": 5},
        processors=("after_token", "squash"),
        suppressed=(5,),
        bad_words=(6,),
        block_size=6,
    )
)
def test_the_laws_hold_for_any_model_and_any_call(setting):
    check_laws(setting)
