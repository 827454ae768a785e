"""What a model needs, from headers and shapes alone, before it is opened."""
