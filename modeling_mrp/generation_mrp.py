"""`generate` for block diffusion: our decoding loop inside transformers' own preparation of a call."""

from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    GenerationMixin,
    StoppingCriteriaList,
    logits_process,
)

from .block_state import BlockState
from .cached_forwards import BACKBONE, HEAD, PREFILL
from .column_emitter import ColumnEmitter
from .decoding import Decoder
from .inputs import check_inputs, check_mask, left_align, right_align, warn_beyond_positions
from .keyed_noise import row_keys
from .options import OPTION_NAMES, DecodingOptions, nearest
from .sampling import Sampler

# processors that truncate the distribution; confidences are read before them
TRUNCATION = ("TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper")
TRUNCATION += ("EpsilonLogitsWarper", "EtaLogitsWarper")
# processors of transformers that work without a left-to-right order
ORDER_FREE = TRUNCATION + ("TemperatureLogitsWarper", "SuppressTokensLogitsProcessor", "InfNanRemoveLogitsProcessor")
ORDER_FREE += ("LogitNormalization", "NoBadWordsLogitsProcessor", "SequenceBiasLogitsProcessor")
MODEL_ARGUMENTS = ("input_ids", "attention_mask")
# options of transformers that have no meaning here, and the values that mean they are not used
UNSUPPORTED = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0.0),
    "use_cache": (None, True),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "token_healing": (None, False),
    "cache_implementation": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_logits": (None, False),
    "position_ids": (None,),
    "past_key_values": (None,),
    "cache": (None,),
}


@dataclass
class GenerationStats:
    """What decoding has cost and how many drafts were accepted, per row.

    Everything equals what the row has alone, with one exception. Stopping criteria are asked about a column once every
    running row has it, so a row that a criterion stops may have decoded on while its neighbours caught up. Its
    forwards and drafts are those that it really took. Tokens are counted only if they are returned.

    Attributes:
        backbone_forwards: all forwards of the backbone that the row took part in, the prompt's included, [R].
        head_forwards: all forwards of the head, [R].
        prefill_forwards: how many of the backbone's forwards read blocks of the prompt, [R].
        tokens_by_backbone: returned new tokens that the backbone chose, [R].
        tokens_by_head: returned new tokens that the head chose, [R].
        drafts_proposed: drafts per depth, [R, K]. Column j counts the drafts j steps after the backbone's own certain
            step; column 0 is that step itself, which needs no verification, and stays 0.
        drafts_accepted: how many of these drafts the backbone accepted, [R, K].
    """

    backbone_forwards: torch.Tensor
    head_forwards: torch.Tensor
    prefill_forwards: torch.Tensor
    tokens_by_backbone: torch.Tensor
    tokens_by_head: torch.Tensor
    drafts_proposed: torch.Tensor
    drafts_accepted: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """[R], new tokens of each row, up to and including the end of text."""
        return self.tokens_by_backbone + self.tokens_by_head


@dataclass
class MRPGenerateOutput(GenerateDecoderOnlyOutput):
    """Output of `generate(..., return_dict_in_generate=True)`.

    Attributes:
        sequences: the prompts as they were given and the new tokens, with padding after a row's end, [R, P + new].
        scores: for each new token the processed scores at which it was revealed, [R, V]; with `output_scores=True`.
        reveal_steps: the denoising step of its block, from 0, at which each token was revealed, [R, P + new]; -1 in
            the prompt and where nothing was revealed. Between a row's end and the end of its last block these are the
            steps of tokens that are not returned; in later blocks they are -1.
        tokens_per_forward: new tokens per forward of the backbone, [R].
        stats: forwards and drafts of every row.
    """

    reveal_steps: torch.Tensor | None = None
    tokens_per_forward: torch.Tensor | None = None
    stats: GenerationStats | None = None


class MRPGenerationMixin(GenerationMixin):
    """Keeps `GenerationMixin.generate` and replaces its decoding loop, its check of options and its cache."""

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: list | None = None,
        stopping_criteria: list | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | MRPGenerateOutput:
        """Generate tokens.

        Args:
            inputs: token ids of the prompts, [R, P]; may also be passed as `input_ids`.
            generation_config: as in transformers.
            logits_processor: as in transformers.
            stopping_criteria: as in transformers; asked once per column of new tokens.
            kwargs: options of transformers' `generate`, and those of `DecodingOptions`.

        Returns:
            Token ids of prompts and new tokens, [R, P + new], or an `MRPGenerateOutput` with
            `return_dict_in_generate=True`.

        Raises:
            ValueError: for an unknown option, a value out of range, an option that has no meaning in block diffusion,
                prompts that are not [rows, tokens] of known ids, or scores that are not finite or leave no token.
        """
        for name in ("prefix_allowed_tokens_fn", "assistant_model", "negative_prompt_ids", "custom_generate"):
            if kwargs.get(name) is not None:
                raise ValueError(f"{name} is not supported: block diffusion does not decode from left to right")
        if kwargs.get("inputs_embeds") is not None:
            raise ValueError("inputs_embeds is not supported: pass input_ids")
        ids = kwargs["input_ids"] if inputs is None and "input_ids" in kwargs else inputs
        check_inputs(ids, kwargs.get("attention_mask"), self.config)
        return super().generate(inputs, generation_config, logits_processor, stopping_criteria, **kwargs)

    def _prepare_generation_config(self, generation_config, *args: Any, **kwargs: Any):
        ours = {name: kwargs.pop(name) for name in OPTION_NAMES if name in kwargs}
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, *args, **kwargs)
        stored = vars(generation_config)
        for name in sorted(stored.keys() - vars(GenerationConfig()).keys() - set(OPTION_NAMES)):  # foreign or misspelt
            if meant := nearest(name, OPTION_NAMES, likeness=0.8):
                raise ValueError(f"unknown option {name!r} in the generation config.{meant}")
        given = stored | model_kwargs
        for name, off in UNSUPPORTED.items():
            if given.get(name) not in off:
                raise ValueError(f"{name}={given[name]!r} is not supported in block-diffusion decoding: omit it")
        for name in model_kwargs:
            if name not in (*MODEL_ARGUMENTS, *UNSUPPORTED) and model_kwargs[name] is not None:
                known = (*OPTION_NAMES, *stored, *MODEL_ARGUMENTS)
                raise ValueError(f"unknown option {name!r} of generate.{nearest(name, known)}")
        _check_temperature(generation_config)
        _check_stop_strings(generation_config)
        values = {name: stored[name] for name in OPTION_NAMES if name in stored}
        if ours.get("mrp_candidates") is not None and values.get("mrp_steps") == "auto":
            del values["mrp_steps"]  # a number that is asked for is not a bound of the checkpoint's default
        generation_config.decoding_options = DecodingOptions.resolve(values | ours, self.config)
        return generation_config, model_kwargs

    def generate_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: continuous batching decodes from left to right, one token per forward."""
        raise NotImplementedError(
            "continuous batching (generate_batch, init_continuous_batching) decodes from left to right, which block "
            "diffusion does not: call generate with a padded batch, whose rows progress independently"
        )

    init_continuous_batching = continuous_batching_context_manager = generate_batch

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        try:
            return super()._get_stopping_criteria(*args, **kwargs)
        except ValueError as error:
            if str(error) != "substring not found":
                raise
            # transformers spells every token by decoding it after a word of its own, which is unknown here
            raise ValueError(
                "stop_strings needs a tokenizer that can write any word, but this one has a fixed list of words: omit "
                "it, or pass the ids of single tokens as eos_token_id"
            ) from error

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any):
        """Prepare no cache: the decoder makes its own."""

    def _sample(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        **model_kwargs,
    ):
        """Decode; transformers has prepared the options, the criteria and the processors, and streamed the prompt."""
        options = generation_config.decoding_options
        shaping, truncation = _split_processors(logits_processor)
        eos = generation_config._eos_token_tensor
        eos = torch.empty(0, dtype=torch.long) if eos is None else eos
        pad = generation_config._pad_token_tensor
        pad = (int(eos[0]) if len(eos) else 0) if pad is None else int(pad)
        max_new_tokens = generation_config.max_length - input_ids.shape[1]
        ids = input_ids.to(self.device, torch.long)
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            check_mask(mask, input_ids)  # again: without a mask, transformers derives one from the pad tokens
        valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(self.device).bool()
        prompts, lengths = left_align(ids, valid)
        warn_beyond_positions(self, lengths, max_new_tokens)

        state = BlockState(
            prompts,
            lengths,
            max_new_tokens,
            options.block_size,
            self.config.mask_token_id,
            eos.to(self.device),
            options.depths,
        )
        sampler = Sampler(
            self.config.mask_token_id,
            shaping,
            truncation,
            keys=self._noise_keys(prompts, lengths) if generation_config.do_sample else None,
            seed=torch.randint(2**62, ()).item() if generation_config.do_sample else 0,
            with_entropy=options.step_rule.needs_entropy,
            with_scores=bool(generation_config.output_scores and generation_config.return_dict_in_generate),
            reads_context=any(type(processor).__name__ not in ORDER_FREE for processor in logits_processor),
        )
        emitter = ColumnEmitter(
            ids,
            right_align(prompts, lengths, pad),
            max_new_tokens,
            pad,
            stopping_criteria,
            streamer,
            sampler.with_scores,
            eos,
        )
        with torch.no_grad(), _in_eval_mode(self):
            Decoder(self, state, options, sampler, pad).run(emitter)
        emitter.finish(state)
        sequences = emitter.sequences.to(input_ids.device)
        if not generation_config.return_dict_in_generate:
            return sequences
        stats = _stats(state, emitter)
        return MRPGenerateOutput(
            sequences=sequences,
            scores=emitter.scores,
            reveal_steps=_reveal_steps(state, emitter).to(input_ids.device),
            tokens_per_forward=emitter.lengths / stats.backbone_forwards.clamp(min=1),
            stats=stats,
        )

    @staticmethod
    def _noise_keys(prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        index = torch.arange(prompts.shape[1], device=prompts.device)
        return row_keys(prompts, index < lengths[:, None])


# models that are generating, with the number of their calls and the modules in training mode before the first
_generating: WeakKeyDictionary[torch.nn.Module, tuple[int, list[torch.nn.Module]]] = WeakKeyDictionary()
_generating_lock = Lock()


@contextmanager
def _in_eval_mode(model):
    """Set eval mode for a while, then restore every module's own mode.

    Training mode would apply dropout, and gradient checkpointing would pass no cache to the layers. Several threads
    may generate at once: the first call sets eval mode, and the last one to end restores the modes.
    """
    with _generating_lock:
        calls, trained = _generating.get(model) or (0, [module for module in model.modules() if module.training])
        _generating[model] = calls + 1, trained
        if calls == 0 and trained:
            model.eval()
    try:
        yield
    finally:
        with _generating_lock:
            calls, trained = _generating.pop(model)
            if calls > 1:
                _generating[model] = calls - 1, trained
            else:
                for module in trained:
                    module.training = True


def _check_temperature(config: GenerationConfig):
    value = config.temperature
    if not config.do_sample or value is None or (isinstance(value, int | float) and 0 < value < float("inf")):
        return
    raise ValueError(f"temperature must be above 0 with do_sample=True, got {value!r}: use do_sample=False")


def _check_stop_strings(config: GenerationConfig):
    given = config.stop_strings
    if "" in ([given] if isinstance(given, str) else given or ()):
        raise ValueError(f"stop_strings must not hold an empty string, which every text ends in, got {given!r}")


def _split_processors(processors):
    """Split logits processors into those before the first that truncates, and that one with all after it.

    Raises:
        ValueError: for a processor of transformers that needs left-to-right order.
    """
    known = {name for name in vars(logits_process) if name.endswith(("Warper", "Processor", "LogitNormalization"))}
    names = [type(processor).__name__ for processor in processors]
    for processor, name in zip(processors, names, strict=True):
        if name in known and name not in ORDER_FREE:
            raise ValueError(f"{name} needs left-to-right order, which block diffusion does not have: omit its option")
        if name in ("NoBadWordsLogitsProcessor", "SequenceBiasLogitsProcessor"):
            long = [sequence for sequence in processor.sequence_bias if len(sequence) > 1]
            if long:
                raise ValueError(
                    f"bad_words_ids and sequence_bias take single tokens only in block diffusion, got {list(long[0])}"
                )
    first = next((at for at, name in enumerate(names) if name in TRUNCATION), len(names))
    return list(processors[:first]), list(processors[first:])


def _reveal_steps(state: BlockState, emitter: ColumnEmitter) -> torch.Tensor:
    """Return the reveal steps of the new tokens, and -1 in the prompts and after the rows' last blocks, [R, P + new].

    A row that a criterion stopped may have decoded later blocks while its neighbours caught up.
    """
    at = state.prompt_lengths[:, None] + torch.arange(int(emitter.lengths.max()), device=state.tokens.device)
    last_block = (state.prompt_lengths + emitter.lengths - 1) // state.block_size
    steps = state.reveal_steps.gather(1, at.clamp(max=state.width - 1))
    steps = steps.masked_fill(at // state.block_size > last_block[:, None], -1)
    return torch.nn.functional.pad(steps, (emitter.prompt_columns, 0), value=-1)


def _stats(state: BlockState, emitter: ColumnEmitter) -> GenerationStats:
    column = torch.arange(state.width, device=state.tokens.device)
    end = (state.prompt_lengths + emitter.lengths)[:, None]
    returned = (column >= state.prompt_lengths[:, None]) & (column < end)
    by_head = (state.revealed_by_head & returned).sum(1)
    return GenerationStats(
        backbone_forwards=state.forwards[:, BACKBONE],
        head_forwards=state.forwards[:, HEAD],
        prefill_forwards=state.forwards[:, PREFILL],
        tokens_by_backbone=emitter.lengths - by_head,
        tokens_by_head=by_head,
        drafts_proposed=state.proposed,
        drafts_accepted=state.accepted,
    )
