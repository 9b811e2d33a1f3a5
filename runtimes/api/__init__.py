"""The api runtime: calls of external services at the pace that they allow."""
