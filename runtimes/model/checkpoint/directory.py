"""A checkpoint's directory, looked at and never read whole."""

from __future__ import annotations

from pathlib import Path

from manager.errors import exhaustion

#: Checkpoint files that run code when they are read.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_HEADER_LIMIT_BYTES = 100 * 2**20


def checkpoint_problem(path: Path) -> str | None:
    """What is wrong with a checkpoint directory, or None."""
    if not path.exists():
        return f"no checkpoint at {path}: put a directory with config.json and *.safetensors there"
    if not path.is_dir():
        return f"{path} is a file: name the directory that holds config.json and *.safetensors"
    tensors = sorted(path.glob("*.safetensors"))
    if not tensors:
        pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickles:
            return (
                f"{path / pickles[0]} is a pickle, which can run code when it is read: "
                "convert it to safetensors (model.save_pretrained(directory, safe_serialization=True))"
            )
        return f"{path} holds no *.safetensors: the weights are missing"
    if not (path / "config.json").is_file():
        return f"{path} holds no config.json: the architecture is unknown"
    return next((problem for file in tensors if (problem := _tensors_problem(file)) is not None), None)


def _tensors_problem(file: Path) -> str | None:
    """A safetensors file begins with the length of its JSON header."""
    try:
        with file.open("rb") as opened:
            head = opened.read(9)
    except OSError as error:
        if short := exhaustion(error, "model"):
            raise short from None
        return f"{file} cannot be read: {error.strerror}"
    header_bytes = int.from_bytes(head[:8], "little")
    if len(head) == 9 and head[8:] == b"{" and header_bytes < _HEADER_LIMIT_BYTES:
        return None
    kind = "a pickle" if head[:1] == b"\x80" or head[:2] == b"PK" else "no safetensors file"
    return f"{file} is {kind} in spite of its name: convert the checkpoint to safetensors"
