"""One module for each library that is measured: what its ranks do. None is imported before a rank needs it."""
