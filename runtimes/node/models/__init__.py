"""Model services on nodes: what they cost there, and on which devices they are resident."""
