"""The word problems: drawing them, splits, scoring, and the tokenizer."""

import re

import pytest

from hub_cards.tasks.word_problems import (
    MAX_ANSWER_TOKENS,
    MAX_PROMPT_TOKENS,
    SPLITS,
    Score,
    Step,
    problem,
    problems,
    score,
    split_of,
    split_text,
    vocabulary,
)
from hub_cards.tasks.word_tokenizer import EOS, MASK, PAD, UNKNOWN, build_tokenizer


@pytest.fixture(scope="module")
def sample():
    return [p for split in SPLITS for p in problems(split, 100)]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def number_in(words):
    return int(re.search(r"\d+", words).group())


def solve(prompt):
    """Work out the answer to a prompt from its words alone."""
    story = prompt.removesuffix(". How many?").split(", ")
    value = number_in(story[0])
    for clause in story[1:]:
        verb = clause.split()[0]
        if verb in ("doubles", "triples", "halves"):
            value = {"doubles": value * 2, "triples": value * 3, "halves": value / 2}[verb]
        else:
            numbers = [int(n) for n in re.findall(r"\d+", clause)]
            change = numbers[0] * numbers[1] if len(numbers) == 2 else numbers[0]
            value += change if verb in ("buys", "finds", "wins", "gets") else -change
    return value


def test_solving_the_prompt_gives_the_value(sample):
    assert [solve(p.prompt) for p in sample] == [p.value for p in sample]


def test_every_step_of_an_answer_is_correct_arithmetic(sample):
    lines = [re.findall(r"(\d+ . \d+) = (\d+)", p.answer) for p in sample]
    assert all(eval(left) == int(right) for found in lines for left, right in found)  # noqa: S307
    assert [len(found) for found in lines] == [len(p.steps) for p in sample]
    assert {len(found) for found in lines} == {2, 3, 4, 5, 6}


def test_lengths_and_values_stay_within_the_limits(sample):
    assert max(len(split_text(p.prompt)) for p in sample) <= MAX_PROMPT_TOKENS
    assert max(len(split_text(p.answer)) + 1 for p in sample) <= MAX_ANSWER_TOKENS
    assert all(0 < n < 100 for p in sample for n in (p.value, *(s.result for s in p.steps)))


def test_problem_depends_only_on_split_seed_and_index():
    assert list(problems("test", 5)) == [problem("test", i) for i in range(5)]
    assert problem("train", 3, seed=1) == problem("train", 3, seed=1) != problem("train", 3, seed=2)
    with pytest.raises(ValueError, match="split must be one of .*'dev'"):
        problem("dev", 0)


def test_split_is_computed_from_the_arithmetic_alone():
    """The split is a function of the chain of operations, so two splits have no chain in common."""
    for split in SPLITS:
        for p in problems(split, 60):
            start = number_in(p.prompt)
            assert split_of(start, p.steps) == split
    renamed = split_of(5, (Step(5, "+", 3), Step(8, "-", 1)))
    assert renamed == split_of(5, (Step(5, "+", 3), Step(8, "-", 1))) and renamed in SPLITS


def test_splits_have_the_intended_sizes():
    pairs = [(a, b) for a in range(40) for b in range(40)]
    chains = [split_of(a, (Step(a, "+", b), Step(a + b, "-", 1))) for a, b in pairs]
    assert [chains.count(s) / len(chains) for s in SPLITS] == pytest.approx([14 / 16, 1 / 16, 1 / 16], abs=0.02)


def test_reference_answers_score_full_marks(sample):
    assert {score(p, p.answer) for p in sample} == {Score(True, True)}


def a_problem():
    found = next(p for p in problems("test") if [s.operation for s in p.steps] == ["+", "-", "*"] and p.value > 9)
    first, second, third = found.steps
    lines = [f"{s.left} {s.operation} {s.right} = {s.result}" for s in found.steps]
    return found, lines, (first, second, third)


def test_every_connective_and_operand_order_is_accepted():
    p, lines, (first, _, third) = a_problem()
    lines[0] = f"{first.right} + {first.left} = {first.result}"
    lines[2] = f"{third.right} * {third.left} = {third.result}"
    text = f"at first {lines[0]} after that {lines[1]} next {lines[2]} that leaves {p.name} with {p.value} {p.item}."
    assert score(p, text) == Score(True, True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda p, text: text.replace(p.name, "Tom" if p.name != "Tom" else "Ben"),
        lambda p, text: text.replace(p.item, "pens" if p.item != "pens" else "nuts"),
        lambda p, text: text.replace("then", "then then", 1),
        lambda p, text: text.replace("first", "", 1),
        lambda p, text: re.sub(r"= \d+", "= 0", text, count=1),
        lambda p, text: text.replace(" - ", " + ", 1),
        lambda p, text: text.replace(f"{p.steps[1].left} - {p.steps[1].right}", "9 - 9", 1),
        lambda p, text: text.replace(".", ""),
        lambda p, text: text + " 7 + 1 = 8 " + str(p.value),
    ],
)
def test_wrong_word_or_step_makes_worked_false_but_not_number(damage):
    p, lines, _ = a_problem()
    text = f"first {lines[0]} then {lines[1]} then {lines[2]} so {p.name} has {p.value} {p.item}."
    assert score(p, text) == Score(True, True)
    assert damage(p, text) != text
    assert score(p, damage(p, text)) == Score(number=True, worked=False)


def test_wrong_final_number_is_rejected():
    p, _, _ = a_problem()
    closing = p.answer.rindex(str(p.value))
    assert score(p, p.answer[:closing] + "9" + p.answer[closing:]) == Score(number=False, worked=False)
    assert score(p, p.answer[:closing] + "0" + p.answer[closing:]) == Score(number=True, worked=False)
    assert score(p, "") == Score(False, False)


def test_swapped_operands_of_a_subtraction_are_rejected():
    p, lines, (_, second, _) = a_problem()
    lines[1] = f"{second.right} - {second.left} = {second.result}"
    text = f"first {lines[0]} then {lines[1]} then {lines[2]} so {p.name} has {p.value} {p.item}."
    assert score(p, text) == Score(number=True, worked=False)


def test_vocabulary_is_exactly_the_tokens_that_occur():
    seen = {t for split in SPLITS for p in problems(split, 200) for t in split_text(p.prompt + " " + p.answer)}
    assert seen == set(vocabulary())


def test_tokenizer_agrees_with_split_text_and_decodes_to_the_same_text(sample, tokenizer):
    for p in sample:
        for text in (p.prompt, p.answer):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.convert_ids_to_tokens(ids) == split_text(text)
            assert tokenizer.decode(ids) == text


def test_decode_leaves_out_special_tokens(tokenizer):
    p = problem("test", 0)
    ids = tokenizer(p.answer)["input_ids"] + [tokenizer.eos_token_id] * 3 + [tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == p.answer


def test_saved_tokenizer_keeps_its_special_tokens_and_its_encoding(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    p = problem("test", 1)
    assert loaded(p.prompt)["input_ids"] == tokenizer(p.prompt)["input_ids"]
    assert loaded.decode(loaded(p.answer)["input_ids"]) == p.answer
    specials = [loaded.mask_token, loaded.pad_token, loaded.eos_token, loaded.unk_token]
    assert specials == [MASK, PAD, EOS, UNKNOWN] and len(loaded) == len(vocabulary()) + 4
    batch = loaded([p.prompt, "Tom has 5 apples"], padding=True)
    assert batch["input_ids"][1][0] == loaded.pad_token_id and batch["attention_mask"][1][0] == 0


def test_chat_template_ends_an_assistant_turn_with_eos(tokenizer):
    p = problem("test", 2)
    chat = [{"role": "user", "content": p.prompt}, {"role": "assistant", "content": p.answer}]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    assert ids == tokenizer(p.prompt)["input_ids"] + tokenizer(p.answer)["input_ids"] + [tokenizer.eos_token_id]


def test_unknown_word_becomes_the_unknown_token(tokenizer):
    ids = tokenizer("Tom has 5 elephants")["input_ids"]
    assert ids.count(tokenizer.unk_token_id) == 1 and ids[-1] == tokenizer.unk_token_id
