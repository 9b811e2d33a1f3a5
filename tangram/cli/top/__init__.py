"""`tangram top`: what the gateway does now, as a screen that follows it, or printed once."""
