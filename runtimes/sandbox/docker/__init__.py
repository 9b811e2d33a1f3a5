"""Container sandboxes: the Docker engine, and how a runner inside a container is reached."""
