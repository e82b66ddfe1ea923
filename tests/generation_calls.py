"""The calls of `generate` that several test files make: modes, prompts, a model and recording streamers."""

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

PROMPT = torch.tensor([[5, 6, 7]])

MODES = {
    "backbone": {"mrp_mode": None},
    "spec": {"mrp_mode": "spec", "mrp_steps": 4},
    "self": {"mrp_mode": "spec", "mrp_steps": 4, "mrp_draft": "self"},
    "token": {"mrp_mode": "spec", "mrp_steps": 4, "mrp_acceptance": "token", "mrp_acceptance_floor": 0.0},
    "direct": {"mrp_mode": "direct", "mrp_steps": 2},
    "remask": {"mrp_mode": "remask", "confidence_threshold": 0.3},
    "remask-confidence": {"mrp_mode": "remask", "confidence_threshold": 0.3, "remask_criterion": "confidence"},
    "remask-residual": {
        "mrp_mode": "remask",
        "confidence_threshold": 0.3,
        "remask_criterion": "residual",
        "remask_threshold": 0.5,
    },
    "remask-backbone": {
        "mrp_mode": "remask",
        "confidence_threshold": 0.3,
        "remask_criterion": "backbone",
        "remask_threshold": 0.8,
    },
}

every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def drafting_model(tiny_model):
    """Block size 8; the head's residuals are small compared with the logits, so that some drafts are right."""
    model = tiny_model(block_size=8)
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.1, generator=torch.Generator().manual_seed(3))
    return model


def left_padded_prompts():
    """Prompts of 3, 8 and 12 tokens, left-padded."""
    generator = torch.Generator().manual_seed(1)
    ids, mask = torch.zeros(3, 12).long(), torch.zeros(3, 12).long()
    for row, length in enumerate((3, 8, 12)):
        ids[row, -length:] = torch.randint(4, 61, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, **options):
    options = {"max_new_tokens": 20, "eos_token_id": None} | options
    return model.generate(**inputs, **options, return_dict_in_generate=True)


class Recorder(BaseStreamer):
    """Keeps what a streamer receives, in order."""

    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(("put", value.clone()))

    def end(self):
        self.events.append(("end", None))

    def values(self, kind):
        return [value for name, value in self.events if name == kind]


class DraftRecorder(Recorder):
    def put_draft(self, value, **kwargs):
        self.events.append(("draft", value.clone()))
