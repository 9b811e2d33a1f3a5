"""Sessions on other machines: what is typed and said of them, over a node's channel, beside the actions."""
