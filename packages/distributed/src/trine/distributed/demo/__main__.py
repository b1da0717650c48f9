"""`python -m trine.distributed.demo`."""

import sys

from trine.distributed.demo.cli import main

if __name__ == "__main__":
    sys.exit(main())
