"""`python -m resume_pairs`: see `pairs`."""

import sys

from resume_pairs.pairs import main

if __name__ == "__main__":
    sys.exit(min(main(), 1))
