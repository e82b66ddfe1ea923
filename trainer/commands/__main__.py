"""`python -m mrp_trainer.commands` is the `mrp` command."""

import sys

from .cli import main

sys.exit(main())
