"""Where rows are: cache types, the layout of pages, the pool, page lists and sequences."""
