"""`infinity bench`: options, tables and pages. `infinity.bench` measures.

Each command has a folder: `command` takes the options and calls the library, and `show` (for io
`table` and `page`) shows the result.
"""
