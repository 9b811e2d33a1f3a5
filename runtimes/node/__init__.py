"""The machine that actions run on."""
