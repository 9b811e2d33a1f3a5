"""The E2B API: sandboxes, their commands and their files."""
