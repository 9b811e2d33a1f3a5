"""The bench of model slots."""
