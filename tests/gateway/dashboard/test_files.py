"""The document: all of the page in one answer, and nothing else that could run."""

from __future__ import annotations

import gzip
import hashlib
import re
from base64 import b64encode

import pytest

from gateway.dashboard.files import bundled, the_page
from tests.gateway.conftest import RunningGateway


async def test_one_answer_brings_the_page_and_what_it_may_run_is_named_by_digest(gateway: RunningGateway) -> None:
    index = await gateway.http.get("/", headers={"Accept": "text/html"}, follow_redirects=True)
    policy = index.headers["content-security-policy"]
    assert index.url.path == "/ui/now" and "unsafe" not in policy and "'self'" not in policy.split("connect-src")[0]
    parts = re.findall(r"<(?:script[^>]*|style)>(.*?)</(?:script|style)>", index.text, re.DOTALL)
    assert len(parts) == 2
    for each in parts:
        assert f"'sha256-{b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" in policy
    same = await gateway.http.get("/ui/timeline", headers={"If-None-Match": index.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    bare = await gateway.http.get("/ui/now", headers={"Accept-Encoding": "identity"})
    assert bare.content == index.content == gzip.decompress(the_page().packed)


async def test_the_worker_of_the_page_may_ask_its_own_gateway_and_nothing_else(gateway: RunningGateway) -> None:
    (address,) = re.findall(r'"(/ui/worker\.js\?[0-9a-f]{16})"', the_page().data.decode())
    worker = await gateway.http.get(address)
    assert worker.headers["content-type"].startswith("text/javascript")
    assert worker.headers["content-security-policy"] == "default-src 'none'; connect-src 'self'"
    assert worker.headers["x-content-type-options"] == "nosniff"
    assert worker.content == the_page().worker.data and b"<!doctype" not in worker.content
    same = await gateway.http.get(address, headers={"If-None-Match": worker.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")


def test_the_page_is_small_and_names_nothing_foreign() -> None:
    page = the_page()
    assert len(page.data) <= 180_000 and len(page.packed) <= 55_000
    text = page.data.decode()
    assert [each for each in re.findall(r"https?://[^\"'\s)]+", text) if "www.w3.org/2000/svg" not in each] == []
    assert "innerHTML" not in text and "eval(" not in text and " style=" not in text
    assert re.findall(r"(?:src|href)=\"(?!/ui/|data:)", text) == []


def test_a_module_comes_once_and_after_what_it_imports() -> None:
    sources = {
        "app.js": 'import {one} from "./a.js";\nimport {two} from "./b.js";\nexport const three = one + two;',
        "a.js": 'import {two} from "./b.js";\nexport const one = two - 1;',
        "b.js": "export const two = 2;\nexport async function* more() {}",
    }
    script = bundled(sources, "app.js")
    assert [script.index(f"const $_{each} =") for each in "ba"] == sorted(
        script.index(f"const $_{each} =") for each in "ba"
    )
    assert script.count("const two = 2;") == 1 and "return {two, more};" in script
    assert "const {one} = $_a;" in script and "export" not in script


@pytest.mark.parametrize(
    "text",
    ['import * as b from "./b.js";', "export default 3;", "export let moving = 3;", 'const end = "</script>";'],
)
def test_what_one_document_cannot_hold_is_refused(text: str) -> None:
    with pytest.raises(AssertionError, match="cannot hold"):
        bundled({"app.js": text, "b.js": ""}, "app.js")


def test_a_ring_of_imports_is_refused() -> None:
    ring = {"app.js": 'import {b} from "./b.js";', "b.js": 'import {a} from "./app.js";'}
    with pytest.raises(AssertionError, match="imports itself"):
        bundled(ring, "app.js")
