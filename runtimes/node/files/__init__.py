"""Files of sandboxes on other machines: bytes to and fro over a node's channel, beside the actions."""
