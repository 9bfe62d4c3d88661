"""Hooks on an `nn.Module`: its units come before they are used, and leave afterwards."""
