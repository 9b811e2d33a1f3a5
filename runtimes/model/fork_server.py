"""The fork server: one process with torch imported that forks the others, so that each starts in milliseconds.

It runs on one thread and touches no device, which makes forking safe. It dies with the gateway, its children with it.
On CUDA every child is a fresh interpreter instead: a CUDA context cannot be inherited.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

MESSAGE_BYTES_MAX = 65536
#: The module of each role that a model process can have.
_MODULES = {"worker": "worker", "tokenizer": "tokenizer_process"}
_PR_SET_PDEATHSIG = 1
_PRELOAD = (
    "torch",
    "torch.distributed",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.bert.modeling_bert",
    "runtimes.model.worker",
    "runtimes.model.tokenizer_process",
)


def main() -> None:
    """Serve the socket of the descriptor in the first argument: fork and kill on demand."""
    control = socket.socket(fileno=int(sys.argv[1]))
    _preload()
    children: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            ready = selector.select(timeout=1.0)
            _reap(children)
            if ready and not _serve(control, children):
                return


def child(role: str, descriptor: int, options: dict[str, object]) -> None:
    """The whole life of a model process."""
    connection = socket.socket(fileno=descriptor)
    module = importlib.import_module(f"runtimes.model.{_MODULES[role]}")
    module.serve(connection, **options)


def _preload() -> None:
    for module in _PRELOAD:
        importlib.import_module(module)


def _serve(control: socket.socket, children: set[int]) -> bool:
    """Handle one message; False when the gateway is gone."""
    body, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 1)
    if not body:
        return False
    message = json.loads(body)
    if message["do"] == "kill":
        if message["pid"] in children:
            os.kill(message["pid"], signal.SIGKILL)
        return True
    pid = os.fork()
    if pid == 0:
        _become(control, message, descriptors[0])
    children.add(pid)
    os.close(descriptors[0])
    return True


def _become(control: socket.socket, message: dict[str, Any], descriptor: int) -> None:
    """In the child: never returns."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        control.close()
        role, options = str(message["role"]), message["options"]
        if message["environment"] is not None:
            os.set_inheritable(descriptor, True)
            arguments = [sys.executable, "-m", "runtimes.model.fork_server", "--child", role, str(descriptor)]
            environment = {**os.environ, **message["environment"]}
            os.execve(sys.executable, [*arguments, json.dumps(options)], environment)
        child(role, descriptor, options)
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _reap(children: set[int]) -> None:
    for pid in list(children):
        if os.waitpid(pid, os.WNOHANG)[0]:
            children.discard(pid)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        _preload()  # before it says hello: later, a slow disk would make it look stuck
        child(sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        main()
