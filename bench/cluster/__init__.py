"""What many machines cost a gateway: the channel against the local executor and against calls of a Ray actor."""
