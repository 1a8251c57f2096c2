"""Entry point of ``python -m triton_dist``: see :mod:`triton_dist.cli`."""

import sys

from triton_dist.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
