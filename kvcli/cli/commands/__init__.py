"""The commands of `kv`, one file or folder each."""
