"""Draw settings of tests/test_laws_property.py until the time is up, and print how many were drawn.

    MRP_FUZZ_SECONDS=3600 python tests/fuzz_laws.py        run for an hour, which is the default
    MRP_FUZZ_SEED=7 python tests/fuzz_laws.py              draw other settings than with seed 0

The settings come in rounds of `EXAMPLES`, each with a seed of its own. The first round that fails ends the run, after
hypothesis has reduced its setting to a small one and printed it.
"""

import os
import sys
import time
import warnings
from itertools import count

import transformers
from hypothesis import HealthCheck, given, seed, settings
from law_settings import generate_calls
from test_laws_property import check_laws

EXAMPLES = 250

settings.register_profile(
    "fuzz", max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def main() -> None:
    """Run rounds until the time is up, or until one fails."""
    seconds, first = float(os.environ.get("MRP_FUZZ_SECONDS", 3600)), int(os.environ.get("MRP_FUZZ_SEED", 0))
    settings.load_profile("fuzz")
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="block_size=")
    started, drawn = time.monotonic(), 0

    def counted(setting):
        nonlocal drawn
        drawn += 1
        check_laws(setting)

    for number in count(first):
        if time.monotonic() - started >= seconds:
            break
        seed(number)(settings()(given(generate_calls())(counted)))()
        sys.stdout.write(f"{drawn} settings in {time.monotonic() - started:.0f} s: every law held\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
