"""Measuring, as a library: results are plain data, progress goes to a function that the caller
gives, and nothing prints.

| module | measures |
|---|---|
| `io` | NVMe directories: finds the fastest setting of the I/O engine, and says what limits it |
| `adam` | the optimizer kernels, beside a plain loop over memory and their peers |
| `step` | a training step, beside what each device under it gives alone |
| `machine` | nothing: it asks the kernel what this machine allows |
| `summary` | nothing: it is the one schema of results, with commit, machine and spread |
"""
