"""The shape of a model from a file's header, a config.json, the hub, a recipe or flags."""
