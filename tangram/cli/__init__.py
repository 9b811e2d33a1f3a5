"""The command ``tangram``: its verbs speak to a gateway on any machine; an installed server adds verbs of its own."""

import sys


def run() -> None:
    """Run the command line; say what to install if its libraries are missing."""
    try:
        from tangram.cli.main import main

        main()
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("click", "rich"):
            raise
        sys.exit(f"the command line needs {library}: pip install 'tangram-client[cli]'")
