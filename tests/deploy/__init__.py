"""Whether what deploy/ holds fits the gateway."""
