"""Run torchrun, but end with one line instead of torchrun's traceback.

The line names the rank that failed, or the signal that ended the launcher. The rank's own error is
printed above the line; torchrun's traceback would hide it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partialmethod
from types import FrameType
from typing import Any


def exit_by_signal(number: int, _: FrameType | None = None) -> None:
    """End the process with the status that a shell reports for a signal."""
    print(f"launch.sh: ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)


def start_uninterrupted(context: Any, start: Callable[[Any], None]) -> None:
    """Start the ranks, and handle signals only after the last rank has started.

    torchrun ends only ranks that it has registered, and it registers them after the last start: a
    signal between two starts would leave ranks behind.
    """
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        start(context)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in received:
        signal.raise_signal(number)


def main() -> int:
    """Run the command line; return the status of the rank that failed first, or 1 if a signal
    ended that rank."""
    for number in (signal.SIGINT, signal.SIGTERM):  # torch takes seconds to install its handlers
        signal.signal(number, exit_by_signal)
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    SubprocessContext._start = partialmethod(start_uninterrupted, SubprocessContext._start)
    options = parse_args(None)
    if not options.max_restarts:  # with restarts, these logs show the reason of each restart
        for name in ("multiprocessing.api", "agent.server.api"):
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel("CRITICAL")
    try:
        run(options)
    except SignalException as error:
        exit_by_signal(error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        was_signalled = failure.exitcode < 0
        end = (
            f"was ended by {failure.signal_name()}"
            if was_signalled
            else f"ended with status {failure.exitcode}"
        )
        # initialize_distributed() and @record write the exception that ends a rank to a file.
        written = failure.error_file_data.get("message")
        if isinstance(written, dict):
            written = written.get("message")
        first_line = str(written or "<NONE>").partition("\n")[0]
        reason = "; its output is above" if first_line == "<NONE>" else f": {first_line}"
        print(f"launch.sh: rank {rank} {end}{reason}", file=sys.stderr)
        return 1 if was_signalled else failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
