"""`python -m infinity_command`, the command `infinity`."""

from infinity_command import main

main()
