"""Measurements, as a library. Results are plain data, progress goes to a function of the caller,
and nothing prints.

| module | measures |
|---|---|
| `io` | NVMe directories: finds the fastest setting of the I/O engine, and its limit |
| `adam` | the optimizer kernels, beside a plain loop over memory and other optimizers |
| `step` | a training step, beside each device alone |
| `machine` | nothing: it asks the kernel for the limits of this machine |
| `summary` | nothing: it is the one schema of results, with commit, machine and spread |
"""
