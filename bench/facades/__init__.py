"""The bench of the doors in other protocols, and the real clients that drive it."""
