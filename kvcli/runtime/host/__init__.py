"""The machine: its processors, GPUs, memory and disks, and what is measured of them."""
