"""The accelerate configs of hub_cards/recipes: accelerate reads them, and two processes train with them."""

import re
import socket
import subprocess
import sys
from functools import partial

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from conftest import NUMBERS
from train_runs import ENVIRONMENT, ROOT, head, logs, losses, write_data

from modeling_mrp import MRPForDiffusionLM
from mrp_trainer.checkpoints.head_files import load_head
from mrp_trainer.train import main

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


@pytest.fixture
def config(project, tiny_model, word_tokenizer, tmp_path):
    """A function that writes the YAML of a run over a tiny backbone and four rows: `config(name, **options)`."""
    data = tmp_path / "four.jsonl"
    write_data(data, [{"prompt": "what is one", "completion": f"so {word} plus two"} for word in NUMBERS[:4]])

    def write(name: str, backbone_seed: int = 0, **options) -> str:
        base = tmp_path / f"base-{backbone_seed}"
        tiny_model(seed=backbone_seed, num_mrp_layers=0).save_pretrained(base)
        word_tokenizer.save_pretrained(base)
        values = {"base_model": str(base), "train_data": str(data), "max_steps": 2, "learning_rate": 0.1}
        return project(name, **values | {"save_strategy": "no"} | options)

    return write


def launch_two(accelerate_config: str, *script_and_arguments: str) -> subprocess.CompletedProcess:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / accelerate_config)]
    launcher += ["--num_processes", "2", "--main_process_port", str(port), *script_and_arguments]
    return subprocess.run(launcher, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.slow
def test_two_processes_of_the_ddp_config_train_one_head(config, tmp_path):
    """On the CPU, two processes with one row each take the same steps as one process with two rows."""
    main([config("one", per_device_train_batch_size=2, optim="sgd")])
    two = config("two", per_device_train_batch_size=1, optim="sgd", ddp_backend="gloo")
    done = launch_two("accelerate-ddp.yaml", "-m", "mrp_trainer.train", two)
    assert done.returncode == 0, done.stderr
    start = MRPForDiffusionLM.from_backbone(tmp_path / "base-0", 1).mrp_head.state_dict()
    one, two = head(tmp_path / "one"), head(tmp_path / "two")
    assert not torch.equal(one["norm.weight"], start["norm.weight"])
    for tensor in one:
        torch.testing.assert_close(two[tensor], one[tensor], rtol=1e-4, atol=1e-6)


FOUR_STEPS = {"learning_rate": 0.01, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3}
EVALUATION = {"eval_steps": 4, "decode_new_tokens": 4, "reveal": "confident"}
RECIPE = {
    "backbone_dtype": "bfloat16",
    "bf16": True,
    "activation_checkpointing": True,
    "choice_weight": 0.1,
    "packing": True,
    "sequence_length": 32,
    "gradient_accumulation_steps": 2,
}


@pytest.mark.slow
def test_fsdp2_config_trains_the_head_of_one_process_and_resumes_it(config, tmp_path):
    """One launch trains with several sets of options; a second resumes them, and then tries another backbone.

    In the data for the recipe's options every fourth sample fills a row, so that packed rows hold different numbers of
    answers.
    """
    held_out, uneven = tmp_path / "held-out.jsonl", tmp_path / "uneven.jsonl"
    samples = [{"prompt": "what is", "completion": "so one plus two " * (1 if n % 4 else 7)} for n in range(32)]
    write_data(uneven, samples)
    write_data(held_out, samples[1:5])
    shared = {
        "adam": FOUR_STEPS | EVALUATION | {"eval_data": str(held_out)},
        "muon": FOUR_STEPS | {"muon_learning_rate": 0.02},
        "recipe": FOUR_STEPS | RECIPE | {"train_data": str(uneven)},
    }
    middle = {name: tmp_path / name / "checkpoint-2" for name in shared}
    alone = {"per_device_train_batch_size": 2}
    halved = {"per_device_train_batch_size": 1, "ddp_backend": "gloo"}
    launch = partial(launch_two, "accelerate-fsdp2.yaml", "-m", "tests.fsdp_on_cpu")
    done = launch(*(config(name, **shared[name], **halved) for name in shared))
    assert done.returncode == 0, done.stderr
    resume = {name: {"resume_from_checkpoint": str(middle[name])} for name in shared}
    again = [config(f"{name}-resumed", **shared[name], **halved, **resume[name]) for name in shared]
    done = launch(*again, config("other", backbone_seed=1, **shared["adam"], **halved, **resume["adam"]))
    assert "load it onto the backbone it belongs to" in done.stderr

    # Muon orthogonalises in bfloat16 and the recipe computes in it, so the order of sums is visible there.
    for name, tolerance in (("adam", 1e-4), ("muon", 1e-2), ("recipe", 1e-2)):
        main([config(f"{name}-alone", **shared[name], **alone)])
        main([config(f"{name}-onward", **shared[name], **alone, **resume[name])])
        two = head(tmp_path / name)
        assert all(torch.equal(head(tmp_path / f"{name}-resumed")[tensor], two[tensor]) for tensor in two)
        assert losses(tmp_path / f"{name}-resumed") == losses(tmp_path / name)
        assert sorted(losses(tmp_path / name)) == [3]  # the mean of steps on both sides of the checkpoint
        for other in ("alone", "onward"):
            one = head(tmp_path / f"{name}-{other}")
            assert one.keys() == two.keys()
            for tensor in one:
                scale = one[tensor].abs().max()
                torch.testing.assert_close(two[tensor] / scale, one[tensor] / scale, rtol=0, atol=tolerance)
    timed = re.compile("runtime|per_second")
    for two, one in zip(logs(tmp_path / "adam"), logs(tmp_path / "adam-alone"), strict=True):
        figures = [{key: value for key, value in log.items() if not timed.search(key)} for log in (two, one)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-4, abs=1e-6)
    assert [log["eval_tokens_per_forward"] > 0 for log in logs(tmp_path / "adam") if "eval_loss" in log] == [True]

    model = load_head(MRPForDiffusionLM.from_backbone(tmp_path / "base-0", 1), middle["adam"])
    assert head(middle["adam"]).keys() == model.mrp_head.state_dict().keys()
    assert [file.name for file in middle["adam"].glob("*model*")] == []
    state = torch.load(middle["adam"] / "optimizer.pt", weights_only=True)["state"]
    shapes = sorted(tuple(moment["exp_avg"].shape) for moment in state.values())
    assert shapes == sorted(tuple(parameter.shape) for parameter in model.mrp_head.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("accelerate_config", ["accelerate-fsdp2.yaml", "accelerate-ddp.yaml"])
def test_a_failure_to_decode_on_one_process_is_a_warning_on_both(config, tmp_path, accelerate_config):
    """Under FSDP2 the other process waited for the weights of the next layer until its time was up, and the run was
    lost. Under DDP the two had different figures, and might have chosen different best checkpoints.
    """
    write_data(tmp_path / "held-out.jsonl", [{"prompt": "what is", "completion": "so one plus two"}] * 4)
    options = {"eval_data": str(tmp_path / "held-out.jsonl"), "eval_steps": 1, "decode_new_tokens": 4}
    options |= {"per_device_train_batch_size": 1, "ddp_backend": "gloo", "ddp_timeout": 60}
    done = launch_two(accelerate_config, "-m", "tests.failing_rank", "3", config("two", **options))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "held-out prompts could not be decoded" in line]
    assert sum("MemoryError('out of memory on one device')" in line for line in lines) == 3  # two evaluations, the end
    assert sum("OtherProcessFailed('another process failed')" in line for line in lines) == 3
    evaluations = [log for log in logs(tmp_path / "two") if "eval_loss" in log]
    assert len(evaluations) == 2 and not any("eval_tokens_per_forward" in log for log in evaluations)
