"""The speeds of NVMe directories, and the setting of the I/O engine that reaches them.

`benchmark` carries out a `plan`: `preflight` examines the directories, `workspace` makes the files,
`search` finds a setting, `patterns` has the transfers of a mode, `rig` runs them, `fio` and `load`
run beside it. `results` sums up, and `verdict`, `wear` and `block` draw conclusions.
"""
