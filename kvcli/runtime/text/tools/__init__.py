"""Calls of tools: how families of models write them (`forms`), read (`reader`) and as a grammar (`rules`). No torch."""
