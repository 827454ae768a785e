"""The command line: words in, text and exit codes out. Everything it does is done by `kvcli.runtime`."""
