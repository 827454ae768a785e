"""Decoding on a GPU as one captured graph a token."""
