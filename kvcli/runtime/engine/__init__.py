"""Generation: an opened model, its pool, one step after the other, and how the next token is chosen."""
