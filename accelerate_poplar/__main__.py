"""`python -m accelerate_poplar`, for launchers that start a module."""

import sys

from .cli import main

sys.exit(main())
