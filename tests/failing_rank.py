"""Trains as tests.fsdp_on_cpu does, but sampling fails in the second process: `failing_rank.py CALL CONFIG ...`.

The processes claim to have GPUs, and so shard the model, only under an FSDP config of accelerate.
"""

import os
import sys

from accelerate.state import PartialState

from modeling_mrp.sampling import Sampler
from mrp_trainer.train import leave_process_group, train
from tests.fsdp_on_cpu import init_as_on_gpus

if __name__ == "__main__":
    last, *configs = sys.argv[1:]
    choose, calls = Sampler.choose, 0

    def choose_or_fail(self, *args):
        global calls
        calls += 1
        if calls >= int(last):
            raise MemoryError("out of memory on one device")
        return choose(self, *args)

    if os.environ["RANK"] == "1":
        Sampler.choose = choose_or_fail
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState.__init__ = init_as_on_gpus
    for config in configs:
        train([config])
    leave_process_group()
