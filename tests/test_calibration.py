"""The calibrated remask threshold: how it is chosen, and where it is stored."""

import json
import math

import pytest

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.options import DecodingOptions
from mrp_trainer.evaluation.calibration import calibrate, store_in_config
from mrp_trainer.evaluation.decoding import decode_batch, prompt_ids
from mrp_trainer.evaluation.modes import BACKBONE_ONLY
from mrp_trainer.evaluation.runs import Settings

ROWS = [{"prompt": f"what is {word} ?", "answer": word} for word in ("one", "two", "three", "two", "two")]


def first_is_odd(text, row):
    return len(text) % 2


def settings(**changes):
    return Settings(**{"modes": {"static": BACKBONE_ONLY}, "scorer": "odd", "batch_size": 2} | changes)


@pytest.fixture
def setup(tiny_model, word_tokenizer):
    return tiny_model(), word_tokenizer


def test_calibration_chooses_the_candidate_with_the_highest_value(setup):
    model, tokenizer = setup
    chosen = settings(max_new_tokens=12, batch_size=5, options={"eos_token_id": None})
    seen = []
    best = calibrate(
        model, tokenizer, ROWS, first_is_odd, chosen, candidates=(1e9, 0.0, 1.0), on_candidate=seen.append
    )
    prompts = [prompt_ids(tokenizer, row) for row in ROWS]

    def figures(options):
        answers = decode_batch(model, prompts, options | chosen.options, 12)
        texts = [tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers]
        right = sum(first_is_odd(text, None) for text in texts) / len(texts)
        return right, sum(len(answer.token_ids) for answer in answers) / sum(answer.forwards for answer in answers)

    reference, _ = figures({"mrp_mode": None})
    assert [figures_of["remask_threshold"] for figures_of in seen] == [0.0, 1.0, 1e9]
    for candidate in seen:
        accuracy = candidate["accuracy"]
        weight = min(1.0, math.exp(-3 * (1 - accuracy / reference)))
        assert candidate["value"] == pytest.approx(accuracy * weight * candidate["tokens_per_forward"])
    assert best == max(seen, key=lambda candidate: candidate["value"])["remask_threshold"]
    # where nothing is masked again, this is SDAR's own threshold decoding
    dynamic = {"mrp_mode": None, "remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.5}
    assert (seen[-1]["accuracy"], seen[-1]["tokens_per_forward"]) == pytest.approx(figures(dynamic))


def test_calibration_without_a_right_answer_says_so(setup):
    with pytest.raises(ValueError, match="no answer to 1 prompt was right"):
        calibrate(*setup, ROWS[:1], lambda text, row: 0, settings(max_new_tokens=2), candidates=(1.0,))


def test_a_stored_threshold_is_what_the_residual_criterion_uses(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    store_in_config(tmp_path, calibrated_remask_threshold=2.0)
    config = MRPForDiffusionLM.from_pretrained(tmp_path).config
    options = DecodingOptions.resolve({"mrp_mode": "remask", "remask_criterion": "residual"}, config)
    assert options.keep_threshold == 2.0


def test_a_threshold_is_stored_in_our_checkpoints_only(golden_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((golden_folder / "config.json").read_bytes())
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ValueError, match="not the folder of a converted checkpoint"):
            store_in_config(folder, calibrated_remask_threshold=2.0)


def test_results_of_an_embedded_checkpoint_are_stored_by_its_name(tmp_path, monkeypatch):
    """`mrp eval words --calibrate` said that words was not the folder of a checkpoint."""
    (tmp_path / "sdar-tiny-mrp").mkdir()
    (tmp_path / "sdar-tiny-mrp" / "config.json").write_text('{"model_type": "sdar_mrp"}')
    monkeypatch.setattr("mrp_trainer.checkpoints.weight_files.EMBEDDED", tmp_path)
    file = store_in_config("words", calibrated_remask_threshold=2.0)
    assert json.loads(file.read_text())["calibrated_remask_threshold"] == 2.0
