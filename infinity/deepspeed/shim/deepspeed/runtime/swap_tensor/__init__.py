"""NVMe."""

MIN_SWAPPABLE_BYTES = 0
"""States of any size go to the drive."""
