"""The Docker Engine API on a unix socket: a container is a trajectory, which holds cores only while a command runs."""
