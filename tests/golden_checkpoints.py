"""The golden checkpoints in other forms: as a source to convert, as a plain backbone, as expected logits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HEAD = "mrp_modules.0.model."
BLOCK4 = Path(__file__).parent / "golden" / "block4"


def write_source(
    folder: Path, golden: Path, *, rename=lambda name: name, edit=lambda tensors: None, shards=1, **config
):
    """Write a golden checkpoint with other tensor names, tensors, shards or config values (None drops a value)."""
    folder.mkdir(parents=True)
    tensors = {rename(name): tensor for name, tensor in load_file(golden / "model.safetensors").items()}
    edit(tensors)
    values = json.loads((golden / "config.json").read_text()) | config
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {
        name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(tensors)
    }
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def plain_sdar(folder: Path, golden: Path, **options) -> Path:
    """Write the golden backbone as a plain SDAR checkpoint, without a head."""

    def drop_head(tensors):
        for name in [name for name in tensors if name.startswith(HEAD)]:
            del tensors[name]

    return write_source(
        folder, golden, edit=drop_head, num_nextn_predict_layers=None, num_mrp_heads=None, auto_map=None, **options
    )


def golden_step(model, golden: Path):
    """Return backbone and corrected logits of the golden step by the model, and the expected ones; all [B, V]."""
    values = load_file(golden / "expected.safetensors")
    before = torch.cat([values["step.prefix"], values["step.block"]])[None].long()
    after = torch.cat([values["step.prefix"], values["step.revealed_block"]])[None, None].long()
    with torch.no_grad():
        out = model(before, revealed_ids=after, logits_to_keep=model.config.block_size)
    expected = values["step.backbone_logits"], values["step.corrected_logits.full_context"]
    return (out.logits[0], out.corrected_logits[0, 0]), expected


def run(code: str, **environment) -> subprocess.CompletedProcess:
    """Run Python code in a new process that can import this package, and check that it succeeds."""
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done
