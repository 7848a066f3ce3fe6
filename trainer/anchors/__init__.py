"""Cached reference distributions at the tokens of stored completions, so that a KL term needs no reference in memory."""
