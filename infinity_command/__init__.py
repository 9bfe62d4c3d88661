"""Starts the command `infinity`.

A package of its own, because importing any part of `infinity` imports torch first, which takes
seconds. A list of the commands needs none of it.
"""

import gc
import sys


def main() -> None:
    """Run the command. Ctrl-C while it is imported is one line and status 130, as later on."""
    if sys.argv[1:2] == ["run"] and not {"-h", "--help"}.intersection(sys.argv[2:3] or ["-h"]):
        from infinity_command import run

        sys.exit(run.main(sys.argv[2:]))
    try:
        from infinity_command.overview import overview, suffices

        if suffices(sys.argv[1:]):
            app = overview()
        else:
            from infinity_command.importing import announced

            gc.disable()  # Imports make no garbage, and looking for it takes a tenth of their time.
            with announced():
                from infinity.cli.main import app
            gc.enable()
    except KeyboardInterrupt:
        sys.stderr.write("infinity: interrupted\n")
        sys.exit(130)
    app()
