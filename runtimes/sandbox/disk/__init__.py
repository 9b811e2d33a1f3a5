"""The disk of a sandbox: how it is bounded, by a quota, an image of its own or a watch."""
