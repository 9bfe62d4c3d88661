"""How near a training step comes to what the devices under it give.

`measure` returns the summary: `train` makes the steps, `limits` measures what each device gives in
the same run, `flops` counts.
"""
