"""Tasks as files: patches are applied as patch(1) would, all or nothing, and never outside the project."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtimes.sandbox.pytest.swe_task import PatchError, apply_patch, parse_patch, patched

lines = st.lists(st.sampled_from(["a", "b", "c", "", "    d", "-e", "+f"]), max_size=12)


@given(before=lines, after=lines)
def test_a_diff_turns_the_old_text_into_the_new(before: list[str], after: list[str]) -> None:
    if not before or not after or before == after:
        return
    diff = difflib.unified_diff([x + "\n" for x in before], [x + "\n" for x in after], "a/x", "b/x")
    [change] = parse_patch("".join(diff))
    assert patched("\n".join(before) + "\n", change) == "\n".join(after) + "\n"


MOVE = """\
diff --git a/src/old.py b/src/new.py
--- a/src/old.py
+++ b/src/new.py
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
diff --git a/made/here.py b/made/here.py
new file mode 100644
--- /dev/null
+++ b/made/here.py
@@ -0,0 +1,2 @@
+first
+second
diff --git a/gone.py b/gone.py
deleted file mode 100644
--- a/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-bye
"""


def test_files_are_moved_made_and_removed(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/old.py").write_text("one\ntwo\nthree\n")
    (tmp_path / "gone.py").write_text("bye\n")
    assert sorted(apply_patch(tmp_path, MOVE)) == ["gone.py", "made/here.py", "src/new.py", "src/old.py"]
    found = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.py")}
    assert found == {"src/new.py": "one\nTWO\nthree\n", "made/here.py": "first\nsecond\n"}


def test_a_hunk_is_found_elsewhere_and_with_other_context() -> None:
    [change] = parse_patch("--- a/x\n+++ b/x\n@@ -1,5 +1,5 @@\n other\n k1\n-old\n+new\n k2\n end\n")
    assert patched("0\n1\n2\nelse\nk1\nold\nk2\nend\n", change) == "0\n1\n2\nelse\nk1\nnew\nk2\nend\n"


def test_a_patch_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\n")
    (tmp_path / "b.py").write_text("one\n")
    patch = "".join(
        f"--- a/{n}.py\n+++ b/{n}.py\n@@ -1 +1 @@\n-{old}\n+two\n" for n, old in (("a", "one"), ("b", "no"))
    )
    with pytest.raises(PatchError, match="hunk at line 1 does not fit"):
        apply_patch(tmp_path, patch)
    assert (tmp_path / "a.py").read_text() == "one\n"


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("--- /dev/null\n+++ b/../out.py\n@@ -0,0 +1 @@\n+x\n", "leaves the project"),
        ("--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n one\n", "ends early"),
        ("diff --git a/x b/x\nGIT binary patch\n", "binary"),
    ],
)
def test_a_patch_that_cannot_be_applied_is_refused(tmp_path: Path, patch: str, message: str) -> None:
    (tmp_path / "x").write_text("one\n")
    with pytest.raises(PatchError, match=message):
        apply_patch(tmp_path, patch)
    assert not (tmp_path.parent / "out.py").exists()
