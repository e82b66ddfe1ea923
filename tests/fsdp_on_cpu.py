"""Trains with each config on the command line, launched by accelerate-fsdp2.yaml on a machine without a GPU."""

import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from mrp_trainer.train import leave_process_group, train

original_init = PartialState.__init__


def init_as_on_gpus(self, *args, **kwargs):
    """Claim to have several GPUs: otherwise accelerate does not shard."""
    original_init(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = init_as_on_gpus
    for config in sys.argv[1:]:
        train([config])
    leave_process_group()
