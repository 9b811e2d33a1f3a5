"""What is too long is cut on one side, whatever form it came in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from manager.errors import InvalidInput
from manager.function import ModelAction, ModelSpec
from runtimes.model.host_images import Tokens, check_ids

WORDS = [f"w{number}" for number in range(9)]


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    """Every word is a token; a text begins with <s>, a conversation with nothing."""
    vocabulary = {word: number for number, word in enumerate(["<s>", *WORDS])}
    model = Tokenizer(WordLevel(vocabulary, unk_token="<s>"))
    model.pre_tokenizer = WhitespaceSplit()
    model.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=model, bos_token="<s>")
    made.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    made.save_pretrained(tmp_path)
    return Tokens(tmp_path)


@pytest.mark.promise("An input that is too long for a model is refused, or cut on one side in every form.")
def test_texts_ids_and_conversations_lose_the_same_side(tokens: Tokens) -> None:
    text, ids = " ".join(WORDS), [range(1, 10)]
    chat = [[{"role": "user", "content": " ".join(WORDS[:4])}, {"role": "user", "content": " ".join(WORDS[4:])}]]
    kept = {"left": (6, 7, 8, 9), "right": (1, 2, 3, 4)}
    for side, last in kept.items():
        assert tokens.encode([text], 5, side).ids == ((0, *last),), "what the tokenizer adds stays"
        assert check_ids([list(*ids)], 4, side).ids == (last,)
        (row,) = tokens.encode_chats(chat, 4, side, continued=False).ids
        assert row in (last, (0, *last[:3]))
    assert check_ids([[0, *range(1, 10)]], 4, "left", 0).ids == ((0, 7, 8, 9),), "so does what a sequence begins with"
    assert check_ids([[0, *range(1, 10)]], 1, "left", 0).ids == ((0,),)
    assert tokens.encode(["w0", text], 3, "left").truncated == (1,)
    with pytest.raises(InvalidInput, match="overlong: truncate"):
        tokens.encode([text], 5, "")
    with pytest.raises(InvalidInput, match="overlong: truncate"):
        check_ids([list(*ids)], 4, "")


@pytest.mark.parametrize(
    ("action", "side"), [("score", "left"), ("generate", "left"), ("logprobs", "right"), ("embed", "right")]
)
def test_the_side_follows_what_is_asked_unless_it_is_said(action: str, side: str) -> None:
    spec = ModelSpec(path=Path("m"), action=ModelAction(action), overlong="truncate")
    assert spec.cut == side
    assert ModelSpec(path=Path("m"), action=ModelAction(action), overlong="truncate", truncate="right").cut == "right"
    assert ModelSpec(path=Path("m"), action=ModelAction(action), truncate="left").cut == ""
