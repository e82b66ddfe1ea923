"""Lines of the training log."""

import logging

from mrp_trainer.console import log_line, without_invitation

TRAINING = {
    "loss": 0.0612,
    "learning_rate": 0.001,
    "kl_before_1": 0.128,
    "kl_after_1": 0.06,
    "kl_removed_1": 0.53,
    "same_token_1": 0.9,
    "same_pick_1": 0.78,
    "kl_before_2": 0.21,
    "kl_after_2": 0.07,
    "kl_removed_2": 0.67,
    "same_token_2": 0.88,
    "same_pick_2": 0.75,
    "expected_tokens_per_forward": 2.365,
    "epoch": 0.5,
}


def test_training_line_shows_the_improvement_at_every_depth():
    line = log_line(TRAINING)
    assert line == (
        "loss 0.0612  lr 0.001  KL 0.128>0.0600 0.210>0.0700 (removed 53/67 %)  same pick 78/75 %  "
        "expect 2.37 tokens/forward"
    )


def test_evaluation_line_adds_the_figures_of_decoding():
    logs = {f"eval_{name}": value for name, value in TRAINING.items() if name != "learning_rate"}
    line = log_line(logs | {"eval_tokens_per_forward": 1.954, "eval_accepted_1": 0.78, "eval_accepted_2": 0.74})
    assert line.startswith("held-out loss 0.0612  KL 0.128>0.0600 0.210>0.0700 (")
    assert line.endswith("decoded 1.95 tokens/forward (accepted 78/74 %)")


def test_small_kl_values_are_shown_with_significant_digits():
    line = log_line(TRAINING | {"kl_before_1": 0.0004217, "kl_after_1": 0.00004217, "kl_before_2": 12.34})
    assert "KL 0.000422>4.22e-05 12.3>0.0700" in line


def test_other_figures_are_shown_as_they_are():
    assert log_line({"train_runtime": 12.345, "note": "text"}) == "train_runtime 12.35"


def test_invitation_to_share_the_model_is_not_shown_during_training(caplog):
    """transformers writes it even after a run that trained nothing."""
    source = logging.getLogger("transformers.trainer")
    with caplog.at_level(logging.INFO, logger="transformers.trainer"):
        source.propagate, before = True, source.propagate
        try:
            with without_invitation():
                source.info("Training completed. Do not forget to share your model on huggingface.co/models =)")
                source.info("another line")
            source.info("share your model")
        finally:
            source.propagate = before
    assert [record.getMessage() for record in caplog.records] == ["another line", "share your model"]
