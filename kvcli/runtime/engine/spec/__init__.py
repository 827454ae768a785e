"""Speculative decoding: tokens that are guessed, and computed together with the one that is known."""
