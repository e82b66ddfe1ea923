"""The accelerate configs beside the recipes: accelerate reads them, and a run on two processes works with them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file

from modeling_mrp import MRPForDiffusionLM

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "hub_cards" / "recipes"
EXPECTED = {"accelerate-ddp": DistributedType.MULTI_GPU, "accelerate-fsdp2": DistributedType.FSDP}


@pytest.mark.parametrize(("name", "kind"), EXPECTED.items())
def test_accelerate_reads_the_config(name, kind):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert type(config) is ClusterConfig
    assert config.distributed_type == kind
    assert config.num_processes > 1
    assert config.mixed_precision == "no"


def test_fsdp2_config_reaches_the_processes(tiny_model):
    path = str(CONFIGS / "accelerate-fsdp2.yaml")
    args = launch_command_parser().parse_args(["--config_file", path, "script.py"])
    environment = prepare_multi_gpu_env(_validate_launch_command(args)[0])
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT"
    model = tiny_model()
    wrapped = {environment["FSDP_TRANSFORMER_CLS_TO_WRAP"]}
    assert {type(layer).__name__ for layer in (*model.model.layers, *model.mrp_head.layers)} == wrapped


@pytest.mark.slow
def test_two_processes_of_the_ddp_config_train_one_head(tiny_model, word_tokenizer, tmp_path):
    """The config as it is, on the CPU: two processes with a row each take the steps of one process with two rows."""
    base = tmp_path / "base"
    tiny_model(num_mrp_layers=0).save_pretrained(base)
    word_tokenizer.save_pretrained(base)
    records = [
        {"prompt": "what is one", "completion": f"so {word} plus two"} for word in ("one", "two", "three", "four")
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {
        "base_model": str(base),
        "num_mrp_layers": 1,
        "train_data": str(tmp_path / "data.jsonl"),
        "sequence_length": 16,
        "packing": False,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
        "save_strategy": "no",
        "unroll_steps": 2,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    offline = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "accelerate-ddp.yaml")]
    launch += ["--num_processes", "2", "--main_process_port", str(port)]
    heads = []
    for name, launcher, rows in (("one", [], 2), ("two", launch, 1)):
        options = ["--output_dir", str(tmp_path / name), "--per_device_train_batch_size", str(rows)]
        options += ["--ddp_backend", "gloo"] if launcher else []
        command = [sys.executable, *launcher, "-m", "trainer.train", str(tmp_path / "run.yaml"), *options]
        done = subprocess.run(
            command, env={**os.environ, **offline, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        heads.append(load_file(tmp_path / name / "mrp_head.safetensors"))
    one, two = heads
    start = MRPForDiffusionLM.from_backbone(base, 1).mrp_head.state_dict()
    assert not torch.equal(one["norm.weight"], start["norm.weight"])
    for tensor in one:
        torch.testing.assert_close(two[tensor], one[tensor], rtol=1e-4, atol=1e-6)
