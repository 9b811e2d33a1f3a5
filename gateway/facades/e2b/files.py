"""What the E2B API does to files beyond reading and writing: a shell's script, each an action of the trajectory."""

from __future__ import annotations

import posixpath
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from gateway.api import placed_path
from gateway.facades.e2b.rpc import RpcFailed
from manager.errors import InvalidInput

#: How a script ends for what is there, or is not, and what that is to a client.
ENDS = {
    3: ("not_found", 404, "no such file or directory"),
    4: ("invalid_argument", 400, "it is no directory"),
    5: ("already_exists", 409, "it is there already"),
}
#: Shows entries of which every name begins with a word that nobody inside knew, whatever else is in it.
_SHOW = """
t=$1 p=$2 d=$3 q=$4
there() { [ -e "$1" ] || [ -L "$1" ] || exit 3; }
show() {
  find "$@" -exec stat -c "${t}E%f %s %Y %U %G %n" -- {} + 2>/dev/null
  find "$@" -type l -exec sh -c 't=$1; shift; for p do
    printf "%sL%s%sP%s%sT%s\\n" "$t" "$(stat -L -c %f -- "$p" 2>/dev/null)" "$t" "$p" "$t" "$(readlink -- "$p")"
  done' sh "$t" {} + 2>/dev/null
  :
}
"""
SCRIPTS = {
    "Stat": 'there "$p"; show "$p" -prune',
    "ListDir": '[ -d "$p" ] || { there "$p"; exit 4; }; show "$p/" -mindepth 1 -maxdepth "$d"',
    "MakeDir": '[ -d "$p" ] && exit 5; [ -e "$p" ] && exit 4; mkdir -p -- "$p" && show "$p" -prune',
    "Move": 'there "$p"; mkdir -p -- "$d" && mv -fT -- "$p" "$q" && show "$q" -prune',
    "Remove": 'rm -rf -- "$p"',
}


def inner(path: str, workdir: str) -> str:
    """Return a path as a script in the working directory finds it; raises InvalidInput."""
    full = placed_path(path, workdir)
    full = "/" + full.lstrip("/")
    if full == workdir or full.startswith(workdir.rstrip("/") + "/"):
        return posixpath.join(".", posixpath.relpath(full, workdir))
    return full


def script_input(verb: str, fields: Mapping[str, object], workdir: str, user: str) -> tuple[dict[str, object], str]:
    """Return the input of an action that does it, and the word that its entries begin with; raises InvalidInput."""
    word = f"~{secrets.token_hex(12)}~"
    path, other = str(fields.get("path") or fields.get("source") or ""), str(fields.get("destination") or "")
    if not path or (verb == "Move" and not other):
        raise InvalidInput("a path is missing", component="e2b")
    first, second = inner(path, workdir), inner(other, workdir) if other else ""
    depth = str(fields.get("depth") or 1)
    if re.fullmatch(r"[0-9]{1,4}", depth) is None:
        raise InvalidInput(f"depth: {depth[:32]!r} is none", component="e2b")
    words = (word, first, posixpath.dirname(second) or "." if other else depth, second)
    argv = ["/bin/sh", "-c", _SHOW + SCRIPTS[verb], "sh", *words]
    return {"argv": argv} | ({"user": user} if user else {}), word


def entries_of(result: Mapping[str, object], word: str, workdir: str, path: str) -> list[dict[str, object]]:
    """Return what a script has shown, by path; raises RpcFailed for how it ended."""
    code = result.get("exit_code")
    if code in ENDS:
        name, status, message = ENDS[code]
        raise RpcFailed(name, f"path {path[:256]!r}: {message}", status)
    if code != 0:
        said = str(result.get("stderr"))[-1000:].strip()
        raise RpcFailed("permission_denied" if "ermission denied" in said else "unknown", said or f"exit status {code}")
    if result.get("stdout_truncated"):
        raise RpcFailed("resource_exhausted", "there are more entries than output_limit allows to show", 429)
    entries: dict[str, dict[str, object]] = {}
    pieces = str(result.get("stdout")).split(word)[1:]
    for place, piece in enumerate(pieces):
        if piece[:1] == "E":
            mode, size, modified, owner, group, name = piece[1:].removesuffix("\n").split(" ", 5)
            entries[_outer(name, workdir)] = _entry(_outer(name, workdir), mode, size, modified, (owner, group))
        elif piece[:1] == "L" and (link := entries.get(_outer(pieces[place + 1][1:], workdir))) is not None:
            link |= {"symlinkTarget": pieces[place + 2][1:].removesuffix("\n"), "isSymlink": True}
            link["type"] = _type(int(piece[1:] or "0", 16))
    return [entries[name] for name in sorted(entries)]


def _outer(name: str, workdir: str) -> str:
    return posixpath.normpath(posixpath.join(workdir, name))


def _type(mode: int) -> str:
    return "FILE_TYPE_DIRECTORY" if stat.S_ISDIR(mode) else "FILE_TYPE_FILE" if mode else "FILE_TYPE_UNSPECIFIED"


def _entry(path: str, mode: str, size: str, modified: str, owners: Sequence[str]) -> dict[str, object]:
    bits = int(mode, 16)
    return {
        "name": posixpath.basename(path),
        "path": path,
        "type": _type(bits),
        "size": size,
        "mode": stat.S_IMODE(bits),
        "permissions": stat.filemode(bits),
        "owner": owners[0],
        "group": owners[1],
        "modifiedTime": datetime.fromtimestamp(int(modified), UTC).isoformat().replace("+00:00", "Z"),
    }
