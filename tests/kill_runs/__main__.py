"""`python -m kill_runs`: see `chains`, which is a module of its own, for other processes cannot
import this one."""

import sys

from kill_runs.chains import main

if __name__ == "__main__":
    sys.exit(main())
