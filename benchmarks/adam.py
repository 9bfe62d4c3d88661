#!/usr/bin/env python3
"""The optimizer kernels against what memory gives and against their peers: a thin script around `infinity bench adam`.

Prints a table for each size and keeps everything in JSON. Needs 26 bytes of memory per parameter. torch's fused AdamW always
runs beside; DeepSpeed's CPUAdam where it can be imported. How they are compared: `infinity/bench/adam.py`.

    benchmarks/adam.py [--parameters 100e6 300e6] [--rounds 7] [--threads N] [--output benchmarks/results/adam.json]

Sizes that are measured replace those in the output; the others stay.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

from rich.console import Console

from infinity.bench.adam import measure
from infinity.cli.bench.adam.show import print_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, nargs="+", default=[100e6, 300e6])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "adam.json")
    options = parser.parse_args()
    kept = {}
    if options.output.exists():
        kept = {result["parameters_count"]: result for result in json.loads(options.output.read_text())["results"]}
    for count in map(int, options.parameters):
        result = measure(count, options.rounds, options.threads, not options.no_peers, lambda text: print(text, file=sys.stderr))
        kept[count] = result | {"machine": platform.platform(), "python": platform.python_version()}
        print_table([result], Console(width=130))
        options.output.parent.mkdir(exist_ok=True)
        options.output.write_text(json.dumps({"results": [kept[count] for count in sorted(kept)]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
