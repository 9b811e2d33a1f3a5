"""Interactive sessions over HTTP: one lasting answer for the output, requests beside it for the input."""
