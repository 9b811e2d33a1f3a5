"""The command ``tangram``: its verbs speak to a gateway on any machine; an installed server adds verbs of its own."""

import os
import signal
import sys


def run() -> None:
    """Run the command line; say what to install if its libraries are missing."""
    if sys.argv[1:2] == ["serve"]:  # it has begun nothing before its libraries are loaded: it may just end
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        from tangram.cli.main import main

        main()
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("click", "rich"):
            raise
        sys.exit(f"the command line needs {library}: pip install 'tangram-client[cli]'")
