"""Run at the start of each Python with `infinity` among the arguments of its program, by
`infinity_run.pth`, which the wheel puts beside the package.

`accelerate launch --use_deepspeed ... --no_python infinity run train.py` looks for DeepSpeed before
it starts a rank. So that process finds the package of `infinity run`, too.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path


def launches_this_engine(command: Sequence[str]) -> bool:
    """Whether `command` is accelerate's launcher, and `infinity run` the program it launches."""
    words = [Path(word).name for word in command]
    pairs = list(itertools.pairwise(words))
    before = words[: pairs.index(("infinity", "run"))] if ("infinity", "run") in pairs else []
    return any(re.match(r"accelerate(-launch|\.commands\.\w+)?$", word) for word in before)


if launches_this_engine(sys.orig_argv):
    from infinity_command.run import shim

    sys.path.insert(0, str(shim()))
