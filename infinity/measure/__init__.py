"""Meters of links, drives and kernels, which placement, plans and benchmarks read."""
