"""The suites of other libraries with this engine as their `deepspeed`, behind `make their-tests`.

CONTRIBUTING.md says how their sources are fetched. Here is what adapts them: `hub` makes small
local models and data under the names that the suites ask a hub for, `plugin` lets tests run that
ask for GPUs, and `left_out` has the reason for each test that does not pass. `__main__` runs the
suites and prints the tally.
"""
