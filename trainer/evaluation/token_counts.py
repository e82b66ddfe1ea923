"""Which tokens are frequent in a kind of text: those that a draft vocabulary should hold."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from modeling_mrp import MRPForDiffusionLM

from ..data.wording import counted
from .decoding import decode_prompts, end_of_text_ids, prompt_ids
from .modes import BACKBONE_ONLY

ANSWER_FIELDS = ("answer", "completion")


def count_tokens(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Mapping], raw: bool) -> Counter[int]:
    """Count the tokens of rows of a data file: of their prompts, and of their answers if they have any.

    Args:
        tokenizer: the tokenizer.
        rows: the rows, see `mrp_trainer.evaluation.runs.read_eval_rows`.
        raw: whether to leave the chat template out.
    """
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(prompt_ids(tokenizer, row, raw))
        for text in (row.get(name) for name in ANSWER_FIELDS):
            if isinstance(text, str):
                counts.update(tokenizer(text, add_special_tokens=False)["input_ids"])
    return counts


def count_decoded(model: MRPForDiffusionLM, prompts: Sequence[list[int]], max_new_tokens: int) -> Counter[int]:
    """Count the tokens that the backbone writes after the prompts, each given as token ids."""
    answers = decode_prompts(model, prompts, BACKBONE_ONLY, max_new_tokens, batch_size=16)
    return Counter(token for answer in answers for token in answer.token_ids)


def most_frequent(model: MRPForDiffusionLM, counts: Mapping[int, int], number: int) -> list[int]:
    """Return the most frequent tokens, among them always those that end a text, and never the mask token.

    Args:
        model: the model.
        counts: how often each token occurs.
        number: how many tokens to return.

    Raises:
        ValueError: if `counts` and the ends of text are fewer different tokens than `number`.
    """
    ends = set(end_of_text_ids(model))
    candidates = (set(counts) | ends) - {model.config.mask_token_id}
    if len(candidates) < number:
        raise ValueError(
            f"a draft vocabulary of {counted(number, 'token')} needs as many different tokens, but the data holds "
            f"{len(candidates)}: pass more data, or a smaller number"
        )
    ranked = sorted(candidates, key=lambda token: (token not in ends, -counts.get(token, 0), token))
    return ranked[:number]
