"""The page: what it is told, twice a second while somebody looks, and its files."""
