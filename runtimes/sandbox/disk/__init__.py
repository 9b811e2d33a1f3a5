"""The disk of a sandbox: how it is bounded, by an image of its own or a watch."""
