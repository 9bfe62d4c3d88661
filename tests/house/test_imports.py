"""What an import of the package brings with it."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_imports_no_measuring() -> None:
    """`import infinity` loads neither `infinity.bench` nor `infinity.models`."""
    code = (
        "import sys, infinity; print([n for n in sys.modules if "
        "n.startswith(('infinity.bench', 'infinity.models'))])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
