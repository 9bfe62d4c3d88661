"""`infinity bench adam`: how near the optimizer kernels come to what memory gives, and how they stand beside their peers.

`measure` takes the times, `table` and `page` show them, `command` is the command.
"""
