"""The resident runner inside each sandbox, and the gateway's side of the connection to it."""
