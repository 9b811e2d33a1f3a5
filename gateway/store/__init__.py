"""The store: every record of the gateway in SQLite."""
