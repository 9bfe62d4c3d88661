"""The launcher."""

import os

from infinity_command import launched

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
launched.keep_deepspeed_on_cpu(os.environ)  # accelerate imports this as it starts ranks
