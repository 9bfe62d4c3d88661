"""`infinity run`: runs scripts that were written for DeepSpeed. The code is in
`infinity_command.run`, because it must not wait for the import of torch."""

from __future__ import annotations

from typing import Annotated

import typer


def run(
    arguments: Annotated[
        list[str],
        typer.Argument(
            help="A script, a command as accelerate, or -m and a module; then its arguments.",
            metavar="SCRIPT",
        ),
    ],
) -> None:
    """Run a script that was written for DeepSpeed, unmodified: `import deepspeed` finds this
    engine.

    A package with that name comes first on the path, in this process and in those that the script
    starts. Nothing is installed. For several ranks: torchrun --nproc-per-node 4 --no-python
    infinity run SCRIPT.
    """
    from infinity_command import run as command

    raise typer.Exit(command.main(arguments))
