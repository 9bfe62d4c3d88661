"""Calls of the system that fail: each ends in an error of ours, and leaves what was committed.

`calls` makes one call fail, `entries` are the public entry points, and `walk` makes each call of an
entry fail with each error that it may give. `python -m failing_calls --help`, in the folder
`tests`, takes all of them.
"""
