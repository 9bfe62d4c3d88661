"""Decides WHERE every block is at home: frozen specs, budgets and measured rates in, a layout out.

Pure: no torch, no live object, nothing set and put back. `decide` is the way in; `tiers/store`
carries a layout out.
"""
