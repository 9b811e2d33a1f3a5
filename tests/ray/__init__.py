"""A real Ray cluster, and what of it dies. Run by `make ray`, in an environment and a network of its own."""
