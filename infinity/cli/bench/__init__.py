"""`infinity bench io`: what the NVMe directories of this machine give, and the settings that give it.

`command` takes the options and `benchmark` runs them: `preflight` looks, `workspace` makes the files, `search` finds a setting,
`patterns` says what a mode moves, `rig` moves it, `fio` and `load` stand beside it; `verdict`, `wear` and `block` say what
follows, `table` and `page` show it.
"""
