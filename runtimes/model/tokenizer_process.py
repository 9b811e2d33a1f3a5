"""The tokenizer process: it reads checkpoints and turns text into tokens, so that the gateway never imports torch."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from manager.errors import CodedError, InvalidInput, Reason
from runtimes.model.checkpoint import open_checkpoint
from runtimes.model.host_images import Tokens, stop_ids
from runtimes.model.processes import (
    Decode,
    Done,
    Encode,
    EncodedText,
    Failed,
    Fill,
    Hello,
    Inspect,
    Inspection,
    MessagePipe,
    Request,
)
from runtimes.model.weights import build_layout, fill

#: Requests served at once: a checkpoint may be read while texts are tokenised.
THREADS = 4
#: Tokenizers kept.
TOKENIZERS_MAX = 32


def serve(connection: socket.socket) -> None:
    """Answer until the gateway goes away."""
    import torch

    torch.set_num_threads(1)
    pipe = MessagePipe(connection)
    pipe.send(Hello(pid=os.getpid()))
    pool = ThreadPoolExecutor(THREADS)
    try:
        while True:
            request: Request = pipe.receive()  # type: ignore[assignment]  # our own gateway sends nothing else
            pool.submit(_answer, pipe, *request)
    except EOFError:
        os._exit(0)  # a checkpoint may still be being read: nobody waits for it any more


def _answer(pipe: MessagePipe, number: int, request: object) -> None:
    try:
        value = perform(request)
    except CodedError as error:
        reason = Reason.INVALID_INPUT if isinstance(error, InvalidInput) else Reason.MODEL_ERROR
        pipe.send(Failed(request=number, kind=type(error).__name__, message=error.message, reason=reason))
    except Exception as error:  # noqa: BLE001  # crosses the pipe as a failed request
        pipe.send(Failed(request=number, kind=type(error).__name__, message=f"{type(error).__name__}: {error}"))
    else:
        pipe.send(Done(request=number, value=value))


def perform(request: object) -> object:
    """One request, in this process; raises InvalidConfig, Unsupported or InvalidInput."""
    match request:
        case Inspect():
            return _inspect(request)
        case Fill():
            fill(open_checkpoint(request.path), request.layout, request.image_path, request.threads)
            return None
        case Encode():
            return _encode(request)
        case Decode():
            return _tokens(request.path, request.fingerprint).decode(request.ids)
    raise TypeError(f"the tokenizer process does not know {request!r}")


def _inspect(request: Inspect) -> Inspection:
    checkpoint = open_checkpoint(request.path, request.head)
    layout = build_layout(checkpoint, request.head, request.dtype, request.ignore)
    return Inspection(layout=layout, fingerprint=checkpoint.fingerprint, stop_ids=stop_ids(request.path))


def _encode(request: Encode) -> EncodedText:
    tokens = _tokens(request.path, request.fingerprint)
    if request.conversations:
        return tokens.encode_chats(request.conversations, request.limit, request.cut, request.continued)
    return tokens.encode(request.texts, request.limit, request.cut)


@lru_cache(maxsize=TOKENIZERS_MAX)
def _tokens(path: Path, fingerprint: str) -> Tokens:
    """The tokenizer of one version of a checkpoint."""
    return Tokens(path)
