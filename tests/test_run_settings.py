"""Which options a resumed run may change."""

from dataclasses import fields

from mrp_trainer.arguments import DataArguments, ModelArguments, MRPTrainingArguments
from mrp_trainer.checkpoints.run_settings import CHANGEABLE, FREE, differences, listed, run_settings
from mrp_trainer.trainer_inputs import collator_for

OF_OTHER_VERSIONS = {"warmup_ratio"}
OWN = {"eval_data", "attn_implementation"}  # options of model and data


def test_every_name_is_an_option_and_in_one_list():
    options = {one.name for kind in (MRPTrainingArguments, DataArguments, ModelArguments) for one in fields(kind)}
    assert (set(FREE) | set(CHANGEABLE)) - options <= OF_OTHER_VERSIONS
    assert len({*FREE, *CHANGEABLE}) == len(FREE) + len(CHANGEABLE)
    training = {one.name for one in fields(MRPTrainingArguments)}
    assert set(CHANGEABLE) - training <= OF_OTHER_VERSIONS | OWN


def test_everything_that_makes_a_batch_must_stay(tiny_model):
    """The collator's options are those of the noise."""
    collator = collator_for(tiny_model(), MRPTrainingArguments(use_cpu=True))
    names = {one.name for one in fields(collator)} & {one.name for one in fields(MRPTrainingArguments)}
    assert names == {"seed", "reveal_counts", "noise_eps", "noise_per_block"}
    recorded = run_settings(MRPTrainingArguments(use_cpu=True), {})
    assert (names | {"unroll_steps"}) <= recorded.keys() - set(CHANGEABLE)


def test_differences_are_listed_with_both_values_and_hashes_shortened():
    old = {"seed": 1, "rows": "0123456789ab" + "c" * 52, "reveal_counts": [1], "gone": 1}
    new = {"seed": 2, "rows": "ba9876543210" + "c" * 52, "reveal_counts": [1], "option of a newer version": 1}
    changes = differences(old, new)
    assert listed(changes) == "seed: 1 -> 2; rows: 0123456789ab... -> ba9876543210..."
    assert differences(old, old) == {}


def test_settings_are_the_same_after_json(tmp_path):
    args = MRPTrainingArguments(str(tmp_path), use_cpu=True, reveal_counts=[1, 2])
    assert run_settings(args, {"pair": (1, 2)})["pair"] == [1, 2]
    assert "hub_token" not in run_settings(args, {})
    assert not [value for value in run_settings(args, {}).values() if str(tmp_path) in str(value)]
