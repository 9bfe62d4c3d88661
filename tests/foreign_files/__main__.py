"""`python -m foreign_files`: see `many`."""

from foreign_files.many import main

if __name__ == "__main__":
    main()
