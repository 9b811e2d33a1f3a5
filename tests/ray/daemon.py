"""A stand-in for a node's daemon: writes its pid into its state directory and lives until it is asked to end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(Path(sys.argv[1]) / "pid").write_text(str(os.getpid()))
while True:
    signal.pause()
