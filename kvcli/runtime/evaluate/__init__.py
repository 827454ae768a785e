"""Measurements of an engine: speed, quality of cache types, recall, rows of a prompt cache computed again."""
