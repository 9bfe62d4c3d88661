"""NVMe."""

MIN_SWAPPABLE_BYTES = 1 << 20
"""States of this size go to the drive with every engine; here smaller ones do, too."""
