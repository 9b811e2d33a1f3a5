"""Shapes of model servers: what clients of OpenAI, vLLM and SGLang post, and one judged sequence in the words of each.

What a request names and nobody here reads is refused, never ignored: a bias or a stop word that does nothing would be
a wrong number that looks right.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from manager.errors import InvalidInput

#: One sequence or several, as text or as token ids.
Prompts = str | list[str | int | list[int]]
Ids = list[int | list[int]]
Texts = str | list[str]
TOP_MAX = 128


class CompletionRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``/v1/completions``: judge a prompt (``prompt_logprobs``, or ``echo`` with ``logprobs``), or go on with it."""

    prompt: Prompts
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    user: str | None = None


class ChatRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``/v1/chat/completions``: the next message of a conversation."""

    messages: list[dict[str, object]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    user: str | None = None


class EmbeddingRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``/v1/embeddings`` and vLLM's ``/pooling``."""

    input: Prompts
    model: str | None = None
    encoding_format: str = "float"
    user: str | None = None


class ClassifyRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's ``/classify``; without ``use_activation`` the head's own values."""

    input: Prompts
    model: str | None = None
    use_activation: bool = True


class ScoreRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's ``/score``: how alike two texts are."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


class VllmSampling(Struct, frozen=True, forbid_unknown_fields=True):
    """``sampling_params`` of vLLM's ``/inference/v1/generate``."""

    max_tokens: int = 1
    temperature: float | None = None
    top_p: float | None = None
    prompt_logprobs: int | None = None


class VllmGenerateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's ``/inference/v1/generate``, as prime-rl asks its teacher."""

    token_ids: list[int]
    sampling_params: VllmSampling
    model: str | None = None


class SglangSampling(Struct, frozen=True, forbid_unknown_fields=True):
    """``sampling_params`` of SGLang's ``/generate``."""

    temperature: float | None = None
    max_new_tokens: int | None = None
    skip_special_tokens: bool = True


class SglangGenerateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """SGLang's ``/generate``, as slime asks its teacher: only to judge the input."""

    text: Texts | None = None
    input_ids: Ids | None = None
    sampling_params: SglangSampling = SglangSampling()
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    image_data: None = None
    stream: bool = False


class SglangEncodeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """SGLang's ``/encode`` and ``/classify``."""

    text: Texts | None = None
    input_ids: Ids | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSequence:
    """A sequence whose tokens were judged: its ids, and of each but the first what `logprobs` tells."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int]
    #: [token id, log-probability], likeliest first.
    top: Sequence[Sequence[Sequence[float]]]

    def vllm(self) -> list[dict[str, object] | None]:
        """Return vLLM's ``prompt_logprobs``: of each token itself first, then the likeliest that it is not."""
        rows: list[dict[str, object] | None] = [None]
        for token, logprob, rank, top in zip(self.ids[1:], self.logprobs, self.ranks, self.top, strict=True):
            row: dict[str, object] = {str(token): _told(logprob, rank)}
            for place, (other, value) in enumerate(top, 1):
                row.setdefault(str(int(other)), _told(value, place))
            rows.append(row)
        return rows

    def openai(self) -> dict[str, object]:
        """Return the ``logprobs`` of an echoed prompt; tokens are written by their ids, as vLLM can be told to."""
        names = [f"token_id:{token}" for token in self.ids]
        top: list[dict[str, float] | None] = [None]
        for name, logprob, row in zip(names[1:], self.logprobs, self.top, strict=True):
            top.append({f"token_id:{int(other)}": value for other, value in row} | {name: logprob})
        return {
            "tokens": names,
            "token_logprobs": [None, *self.logprobs],
            "top_logprobs": top,
            "text_offset": [0] * len(names),
        }

    def sglang(self, start: int, top: int) -> dict[str, object]:
        """Return SGLang's ``meta_info`` of the input, from its token ``start`` on."""
        rows: list[list[object]] = [[None, self.ids[0], None]]
        rows += [[value, token, None] for value, token in zip(self.logprobs, self.ids[1:], strict=True)]
        told: dict[str, object] = {"input_token_logprobs": rows[start:], "output_token_logprobs": []}
        if top:
            others = [None, *([[value, int(token), None] for token, value in row] for row in self.top)]
            told["input_top_logprobs"] = others[start:]
        return told


def _told(logprob: float, rank: int) -> dict[str, object]:
    return {"logprob": logprob, "rank": rank, "decoded_token": None}


def sequences_of(prompts: Prompts | Sequence[str] | Sequence[int] | Ids, what: str) -> dict[str, object]:
    """Return the input of a model action: ``texts`` or ``token_ids``; raises InvalidInput."""
    one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
    rows: list[object] = [prompts] if one else list(prompts)
    if not rows or not all(rows):
        raise refusal(what, "must not be empty")
    if all(isinstance(row, str) for row in rows):
        return {"texts": rows}
    if not all(isinstance(row, list) and all(isinstance(token, int) for token in row) for row in rows):
        raise refusal(what, "must be texts, or token ids, of one kind")
    return {"token_ids": rows}


def vector(values: Sequence[float], encoding: str) -> object:
    """Return an embedding as a list, or as the base64 of little-endian float32; raises InvalidInput."""
    if encoding == "float":
        return values
    if encoding != "base64":
        raise refusal("encoding_format", f"{encoding[:64]!r} is none of float and base64")
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def check_scoring(max_tokens: int | None, temperature: float | None, top: int, what: str) -> None:
    """Raise InvalidInput where a request to judge asks for more than that.

    A temperature other than 1 would change the numbers in some servers and not in others; 0 says only that what is
    generated is the likeliest.
    """
    if max_tokens not in (None, 0, 1):
        raise refusal("max_tokens", "must be 0 or 1 where a prompt is judged: nothing is generated")
    if temperature not in (None, 0.0, 1.0):
        raise refusal("temperature", f"{temperature:g} is not applied to the prompt's log-probabilities: send 1.0")
    if not 0 <= top <= TOP_MAX:
        raise refusal(what, f"must be 0 to {TOP_MAX}")


def check_generating(asked: CompletionRequest | ChatRequest) -> None:
    """Raise InvalidInput for what changes a generation and is not served."""
    if asked.n not in (None, 1):
        raise refusal("n", "must be 1")
    if asked.stop:
        raise refusal("stop", "is not served")


def refusal(what: str, message: str) -> InvalidInput:
    return InvalidInput(f"{what}: {message}", component="models", detail={"path": what})


def texts_of(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return a conversation with contents as text; raises InvalidInput for what is none."""
    found: list[dict[str, object]] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                each.get("text") if isinstance(each, dict) and each.get("type") == "text" else None for each in content
            ]
            if not all(isinstance(part, str) for part in parts):
                raise refusal(f"messages[{index}].content", "only parts of type text are served")
            content = "".join(str(part) for part in parts)
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise refusal(f"messages[{index}]", "must have a role and a content of text")
        unknown = message.keys() - {"role", "content", "name"}
        if unknown:
            raise refusal(f"messages[{index}].{min(unknown)}", "is not served")
        found.append({"role": message["role"], "content": content})
    return found
