"""`kv`: local inference whose heart is the KV cache."""

__version__ = "0.1.0"
