"""The core: a state machine of events and commands, and the parts of its scheduling pass."""
