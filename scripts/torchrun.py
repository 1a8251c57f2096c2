"""torchrun that ends with one line about the rank that failed, and with that rank's status.

What a rank itself said stands above; torchrun's own traceback, of its own lines, would hide it.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main() -> int:
    """Run what the command line says; the status of the rank that failed first, or 1 if a signal
    ended it."""
    options = parse_args(None)
    if not options.max_restarts:  # with restarts, these lines tell why there was one
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel("CRITICAL")
    try:
        run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        by_signal = failure.exitcode < 0
        end = (
            f"was ended by {failure.signal_name()}"
            if by_signal
            else f"ended with status {failure.exitcode}"
        )
        print(f"launch.sh: rank {rank} {end}; what it said is above", file=sys.stderr)
        return 1 if by_signal else failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
