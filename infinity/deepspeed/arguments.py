"""The command line options of scripts for DeepSpeed."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, which `infinity.initialize(args=...)` reads."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", default=False, action="store_true", help="Use the engine.")
    group.add_argument(
        "--deepspeed_config", default=None, type=str, help="A JSON file with its configuration."
    )
    return parser
