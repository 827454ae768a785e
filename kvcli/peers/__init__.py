"""Other programs that serve models: what options of `kv` are there, what they leave for a cache, and vLLM as a process
of ours."""
