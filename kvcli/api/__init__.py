"""What `import kvcli` offers, and what the command line shares with it."""
