"""`infinity bench step`: how near a training step comes to what the devices under it give.

`command` takes the options and `measure` runs them: `train` makes the steps, `limits` measures what each device gives in the same
run, `flops` counts, `show` shows.
"""
