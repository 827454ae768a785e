"""`python -m kvcli` is `kv`."""

from kvcli.cli import main

main()
