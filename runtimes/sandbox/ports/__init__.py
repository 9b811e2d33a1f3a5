"""Ports of a sandbox: connections to servers on its loopback, and the cores that these have while they answer."""
