"""Random tiny models and random `generate` calls, drawn by hypothesis for the tests of the laws."""

import string
from dataclasses import dataclass, field
from functools import cache
from types import MethodType
from typing import Any

import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from modeling_mrp.draft_vocabulary import pack_ids

PAD = 0
LETTERS = string.ascii_lowercase[:23]  # token i is the i-th letter in stop strings


@dataclass(frozen=True)
class TinyModel:
    """The size of a random model; `head_scale` is the spread of what its head adds (0: nothing).

    `drafted` holds the tokens among which drafts are chosen; none means all.
    """

    block_size: int = 4
    layers: int = 1
    head_layers: int = 1
    heads: int = 2
    kv_heads: int = 1
    vocab_size: int = 11
    mask_token_id: int = 3
    tied: bool = False
    residual: bool = True
    spread: float = 0.5
    head_scale: float = 0.1
    drafted: frozenset[int] = frozenset()
    seed: int = 0

    def build(self) -> MRPForDiffusionLM:
        """A model in double precision, so that no choice hangs on rounding."""
        config = MRPConfig(
            vocab_size=self.vocab_size, hidden_size=8, intermediate_size=12, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, head_dim=4,
            max_position_embeddings=256, block_size=self.block_size, mask_token_id=self.mask_token_id,
            pad_token_id=PAD, eos_token_id=None, bos_token_id=None, num_mrp_layers=self.head_layers,
            mrp_residual=self.residual, initializer_range=self.spread, tie_word_embeddings=self.tied,
            draft_vocabulary=pack_ids(self.drafted) if self.drafted else None,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = MRPForDiffusionLM(config).eval()
            torch.nn.init.normal_(model.mrp_head.norm.weight, std=self.head_scale)
            torch.nn.init.normal_(model.mrp_head.eh_proj.weight, std=0.4)
        return in_double_precision(model)


def in_double_precision(model: MRPForDiffusionLM) -> MRPForDiffusionLM:
    """Convert a model, and the norms and rotary embeddings too, which transformers computes in float32."""

    def norm(self, hidden):
        variance = hidden.square().mean(-1, keepdim=True)
        return self.weight * hidden * torch.rsqrt(variance + self.variance_epsilon)

    def rotary(self, hidden, positions):
        angles = positions[..., None].double() * self.inv_freq.double()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    for module in model.double().modules():
        if isinstance(module, Qwen3RMSNorm):
            module.forward = MethodType(norm, module)
        elif isinstance(module, Qwen3RotaryEmbedding):
            module.forward = MethodType(rotary, module)
    return model


@dataclass(frozen=True)
class Setting:
    """One `generate` call on one model.

    Attributes:
        model: the model.
        prompts: token ids of every row.
        mode: options of the decoding mode.
        rule: options of the step rule.
        max_new_tokens: limit of new tokens.
        left: whether padding is on the left.
        sampling: options of sampling; empty for greedy decoding.
        copies: `num_return_sequences`.
        ends: ids that end a row.
        stop_lengths: new tokens after which a criterion of the test stops each row, or None.
        stop_tokens: ids at which this criterion stops any row.
        stop_strings: stop strings.
        scores: whether scores are returned.
        processors: names of logits processors, out of `PROCESSORS`.
        suppressed: `suppress_tokens`.
        bad_words: single tokens of `bad_words_ids`.
        block_size: block size of the call; None is the model's.
        selects: whether only masked positions are read, however small the model is.
        chunk: positions that are read at a time; None: all.
        seed: seed of the sampling noise.
    """

    model: TinyModel = TinyModel()
    prompts: tuple[tuple[int, ...], ...] = ((1,), (2, 4, 5, 6))
    mode: dict[str, Any] = field(default_factory=dict)
    rule: dict[str, Any] = field(default_factory=dict)
    max_new_tokens: int = 9
    left: bool = True
    sampling: dict[str, Any] = field(default_factory=dict)
    copies: int = 1
    ends: tuple[int, ...] = ()
    stop_lengths: tuple[int, ...] | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    scores: bool = False
    processors: tuple[str, ...] = ()
    suppressed: tuple[int, ...] = ()
    bad_words: tuple[int, ...] = ()
    block_size: int | None = None
    selects: bool = True
    chunk: int | None = None
    seed: int = 0

    def shape(self, before: list[int], scores: torch.Tensor) -> torch.Tensor:
        """Scores [B, V] after the logits processors, given the tokens before the block."""
        scores = scores.index_fill(-1, torch.tensor((*self.suppressed, *self.bad_words), dtype=torch.long), -torch.inf)
        for name in self.processors:
            scores = PROCESSORS[name](torch.tensor([before] * len(scores)), scores)
        return scores


class AfterToken(LogitsProcessor):
    """Adds scores that depend on the last of the tokens so far; no token counts as the padding."""

    def __call__(self, input_ids, scores):
        last = input_ids[:, -1] if input_ids.shape[1] else input_ids.new_full((len(scores),), PAD)
        token = torch.arange(scores.shape[-1])
        return scores + 2 * torch.sin(1.0 + 3 * last[:, None] + 7 * token)


class Squash(LogitsProcessor):
    """A function of the scores alone, which does not keep their order."""

    def __call__(self, input_ids, scores):
        return torch.where(scores.isfinite(), 2 * torch.sin(scores), scores)


PROCESSORS = {"after_token": AfterToken(), "squash": Squash()}


class StopRows(StoppingCriteria):
    """Stops each row after a number of new tokens of its own, and any row at one of some tokens."""

    def __init__(self, lengths: torch.Tensor, tokens: tuple[int, ...], prompt_columns: int):
        self.lengths, self.tokens, self.prompt_columns = (
            lengths,
            torch.tensor(tokens, dtype=torch.long),
            prompt_columns,
        )

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids.shape[1] - self.prompt_columns >= self.lengths) | torch.isin(input_ids[:, -1], self.tokens)


@cache
def letter_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Token i is the i-th letter of the alphabet."""
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(LETTERS[:size])}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


# -- strategies


@st.composite
def tiny_models(draw) -> TinyModel:
    heads = draw(st.sampled_from([1, 2]))
    vocab_size = draw(st.integers(5, len(LETTERS)))
    mask_token_id = draw(st.integers(1, vocab_size - 1))
    others = st.sampled_from([token for token in range(vocab_size) if token != mask_token_id])
    return TinyModel(
        block_size=draw(st.sampled_from([4, 3, 5, 2, 1, 8])),
        layers=draw(st.integers(1, 2)),
        head_layers=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=draw(st.integers(1, heads)),
        vocab_size=vocab_size,
        mask_token_id=mask_token_id,
        tied=draw(st.booleans()),
        residual=draw(st.booleans()),
        spread=draw(st.sampled_from([0.5, 0.2, 1.0])),
        head_scale=draw(st.sampled_from([0.1, 0.0, 0.02, 0.5])),
        drafted=draw(st.one_of(st.just(frozenset()), st.frozensets(others, min_size=1, max_size=6))),
        seed=draw(st.integers(0, 10**6)),
    )


def modes(block_size: int) -> st.SearchStrategy[dict]:
    steps = st.integers(1, block_size + 2)
    tau = st.sampled_from([0.13, 0.0, 0.37, 0.61])
    spec = st.fixed_dictionaries(
        {"mrp_mode": st.just("spec"), "mrp_steps": steps, "mrp_draft": st.sampled_from(["head", "self"])},
        optional={
            "mrp_candidates": st.integers(1, 2 * block_size + 2),
            "mrp_drafts_per_head_step": st.integers(1, block_size),
            "mrp_draft_threshold": tau,
            "mrp_acceptance": st.sampled_from(["exact", "token"]),
            "mrp_acceptance_floor": tau,
        },
    )
    auto = st.fixed_dictionaries(
        {"mrp_mode": st.just("spec"), "mrp_steps": st.just("auto"), "mrp_draft": st.sampled_from(["head", "self"])}
    )
    direct = st.fixed_dictionaries({"mrp_mode": st.just("direct"), "mrp_steps": steps})
    remask = st.fixed_dictionaries(
        {
            "mrp_mode": st.just("remask"),
            "confidence_threshold": tau,
            "remask_criterion": st.sampled_from(["leave_one_out", "confidence", "residual", "backbone"]),
            "remask_threshold": st.sampled_from([0.23, 0.0, 0.47, 0.83]),
        }
    )
    return st.one_of(st.just({"mrp_mode": None}), spec, auto, direct, remask)


def step_rules(block_size: int) -> st.SearchStrategy[dict]:
    def rule(name, **values):
        return st.fixed_dictionaries({"remasking_strategy": st.just(name), **values})

    denoising_steps = st.integers(1, block_size)
    return st.one_of(
        rule("low_confidence_static", denoising_steps=denoising_steps),
        rule("sequential", denoising_steps=denoising_steps),
        rule("low_confidence_dynamic", confidence_threshold=st.sampled_from([0.37, 0.0, 0.13, 0.61, 0.93])),
        rule("entropy_bounded", eb_threshold=st.sampled_from([0.71, 0.0, 2.3])),
    )


def samplings(vocab_size: int) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries(
        {"do_sample": st.just(True), "temperature": st.sampled_from([1.0, 0.3, 0.8, 2.0])},
        optional={
            "top_k": st.integers(1, vocab_size),
            "top_p": st.sampled_from([0.9, 0.5]),
            "min_p": st.sampled_from([0.02, 0.2]),
        },
    )


@st.composite
def generate_calls(draw) -> Setting:
    model = draw(tiny_models())
    block_size = draw(st.one_of(st.none(), st.integers(1, 6)))
    size = block_size or model.block_size
    token = st.integers(0, model.vocab_size - 1).filter(lambda index: index != model.mask_token_id)
    lengths = st.one_of(st.integers(1, 3 * size + 1), st.sampled_from([1, size, 2 * size]))
    prompt = lengths.flatmap(lambda length: st.lists(token, min_size=length, max_size=length)).map(tuple)
    sampling = draw(st.one_of(st.just({}), samplings(model.vocab_size)))
    # copies of a prompt draw samples of their own, so a row with an equal row before it is not the row alone
    prompts = draw(st.lists(prompt, min_size=1, max_size=4, unique=bool(sampling)).map(tuple))
    mode = draw(modes(size))
    count = draw(st.integers(1, 3 * size + 1))
    limits = st.lists(st.integers(1, count + 1), min_size=len(prompts), max_size=len(prompts)).map(tuple)
    ends = draw(st.lists(token, max_size=3, unique=True).map(tuple))
    # with the mask, three ids of at least five are never chosen; transformers allows a bad word that ends a row
    suppressed = draw(st.lists(token, max_size=2, unique=True).map(tuple))
    bad_words = draw(st.lists(token.filter(lambda index: index not in ends), max_size=1).map(tuple))
    letters = st.text(alphabet=LETTERS[: model.vocab_size], min_size=1, max_size=2)
    return Setting(
        model=model,
        prompts=prompts,
        mode=mode,
        rule={} if mode["mrp_mode"] == "remask" else draw(step_rules(size)),
        max_new_tokens=count,
        left=draw(st.booleans()),
        sampling=sampling,
        copies=draw(st.integers(1, 3)) if sampling else 1,
        ends=ends,
        stop_lengths=draw(st.one_of(st.none(), limits)),
        stop_tokens=draw(st.one_of(st.just(()), st.tuples(token))),
        stop_strings=draw(st.one_of(st.just(()), st.lists(letters, min_size=1, max_size=2, unique=True).map(tuple))),
        scores=draw(st.booleans()),
        processors=draw(st.lists(st.sampled_from(sorted(PROCESSORS)), max_size=2, unique=True).map(tuple)),
        suppressed=suppressed,
        bad_words=bad_words,
        block_size=block_size,
        selects=draw(st.booleans()),
        chunk=draw(st.sampled_from([None, 1, 5])),
        seed=draw(st.integers(0, 10**6)),
    )
