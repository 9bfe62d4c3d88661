"""How tests start other Python processes."""

from __future__ import annotations

import os
import sys

CHILD = {
    "env": os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    "text": True,
}
"""Arguments for `subprocess`, so that a child imports what this process does."""
