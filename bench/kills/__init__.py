"""Random kills of a gateway under load of all kinds, and a check for each promise."""
