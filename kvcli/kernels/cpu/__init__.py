"""The CPU backend: C, for the instruction set that the processor has."""
