"""Preparing data sets: formats, rows, sources; and the collator that makes batches of them."""

import json
import logging

import pytest
import torch
from datasets import Dataset

from mrp_trainer.data.chats import chat_samples
from mrp_trainer.data.collator import MRPCollator
from mrp_trainer.data.reading import load_source
from mrp_trainer.data.rows import pack, prepare_dataset

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} [EOS] {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MASK = 3


@pytest.fixture
def tokenizer(word_tokenizer):
    word_tokenizer.chat_template = CHAT
    return word_tokenizer


def prepare(records, tokenizer, **options):
    return prepare_dataset(Dataset.from_list(records), tokenizer, **{"sequence_length": 16} | options)


def samples_of(dataset):
    """Yield (ids, answer mask, sample id) of every sample of prepared rows."""
    for row in dataset:
        assert sum(row["lengths"]) == len(row["input_ids"]) == len(row["answer_mask"])
        start = 0
        for length, sample in zip(row["lengths"], row["sample_ids"], strict=True):
            yield row["input_ids"][start : start + length], row["answer_mask"][start : start + length], sample
            start += length


def text_of(ids, mask, tokenizer, supervised):
    return tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m == supervised])


# --- formats


def test_text_is_supervised_throughout_and_ends_with_eos(tokenizer):
    [(ids, mask, _)] = samples_of(prepare([{"text": "one plus two"}], tokenizer))
    assert tokenizer.decode(ids) == "one plus two [EOS]"
    assert mask == [1] * 4
    [(ids, _, _)] = samples_of(prepare([{"text": "one plus two"}], tokenizer, append_eos=False))
    assert tokenizer.decode(ids) == "one plus two"


def test_only_the_completion_of_a_prompt_is_supervised(tokenizer):
    [(ids, mask, _)] = samples_of(prepare([{"prompt": "what is one ?", "completion": "so two ."}], tokenizer))
    assert text_of(ids, mask, tokenizer, 0) == "what is one ?"
    assert text_of(ids, mask, tokenizer, 1) == "so two . [EOS]"


def test_only_the_turns_of_the_assistant_are_supervised_in_a_chat(tokenizer):
    messages = [
        {"role": "system", "content": "ok"},
        {"role": "user", "content": "what is one ?"},
        {"role": "assistant", "content": "so two ."},
        {"role": "user", "content": "and three ?"},
        {"role": "assistant", "content": "then four ."},
    ]
    [(ids, mask, _)] = samples_of(prepare([{"messages": messages}], tokenizer, sequence_length=64))
    assert text_of(ids, mask, tokenizer, 1) == "so two . [EOS] then four . [EOS]"
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_prompt_and_completion_may_be_messages(tokenizer):
    record = {
        "prompt": [{"role": "user", "content": "what is one ?"}],
        "completion": [{"role": "assistant", "content": "so two ."}],
    }
    [(ids, mask, _)] = samples_of(prepare([record], tokenizer))
    assert text_of(ids, mask, tokenizer, 1) == "so two . [EOS]"


def test_template_that_rewrites_earlier_turns_gives_one_sample_per_rendering(tokenizer):
    """Templates of reasoning models drop the reasoning of earlier turns, so no single text has all turns as in use."""
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}> "
        "{% if m['role'] == 'assistant' and loop.last %}hmm {% endif %}{{ m['content'] }} . {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    messages = [
        {"role": role, "content": content}
        for role, content in [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    ]
    first, second = chat_samples(messages, tokenizer)
    assert first == [("<user> one . <assistant> ", False), ("hmm two . ", True)]
    assert second == [("<user> one . <assistant> two . <user> three . <assistant> ", False), ("hmm four . ", True)]


def test_template_whose_answer_does_not_begin_with_its_prompt_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}so{% endif %}"
    )
    with pytest.raises(ValueError, match="generation prompt"):
        chat_samples([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}], tokenizer)


def test_unknown_columns_and_options_are_refused(tokenizer):
    with pytest.raises(ValueError, match="question.*messages"):
        prepare([{"question": "one"}], tokenizer)
    with pytest.raises(ValueError, match="long_samples"):
        prepare([{"text": "one"}], tokenizer, long_samples="cut")
    with pytest.raises(ValueError, match="sequence_length"):
        prepare([{"text": "one"}], tokenizer, sequence_length=0)


def test_data_with_nothing_to_supervise_is_refused(tokenizer):
    with pytest.raises(ValueError, match="no sample has anything to supervise"):
        prepare([{"messages": [{"role": "user", "content": "one"}]}], tokenizer)


def test_samples_without_an_answer_are_counted(tokenizer, caplog):
    user, assistant = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
    chats = [[user], [assistant, user], [user, assistant]]
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    rows = prepare([{"messages": messages} for messages in chats], tokenizer, packing=False)
    logger.removeHandler(caplog.handler)
    assert [text_of(ids, mask, tokenizer, 1) for ids, mask, _ in samples_of(rows)] == ["two [EOS]"]
    assert "2 samples have nothing to supervise and are left out, of 3" in caplog.text


@pytest.mark.parametrize(
    "column, record",
    [
        ("text", {"text": "one"}),
        ("prompt", {"prompt": "one", "completion": "two"}),
        ("completion", {"prompt": "one", "completion": "two"}),
        ("messages", {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_row_without_a_value_is_named(tokenizer, column, record, streamed):
    data = Dataset.from_list([record, record, record | {column: None}])
    with pytest.raises(ValueError, match=f"row 2 .* column {column}: remove it or fill it in"):
        prepare_dataset(data.to_iterable_dataset() if streamed else data, tokenizer, sequence_length=16)


def test_prepared_rows_are_returned_unchanged(tokenizer):
    rows = prepare([{"text": "one"}], tokenizer)
    assert prepare_dataset(rows, tokenizer, sequence_length=16) is rows


# --- rows


def records(count):
    return [
        {"text": " ".join(["one", "two", "three", "four", "five"][: 1 + i % 5] * (1 + i % 3))} for i in range(count)
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_rows_keep_every_token_in_its_sample(tokenizer, packing):
    data = records(50)
    rows = prepare(data, tokenizer, packing=packing)
    found = {sample: tokenizer.decode(ids) for ids, _, sample in samples_of(rows)}
    assert sorted(found.values()) == sorted(f"{record['text']} [EOS]" for record in data)
    assert all(len(row["input_ids"]) <= 16 for row in rows)
    assert (len(rows) < 50) == packing


def test_packing_fills_bins_and_never_overflows():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 33, (200,), generator=generator).tolist()
    bins = pack(lengths, 32)
    assert sorted(index for members in bins for index in members) == list(range(200))
    assert all(sum(lengths[i] for i in members) <= 32 for members in bins)
    assert len(bins) <= 1.1 * sum(lengths) / 32 + 1  # best fit decreasing is at most 11/9 of the optimum + 1
    assert pack([5, 3, 2, 4], 7) == [[0, 2], [1, 3]]


def test_long_samples_are_split_or_dropped_and_counted(tokenizer, caplog):
    data = [{"text": "one two three four five " * 4}, {"text": "ok"}]  # 21 and 2 tokens
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    split = {sample: ids for ids, _, sample in samples_of(prepare(data, tokenizer, sequence_length=8))}
    dropped = [tokenizer.decode(ids) for ids, _, _ in samples_of(prepare(data, tokenizer, long_samples="drop"))]
    logger.removeHandler(caplog.handler)
    assert [len(ids) for _, ids in sorted(split.items())] == [8, 8, 5, 2]
    assert dropped == ["ok [EOS]"]
    assert "1 sample is longer than 8 tokens and is split into several, of 2" in caplog.text
    assert "1 sample is longer than 16 tokens and is dropped, of 2" in caplog.text


def test_without_a_sequence_length_rows_hold_1024_tokens(tokenizer):
    rows = prepare([{"text": "one " * 1500}], tokenizer, sequence_length=None)
    assert [len(row["input_ids"]) for row in rows] == [1024, 477]


def test_stream_logs_what_it_leaves_out_at_powers_of_ten(tokenizer, caplog):
    data = [{"text": "one two three four five " * 4}] * 25 + [{"text": "ok"}]
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    stream = Dataset.from_list(data).to_iterable_dataset()
    rows = prepare_dataset(stream, tokenizer, sequence_length=16, long_samples="drop")
    caplog.clear()
    assert len(list(rows)) == 1
    logger.removeHandler(caplog.handler)
    assert len(caplog.records) == 2
    assert "10 samples are longer than 16 tokens and are dropped, of 10 so far" in caplog.text


def test_pieces_without_anything_to_supervise_are_left_out(tokenizer):
    rows = prepare([{"prompt": "one two " * 8, "completion": "three"}], tokenizer, sequence_length=8)
    assert [tokenizer.decode(ids) for ids, _, _ in samples_of(rows)] == ["three [EOS]"]


# --- sources


def test_jsonl_parquet_folder_and_stream_give_the_same_rows(tokenizer, tmp_path):
    data = records(30)
    source = Dataset.from_list(data)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in data))
    source.to_parquet(str(tmp_path / "data.parquet"))
    source.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text((tmp_path / "data.jsonl").read_text())
    expected = list(prepare(data, tokenizer))
    for name in ("data.jsonl", "data.parquet", "saved", "folder"):
        rows = prepare_dataset(load_source(tmp_path / name), tokenizer, sequence_length=16)
        assert list(rows) == expected, name
        stream = prepare_dataset(load_source(tmp_path / name, streaming=True), tokenizer, sequence_length=16)
        ids = {"sample_ids": None}  # those of a stream are hashes
        assert [row | ids for row in stream] == [row | ids for row in expected], name


def test_several_sources_are_refused_with_advice(tmp_path):
    with pytest.raises(ValueError, match=r"expected one .*\['a.jsonl', 'b.jsonl'\].* into one folder"):
        load_source(["a.jsonl", "b.jsonl"])


def test_file_of_another_kind_and_missing_split_are_refused(tmp_path):
    (tmp_path / "data.csv").write_text("text\none\n")
    with pytest.raises(ValueError, match=r"\.jsonl"):
        load_source(tmp_path / "data.csv")
    with pytest.raises(ValueError, match="data file .*missing.jsonl does not exist"):
        load_source(tmp_path / "missing.jsonl")


def test_cache_of_the_tokenization_depends_on_what_determines_the_ids_and_nothing_else(tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records(5)))
    source = load_source(path)

    def key(tokenizer=tokenizer, **options):
        return prepare_dataset(source, tokenizer, **{"sequence_length": 16} | options)._fingerprint

    first = key()
    tokenizer(["one two", "one"], truncation=True, max_length=1, padding=True)  # changes the tokenizer's state
    assert key() == first
    others = [key(sequence_length=8), key(packing=False), key(long_samples="drop"), key(append_eos=False)]
    tokenizer.chat_template = "{{ messages }}"
    assert len({first, key(), *others}) == 6


# --- the collator


def collator(**options):
    return MRPCollator(**{"block_size": 4, "mask_token_id": MASK, "steps": 2, "sequence_length": 16} | options)


def test_batch_has_the_documented_shapes_and_consistent_parts(tokenizer):
    rows = list(prepare(records(20), tokenizer))
    batch = collator()(rows[:3])
    assert {name: tuple(t.shape) for name, t in batch.items()} == {
        "input_ids": (3, 16),
        "revealed_ids": (3, 2, 16),
        "clean_ids": (3, 16),
        "segment_ids": (3, 16),
        "sample_ids": (3, 16),
        "block_ids": (3, 16),
        "loss_weight": (3, 2, 16),
        "normaliser": (3, 2),
        "reveal_step": (3, 16),
        "p_mask": (3, 16),
    }
    states = torch.cat([batch["input_ids"][:, None], batch["revealed_ids"]], dim=1)
    for state in states.unbind(1):
        assert ((state == batch["clean_ids"]) | (state == MASK)).all()
    assert torch.equal(batch["loss_weight"] > 0, batch["revealed_ids"] == MASK)
    weight = batch["loss_weight"] * batch["p_mask"][:, None]
    torch.testing.assert_close(weight, (weight > 0).float())


def test_blocks_are_counted_from_the_start_of_each_sample_and_padding_is_marked():
    row = {"input_ids": [9] * 11, "answer_mask": [1] * 11, "lengths": [5, 6], "sample_ids": [0, 1]}
    batch = collator()([row])
    assert batch["segment_ids"].tolist() == [[0] * 5 + [1] * 6 + [-1] * 5]
    first, second = row["sample_ids"]
    assert batch["sample_ids"].tolist() == [[first] * 5 + [second] * 6 + [-1] * 5]
    assert batch["block_ids"].tolist() == [[0] * 4 + [1] + [2] * 4 + [3] * 2 + [-1] * 5]
    assert (batch["input_ids"][0, 11:] == 0).all()
    assert (batch["loss_weight"][..., 11:] == 0).all()


def test_noise_of_a_sample_does_not_depend_on_its_neighbours():
    """So a resumed run, another batch size or other packing sees the same noise."""
    samples = [{"input_ids": [9 + i] * 6, "answer_mask": [1] * 6, "lengths": [6], "sample_ids": [i]} for i in range(4)]
    packed = {
        "input_ids": sum((s["input_ids"] for s in samples[:2]), []),
        "answer_mask": [1] * 12,
        "lengths": [6, 6],
        "sample_ids": [0, 1],
    }
    together = collator()(samples)["revealed_ids"][..., :6]
    alone = torch.cat([collator()([sample])["revealed_ids"][..., :6] for sample in samples])
    in_pack = collator()([packed])["revealed_ids"][0]
    assert torch.equal(together, alone)
    assert torch.equal(in_pack[:, :6], alone[0])
    assert torch.equal(in_pack[:, 6:12], alone[1])


def test_persistent_workers_see_the_next_epoch():
    rows = [{"input_ids": [9] * 16, "answer_mask": [1] * 16, "lengths": [16], "sample_ids": [i]} for i in range(4)]
    collate = collator()
    loader = torch.utils.data.DataLoader(
        rows, batch_size=2, collate_fn=collate, num_workers=2, persistent_workers=True
    )
    for epoch in range(3):
        collate.set_epoch(epoch)
        expected = [collate(rows[:2]), collate(rows[2:])]
        for batch, same in zip(loader, expected, strict=True):
            assert torch.equal(batch["input_ids"], same["input_ids"])
    assert not torch.equal(collate(rows)["input_ids"], collator()(rows)["input_ids"])


def test_rows_without_a_sequence_length_are_padded_to_whole_blocks():
    rows = [{"input_ids": [9] * n, "answer_mask": [1] * n, "lengths": [n], "sample_ids": [n]} for n in (3, 9)]
    assert collator(sequence_length=None)(rows)["input_ids"].shape == (2, 12)


def test_rows_that_were_not_prepared_or_are_too_long_are_refused():
    with pytest.raises(ValueError, match="prepare_dataset"):
        collator()([{"input_ids": [9]}])
    row = {"input_ids": [9] * 17, "answer_mask": [1] * 17, "lengths": [17], "sample_ids": [0]}
    with pytest.raises(ValueError, match="17 tokens.*sequence_length=16: .* at least 17, or long_samples to drop"):
        collator()([row])
