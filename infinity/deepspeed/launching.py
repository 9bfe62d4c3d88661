"""`deepspeed.launcher.runner`.

The launcher of accelerate imports it right before it starts ranks for a DeepSpeed configuration.
That is the last place that can make those ranks use DeepSpeed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity_command import deepspeed_launcher, launched

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]

launched.keep_deepspeed_on_cpu(os.environ)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Become torchrun, like `infinity run deepspeed`. Raises `ConfigError` for options that
    torchrun does not have."""
    try:
        deepspeed_launcher.run(sys.argv[1:] if args is None else args)
    except ValueError as error:
        raise DeepSpeedConfigError(str(error)) from None
