"""Rows that outlive a sequence: in the pool, in files, in the store."""
