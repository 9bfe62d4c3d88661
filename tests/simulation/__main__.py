"""`python -m simulation`: see `many`, which is a module of its own, for other processes cannot
import this one."""

import sys

from simulation.many import main

if __name__ == "__main__":
    sys.exit(min(main(), 1))
