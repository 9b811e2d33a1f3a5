"""HTTP operations on the machines that work for the gateway."""
