"""Decode prompts and count what it took.

This is the one place that encodes prompts, pads them on the left, decodes them in batches, cuts the answers at their
end and counts forwards and drafts. Every command and callback that decodes a list of prompts goes through it.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import BatchEncoding, PreTrainedTokenizerBase

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.generation_mrp import MRPGenerateOutput
from modeling_mrp.options import OPTION_NAMES

from ..data.encoding import TextEncoder

# Modes name their own options: whatever the checkpoint's generation config says about the others is set aside.
PACKAGE_DEFAULTS = dict.fromkeys(OPTION_NAMES) | {"do_sample": False}


# -- prompts


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict], raw: bool = False, tools: list | None = None
) -> list[int]:
    """Return the token ids of one prompt, written with the tokenizer's chat template when it has one.

    Args:
        tokenizer: the model's tokenizer.
        prompt: text, or the messages of a chat.
        raw: do not apply the chat template.
        tools: descriptions of tools for the template.

    Raises:
        ValueError: if `prompt` is a list of messages and no chat template is applied, or the template refuses them.
    """
    encoder = TextEncoder(tokenizer)
    if tokenizer.chat_template is None or raw:
        if isinstance(prompt, list):
            raise ValueError("the data has messages, but there is no chat template to write them with (or raw is set)")
        return encoder.opening(prompt)
    chat = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses {chat!r:.80}: {error}") from error
    return encoder.following(text)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: Mapping, raw: bool = False) -> list[int]:
    """Return the token ids of the prompt (`messages`, or `prompt`) of a row of a data file, see `encode_prompt`."""
    return encode_prompt(tokenizer, row.get("messages") or row["prompt"], raw, row.get("tools"))


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], raw: bool = False) -> BatchEncoding:
    """Return `input_ids` and `attention_mask` [R, P] of prompts, padded on the left, see `encode_prompt`."""
    return left_padded([encode_prompt(tokenizer, prompt, raw) for prompt in prompts], tokenizer.pad_token_id or 0)


def left_padded(
    prompts: Sequence[list[int]], pad_token_id: int = 0, device: torch.device | str | None = None
) -> BatchEncoding:
    """Return `input_ids` and `attention_mask`, both [R, P] for the longest prompt's length P, padded on the left."""
    width = max(map(len, prompts))
    ids = [[pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return BatchEncoding(
        {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}
    )


def without_padding(inputs: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """Return the token ids of each row of `input_ids` that its `attention_mask` keeps."""
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    return [ids[valid].tolist() for ids, valid in rows]


def pad_token_id(model: MRPForDiffusionLM) -> int:
    """Return the id that fills the padding: the model's, else that of its end of text, but never the mask's."""
    candidates = [model.config.pad_token_id, *end_of_text_ids(model), 0, 1]
    return next(one for one in candidates if one not in (None, model.config.mask_token_id))


def end_of_text_ids(model: MRPForDiffusionLM, options: Mapping | None = None) -> list[int]:
    """Return the ids that end a row in `generate` with these options: theirs, or else the generation config's."""
    ids = (options or {}).get("eos_token_id", model.generation_config.eos_token_id)
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


# -- answers


@dataclass(frozen=True)
class Answer:
    """The new tokens of one prompt and what they took.

    Attributes:
        token_ids: new tokens, up to and including the end of text, without padding.
        forwards, head_forwards: forwards of the backbone and of the head that the row took part in.
        prefill_forwards: those of the backbone's forwards that carried blocks of the prompt.
        proposed, accepted: drafts by depth; entry j counts those j steps after the backbone's own certain step.
        position_tokens, position_forwards: by position in the block [B], how many new tokens fell there and how many
            forwards they cost; empty unless reveals were traced.
        seconds: an equal share of the time that the batch took.
        reveal_steps: the denoising step, within its block, that revealed each token; it may go on after the end of
            text with what else of the last block was revealed, -1 where nothing was.
    """

    token_ids: list[int]
    forwards: int = 0
    head_forwards: int = 0
    prefill_forwards: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    position_tokens: list[int] = field(default_factory=list)
    position_forwards: list[float] = field(default_factory=list)
    seconds: float = 0.0
    reveal_steps: list[int] = field(default_factory=list)

    def record(self) -> dict:
        """Return the figures that a results file keeps: all but `reveal_steps`."""
        return {name: value for name, value in asdict(self).items() if name != "reveal_steps"}

    @classmethod
    def from_record(cls, record: Mapping) -> "Answer":
        """Return the answer of a record, which may hold other figures too."""
        return cls(**{known.name: record[known.name] for known in fields(cls) if known.name in record})


@dataclass(frozen=True)
class Totals:
    """The sums of several answers of one mode; see `Answer` for the fields."""

    tokens: int
    forwards: int
    head_forwards: int
    proposed: list[int]
    accepted: list[int]
    position_tokens: list[int]
    position_forwards: list[float]
    seconds: float

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> "Totals":
        """Add up answers, all with the same look-ahead and block size."""
        answers = list(answers)

        def summed(name: str) -> list:
            return [sum(column) for column in zip(*(getattr(answer, name) for answer in answers), strict=True)]

        return cls(
            tokens=sum(len(answer.token_ids) for answer in answers),
            forwards=sum(answer.forwards for answer in answers),
            head_forwards=sum(answer.head_forwards for answer in answers),
            proposed=summed("proposed"),
            accepted=summed("accepted"),
            position_tokens=summed("position_tokens"),
            position_forwards=summed("position_forwards"),
            seconds=sum(answer.seconds for answer in answers),
        )

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per forward of the backbone, every forward counted."""
        return self.tokens / self.forwards

    @property
    def acceptance(self) -> list[float]:
        """Share of the drafts at depth 1, 2, ... that were accepted, as deep as any were proposed."""
        return [a / p for a, p in zip(self.accepted[1:], self.proposed[1:], strict=True) if p]

    @property
    def tokens_per_forward_by_position(self) -> list[float | None]:
        """New tokens per forward at each position of the block; None where no token fell."""
        return [t / c if t else None for t, c in zip(self.position_tokens, self.position_forwards, strict=True)]


class RevealTrace:
    """A streamer that records the round in which each new token was revealed, `rounds` [R, T], counted from 1.

    A round is one forward of the backbone for every row that is still running. Columns after a row's end are
    meaningless.
    """

    def __init__(self, mask_token_id: int, max_new_tokens: int):
        self.mask_token_id = mask_token_id
        self.max_new_tokens = max_new_tokens
        self.rounds = None
        self.round = 1
        self.done = 0  # finished columns

    def put(self, value: torch.Tensor) -> None:
        """Record the next finished column [R]; the first call gets the prompts."""
        if self.rounds is None:
            self.rounds = torch.zeros(len(value), self.max_new_tokens, dtype=torch.long)
            return
        self._record(value[:, None])
        self.done += 1

    def put_draft(self, value: torch.Tensor) -> None:
        """Record the unfinished columns [R, N] at the end of a round."""
        self._record(value)
        self.round += 1

    def end(self) -> None:
        """Nothing is left to record."""

    def _record(self, tokens):
        seen = self.rounds[:, self.done : self.done + tokens.shape[1]]
        shown = tokens[:, : seen.shape[1]] != self.mask_token_id
        seen[(seen == 0) & shown] = self.round
        seen[~shown] = 0  # masked again: what counts is the last time that the token was revealed

    def costs(self, row: int, length: int) -> torch.Tensor:
        """Return the share of a forward that each of the first `length` tokens of a row cost, [length].

        The tokens that a forward revealed share it equally. A forward that revealed only tokens after the end of
        text, or tokens that were masked again later, is charged to no token.
        """
        rounds = self.rounds[row, :length]
        return 1 / rounds.bincount()[rounds].double()


# -- decoding


@contextmanager
def decoding_attention(model: MRPForDiffusionLM) -> Iterator[None]:
    """Replace flex_attention by sdpa while decoding: flex compiles for each new shape, and decoding has many."""
    usual = model.config._attn_implementation
    if usual == "flex_attention":
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if usual == "flex_attention":
            model.set_attn_implementation(usual)


def decode_prompts(
    model: MRPForDiffusionLM,
    prompts: Sequence[list[int]],
    options: Mapping,
    max_new_tokens: int,
    batch_size: int,
    **settings: Any,
) -> Iterator[Answer]:
    """Decode prompts in batches of `batch_size` and yield their answers in order; see `decode_batch`."""
    for start in range(0, len(prompts), batch_size):
        yield from decode_batch(model, prompts[start : start + batch_size], options, max_new_tokens, **settings)


@torch.no_grad()
def decode_batch(
    model: MRPForDiffusionLM,
    prompts: Sequence[list[int]],
    options: Mapping,
    max_new_tokens: int,
    seed: int | None = None,
    trace: bool = False,
    checkpoint_defaults: bool = False,
) -> list[Answer]:
    """Decode prompts together and return the answer of each.

    Args:
        model: the model, in eval mode on its device.
        prompts: token ids of each prompt, of any lengths.
        options: options of `generate`.
        max_new_tokens: limit per prompt.
        seed: set before decoding, for sampling; None leaves torch's generator as it is.
        trace: record in which forward each token was revealed, for the figures by position in the block.
        checkpoint_defaults: decoding options that `options` does not name take the checkpoint's generation config's
            value instead of the package's default.
    """
    inputs = left_padded(prompts, pad_token_id(model), model.device)
    streamer = RevealTrace(model.config.mask_token_id, max_new_tokens) if trace else None
    if seed is not None:
        torch.manual_seed(seed)
    with decoding_attention(model):
        began = time.perf_counter()
        output = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_token_id(model),
            streamer=streamer,
            return_dict_in_generate=True,
            **({} if checkpoint_defaults else PACKAGE_DEFAULTS) | options,
        )
        output.sequences = output.sequences.cpu()  # waits for the device
        seconds = time.perf_counter() - began
    answers = _answers(output, inputs["input_ids"].shape[1], seconds / len(prompts))
    if streamer is None:
        return answers
    block_size = options.get("block_size") or model.config.block_size
    return [
        _with_positions(answer, len(prompt), streamer.costs(row, len(answer.token_ids)), block_size)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _answers(output: MRPGenerateOutput, prompt_columns: int, seconds: float) -> list[Answer]:
    """The answers of a batch whose prompts take up `prompt_columns` columns."""
    stats = output.stats
    rows = zip(
        output.sequences[:, prompt_columns:].tolist(),
        stats.lengths.tolist(),
        stats.backbone_forwards.tolist(),
        stats.head_forwards.tolist(),
        stats.prefill_forwards.tolist(),
        stats.drafts_proposed.tolist(),
        stats.drafts_accepted.tolist(),
        output.reveal_steps[:, prompt_columns:].tolist(),
        strict=True,
    )
    return [
        Answer(
            token_ids=tokens[:length],
            forwards=forwards,
            head_forwards=head_forwards,
            prefill_forwards=prefill_forwards,
            proposed=proposed,
            accepted=accepted,
            seconds=seconds,
            reveal_steps=reveal_steps,
        )
        for tokens, length, forwards, head_forwards, prefill_forwards, proposed, accepted, reveal_steps in rows
    ]


def _with_positions(answer: Answer, prompt_length: int, costs: torch.Tensor, block_size: int) -> Answer:
    """The answer with its figures by position in the block, from what each of its tokens cost."""
    position = (prompt_length + torch.arange(len(answer.token_ids))) % block_size
    forwards = torch.zeros(block_size, dtype=torch.double).index_add(0, position, costs)
    return replace(
        answer,
        position_tokens=position.bincount(minlength=block_size).tolist(),
        position_forwards=[round(cost, 6) for cost in forwards.tolist()],
    )
