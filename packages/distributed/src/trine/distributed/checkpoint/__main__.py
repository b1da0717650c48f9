"""`python -m trine.distributed.checkpoint`."""

import sys

from trine.distributed.checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
