"""Speculative decoding: tokens that are guessed, and computed together with the one that is known."""

SUFFIX, NGRAM, DRAFT, OFF = "suffix", "ngram", "draft", "off"
METHODS = (SUFFIX, NGRAM, DRAFT, OFF)
