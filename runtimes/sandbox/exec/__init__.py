"""The exec runtime: commands in sandboxes."""
