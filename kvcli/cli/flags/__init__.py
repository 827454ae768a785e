"""Groups of flags that several commands take, and what each group means as options."""
