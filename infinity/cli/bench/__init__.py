"""`infinity bench`: options, tables and pages. `infinity.bench` does the measuring.

Each command has a folder: `command` takes the options and calls the library, `show` shows the
result (`table` and `page` for io).
"""
