"""``python -m gateway`` is ``tangram``."""

from gateway.cli import main

main()
