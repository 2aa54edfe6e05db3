"""`accelerate-poplar checkpoint`: checkpoints whose training state is in unequal shares."""

from __future__ import annotations

import argparse
from typing import Any

DESCRIPTION = """\
Convert a checkpoint of a run with uneven training state (state_shards) into an ordinary DeepSpeed checkpoint, in which
every rank has an equal share. Afterwards

- a run with even shares and as many ranks resumes from it exactly;
- DeepSpeed's zero_to_fp32.py makes one file of fp32 weights of it;
- DeepSpeed's ds_to_universal.py --inject_missing_state makes a universal checkpoint of it, from which a run with any
  shares and any number of ranks resumes (checkpoint: {load_universal: true} in the DeepSpeed config).

The original is not changed. No GPU is needed, but disk space for the copy is."""

EXAMPLE = """\
example:
  accelerate-poplar checkpoint to-even outputs/checkpoint-500"""


def add_parsers(subparsers: Any) -> None:
    """Add the command `checkpoint`; it sets `run`, a function of the parsed arguments to an exit code."""
    parser = subparsers.add_parser("checkpoint", help="convert checkpoints of runs with uneven training state")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    even = actions.add_parser(
        "to-even",
        help="write a copy with equal shares",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    even.add_argument("folder", metavar="DIR", help="checkpoint folder: the one with a `latest` file")
    even.add_argument("--output", metavar="DIR", help="where the copy goes (default: DIR-even)")
    even.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert and say where the copy is.

    Returns:
        0.

    Raises:
        ConfigError: The folder holds no checkpoint with unequal shares, or the output exists.
    """
    from .checkpoint import saved_shares, to_even

    shares = saved_shares(args.folder)
    written = to_even(args.folder, args.output)
    if shares is not None:
        listing = ", ".join(f"rank {rank} {100 * share:.1f}%" for rank, share in enumerate(shares.fractions))
        print(f"training state was shared {listing}; now {100 / shares.world_size:.1f}% each.")
    print(f"written to {written}")
    return 0
