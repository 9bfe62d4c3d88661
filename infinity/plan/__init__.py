"""`infinity plan`: what a model would take of a machine, before anybody has either.

`forecast.plan` is the way in. It asks the code that decides at run time (`placement/`,
`schedule/planner`), so there is no second model of memory.
"""
