"""Text to token ids and back, by the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manager.errors import InvalidConfig, InvalidInput
from runtimes.model.device.messages import EncodedText

_COMPONENT = "model.tokens"

#: One of these holds the vocabulary. Without any, transformers makes an empty tokenizer and says nothing.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class Tokens:
    """One checkpoint's tokenizer; safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        if not any((path / name).is_file() for name in _VOCABULARIES):
            raise InvalidConfig(
                f"{path} holds no tokenizer; add tokenizer.json, or send token_ids", component=_COMPONENT
            )
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidConfig(
                f"{path} holds no usable tokenizer ({error}); add tokenizer.json, or send token_ids",
                component=_COMPONENT,
            ) from error
        self.stop_ids = stop_ids(path, self._tokenizer.eos_token_id)
        # Fast tokenizers keep truncation as state.
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str], limit: int, cut: str) -> EncodedText:
        """Return the ids of each text, special tokens included.

        One that is longer than ``limit`` is cut on a side, ``left`` or ``right``, or raises InvalidInput without one.
        """
        with self._lock:
            ids = [tuple(row) for row in self._tokenizer(list(texts), verbose=False)["input_ids"]]
            long = _overlong(ids, limit, cut)
            if long:
                self._tokenizer.truncation_side = cut
                rows = self._tokenizer([texts[i] for i in long], truncation=True, max_length=limit)["input_ids"]
                for index, row in zip(long, rows, strict=True):
                    ids[index] = tuple(row)
        return EncodedText(ids=tuple(ids), truncated=tuple(long), stop_ids=self.stop_ids)

    def encode_chats(
        self, conversations: Sequence[Sequence[Mapping[str, object]]], limit: int, cut: str, continued: bool
    ) -> EncodedText:
        """Return the ids of each conversation by its template; ``continued`` adds the prompt for the next answer."""
        if not self._tokenizer.chat_template:
            raise InvalidInput("the checkpoint has no chat template: send texts", component=_COMPONENT)
        ids = []
        for conversation in conversations:
            try:
                row = self._tokenizer.apply_chat_template(
                    [dict(message) for message in conversation], add_generation_prompt=continued, return_dict=False
                )
            except Exception as error:  # a template is a program of the checkpoint: it may raise anything
                raise InvalidInput(
                    f"the chat template refuses the conversation: {error}", component=_COMPONENT
                ) from error
            ids.append(tuple(row))
        long = _overlong(ids, limit, cut)
        for index in long:
            ids[index] = _shortened(ids[index], limit, cut)
        return EncodedText(ids=tuple(ids), truncated=tuple(long), stop_ids=self.stop_ids)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        with self._lock:
            return [self._tokenizer.decode(list(row), skip_special_tokens=True) for row in ids]


def stop_ids(path: Path, tokenizer_end: int | None = None) -> tuple[int, ...]:
    """The tokens that end a generation: generation_config.json, else config.json, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((path / name).read_bytes()).get("eos_token_id")
        except (OSError, ValueError):
            continue
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return () if tokenizer_end is None else (tokenizer_end,)


def check_ids(ids: Sequence[Sequence[int]], limit: int, cut: str) -> EncodedText:
    """The same bounds for an input that came as ids."""
    rows = [tuple(row) for row in ids]
    long = _overlong(rows, limit, cut)
    for index in long:
        rows[index] = _shortened(rows[index], limit, cut)
    return EncodedText(ids=tuple(rows), truncated=tuple(long), stop_ids=())


def _shortened(row: tuple[int, ...], limit: int, cut: str) -> tuple[int, ...]:
    return row[-limit:] if cut == "left" else row[:limit]


def _overlong(ids: Sequence[Sequence[int]], limit: int, cut: str) -> list[int]:
    """Return the indices of rows beyond the limit; raises InvalidInput at the first if they may not be cut."""
    long = [index for index, row in enumerate(ids) if len(row) > limit]
    if long and not cut:
        raise InvalidInput(
            f"sequence {long[0]} has {len(ids[long[0]])} tokens, more than {limit}; "
            "shorten it or set model.overlong: truncate",
            component=_COMPONENT,
            detail={"path": f"$[{long[0]}]"},
        )
    return long
