"""Decides WHERE every block lives. Frozen specs, budgets and measured rates go in, and a layout
comes out.

Pure: no torch, no live object, no temporary state. Start reading at `decide`. `tiers/store` carries
a layout out.
"""
