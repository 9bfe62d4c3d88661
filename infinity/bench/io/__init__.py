"""What NVMe directories give, and the setting of the I/O engine that gives it.

`benchmark` carries out a `plan`: `preflight` looks, `workspace` makes the files, `search` finds a
setting, `patterns` says what a mode moves, `rig` moves it, `fio` and `load` run beside it.
`results` sums up, and `verdict`, `wear` and `block` say what follows.
"""
