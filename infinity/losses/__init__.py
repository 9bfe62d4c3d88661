"""Losses that are computed in chunks of tokens, without all logits at once."""
