"""The options of `mrp train` that are recorded with a run, since they shape its result."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from modeling_mrp import MRPForDiffusionLM

from .arguments import DataArguments, ModelArguments


def recorded_settings(
    model: MRPForDiffusionLM, model_args: ModelArguments, data_args: DataArguments
) -> dict[str, Any]:
    """Return the options of model and data that shape a run's result, as they are recorded with it.

    The backbone is not among them: a head knows its backbone. Nor is the source of prepared data, whose contents are
    recorded instead. No path is recorded, since the record may be published with the head.

    Args:
        model: the model as the run starts from it, without LoRA.
        model_args: the options of the model.
        data_args: the options of the data.
    """
    model_options = ("head_init", "lora_rank", "lora_alpha", "lora_dropout", "backbone_dtype", "attn_implementation")
    data_options = ("sequence_length", "packing", "long_samples", "append_eos", "streaming")
    settings = {name: getattr(model_args, name) for name in model_options}
    settings |= {name: getattr(data_args, name) for name in data_options}
    settings["head"] = None if model_args.head is None else state_hash(model.mrp_head)
    if data_args.streaming:
        settings |= {
            "train_data": source_of(data_args.train_data),
            "train_split": data_args.train_split,
            "data_config": data_args.data_config,
            "shuffle_buffer": data_args.shuffle_buffer,
            "prompt_field": data_args.prompt_field,
            "answer_field": data_args.answer_field,
        }
    return settings


def state_hash(module: torch.nn.Module) -> str:
    """Return a hash of the names and values of a module's tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def source_of(source: str) -> str:
    """Return the id of a data set on the Hub, or a hash of local files: their names, sizes and first MiB.

    Args:
        source: a file, a folder or the id of a data set, which is streamed and so never read as a whole.
    """
    path = Path(source)
    if not path.exists():
        return source
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()):
        with file.open("rb") as content:
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            digest.update(content.read(1 << 20))
    return digest.hexdigest()
