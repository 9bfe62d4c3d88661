"""Computes losses in chunks of tokens, without all logits in memory at once."""
