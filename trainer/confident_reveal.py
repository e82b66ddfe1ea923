"""`reveal: confident`: training reveals the tokens that decoding would, those the backbone is surest of."""

import torch
from torch import Tensor

from modeling_mrp import MRPForDiffusionLM

from .data.corruption import loss_weights, order_reveals, revealed_states
from .losses.linear_kl import auto_chunk_rows

NO_LOGITS = torch.empty(0, dtype=torch.long)  # logits_to_keep of a forward that returns hidden states only


@torch.no_grad()
def reveal_most_confident(
    model: MRPForDiffusionLM, batch: dict[str, Tensor], lm_head: Tensor, steps: int
) -> dict[str, Tensor]:
    """Replace the random reveals of a batch by those of the backbone's most confident positions on x_t.

    Each block reveals as many tokens at each step as before; only which ones changes. This takes one more forward of
    the frozen backbone.

    Args:
        model: the model, unwrapped.
        batch: a batch of `MRPCollator`.
        lm_head: output embedding, [V, H].
        steps: number of reveals K.

    Returns:
        A copy of the batch with other `reveal_step`, `revealed_ids` and `loss_weight`.
    """
    masked = batch["reveal_step"] > 0  # [R, L]
    hidden = model(
        batch["input_ids"],
        clean_ids=batch["clean_ids"],
        segment_ids=batch["segment_ids"],
        logits_to_keep=NO_LOGITS,
    ).last_hidden_state[masked]  # [N, H]
    mask_token_id = model.config.mask_token_id
    scores = []
    for rows in hidden.split(auto_chunk_rows(len(hidden), lm_head, torch.float32)):
        logits = (rows @ lm_head.T).float()
        logits[:, mask_token_id] = -torch.inf
        scores.append(logits.amax(-1) - logits.logsumexp(-1))
    row, position = masked.nonzero(as_tuple=True)
    block = row * (batch["block_ids"].max() + 1) + batch["block_ids"][row, position]  # unique over the batch
    reveal_step = batch["reveal_step"].clone()
    if scores:
        reveal_step[masked] = order_reveals(reveal_step[masked], block, torch.cat(scores))
    _, states = revealed_states(batch["clean_ids"], reveal_step, steps, mask_token_id)
    weight = loss_weights(reveal_step, batch["p_mask"], steps)
    return {**batch, "reveal_step": reveal_step, "revealed_ids": states, "loss_weight": weight}
