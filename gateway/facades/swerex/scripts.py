"""What the door runs in a sandbox, shown to `LOADER` on standard input: each an action of the trajectory.

Each begins with ``asked``, what it is asked, as a literal (`told_script`). What a session said is standard output, and
how it ended is JSON on standard error, where nobody but these scripts writes.

A command is often shorter than the start of the Python that becomes it, so the scripts import as little as they can:
``json``, ``signal`` and ``socket`` together take twice as long as that start, and are taken where they are needed only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

#: How `BOOT` ends if it could not become the command.
REFUSED = 125
PYTHON = ("python3", "-I", "-S", "-c")
#: Reads a script from its input, of as many bytes as its last argument says: a list of processes then does not show it.
LOADER = "import sys; exec(sys.stdin.buffer.read(int(sys.argv.pop())))"

#: Becomes the command, as subprocess would: what could not be begun is the error that it raises, after a word that the
#: command never sees. ``stdin`` of the command is empty.
BOOT = r"""
import _signal, os, sys
place = ""
try:
    if asked["cwd"] is not None:
        place = asked["cwd"]
        os.chdir(place)
    place = asked["argv"][0]
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    os.execvpe(place, asked["argv"], os.environ if asked["env"] is None else asked["env"])
except Exception as error:
    import json
    if isinstance(error, OSError) and error.errno:
        error = type(error)(error.errno, os.strerror(error.errno), place)
    sys.stderr.write(asked["word"] + " " + json.dumps([type(error).__name__, str(error)]))
    sys.stderr.flush()
    os._exit(125)
"""

#: Speaks to the sessions of a trajectory: opens one with the text of its server, or brings one a request.
SESSION = r"""
import _socket, os, sys
place = os.path.join(os.environ.get("TMPDIR") or "/tmp", ".tangram-swerex-%d" % os.getuid())
home = os.getcwd()
def report(output, told):
    sys.stdout.buffer.write(output)
    sys.stdout.flush()
    sys.stderr.buffer.write(told)
def connected(name):
    conn = _socket.socket(_socket.AF_UNIX)
    try:
        conn.connect(name)
    except OSError:
        return None
    return conn
def speak(name, request):
    conn = connected(name)
    if conn is None:
        return None
    parts = []
    try:
        conn.sendall(len(request).to_bytes(4, "big") + request)
        while True:
            part = conn.recv(2**20)
            if not part:
                break
            parts.append(part)
    except OSError:
        pass
    said = b"".join(parts)
    if len(said) < 8:
        return b"", b'{"end": "vanished"}'
    told, output = int.from_bytes(said[:4], "big"), int.from_bytes(said[4:8], "big")
    return said[8 + told:][:output], said[8:8 + told]
if asked["verb"] == "open" and not os.path.lexists(place):
    os.mkdir(place, 0o700)
there = os.path.lexists(place)
if there and os.lstat(place).st_uid != os.getuid():
    raise SystemExit(place + " is another user's")
if there:
    os.chdir(place)
if asked["verb"] == "open":
    if connected(asked["name"]) is not None:
        report(b"", b'{"end": "exists"}')
    else:
        if os.path.lexists(asked["name"]):
            os.unlink(asked["name"])
        os.chdir(home)
        server = {"__name__": "bash_server"}
        exec(compile(asked["server"], "bash_server", "exec"), server)
        server["open_session"](place, asked["name"], asked, report)
elif asked["verb"] == "close all":
    for name in os.listdir(".") if there else ():
        if name.startswith(asked["name"]):
            speak(name, b'{"verb": "close"}')
    report(b"", b'{"end": "done"}')
else:
    report(*(there and speak(asked["name"], asked["request"]) or (b"", b'{"end": "missing"}')))
"""

#: Takes a multipart body apart that lies in a file, and puts its file where its fields say, as SWE-ReX's server does.
#: The body loses its name at once, so that nothing of it is left whatever ends the action.
UNPACK = r"""
import json, mmap, os, re, shutil, sys, zipfile
def parts(body, mark):
    start = body.find(mark)
    while start >= 0:
        start += len(mark)
        end = body.find(b"\r\n" + mark, start)
        if end < 0:
            return
        head = body.find(b"\r\n\r\n", start, end)
        if head >= 0:
            name = re.search(rb'[; ]name="([^"]*)"', body[start:head])
            if name:
                yield name[1].decode(), head + 4, end
        start = end + 2
def place():
    part = asked["body"] + ".part"
    with open(asked["body"], "rb") as file:
        os.unlink(asked["body"])
        body = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = {name: (start, end) for name, start, end in parts(body, asked["mark"].encode())}
        missing = [name for name in ("file", "target_path") if name not in found]
        if missing:
            return {"end": "shape", "missing": missing}
        unknown = sorted(set(found) - {"file", "target_path", "unzip"})
        if unknown:
            return {"end": "shape", "unknown": unknown}
        text = {name: body[slice(*found[name])].decode() for name in found if name != "file"}
        unzip = text.get("unzip", "false").lower() in ("true", "1", "on", "yes", "t", "y")
        target = text["target_path"]
        start, end = found["file"]
        with open(part, "w+b") as sink:
            try:
                if unzip:
                    os.unlink(part)
                while start < end:
                    sink.write(body[start:min(end, start + 2**20)])
                    start += 2**20
                sink.flush()
                os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
                if unzip:
                    with zipfile.ZipFile(sink) as zipped:
                        zipped.extractall(target)
                else:
                    shutil.move(part, os.path.join(target, "temp_file_transfer") if os.path.isdir(target) else target)
            finally:
                if os.path.lexists(part):
                    os.unlink(part)
    return {"end": "done"}
try:
    told = place()
except Exception as error:
    told = {"end": "raised", "class": "%s.%s" % (type(error).__module__, type(error).__name__), "message": str(error)}
sys.stderr.write(json.dumps(told))
"""


@cache
def server_text() -> str:
    """Return the text of what a session leaves behind in its sandbox."""
    return files(__package__).joinpath("bash_server.py").read_text(encoding="utf-8")


def told_script(text: str, asked: Mapping[str, object]) -> dict[str, object]:
    """Return the input of an exec action that runs a script of this module with what it is asked.

    Of texts, bytes, numbers, truths, None, and lists and mappings of them, ``ascii`` is a literal on every Python.
    """
    script = f"asked = {dict(asked)!a}\n{text}"
    return {"argv": [*PYTHON, LOADER, str(len(script.encode()))], "stdin": script}
