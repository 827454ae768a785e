"""Speculative decoding: tokens that are guessed, and computed together with the one that is known."""

SUFFIX, NGRAM, DRAFT, MTP, OFF = "suffix", "ngram", "draft", "mtp", "off"
METHODS = (SUFFIX, NGRAM, DRAFT, MTP, OFF)
