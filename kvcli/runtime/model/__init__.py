"""A model: its weights, its layers, and one file an architecture."""
