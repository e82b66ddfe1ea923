"""Token ids of texts, the same in training and in decoding, whatever special tokens the tokenizer adds by itself."""

from transformers import PreTrainedTokenizerBase

PROBE = "a"  # a text that the special tokens around it are counted on


class TextEncoder:
    """Encodes the parts of a sample.

    Args:
        tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.appended = self._count_appended()

    def opening(self, text: str) -> list[int]:
        """Return the ids of a text that opens a sample: with what the tokenizer puts before it, not what after it.

        A tokenizer may end every text with its end-of-text token. A prompt that held it would ask the model to go on
        after the end.
        """
        ids = self.tokenizer(text)["input_ids"]
        return ids[: len(ids) - self.appended]

    def following(self, text: str) -> list[int]:
        """Return the ids of a text that continues a sample, or that writes all its special tokens itself."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def ended(self, ids: list[int]) -> list[int]:
        """Return ids that end with exactly one end-of-text token, if the tokenizer has one and they do not already."""
        end = self.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _count_appended(self) -> int:
        """Return the number of special tokens that the tokenizer puts after a text."""
        whole, bare = self.tokenizer(PROBE)["input_ids"], self.following(PROBE)
        added = len(whole) - len(bare)
        before = next((n for n in range(added + 1) if whole[n : n + len(bare)] == bare), added)
        return added - before if bare else 0
