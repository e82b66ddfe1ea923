"""Data as people have it: read as it was written, or refused with file, line and column, by every command alike."""

import json
import logging

import pytest
from datasets import Dataset, DatasetDict

from mrp_trainer.commands.cli import main
from mrp_trainer.commands.prompts import read_prompts
from mrp_trainer.data.chats import conversation
from mrp_trainer.data.json_lines import json_rows
from mrp_trainer.data.reading import load_source, read_rows, row_of
from mrp_trainer.data.rows import prepare_dataset
from mrp_trainer.evaluation.decoding import prompt_ids
from mrp_trainer.evaluation.runs import read_eval_rows

CHAT = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} "
    "{% for c in m['tool_calls'] or [] %}{{ c['arguments'] | tojson }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
TURNS = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
TWO_CALLS = [{"city": "Paris"}, {"city": "Rome", "unit": "C"}]
SHARED = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def contents(source, **options) -> list[dict]:
    return [row_of(row, "").content for row in load_source(source, **options)]


# -- read as it was written


@pytest.mark.parametrize(
    "value",
    [
        "line\u2028paragraph\u2029next\u0085end",
        "2024-01-31",
        "2024-01-31T10:00:00Z",
        "\U0001f600 \\ud800",
        {"city": "Paris", "unit": None},
        [{"one": 1}, {"two": None}, "three", 4],
        2**70,
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_values_are_those_of_the_json_text(tmp_path, value, streaming, ascii_only):
    """Arrow made timestamps of dates, and gave every object the keys of all others; splitlines cut at U+2028."""
    rows = [{"text": value}, {"text": "other", "more": {"key": 1}}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows))
    (tmp_path / "data.json").write_text(json.dumps(rows, ensure_ascii=ascii_only, indent=1))
    for name in ("data.jsonl", "data.json"):
        assert contents(tmp_path / name, streaming=streaming) == rows
        assert [row.content for row in read_rows(tmp_path / name)] == rows


def test_a_byte_order_mark_and_windows_line_ends_are_no_content(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two"}')
    assert contents(tmp_path / "data.jsonl") == [{"prompt": "one"}, {"prompt": "two"}]
    assert read_eval_rows(tmp_path / "data.jsonl") == [{"prompt": "one"}, {"prompt": "two"}]
    (tmp_path / "prompts.txt").write_bytes("\ufeffone\u2028and\x85two\r\nthree\n".encode())
    assert read_prompts([], str(tmp_path / "prompts.txt")) == ["one\u2028and\x85two", "three"]


def test_splits_of_a_folder_are_found_by_file_name_and_can_be_sliced(tmp_path):
    for name, numbers in {"train-0": (0, 1), "train-1": (2,), "test": (3,)}.items():
        (tmp_path / f"{name}.jsonl").write_text(lines(*({"text": str(number)} for number in numbers)))
    wanted = {"train": "012", "test": "3", "train[1:]": "12", "train+test": "0123"}
    for split, numbers in wanted.items():
        assert "".join(row["text"] for row in contents(tmp_path, split=split)) == numbers
    assert len(list(load_source(tmp_path, streaming=True))) == 3
    for streaming in (False, True):
        with pytest.raises(ValueError, match="nothing.*train.*test"):
            load_source(tmp_path, split="nothing", streaming=streaming)


@pytest.mark.parametrize("kind", ["data.jsonl", "data.parquet", "saved", "saved-splits"])
def test_a_slice_of_a_local_source_is_its_rows_in_every_reader(tmp_path, kind):
    """The slice of a data set that save_to_disk had written was ignored, and eval refused all of them."""
    rows = [{"prompt": str(number)} for number in range(9)]
    path = tmp_path / kind
    if kind == "data.jsonl":
        path.write_text(lines(*rows))
    elif kind == "data.parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        saved = Dataset.from_list(rows)
        (saved if kind == "saved" else DatasetDict(train=saved)).save_to_disk(path)
    wanted = {"train": rows, "train[:3]": rows[:3], "train[-2:]+train[:1]": rows[-2:] + rows[:1]}
    for split, expected in wanted.items():
        assert contents(path, split=split) == expected
        assert read_eval_rows(path, split=split) == expected
    for split in ("test", "train[:x"):
        with pytest.raises(ValueError, match=r"saved|data"):
            load_source(path, split=split)
    with pytest.raises(ValueError, match=r"split 'train\[:3\]': a stream can only be read as a whole"):
        load_source(path, split="train[:3]", streaming=True)


def test_a_changed_file_is_read_again(tmp_path):
    for text in ("one", "three"):
        (tmp_path / "data.jsonl").write_text(lines({"text": text}))
        assert contents(tmp_path / "data.jsonl") == [{"text": text}]


def test_lines_are_read_one_at_a_time():
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield b'{"text": "one"}\n'

    rows = json_rows(endless(), "data.jsonl")
    assert [next(rows)[0] for _ in range(3)] == [f"data.jsonl, line {number}" for number in (1, 2, 3)]
    assert len(taken) == 3


def test_prepared_rows_may_be_written_as_json(tmp_path):
    row = {"input_ids": [5, 6], "answer_mask": [0, 1], "lengths": [2], "sample_ids": [0], "reveal_steps": [-1, 0]}
    (tmp_path / "rows.jsonl").write_text(lines(row, row))
    for streaming in (False, True):
        rows = prepare_dataset(load_source(tmp_path / "rows.jsonl", streaming=streaming), None, sequence_length=4)
        assert list(rows) == [row, row]
    (tmp_path / "rows.jsonl").write_text(lines(row, row | {"lengths": None}))
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2 has no list of numbers in column lengths"):
        prepare_dataset(load_source(tmp_path / "rows.jsonl"), None, sequence_length=4)


# -- refused in one line


BROKEN = [
    (b'{"prompt": "a"}\n{"prompt" "a"}\n', "line 2, column 11: not valid JSON (Expecting ':' delimiter)"),
    (b'[\n{"prompt": "a"},\n{"prompt": }]', "line 3, column 12: not valid JSON (Expecting value)"),
    (b'{"prompt": "a", "answer": NaN}', "line 1: not valid JSON (NaN is not a JSON number)"),
    (b'{"prompt": ' + b"[" * 100_000, "line 1: not valid JSON (maximum recursion depth exceeded"),
    (b"", "holds no rows"),
    (b"\n \n", "holds no rows"),
    (b"[]", "holds no rows"),
    (b'"prompt"\n', 'line 1: expected an object such as {"prompt": ...}, got "prompt"'),
    ('{"prompt": "é"}\n'.encode("utf-16"), "is UTF-16: data must be UTF-8, so convert the file (iconv -f UTF-16"),
    ('{"prompt": "é"}\n'.encode("utf-16-le"), "line 1, column 2: a NUL byte; data must be UTF-8"),
    ('{"prompt": "é"}\n'.encode("utf-32"), "is UTF-32: data must be UTF-8"),
    ('{"prompt": "ü"}\n{"a": "ü é"}\n'.encode("latin-1"), "line 1, column 13: byte 0xfc is not UTF-8"),
    ('{"a": "ü '.encode() + b'\xe9"}\n', "line 1, column 10: byte 0xe9 is not UTF-8; data must be UTF-8"),
    (b'{"prompt": "a\\n"}\n{"a": "\\ud83d\\ude00 \\\\ud83d \\ud83d"}', "line 2, column 29: \\ud83d is half of a"),
]


@pytest.mark.parametrize("content, expected", BROKEN)
def test_every_reader_refuses_it_in_the_same_words(tmp_path, capsys, content, expected):
    """Training used to end with a traceback of 86 lines, or with StopIteration for an empty file."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    readers = [
        lambda: load_source(path),
        lambda: list(load_source(path, streaming=True)),
        lambda: read_eval_rows(path),
    ]
    messages = set()
    for read in readers:
        with pytest.raises(ValueError) as error:
            read()
        messages.add(str(error.value))
    (message,) = messages
    assert message.startswith(str(path)) and expected in message
    assert main(["eval", "words", "--data", str(path), "--scorer", "exact"]) == 2
    assert main(["train", "--base-model", "words", "--train-data", str(path), "--use-cpu", "true"]) == 2
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mrp: error")]
    assert len(shown) == 2 and all(" ".join(message.split()).rstrip(".") in line for line in shown)


def test_prompt_files_of_another_encoding_are_refused(tmp_path):
    (tmp_path / "prompts.txt").write_bytes("one\nzwölf\n".encode("latin-1"))
    with pytest.raises(ValueError, match="prompts.txt, line 2, column 3: byte 0xf6 is not UTF-8"):
        read_prompts([], str(tmp_path / "prompts.txt"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_damaged_parquet_file_and_a_missing_folder_are_named(tmp_path, streaming):
    (tmp_path / "data.parquet").write_bytes(b"none")
    (tmp_path / "empty").mkdir()
    for name in ("data.parquet", "empty", "missing"):
        with pytest.raises(ValueError, match=str(tmp_path / name)):
            load_source(tmp_path / name, streaming=streaming)


# -- conversations


@pytest.fixture
def tokenizer(word_tokenizer):
    word_tokenizer.chat_template = CHAT
    return word_tokenizer


def prepared(path, tokenizer, **options):
    rows = prepare_dataset(load_source(path), tokenizer, sequence_length=64, packing=False, **options)
    return [(row["input_ids"], row["answer_mask"]) for row in rows]


@pytest.mark.parametrize("column", ["conversations", "messages"])
def test_turns_with_from_and_value_are_the_same_conversation(tokenizer, tmp_path, column):
    (tmp_path / "roles.jsonl").write_text(lines({"messages": TURNS}))
    (tmp_path / "shared.jsonl").write_text(lines({"id": "x", column: SHARED}))
    Dataset.from_list([{column: SHARED}]).to_parquet(tmp_path / "shared.parquet")
    expected = prepared(tmp_path / "roles.jsonl", tokenizer)
    for name in ("shared.jsonl", "shared.parquet"):
        assert prepared(tmp_path / name, tokenizer) == expected
    (tmp_path / "question.jsonl").write_text(lines({"messages": TURNS[:1]}, {column: SHARED[:1]}))
    one, other = (prompt_ids(tokenizer, row) for row in read_eval_rows(tmp_path / "question.jsonl"))
    assert one == other == tokenizer("user one assistant")["input_ids"]


@pytest.mark.parametrize("own", [[], [{"from": "system", "value": "so"}]])
def test_a_column_system_is_the_system_message(tokenizer, tmp_path, own):
    """It was dropped in silence: the head was trained, and the model asked, without it."""
    system = {"role": "system", "content": "so"}
    (tmp_path / "roles.jsonl").write_text(lines({"messages": [system, *TURNS]}, {"messages": TURNS}))
    rows = {"system": "so", "conversations": own + SHARED}, {"system": "", "conversations": SHARED}
    (tmp_path / "shared.jsonl").write_text(lines(*rows))
    Dataset.from_list(list(rows)).to_parquet(tmp_path / "shared.parquet")
    pair = {"system": "so", "prompt": TURNS[:1], "completion": TURNS[1:]}
    (tmp_path / "pairs.jsonl").write_text(lines(pair, pair | {"system": None}))
    expected = prepared(tmp_path / "roles.jsonl", tokenizer)
    assert expected[0] != expected[1]
    for name in ("shared.jsonl", "shared.parquet", "pairs.jsonl"):
        assert prepared(tmp_path / name, tokenizer) == expected
    (tmp_path / "question.jsonl").write_text(lines({"system": "so", "conversations": own + SHARED[:1]}))
    [row] = read_eval_rows(tmp_path / "question.jsonl")
    assert prompt_ids(tokenizer, row) == tokenizer("system so user one assistant")["input_ids"]


@pytest.mark.parametrize(
    "system, expected",
    [(["so"], "column system must hold text, got .'so'."), ("then", "column system and .* system message differ")],
)
def test_another_column_system_is_refused_with_its_line(tokenizer, tmp_path, system, expected):
    chat = [{"role": "system", "content": "so"}, *TURNS]
    (tmp_path / "data.jsonl").write_text(lines({"messages": chat}, {"messages": chat, "system": system}))
    with pytest.raises(ValueError, match=f"data.jsonl, line 2: {expected}"):
        prepared(tmp_path / "data.jsonl", tokenizer)


@pytest.mark.parametrize(
    "turns, expected",
    [
        ([{"from": "robot", "value": "one"}], "message 1: from must be one of human, gpt, system, .* got 'robot'"),
        ([TURNS[0], {"speaker": "x"}], "message 2: expected role and content, or from and value, got speaker"),
        ([TURNS[0], {"role": "user", "content": None}], r"message 2: the user says nothing \(null\)"),
        ([{"from": "human"}, SHARED[1]], "message 1: the user says nothing"),
        (["one"], "message 1: expected {.*}, got 'one'"),
        ("one", "expected a list of messages, got 'one'"),
    ],
)
def test_other_conversations_are_refused_with_their_line(tokenizer, tmp_path, turns, expected):
    (tmp_path / "data.jsonl").write_text(lines({"messages": TURNS[:1]}, {"messages": turns}))
    with pytest.raises(ValueError, match=f"data.jsonl, line 2.*{expected}"):
        prepared(tmp_path / "data.jsonl", tokenizer)
    if not isinstance(turns, str):  # in mrp eval a text is a prompt
        with pytest.raises(ValueError, match=f"data.jsonl, line 2.*{expected}"):
            read_eval_rows(tmp_path / "data.jsonl")


def test_a_conversation_that_the_template_refuses_is_named(tokenizer, tmp_path):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "data.jsonl").write_text(lines({"messages": TURNS}))
    with pytest.raises(ValueError, match="data.jsonl, line 1: the chat template refuses .* roles must alternate"):
        prepared(tmp_path / "data.jsonl", tokenizer)


def test_explicit_nulls_of_tool_arguments_reach_the_template(tokenizer, tmp_path):
    """Arrow gives all objects of a column the same keys, so the nulls that its rows hold had to be dropped, all."""
    calls = [{"city": "Paris", "unit": None}, {"name": "x"}]
    chats = [
        [TURNS[0], {"role": "assistant", "content": "two", "name": None, "tool_calls": [{"arguments": arguments}]}]
        for arguments in calls
    ]
    (tmp_path / "data.jsonl").write_text(lines(*({"messages": chat} for chat in chats)))
    seen = []
    encode = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda messages, **options: seen.append(messages) or encode(messages, **options)
    prepared(tmp_path / "data.jsonl", tokenizer)
    answers = [messages[1] for messages in seen if len(messages) == 2 and "tool_calls" in messages[1]]
    assert [answer["tool_calls"][0]["arguments"] for answer in answers] == calls
    assert all("name" not in answer for answer in answers)


@pytest.mark.parametrize("arguments, warned", [(TWO_CALLS, 1), ([TWO_CALLS[0]] * 2, 0)])
def test_nulls_of_parquet_are_missing_keys_and_a_warning_says_so(tokenizer, tmp_path, caplog, arguments, warned):
    """Whether a null was written or stands for a key of other rows cannot be told, which nothing said."""
    rows = [
        {"messages": [TURNS[0], {"role": "assistant", "content": "two", "tool_calls": [{"arguments": call}]}]}
        for call in arguments
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "data.parquet")
    logging.Logger.warning_once.cache_clear()
    caplog.set_level(logging.WARNING, "mrp_trainer")
    given = [row_of(row, "") for row in load_source(tmp_path / "data.parquet")]
    read = [conversation(row.content["messages"], row)[1]["tool_calls"][0]["arguments"] for row in given]
    assert read == arguments
    assert sum("nulls inside of messages and tools are taken as missing keys" in line for line in caplog.messages) == (
        warned
    )


def test_a_conversation_that_ends_with_its_answer_is_no_question(tmp_path):
    (tmp_path / "data.jsonl").write_text(lines({"messages": TURNS}))
    with pytest.raises(ValueError, match="data.jsonl, line 1: the messages end with an answer"):
        read_eval_rows(tmp_path / "data.jsonl")


# -- fields of other names


MATHS = [{"question": "one plus two ?", "answer": "so one plus two\n#### three"}] * 2


def test_named_fields_are_prompt_and_completion_in_training(tokenizer, tmp_path):
    (tmp_path / "maths.jsonl").write_text(lines(*MATHS))
    (tmp_path / "own.jsonl").write_text(
        lines(*({"prompt": row["question"], "completion": row["answer"]} for row in MATHS))
    )
    named = prepared(tmp_path / "maths.jsonl", tokenizer, prompt_field="question", answer_field="answer")
    assert named == prepared(tmp_path / "own.jsonl", tokenizer)
    with pytest.raises(ValueError, match="answer_field: there is no solution in the data, .* question, answer"):
        prepared(tmp_path / "maths.jsonl", tokenizer, prompt_field="question", answer_field="solution")
    with pytest.raises(ValueError, match="columns question, answer, expected one of: .* prompt_field"):
        prepared(tmp_path / "maths.jsonl", tokenizer)


def test_named_fields_are_prompt_and_answer_in_an_evaluation(tmp_path):
    (tmp_path / "maths.jsonl").write_text(lines(*MATHS))
    Dataset.from_list(MATHS).to_parquet(tmp_path / "maths.parquet")
    for name in ("maths.jsonl", "maths.parquet"):
        rows = read_eval_rows(tmp_path / name, prompt_field="question", answer_field="answer")
        assert [(row["prompt"], row["answer"]) for row in rows] == [tuple(row.values()) for row in MATHS]
    with pytest.raises(ValueError, match=r"line 1 has no solution \(--answer-field\): it has question, answer"):
        read_eval_rows(tmp_path / "maths.jsonl", prompt_field="question", answer_field="solution")
    with pytest.raises(ValueError, match="line 1: expected an object with 'prompt' .* got question, answer"):
        read_eval_rows(tmp_path / "maths.jsonl")


def test_the_command_scores_answers_after_the_mark(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    question = "Tom has 23 apples, buys 14, doubles them. How many?"
    answer = "He has 23 + 14 = 37 of them, and 37 * 2 = 74 in the end.\n#### 74"
    (tmp_path / "maths.jsonl").write_text(lines({"question": question, "answer": answer}))
    command = ["eval", "words", "--data", "maths.jsonl", "--scorer", "numeric", "--raw", "--max-new-tokens", "48"]
    command += ["--modes", "spec", "--steps", "2", "--no-plots", "--json"]
    assert main([*command, "--prompt-field", "question", "--answer-field", "answer"]) == 0
    assert [row["accuracy"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1.0, 1.0]
    assert main(command) == 2
    assert "--prompt-field names another field" in capsys.readouterr().err
