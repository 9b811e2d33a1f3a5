"""The E2B API over process sandboxes."""
