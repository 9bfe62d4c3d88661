"""`infinity bench adam`: the command and its options."""

from __future__ import annotations

from typing import Annotated

import typer

from infinity.cli.bench.delivery import Delivery, say
from infinity.cli.bench.options import Json, ReportFile, parse_count
from infinity.cli.failure import plain_failures, require_extras
from infinity.cli.options import Debug

Parameters = Annotated[
    list[int] | None,
    typer.Option(
        "--count",
        parser=parse_count,
        metavar="COUNT",
        show_default="100M",
        help="How many parameters are updated; several for several sizes.",
    ),
]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians count.")]
Threads = Annotated[
    int | None, typer.Option(min=1, show_default="every CPU", help="Threads, of the peers too.")
]
Peers = Annotated[
    bool,
    typer.Option(
        help="Measure torch's fused AdamW and, where it is installed, DeepSpeed's CPUAdam."
    ),
]


def adam(
    parameters: Parameters = None,
    rounds: Rounds = 7,
    threads: Threads = None,
    peers: Peers = True,
    as_json: Json = None,
    report: ReportFile = None,
    debug: Debug = False,
) -> None:
    """Measure the optimizer kernels against memory bandwidth: GB/s of every state format, and of a
    plain in-place loop.

    Needs 26 bytes of memory per parameter.
    """
    with plain_failures(debug):
        from infinity.bench.adam import measure
        from infinity.cli.bench.adam.show import print_table, render

        if report is not None:
            require_extras("matplotlib", what="--report")
        delivery = Delivery(as_json, report)
        results = [
            measure(count, rounds, threads, peers, say) for count in parameters or [100_000_000]
        ]
        delivery.deliver(
            {"results": results},
            lambda: render(results),
            lambda console: print_table(results, console),
        )
