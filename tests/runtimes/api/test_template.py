"""A request template: holes are filled without leaving their place."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.errors import InvalidConfig, InvalidInput
from manager.function import RequestSpec
from runtimes.api import RequestTemplate
from runtimes.secrets import Secrets, redact

SECRETS = Secrets(environ={"TANGRAM_SECRET_SEARCH_KEY": "s3same/open"})
SEARCH = RequestSpec(method="GET", url="https://api.example.com:8443/v1/{place}/find?q={query}&n=5")

text = st.text(st.characters(codec="utf-8"), max_size=40)


@given(place=text.filter(lambda value: value not in (".", "..")), query=text)
def test_an_input_never_leaves_its_place_in_the_url(place: str, query: str) -> None:
    parts = urlsplit(RequestTemplate(SEARCH).render({"place": place, "query": query}, SECRETS).url)
    assert (parts.scheme, parts.netloc, parts.fragment) == ("https", "api.example.com:8443", "")
    assert [unquote(segment) for segment in parts.path.split("/")] == ["", "v1", place, "find"]
    expected = {"n": ["5"], **({"q": [query]} if query else {})}
    assert parse_qs(parts.query, strict_parsing=bool(query)) == expected or query == ""


@pytest.mark.parametrize("place", [".", ".."])
def test_a_dot_segment_is_refused(place: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        RequestTemplate(SEARCH).render({"place": place, "query": "x"}, SECRETS)
    assert refusal.value.detail == {"path": "$.place"}


@pytest.mark.parametrize("value", ["a\r\nX-Other: 1", "a\nb", "nul\0", "é"])
def test_an_input_cannot_add_a_header(value: str) -> None:
    template = RequestTemplate(RequestSpec(method="GET", url="https://h/", headers={"X-User": "u {user}"}))
    with pytest.raises(InvalidInput, match="printable ASCII") as refusal:
        template.render({"user": value}, SECRETS)
    assert refusal.value.detail == {"path": "$.user"}
    assert template.render({"user": "bob"}, SECRETS).headers == {"X-User": "u bob"}


def test_a_whole_hole_keeps_its_type_in_the_body() -> None:
    body = {"q": "{query}", "deep": [{"n": "{count}", "label": "{count} of {{all}}"}], "fixed": 3}
    template = RequestTemplate(RequestSpec(method="POST", url="https://h/x", json=body))
    rendered = template.render({"query": {"any": ["json", None]}, "count": 7}, SECRETS)
    assert rendered.body is not None
    assert json.loads(rendered.body) == {
        "q": {"any": ["json", None]},
        "deep": [{"n": 7, "label": "7 of {all}"}],
        "fixed": 3,
    }
    assert template.field_names() == {"query", "count"}


def test_a_missing_field_and_a_structured_field_in_text_are_named() -> None:
    template = RequestTemplate(SEARCH)
    with pytest.raises(InvalidInput, match="needs the field 'query'"):
        template.render({"place": "x"}, SECRETS)
    with pytest.raises(InvalidInput, match="string, a number or a boolean"):
        template.render({"place": "x", "query": ["a"]}, SECRETS)
    assert template.render({"place": 3, "query": True}, SECRETS).url.endswith("/v1/3/find?q=true&n=5")


def test_a_secret_is_resolved_late_from_its_file_before_the_environment(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path, environ={"TANGRAM_SECRET_SEARCH_KEY": "from the environment"})
    spec = RequestSpec(method="GET", url="https://h/", headers={"Authorization": "Bearer ${secret:search_key}"})
    template = RequestTemplate(spec)
    assert template.render({}, secrets).headers == {"Authorization": "Bearer from the environment"}
    (tmp_path / "search_key").write_text("from the file\n")
    rendered = template.render({}, secrets)
    assert rendered.headers == {"Authorization": "Bearer from the file"}
    assert rendered.secrets == ("from the file",)


def test_an_input_cannot_name_a_secret() -> None:
    rendered = RequestTemplate(SEARCH).render({"place": "p", "query": "${secret:search_key}"}, SECRETS)
    assert "s3same" not in rendered.url
    assert rendered.secrets == ()


def test_an_undefined_secret_says_where_to_define_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="set TANGRAM_SECRET_NO_SUCH"):
        Secrets(environ={}).get("no-such")
    with pytest.raises(InvalidConfig, match=r"'\.\./x' is not defined"):
        Secrets(tmp_path / "inner", environ={}).get("../x")


def test_redaction_covers_the_percent_encoded_form_and_leaves_tiny_values_alone() -> None:
    assert redact("k=s3same/open&k=s3same%2Fopen ab", ("s3same/open", "ab")) == "k=[secret]&k=[secret] ab"
    assert redact(r"s3same\/open", ("s3same/open",)) == "[secret]"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RequestSpec(method="FETCH", url="https://h/"), "method 'FETCH'"),  # type: ignore[arg-type]  # made by hand
        (RequestSpec(method="GET", url="ftp://h/"), "must begin with http"),
        (RequestSpec(method="GET", url="https://{host}/"), "host is fixed"),
        (RequestSpec(method="GET", url="https://user:pw@h/"), "no user name"),
        (RequestSpec(method="GET", url="https://h/{not closed"), "stray '{'"),
        (RequestSpec(method="GET", url="https://h/#part"), "fragment"),
        (RequestSpec(method="GET", url="https://h/", headers={"Host": "{x}"}), "'Host' belongs"),
    ],
)
def test_a_template_that_can_never_be_a_request_is_refused(spec: RequestSpec, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        RequestTemplate(spec)
