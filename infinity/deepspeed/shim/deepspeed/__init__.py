"""The package `deepspeed` that scripts see inside of `infinity run`: names of DeepSpeed over those
of `infinity`. It holds no code of its own; `infinity.deepspeed.names` has the table."""

import sys

from infinity.deepspeed.package import fill

fill(sys.modules[__name__])
