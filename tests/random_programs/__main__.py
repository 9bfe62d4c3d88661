"""`python -m random_programs`: see `many`, which is a module of its own, for other processes cannot
import this one."""

import sys

from random_programs.many import main

if __name__ == "__main__":
    sys.exit(min(main(), 1))
