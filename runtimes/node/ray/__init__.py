"""Ray, at arm's length: it says which machines there are, holds what we reserve on them, and starts a daemon on each.

No action travels through it, and no process of the gateway imports it: `driver` is run as a child, by an interpreter
that has the cluster's own Ray, and `actor` is what the driver leaves on each machine.
"""
