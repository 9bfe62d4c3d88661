"""`infinity bench adam`: how near the optimizer kernels come to what memory gives, and how they stand beside their peers.

`measure` takes the times, `show` shows them, `command` is the command.
"""
