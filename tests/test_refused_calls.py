"""Calls that reach the model beside our own checks: they work, or are refused by name."""

import threading

import pytest
import torch
from generation_calls import PROMPT, drafting_model, generate
from model_states import assert_same_output, noisy_states
from transformers import StoppingCriteria

CHECKPOINTING = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")


@pytest.fixture
def model(tiny_model):
    return drafting_model(tiny_model)


class Pause(StoppingCriteria):
    """Announces its first call, waits for an event there, and then notes whether the model is in training mode."""

    def __init__(self, model, wait_for):
        self.model, self.wait_for, self.reached, self.training = model, wait_for, threading.Event(), None

    def __call__(self, input_ids, scores, **kwargs):
        if self.training is None:
            self.reached.set()
            assert self.wait_for.wait(timeout=60)
            self.training = self.model.training
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_two_threads_may_generate_on_a_model_in_training_mode(model):
    """The second thread found eval mode, took it for the caller's, and left the model in it for good; the first one
    switched training mode on again while the second was decoding."""
    expected = generate(model, {"input_ids": PROMPT}).sequences
    model.train()
    first_ended, results = threading.Event(), {}
    second = Pause(model, wait_for=first_ended)
    first = Pause(model, wait_for=second.reached)

    def run(name, criterion):
        results[name] = generate(model, {"input_ids": PROMPT}, stopping_criteria=[criterion]).sequences

    threads = [threading.Thread(target=run, args=item) for item in (("first", first), ("second", second))]
    threads[0].start()
    assert first.reached.wait(timeout=60)
    threads[1].start()
    threads[0].join(timeout=60)
    first_ended.set()
    threads[1].join(timeout=60)
    assert torch.equal(results["first"], expected) and torch.equal(results["second"], expected)
    assert second.training is False
    assert model.training and model.mrp_head.training and not model.model.training


def test_training_mode_comes_back_after_an_error(model):
    def broken(context, scores):
        raise RuntimeError("broken")

    model.train()
    with pytest.raises(RuntimeError, match="broken"):
        generate(model, {"input_ids": PROMPT}, logits_processor=[broken])
    assert model.training and model.mrp_head.training


@pytest.mark.parametrize("name", ["generate_batch", "init_continuous_batching", "continuous_batching_context_manager"])
def test_continuous_batching_is_refused_at_once(model, name):
    with pytest.raises(NotImplementedError, match="continuous batching .*left to right.*call generate with a padded"):
        getattr(model, name)([[5, 6, 7]])


# -- PEFT


@pytest.mark.parametrize("task_type", ["CAUSAL_LM", None])
def test_an_adapter_of_any_task_type_runs_forward_and_generate(model, task_type):
    """The wrapper of CAUSAL_LM passes inputs_embeds=None and more, which forward did not know."""
    import peft

    clean, state, revealed = noisy_states(model)
    inputs = {"input_ids": state, "revealed_ids": revealed, "clean_ids": clean}
    expected, tokens = model(**inputs), generate(model, {"input_ids": PROMPT}, mrp_mode="spec").sequences
    config = peft.LoraConfig(target_modules=r"mrp_head\..*(q_proj|v_proj)", task_type=task_type)
    adapted = peft.get_peft_model(model, config)  # a fresh adapter adds zero
    assert_same_output(adapted(**inputs), expected)
    new = adapted.generate(input_ids=PROMPT, mrp_mode="spec", max_new_tokens=20, eos_token_id=None)
    assert torch.equal(new, tokens)


def test_arguments_of_other_models_are_refused_unless_they_are_none(model):
    assert torch.equal(model(PROMPT, inputs_embeds=None, labels=None).logits, model(PROMPT).logits)
    for name in ("inputs_embeds", "labels", "output_attentions"):
        with pytest.raises(TypeError, match=rf"forward\(\) does not take {name}"):
            model(PROMPT, **{name: PROMPT})


# -- vocabulary


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        ({"mask_token_id": 60}, 60, "60 token embeddings leave none for mask_token_id=60: keep at least 61"),
        ({"mask_token_id": 60}, 50, "50 token embeddings leave none for mask_token_id=60"),
        ({"eos_token_id": [1, 40]}, 40, "40 token embeddings leave none for eos_token_id=40"),
        ({"pad_token_id": 59}, 30, "30 token embeddings leave none for pad_token_id=59"),
    ],
)
def test_a_vocabulary_without_the_special_ids_is_refused(tiny_model, config, size, message):
    """A model whose mask token had no embedding failed later, with an index error inside the embedding."""
    model = tiny_model(**config)
    with pytest.raises(ValueError, match=message):
        model.resize_token_embeddings(size)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 61


@pytest.mark.parametrize(("arguments", "size"), [((61,), 61), ((80,), 80), ((55, 32), 64)])
def test_a_vocabulary_that_keeps_the_special_ids_is_resized(tiny_model, arguments, size):
    model = tiny_model(mask_token_id=60)
    model.resize_token_embeddings(*arguments)
    assert model.config.vocab_size == size
    new = model.generate(PROMPT, max_new_tokens=5, eos_token_id=None)[0, 3:]
    assert len(new) == 5 and not new.eq(60).any() and new.lt(size).all()


# -- gradient checkpointing


def head_gradients(model):
    clean, state, revealed = noisy_states(model, steps=3)
    model.zero_grad()
    output = model(state, revealed_ids=revealed, clean_ids=clean)
    output.corrected_logits.square().mean().backward()
    return {name: value.grad.clone() for name, value in model.mrp_head.named_parameters()}


@CHECKPOINTING
@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": True, "preserve_rng_state": False}])
def test_reentrant_checkpointing_is_refused(model, options):
    """It lost the gradients that reach the clean stream through later steps: a relative error of 0.75."""
    with pytest.raises(ValueError, match="use_reentrant=True loses gradients.*'use_reentrant': False"):
        model.gradient_checkpointing_enable(options)
    assert not model.is_gradient_checkpointing


@CHECKPOINTING
@pytest.mark.parametrize("options", [None, {"use_reentrant": False}, {"preserve_rng_state": False}])
def test_checkpointing_changes_no_gradient(model, options):
    expected = head_gradients(model.train())
    model.gradient_checkpointing_enable(options)
    assert model.is_gradient_checkpointing
    for name, value in head_gradients(model).items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, n=name: f"{n}: {text}")


@CHECKPOINTING
def test_a_thawed_backbone_with_clean_ids_is_refused_under_checkpointing(model):
    """Under checkpointing the backbone's layers drop their cache, and with it the clean stream: a shape error."""
    clean, state, _ = noisy_states(model)
    model.freeze_backbone(False).train()
    expected = model(state, clean_ids=clean).logits
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"clean_ids cannot be used .*freeze_backbone\(\) or gradient_checkpointing"):
        model(state, clean_ids=clean)
    model(state).logits.sum().backward()  # without a clean stream nothing is dropped
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
    with torch.no_grad():
        torch.testing.assert_close(model(state, clean_ids=clean).logits, expected)
    model.freeze_backbone()
    torch.testing.assert_close(model(state, clean_ids=clean).logits, expected)
