"""Trains each config of the command line in a process launched with accelerate-fsdp2.yaml, without a GPU."""

import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from mrp_trainer.train import leave_process_group, train

prepare = PartialState.__init__


def as_on_gpus(self, *args, **kwargs):
    """accelerate shards only where several GPUs are."""
    prepare(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = as_on_gpus
    for config in sys.argv[1:]:
        train([config])
    leave_process_group()
