"""Trajectories: the states that decoding visits, as rows of training data."""

import re

import pytest
import torch
from datasets import Dataset, load_dataset

from mrp_trainer import MRPTrainer, MRPTrainingArguments
from mrp_trainer.commands.cli import main
from mrp_trainer.data.collator import MRPCollator
from mrp_trainer.evaluation.trajectories import packed, trajectories, with_room

PROMPTS = [[9, 8, 7], list(range(10, 19)), [5] * 8]


@pytest.fixture
def model(tiny_model):
    return tiny_model(block_size=4)


def test_rows_hold_the_models_own_answer_and_the_step_of_each_token(model):
    rows = list(trajectories(model, PROMPTS, max_new_tokens=9, batch_size=2, eos_token_id=None))
    for number, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True)):
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=9, eos_token_id=None, mrp_mode=None, return_dict_in_generate=True
        )
        assert row["input_ids"] == out.sequences[0].tolist()
        assert row["answer_mask"] == [0] * len(prompt) + [1] * 9
        assert row["lengths"] == [len(prompt) + 9] and row["sample_ids"] == [number]
        assert row["reveal_steps"] == out.reveal_steps[0].tolist()


def test_the_block_is_filled_with_the_end_of_text_after_it(model):
    plain = next(trajectories(model, PROMPTS[:1], max_new_tokens=12, eos_token_id=None))
    eos = plain["input_ids"][5]
    model.generation_config.eos_token_id = eos
    row = next(trajectories(model, PROMPTS[:1], max_new_tokens=12))
    first = row["input_ids"].index(eos)
    assert len(row["input_ids"]) == (first // 4 + 1) * 4 and set(row["input_ids"][first:]) == {eos}
    assert min(row["reveal_steps"][3 : first + 1]) >= 0


def test_every_state_of_a_batch_is_one_that_decoding_went_through(model):
    """The noisy and the revealed states are found among the states that a streamer is shown."""
    row = next(trajectories(model, PROMPTS[1:2], max_new_tokens=7, eos_token_id=None))
    states = []

    class Drafts:
        def put(self, value):
            pass

        put_draft = end = lambda self, *value: states.extend(v.flatten().tolist() for v in value)

    inputs = torch.tensor([PROMPTS[1]])
    model.generate(inputs, max_new_tokens=7, eos_token_id=None, mrp_mode=None, streamer=Drafts())
    mask = model.config.mask_token_id
    visited = {tuple(state[:3]) for state in states} | {tuple(row["input_ids"][9:12]), (mask,) * 3}
    collate = MRPCollator(block_size=4, mask_token_id=mask, steps=2)
    for epoch in range(20):
        collate.set_epoch(epoch)
        batch = collate([row])
        for ids in (batch["input_ids"], *batch["revealed_ids"].unbind(1)):
            assert tuple(ids[0, 9:12].tolist()) in visited


def test_packing_keeps_every_token():
    rows = [
        {"input_ids": [i] * n, "answer_mask": [1] * n, "lengths": [n], "sample_ids": [i], "reveal_steps": [0] * n}
        for i, n in enumerate((5, 3, 9, 2))
    ]
    done = packed(rows, 8)
    assert sorted(sum((row["lengths"] for row in done), [])) == [2, 3, 5, 9]
    assert sorted(sum((row["input_ids"] for row in done), [])) == sorted(sum((row["input_ids"] for row in rows), []))
    assert all(len(row["reveal_steps"]) == sum(row["lengths"]) <= 9 for row in done)


def test_prompts_leave_room_for_an_answer_up_to_the_end_of_its_block():
    prompts = [[9] * length for length in (1, 3, 4, 9)]
    assert with_room(prompts, 5, 4, 8) == prompts[:2]  # 3 + 5 = 8, 4 + 5 = 9
    assert with_room(prompts, 5, 4, 11) == prompts[:2]  # 4 + 5 = 9, rounded up 12
    assert with_room(prompts, 5, 4, 12) == prompts[:3]
    with pytest.raises(ValueError, match="none of 4 prompts .* 5 new tokens within 5: raise --sequence-length"):
        with_room(prompts, 5, 4, 5)


def test_command_writes_rows_that_train(tiny_model, word_tokenizer, tmp_path, capsys):
    model = tiny_model(vocab_size=20, block_size=4)
    model.save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    texts = [{"prompt": "what is one ?", "completion": "one"}, {"prompt": "what is two", "completion": "two"}]
    texts.append({"prompt": "what is " * 20, "completion": "too long"})
    Dataset.from_list(texts).to_json(tmp_path / "data.jsonl")
    out = tmp_path / "out.parquet"
    command = ["trajectories", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl"), "--out", str(out)]
    assert main([*command, "--max-new-tokens", "8", "--sequence-length", "32"]) == 0
    shown = capsys.readouterr().out.replace("\r", "").splitlines()
    assert shown[:2] == ["left out, since there is no room for an answer: 1 of 3 prompts", "2 of 2 prompts"]
    assert re.fullmatch(r"\d+ answer tokens in 1 row: .*out.parquet", shown[2])
    rows = load_dataset("parquet", data_files=str(out), split="train")
    assert len(rows) == 1 and len(rows[0]["lengths"]) == 2
    args = MRPTrainingArguments(
        str(tmp_path / "run"), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    assert MRPTrainer(model, args, train_dataset=rows).train().training_loss > 0


@pytest.mark.parametrize(
    "option, value", [("--out", "x.csv"), ("--samples", "0"), ("--max-new-tokens", "0"), ("--options", "[]")]
)
def test_bad_options_are_named(option, value, capsys):
    command = ["trajectories", "model", "--data", "data.jsonl", "--out", "x.parquet", option, value]
    assert main(command) == 2
    assert option in capsys.readouterr().err
