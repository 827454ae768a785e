"""Keep-alive: a process that stays behind a command with the model in memory, and does what later commands ask."""
