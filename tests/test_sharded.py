"""Gathering and sharding tensors, in one process; test_accelerate_configs.py does it in several."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mrp_trainer.checkpoints.sharded import gathered, shard_optimizer_state, sharded_like, whole_state


@pytest.fixture
def shard(tmp_path):
    """A function that shards a tensor over a group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])
    dist.destroy_process_group()


def test_state_is_whole_on_ranks_that_keep_it(shard):
    tensor = torch.arange(6.0).reshape(3, 2)
    state = {"state": {0: {"moment": shard(tensor), "step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]}
    whole = whole_state(state)
    assert type(whole["state"][0]["moment"]) is torch.Tensor
    assert torch.equal(whole["state"][0]["moment"], tensor)
    assert whole["state"][0]["step"] == 3
    assert whole["groups"] == [{"lr": 0.1}]
    assert whole_state(state, keep=False) is None


def test_tensor_is_sharded_as_its_target_and_gathered_again(shard):
    tensor = torch.arange(6.0).reshape(3, 2)
    sharded = sharded_like(tensor, shard(torch.zeros(3, 2)))
    assert isinstance(sharded, DTensor)
    assert torch.equal(gathered(sharded), tensor)
    assert sharded_like(tensor, torch.zeros(3, 2)) is tensor
    assert gathered(tensor) is tensor


def test_optimizer_of_sharded_parameters_takes_a_whole_state(shard):
    """After loading, it takes the same step as the optimizer that the state comes from."""
    plain = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))
    sharded = torch.nn.Parameter(shard(plain.detach().clone()))
    ours, theirs = (torch.optim.AdamW([parameter], lr=0.1) for parameter in (sharded, plain))
    plain.grad = torch.ones(3, 2)
    theirs.step()
    with torch.no_grad():
        sharded.copy_(shard(plain.detach()))
    ours.register_load_state_dict_pre_hook(shard_optimizer_state)
    ours.load_state_dict(copy.deepcopy(whole_state(theirs.state_dict())))
    plain.grad = torch.full((3, 2), -0.5)
    sharded.grad = shard(plain.grad.clone())
    for optimizer in (ours, theirs):
        optimizer.step()
    assert isinstance(ours.state[sharded]["exp_avg"], DTensor)
    assert torch.equal(gathered(sharded.detach()), plain.detach())
