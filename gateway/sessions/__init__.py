"""Interactive sessions, as the doors share them."""
