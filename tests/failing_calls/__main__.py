"""`python -m failing_calls`: see `walk`."""

from failing_calls.walk import main

if __name__ == "__main__":
    main()
