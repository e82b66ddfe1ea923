"""The word-level tokenizer of the embedded words checkpoint: one token per word, digit or sign."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .word_problems import vocabulary

MASK, PAD, EOS, UNKNOWN = "<mask>", "<pad>", "<eos>", "<unk>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} "
    "{% if message['role'] == 'assistant' %}{{ eos_token }} {% endif %}{% endfor %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer. Numbers are split into digits ("23" is two tokens), and `decode` joins the digits again."""
    specials = [MASK, PAD, EOS, UNKNOWN]
    ids = {token: i for i, token in enumerate([*specials, *vocabulary()])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=False),  # puts a space before every token but the first
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<=\d) (?=\d)| (?=[.,?])"), ""),
        ]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        mask_token=MASK,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
