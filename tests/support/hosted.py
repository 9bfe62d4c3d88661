"""`python hosted.py FILE`: scripts of others, one after another, in processes forked after imports
that all of them need.

`FILE` is JSON with `imports`, the names of modules, and `jobs`. A job has:

- `directory`, where the script runs and `said.txt` and `status.txt` are written;
- `words`: the script and its arguments;
- `environments`: the variables that each of its processes gets. There are as many processes.

A script that fails does not end this process: `status.txt` has the exit status of the first
process that failed, else 0.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def _become(directory: str, words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the script in this process; returns the exit status that Python would end with."""
    os.chdir(directory)
    with Path("said.txt").open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _fork(job: Mapping[str, Any], environment: Mapping[str, str]) -> int:
    child = os.fork()
    if not child:
        status = 1
        try:
            status = _become(job["directory"], job["words"], environment)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    return child


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    for name in asked["imports"]:
        importlib.import_module(name)
    gc.freeze()  # what was imported is no garbage
    for job in asked["jobs"]:
        children = [_fork(job, environment) for environment in job["environments"]]
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        status = next((end for end in ends if end), 0)
        (Path(job["directory"]) / "status.txt").write_text(str(status))


if __name__ == "__main__":
    main()
