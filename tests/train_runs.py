"""Starting training runs in new processes, and reading what they write."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
ENVIRONMENT = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT)}
TRAIN = [sys.executable, "-m", "mrp_trainer.train"]
ON_TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *TRAIN[1:]]


def run(*command, **environment: str):
    done = subprocess.run(command, env=ENVIRONMENT | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def head(folder) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "mrp_head.safetensors")


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def logs(folder) -> list[dict]:
    return json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]


def losses(folder) -> dict[int, float]:
    return {log["step"]: log["loss"] for log in logs(folder) if "loss" in log}


def write_data(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def checkpoints(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("checkpoint-*"))


def unfinish(folder):
    """Leave a finished run as it was before its last file was written."""
    path = Path(folder) / "mrp_run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"finished": None}))
