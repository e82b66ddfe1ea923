"""`generate` for block diffusion: transformers' own preparation around our decoding loop."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers.generation import GenerateDecoderOnlyOutput, GenerationConfig, GenerationMixin, logits_process

from .block_state import BlockState
from .decoding import BACKBONE, HEAD, PREFILL, Decoder
from .inputs import check_inputs, check_mask, left_align
from .options import OPTION_NAMES, DecodingOptions, nearest
from .sampling import Sampler, row_keys

# processors that cut the distribution: they come after the point where confidence is read
TRUNCATION = ("TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper")
TRUNCATION += ("EpsilonLogitsWarper", "EtaLogitsWarper")
# transformers' own processors that make sense without a left-to-right order
ORDER_FREE = TRUNCATION + ("TemperatureLogitsWarper", "SuppressTokensLogitsProcessor", "InfNanRemoveLogitsProcessor")
ORDER_FREE += ("LogitNormalization", "NoBadWordsLogitsProcessor", "SequenceBiasLogitsProcessor")
MODEL_ARGUMENTS = ("input_ids", "attention_mask")
# options of transformers that mean nothing here, with the values that leave them off
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
    """What decoding has cost and how drafts fared, per row.

    Attributes:
        backbone_forwards: [R], all forwards of the backbone that the row took part in, the prompt's included.
        head_forwards: [R], all forwards of the head.
        prefill_forwards: [R], those of the backbone forwards that carried blocks of the prompt.
        tokens_by_backbone, tokens_by_head: [R], new tokens that are returned, by who chose them.
        drafts_proposed, drafts_accepted: [R, K]; column j counts the drafts j steps behind the backbone's certain one
            (column 0 is that step itself, which needs no verification, and stays 0).
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
        sequences: [R, P + new], the prompts as given and the new tokens, padded behind a row's end.
        scores: per new token [R, V], the processed logits row at which it was revealed (`output_scores=True`).
        reveal_steps: [R, P + new], the denoising step of its block, from 0, at which each token was revealed; -1 in
            the prompt and where nothing was. Behind a row's end it tells what else of the last block was revealed.
        tokens_per_forward: [R], new tokens per forward of the backbone.
        stats: `GenerationStats`.
    """

    reveal_steps: torch.Tensor | None = None
    tokens_per_forward: torch.Tensor | None = None
    stats: GenerationStats | None = None


class Progress:
    """Hands finished columns to the streamer and the stopping criteria, in order, once every running row has them.

    Rows progress unevenly, but criteria and streamers see what token-by-token generation would show them.
    """

    def __init__(self, input_ids, max_new_tokens, pad_token_id, stopping_criteria, streamer, with_scores):
        self.sequences = input_ids
        self.prompt_columns = input_ids.shape[1]
        self.max_new_tokens = max_new_tokens
        self.pad_token_id = pad_token_id
        self.stopping_criteria = stopping_criteria
        self.streamer = streamer
        self.scores = () if with_scores else None
        self.unfinished = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        self.lengths = torch.zeros(len(input_ids), dtype=torch.long, device=input_ids.device)  # new tokens per row
        self.draft_streamer = streamer if hasattr(streamer, "put_draft") else None

    def __call__(self, state: BlockState):
        ready = int(torch.where(state.running, state.starts - state.prompt_lengths, self.max_new_tokens).min())
        done = self.sequences.shape[1] - self.prompt_columns
        while done < ready and self.unfinished.any():
            self._emit(state, done)
            done += 1
        state.running = state.running & self.unfinished
        if self.draft_streamer is not None and state.running.any():
            self._show_draft(state, done)

    def _emit(self, state: BlockState, column: int):
        at = (state.prompt_lengths + column).clamp(max=state.width - 1)[:, None]
        tokens = torch.where(self.unfinished, state.tokens.gather(1, at)[:, 0], self.pad_token_id)
        self.sequences = torch.cat([self.sequences, tokens[:, None]], dim=1)
        self.lengths += self.unfinished
        if self.scores is not None:
            self.scores += (state.scores[torch.arange(len(at), device=at.device), at[:, 0]],)
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())
        self.unfinished = self.unfinished & ~self.stopping_criteria(self.sequences, self.scores)

    def _show_draft(self, state: BlockState, done: int):
        """The rest of the current block as it stands, mask tokens included."""
        ends = (state.starts + state.block_size).clamp(max=int(state.limits.max()))
        width = int((ends - state.prompt_lengths).max())
        index = (state.prompt_lengths[:, None] + torch.arange(done, width, device=ends.device)).clamp(
            max=state.width - 1
        )
        self.draft_streamer.put_draft(state.tokens.gather(1, index).cpu())


class MRPGenerationMixin(GenerationMixin):
    """Keeps `GenerationMixin.generate` and replaces its decoding loop and the preparation of options."""

    def generate(self, inputs=None, generation_config=None, logits_processor=None, stopping_criteria=None, **kwargs):
        """As in transformers, with the options of `DecodingOptions` as further keyword arguments.

        Returns:
            [R, P + new] token ids, or an `MRPGenerateOutput` with `return_dict_in_generate=True`.

        Raises:
            ValueError: for an unknown option, a value out of range, an option that means nothing for block diffusion,
                or an input that is not [rows, tokens] of known ids.
        """
        for name in ("prefix_allowed_tokens_fn", "assistant_model", "negative_prompt_ids", "custom_generate"):
            if kwargs.get(name) is not None:
                raise ValueError(f"{name} is not supported: block diffusion does not decode from left to right")
        if kwargs.get("inputs_embeds") is not None:
            raise ValueError("inputs_embeds is not supported: pass input_ids")
        ids = kwargs["input_ids"] if inputs is None and "input_ids" in kwargs else inputs
        check_inputs(ids, kwargs.get("attention_mask"), self.config)
        return super().generate(inputs, generation_config, logits_processor, stopping_criteria, **kwargs)

    def _prepare_generation_config(self, generation_config, *args, **kwargs):
        ours = {name: kwargs.pop(name) for name in OPTION_NAMES if name in kwargs}
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, *args, **kwargs)
        stored = vars(generation_config)
        for name in sorted(stored.keys() - vars(GenerationConfig()).keys() - set(OPTION_NAMES)):  # foreign or misspelt
            if meant := nearest(name, OPTION_NAMES, likeness=0.8):
                raise ValueError(f"unknown option {name!r} in the generation config.{meant}")
        given = stored | model_kwargs
        for name, off in UNSUPPORTED.items():
            if given.get(name) not in off:
                raise ValueError(f"{name}={given[name]!r} is not supported in block-diffusion decoding: leave it out")
        for name in model_kwargs:
            if name not in (*MODEL_ARGUMENTS, *UNSUPPORTED) and model_kwargs[name] is not None:
                known = (*OPTION_NAMES, *stored, *MODEL_ARGUMENTS)
                raise ValueError(f"unknown option {name!r} of generate.{nearest(name, known)}")
        temperature = generation_config.temperature
        if generation_config.do_sample and temperature is not None and not temperature > 0:
            raise ValueError(
                f"temperature must be above 0 with do_sample=True, got {temperature}: use do_sample=False"
            )
        values = {name: stored[name] for name in OPTION_NAMES if name in stored}
        generation_config.decoding_options = DecodingOptions.resolve(values | ours, self.config)
        return generation_config, model_kwargs

    def _prepare_cache_for_generation(self, *args, **kwargs):
        """The decoder makes its own cache."""

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
        """The decoding loop; all before it (options, criteria, processors, streaming the prompt) is transformers'."""
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
            check_mask(mask, input_ids)  # again: transformers makes one of the pad tokens when none is given
        valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(self.device).bool()
        prompts, lengths = left_align(ids, valid)

        state = BlockState(
            prompts,
            lengths,
            max_new_tokens,
            options.block_size,
            self.config.mask_token_id,
            eos.to(self.device),
            options.candidates,
        )
        sampler = Sampler(
            self.config.mask_token_id,
            shaping,
            truncation,
            keys=self._noise_keys(prompts, lengths) if generation_config.do_sample else None,
            seed=torch.randint(2**62, ()).item() if generation_config.do_sample else 0,
            with_entropy=options.step_rule.needs_entropy,
            with_scores=bool(generation_config.output_scores and generation_config.return_dict_in_generate),
        )
        progress = Progress(ids, max_new_tokens, pad, stopping_criteria, streamer, sampler.with_scores)
        with torch.no_grad(), _in_eval_mode(self):
            Decoder(self, state, options, sampler, pad).run(progress)
        if streamer is not None:
            streamer.end()
        sequences = progress.sequences.to(input_ids.device)
        if not generation_config.return_dict_in_generate:
            return sequences
        stats = _stats(state, progress)
        return MRPGenerateOutput(
            sequences=sequences,
            scores=progress.scores,
            reveal_steps=_reveal_steps(state, progress).to(input_ids.device),
            tokens_per_forward=progress.lengths / stats.backbone_forwards.clamp(min=1),
            stats=stats,
        )

    @staticmethod
    def _noise_keys(prompts, lengths):
        index = torch.arange(prompts.shape[1], device=prompts.device)
        return row_keys(prompts, index < lengths[:, None])


@contextmanager
def _in_eval_mode(model):
    """No dropout in a draft, and no gradient checkpointing, which takes the cache from layers."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _split_processors(processors):
    """(those that shape the distribution, those that truncate it and what follows), refusing what needs an order."""
    theirs = {name for name in vars(logits_process) if name.endswith(("Warper", "Processor", "LogitNormalization"))}
    names = [type(processor).__name__ for processor in processors]
    for processor, name in zip(processors, names, strict=True):
        if name in theirs and name not in ORDER_FREE:
            raise ValueError(
                f"{name} needs left-to-right order, which block diffusion does not have: leave its option out"
            )
        if name in ("NoBadWordsLogitsProcessor", "SequenceBiasLogitsProcessor"):
            long = [sequence for sequence in processor.sequence_bias if len(sequence) > 1]
            if long:
                raise ValueError(
                    f"bad_words_ids and sequence_bias take single tokens only in block diffusion, got {list(long[0])}"
                )
    first = next((at for at, name in enumerate(names) if name in TRUNCATION), len(names))
    return list(processors[:first]), list(processors[first:])


def _reveal_steps(state: BlockState, progress: Progress) -> torch.Tensor:
    """[R, P + new]: those of the new tokens, behind -1 for the prompt as it was given."""
    new = progress.sequences.shape[1] - progress.prompt_columns
    column = torch.arange(new, device=state.tokens.device)
    at = state.prompt_lengths[:, None] + column
    steps = state.reveal_steps.gather(1, at.clamp(max=state.width - 1)).masked_fill(at >= state.width, -1)
    return torch.nn.functional.pad(steps, (progress.prompt_columns, 0), value=-1)


def _stats(state: BlockState, progress: Progress) -> GenerationStats:
    column = torch.arange(state.width, device=state.tokens.device)
    end = (state.prompt_lengths + progress.lengths)[:, None]
    returned = (column >= state.prompt_lengths[:, None]) & (column < end)
    by_head = (state.revealed_by_head & returned).sum(1)
    return GenerationStats(
        backbone_forwards=state.forwards[:, BACKBONE],
        head_forwards=state.forwards[:, HEAD],
        prefill_forwards=state.forwards[:, PREFILL],
        tokens_by_backbone=progress.lengths - by_head,
        tokens_by_head=by_head,
        drafts_proposed=state.proposed,
        drafts_accepted=state.accepted,
    )
