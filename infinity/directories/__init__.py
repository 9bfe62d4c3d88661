"""Directories that others can write to: safe names, locks, files that take their place whole."""
