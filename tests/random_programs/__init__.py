"""Random programs: a random model, a random list of operations, and the same bits on every
placement and in plain PyTorch.

`recipes` says what a program is and is the hypothesis strategy that draws one, `modules` builds
models, `players` runs a program plainly or on a placement, `round_trips` saves and loads,
`comparing` compares what the players saw, `mutations` breaks the engine on purpose, `many` lets
hypothesis run programs and shrink one that differs. `python -m random_programs --help`, in the
folder `tests`, runs many of them.
"""
