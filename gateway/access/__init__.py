"""Who may come in: tokens and what they permit, TLS, and the connections of a door."""
