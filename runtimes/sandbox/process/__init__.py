"""Local process sandboxes, for machines without Docker."""
