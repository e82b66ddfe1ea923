"""The byte-pair tokenizer of the embedded code checkpoint: a line break and the indentation after it are one piece."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MASK, PAD, EOS = "<mask>", "<pad>", "<eos>"
VOCABULARY = 1024
PIECES = r"\n *| ?[A-Za-z]+|_+|[0-9]| ?[^\sA-Za-z0-9_]+|\s+"


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the given texts.

    It is byte-level, so that it can encode any text. Pairs are merged only within a word, an operator, or a line break
    with its indentation.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[MASK, PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        mask_token=MASK,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
