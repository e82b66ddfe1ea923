"""Reading hidden states: logits and the choice of tokens, at the positions that are asked for alone.

Half of the positions of a block are already revealed on average, and padding needs no logits at all, but with a real
vocabulary `lm_head` and the softmax after it are a quarter of a plain step. So where it pays, the positions that
matter are selected first:

    hidden states  --select-->  [n, H]  --lm_head, softmax, noise-->  token [n], ...  --spread-->  [R, C, B]

The logits of one chunk of positions exist at a time, so no tensor [R, C, B, V] is made unless scores are returned.
"""

from dataclasses import dataclass

import torch

from .draft_vocabulary import DraftVocabulary
from .sampling import Sampler, TokenChoice

# logits that have to be saved for a selection to pay: it takes about eight small operations. Measured on a CPU, where
# from 4,000 (70 x 128) to 8,000 (1,024 x 160) numbers were worth them; on a GPU, estimated from 8 launches
WORTH_SELECTING = {"cpu": 2**13, "cuda": 2**23}
CHUNK_NUMBERS = 2**25  # logits that are computed at a time: 128 MiB in float32


@dataclass
class Selection:
    """Hidden states at selected positions.

    Attributes:
        hidden: the hidden states, [n, H].
        index: places of the n positions among all R * ... * B positions, [n]; None if all are selected.
        shape: shape of all positions, (R, ..., B).
        logits: their logits if they have been computed and fit into one chunk, [n, V].
    """

    hidden: torch.Tensor
    index: torch.Tensor | None
    shape: torch.Size
    logits: torch.Tensor | None = None

    def of(self, field: torch.Tensor) -> torch.Tensor:
        """Return a field [R, ..., B] at the selected positions, [n]."""
        flat = field.expand(self.shape).flatten()
        return flat if self.index is None else flat.index_select(0, self.index)

    def spread(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Return values [n, ...] of the selected positions at their places, [R, ..., B, ...], and 0 elsewhere."""
        if values is None or self.index is None:
            return values if values is None else values.view(*self.shape, *values.shape[1:])
        places = values.new_zeros(self.shape.numel(), *values.shape[1:])
        return places.index_copy_(0, self.index, values).view(*self.shape, *values.shape[1:])


class Reader:
    """Chooses tokens from hidden states.

    Args:
        model: an `MRPForDiffusionLM`.
        sampler: chooses tokens from logits.
    """

    def __init__(self, model: torch.nn.Module, sampler: Sampler) -> None:
        self.model = model
        self.sampler = sampler

    def select(self, hidden: torch.Tensor, where: torch.Tensor, count: int | None = None) -> Selection:
        """Select the positions to read, or all of them where that is as fast.

        Args:
            hidden: hidden states, [R, ..., B, H].
            where: positions that have to be read, boolean [R, ..., B].
            count: how many there are, or a bound on that; None where the host does not know.
        """
        size, flat = where.numel(), hidden.reshape(-1, hidden.shape[-1])
        worth = WORTH_SELECTING.get(hidden.device.type, WORTH_SELECTING["cuda"])
        if count is None or self.sampler.with_scores or (size - count) * self.model.config.vocab_size < worth:
            return Selection(flat, None, where.shape)
        index = where.flatten().argsort(descending=True, stable=True)[:count]
        return Selection(flat.index_select(0, index), index, where.shape)

    def read(
        self,
        selection: Selection,
        positions: torch.Tensor,
        steps: torch.Tensor,
        context: torch.Tensor | None,
        vocabulary: DraftVocabulary | None = None,
    ) -> TokenChoice:
        """Choose a token at every selected position.

        Args:
            selection: the hidden states.
            positions: absolute positions, [R, ..., B]; read only when sampling.
            steps: denoising steps done in the block at each state, [R, ...]; read only when sampling.
            context: token ids that logits processors see, [R, P]; read only when there are processors.
            vocabulary: tokens to choose from; None: all. Logits processors need all.

        Returns:
            The choice, [R, ..., B]; its fields are 0 where nothing was read.
        """
        keys = self.sampler.noise_keys(positions, steps) if self.sampler.samples else None
        keys = None if keys is None else selection.of(keys)
        vocabulary = None if self.sampler.processes else vocabulary
        ids = None if vocabulary is None else vocabulary.ids
        choices = [
            self.sampler.choose(
                logits, None if keys is None else keys[part], self._context(selection, context, part), ids
            )
            for part, logits in self._logits(selection, vocabulary)
        ]
        fields = choices[0] if len(choices) == 1 else map(_join, zip(*choices, strict=True))
        return TokenChoice(*map(selection.spread, fields))

    def confidence_of(self, selection: Selection, tokens: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        """Return the probability of given tokens [R, ..., B] at selected positions, and 0 elsewhere, [R, ..., B]."""
        tokens = selection.of(tokens)
        found = [
            self.sampler.confidence_of(logits, tokens[part], self._context(selection, context, part))
            for part, logits in self._logits(selection)
        ]
        return selection.spread(torch.cat(found))

    def logit_of(self, selection: Selection, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of given tokens [R, ..., B] at the selected positions, and 0 elsewhere, [R, ..., B]."""
        tokens = selection.of(tokens)
        found = [logits.float().gather(1, tokens[part, None])[:, 0] for part, logits in self._logits(selection)]
        return selection.spread(torch.cat(found))

    def _logits(self, selection: Selection, vocabulary: DraftVocabulary | None = None):
        """Yield the parts of a selection, as slices, with their logits [c, V]."""
        count = len(selection.hidden)
        numbers = self.model.config.vocab_size if vocabulary is None else len(vocabulary.ids)
        size = count if self.sampler.with_scores else max(1, CHUNK_NUMBERS // numbers)
        if count <= size:
            if selection.logits is None:
                selection.logits = self._project(selection.hidden, vocabulary)
            yield slice(None), selection.logits
            return
        for start in range(0, count, size):
            part = slice(start, start + size)
            yield part, self._project(selection.hidden[part], vocabulary)

    def _project(self, hidden, vocabulary: DraftVocabulary | None):
        if vocabulary is None:
            return self.model.logits(hidden)
        return torch.nn.functional.linear(hidden.to(vocabulary.weight.dtype), vocabulary.weight)

    def _context(self, selection: Selection, context, part: slice):
        """Return what logits processors see for a part of a selection, [c, P]."""
        if context is None or not self.sampler.processes:
            return None
        row = torch.arange(len(context), device=context.device)
        return context[selection.of(row.view(-1, *[1] * (len(selection.shape) - 1)))[part]]


def _join(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    return None if parts[0] is None else torch.cat(parts)
