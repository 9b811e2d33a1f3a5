"""Whether anything can begin on a node, as it finds itself, and why not."""
