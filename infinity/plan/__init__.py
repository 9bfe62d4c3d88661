"""`infinity plan`: the memory and time that a model takes on a machine. It needs neither.

`forecast.plan` is the entry. It asks the code that decides at run time (`placement/`,
`schedule/planner`), so there is no second model of memory.
"""
