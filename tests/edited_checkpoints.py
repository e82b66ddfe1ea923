"""Changing the tensors and the config of a saved checkpoint."""

import json

from safetensors.torch import load_file, save_file


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, edit):
    values = json.loads((folder / "config.json").read_text())
    edit(values)
    (folder / "config.json").write_text(json.dumps(values))
