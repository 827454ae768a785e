"""Models by name: recipes, the hub, resumable and checked downloads, the store on disk."""
