"""`direct` and `remask` as plainly as possible: one row, no cache, everything recomputed at every step."""

import torch


class PlainLoop:
    """One row, no cache: `row` holds the tokens so far, `start` is where the current block begins."""

    def __init__(self, model, prompt, new_tokens, shape):
        self.model, self.shape = model, shape
        self.size, self.mask = model.config.block_size, model.config.mask_token_id
        self.prompt_length, self.end = len(prompt), len(prompt) + new_tokens
        self.row = list(prompt)

    def decode(self, step) -> list[int]:
        """New tokens, calling `step()` as long as the current block holds a mask that will be returned."""
        while len(self.row) < self.end:
            self.start = len(self.row) // self.size * self.size
            self.row += [self.mask] * (self.start + self.size - len(self.row))
            while self.unsettled():
                step()
        return self.row[self.prompt_length : self.end]

    def unsettled(self):
        return self.mask in self.row[self.start : self.end]

    def head(self, before, states):
        """A on `before`, and the corrected logits after the last of a chain of states, of the current block."""
        ids = torch.tensor([before])
        output = self.model(ids, revealed_ids=torch.tensor([states]), clean_ids=ids)
        return output.logits[0, self.start :], output.corrected_logits[0, -1, self.start :]

    def probabilities(self, logits):
        scores = logits.float().index_fill(-1, torch.tensor(self.mask), -torch.inf)
        return self.shape(self.row[: self.start], scores).softmax(-1)

    def picks(self, logits):
        """(position, token, confidence) of every masked position, the surest first."""
        best = self.probabilities(logits).max(-1)
        masked = [i for i in range(self.size) if self.row[self.start + i] == self.mask]
        return sorted(((self.start + i, best.indices[i].item(), best.values[i].item()) for i in masked),
                      key=lambda pick: -pick[2])  # fmt: skip

    def reveal(self, picks):
        for at, token, _ in picks:
            self.row[at] = token

    def backbone_picks(self):
        return self.picks(self.model(torch.tensor([self.row])).logits[0, self.start :])


def unshaped(before, scores):
    """The scores of a block, given the tokens before it, without logits processors."""
    return scores


def direct(model, prompt, new_tokens, steps, shape=unshaped):
    """A backbone step, then up to `steps` head steps, each of one token."""
    loop = PlainLoop(model, prompt, new_tokens, shape)

    def step():
        before, states = list(loop.row), []
        loop.reveal(loop.backbone_picks()[:1])
        while len(states) < steps and loop.unsettled():
            states.append(list(loop.row))
            loop.reveal(loop.picks(loop.head(before, states)[1])[:1])

    return loop.decode(step)


def remask(model, prompt, new_tokens, tau, criterion, threshold, shape=unshaped):
    """All picks above tau except those that the head doubts; the most confident one always stays."""
    loop = PlainLoop(model, prompt, new_tokens, shape)

    def kept(before, after, at, token):
        if criterion == "residual":
            logits, corrected = loop.head(before, [before])
            return (corrected - logits)[at - loop.start, token].abs() <= threshold
        state = list(after)
        if criterion == "leave_one_out":
            state[at] = loop.mask
        return loop.probabilities(loop.head(before, [state])[1])[at - loop.start, token] >= threshold

    def step():
        before, picks = list(loop.row), loop.backbone_picks()
        proposed = [pick for pick in picks if pick[2] > tau] or picks[:1]
        loop.reveal(proposed)
        after = list(loop.row)
        for at, token, _ in proposed[1:]:
            if not kept(before, after, at, token):
                loop.row[at] = loop.mask

    return loop.decode(step)


def decode(model, prompts, **options):
    """New tokens of each prompt, decoded as one padded batch, and the statistics."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=20, eos_token_id=None, return_dict_in_generate=True, **options
    )
    return output.sequences[:, width:].tolist(), output.stats
