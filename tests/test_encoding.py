"""Tokenizers that add special tokens by themselves, have no pad token, or know only a list of words."""

import logging

import pytest
import torch
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from mrp_trainer.commands.cli import main
from mrp_trainer.data.encoding import TextEncoder
from mrp_trainer.data.rows import prepare_dataset
from mrp_trainer.evaluation.decoding import encode, encode_prompt, without_padding

EOS, START = 1, 4  # the first word of the vocabulary serves as the start of a text
PATTERNS = {"none": "$A", "start": "what $A", "end": "$A [EOS]", "both": "what $A [EOS]", "ends": "$A [EOS] [EOS]"}


@pytest.fixture(params=PATTERNS)
def adding(request, word_tokenizer):
    """A tokenizer that adds special tokens to every text, and the ids that it adds before it."""
    word_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=PATTERNS[request.param], special_tokens=[("[EOS]", EOS), ("what", START)]
    )
    return word_tokenizer, [START] if request.param in ("start", "both") else []


def samples(tokenizer, record, **options):
    rows = prepare_dataset(Dataset.from_list([record]), tokenizer, sequence_length=16, packing=False, **options)
    return rows[0]["input_ids"]


def words(tokenizer, text):
    return tokenizer.convert_tokens_to_ids(text.split())


def test_a_prompt_holds_what_comes_before_a_text_and_nothing_after_it(adding):
    """A tokenizer that appends the end-of-text token to everything put it between prompt and answer."""
    tokenizer, start = adding
    expected = start + words(tokenizer, "is one ?")
    assert encode_prompt(tokenizer, "is one ?", raw=True) == expected
    assert without_padding(encode(tokenizer, ["is one ?", "is"], raw=True)) == [
        expected,
        start + words(tokenizer, "is"),
    ]
    assert TextEncoder(tokenizer).opening("") == start
    ids = samples(tokenizer, {"prompt": "is one ?", "completion": "so two"})
    assert ids == expected + words(tokenizer, "so two") + [EOS]


def test_a_text_ends_in_exactly_one_end_of_text_token(adding):
    """It used to end in two where the tokenizer appends one by itself."""
    tokenizer, start = adding
    expected = start + words(tokenizer, "one two")
    assert samples(tokenizer, {"text": "one two"}) == expected + [EOS]
    assert samples(tokenizer, {"text": "one two [EOS]"}) == expected + [EOS]
    assert samples(tokenizer, {"text": "one two"}, append_eos=False) == expected


def test_a_templated_chat_gets_no_further_special_tokens(adding):
    tokenizer, _ = adding
    assert encode_prompt(tokenizer, "is one ?") == words(tokenizer, "is one ? . so")
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} . {% endfor %}{% if add_generation_prompt %}{% endif %}"
    )
    assert samples(tokenizer, {"messages": turns}) == words(tokenizer, "one . two .")


@pytest.mark.parametrize("mask_token_id", [3, 0])
def test_commands_decode_without_a_pad_token(tiny_model, word_tokenizer, tmp_path, capsys, mask_token_id):
    """Padding with any id will do, as nothing reads it: even with that of the mask token."""
    model = tiny_model(vocab_size=20, pad_token_id=None, mask_token_id=mask_token_id)
    model.generation_config.pad_token_id = None
    model.save_pretrained(tmp_path)
    word_tokenizer.pad_token = None
    word_tokenizer.save_pretrained(tmp_path)
    one, other = (["--prompt", text] for text in ("what is one", "so two"))
    alone = []
    for prompts in (one, other, one + other):
        assert main(["generate", str(tmp_path), "--raw", "--max-new-tokens", "8", *prompts]) == 0
        alone.append(capsys.readouterr().out)
    assert alone[2] == alone[0] + alone[1]
    assert main(["verify", str(tmp_path), "--raw", "--max-new-tokens", "8", *one, *other]) == 0


# -- chat templates that end a turn late

LATE = (
    "{% for m in messages %}{% if not loop.first %}[EOS] {% endif %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[EOS] <assistant> {% endif %}"
)
PROMPT = "{% if add_generation_prompt %}<assistant> {% endif %}"
ENDED = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} [EOS] {% endfor %}" + PROMPT
STRICT = "{{ raise_exception('no') if messages | length == 3 }}" + ENDED


@pytest.mark.parametrize("template, warned", [(LATE, True), (ENDED, False), (STRICT, False)])
@pytest.mark.parametrize("columns", [("messages",), ("prompt", "completion")])
def test_a_template_that_ends_a_turn_with_the_next_one_is_warned_about_once(
    word_tokenizer, caplog, template, warned, columns
):
    """What ends the turn is then never supervised, so that a head is not trained on where answers end."""
    word_tokenizer.chat_template = template
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    row = {"messages": turns} if len(columns) == 1 else {"prompt": turns[:1], "completion": turns[1:]}
    data = Dataset.from_list([row, row])
    prepare_dataset(data, word_tokenizer, sequence_length=16)
    logger.removeHandler(caplog.handler)
    found = [record.getMessage() for record in caplog.records if "chat template" in record.getMessage()]
    assert len(found) == warned
    assert all("' [EOS] <user> ' comes only with the next turn" in message for message in found)


# -- stop strings


def test_stop_strings_end_the_answers_of_the_commands(capsys):
    command = ["generate", "code", "--raw", "--prompt", "def name(self):", "--max-new-tokens", "24"]
    assert main(command) == 0
    whole = capsys.readouterr().out.rstrip("\n")
    stop = whole.split()[0]
    assert stop == "return" and len(whole.split()) > 1
    assert main([*command, "--stop-strings", stop]) == 0
    assert capsys.readouterr().out.split() == [stop]


def test_a_list_of_words_has_no_stop_strings(tiny_model, word_tokenizer):
    """transformers spells each token after a word of its own, and failed with a bare "substring not found"."""
    model = tiny_model(vocab_size=20)
    with pytest.raises(ValueError, match="stop_strings needs a tokenizer that can write any word, .* eos_token_id"):
        model.generate(torch.tensor([[5, 6]]), stop_strings=["two"], tokenizer=word_tokenizer, max_new_tokens=4)
