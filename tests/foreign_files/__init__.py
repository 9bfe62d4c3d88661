"""Files that somebody else has changed: read, or refused by an error of ours, within limits of
memory and time.

`kinds` are what the package reads, each with a valid file, `changes` makes others of it, and `many`
reads those in a process with limits. `python -m foreign_files --help`, in the folder `tests`, reads
a million of them.
"""
