"""One file an architecture family, and the loading of their weights."""
