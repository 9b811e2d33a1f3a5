"""Files of sandboxes from outside: one by one, and whole trees in a tar."""
