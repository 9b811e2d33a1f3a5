"""``python -m gateway`` is ``tangram``."""

from gateway.cli.main import main

main()
