"""The configuration: YAML in, one frozen value out, every mistake with its place."""
