"""What tests of several folders share. Nothing is imported from a `test_*.py` or from
`conftest`."""
