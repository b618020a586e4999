"""`python -m yocolm` is the command `yocolm`."""

import sys

from yocolm.cli import main

if __name__ == "__main__":
    sys.exit(main())
