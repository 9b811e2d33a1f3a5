"""What there is: one manager for each kind of resource."""
