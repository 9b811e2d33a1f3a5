"""What the door runs in a sandbox, shown to `LOADER` on standard input: each an action of the trajectory.

After its text each reads JSON, as many bytes as its argument says. What a session said is standard output, and how
it ended is JSON on standard error, where nobody but these scripts writes.
"""

from __future__ import annotations

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
import json, os, signal, sys
told, place = json.loads(sys.stdin.buffer.read(int(sys.argv[1]))), ""
try:
    if told["cwd"] is not None:
        place = told["cwd"]
        os.chdir(place)
    place = told["argv"][0]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(place, told["argv"], os.environ if told["env"] is None else told["env"])
except Exception as error:
    if isinstance(error, OSError) and error.errno:
        error = type(error)(error.errno, os.strerror(error.errno), place)
    sys.stderr.write(told["word"] + " " + json.dumps([type(error).__name__, str(error)]))
    sys.stderr.flush()
    os._exit(125)
"""

#: Speaks to the sessions of a trajectory: opens one with the text of its server, or brings one a request.
SESSION = r"""
import json, os, socket, struct, sys
asked = json.loads(sys.stdin.buffer.read(int(sys.argv[1])))
place = os.path.join(os.environ.get("TMPDIR") or "/tmp", ".tangram-swerex-%d" % os.getuid())
home = os.getcwd()
def report(output, told):
    sys.stdout.buffer.write(output.encode("utf-8", "backslashreplace"))
    sys.stdout.flush()
    sys.stderr.write(json.dumps(told))
def speak(name, asked):
    conn = socket.socket(socket.AF_UNIX)
    try:
        conn.connect(name)
    except OSError:
        return None
    data = json.dumps(asked).encode()
    parts = []
    try:
        conn.sendall(struct.pack("!I", len(data)) + data)
        while True:
            part = conn.recv(2**20)
            if not part:
                break
            parts.append(part)
    except OSError:
        pass
    said = b"".join(parts)
    if len(said) < 8:
        return "", {"end": "vanished"}
    told, output = struct.unpack("!II", said[:8])
    return said[8 + told:][:output].decode(), json.loads(said[8:8 + told])
if asked["verb"] == "open" and not os.path.lexists(place):
    os.mkdir(place, 0o700)
there = os.path.lexists(place)
if there and os.lstat(place).st_uid != os.getuid():
    raise SystemExit(place + " is another user's")
if there:
    os.chdir(place)
if asked["verb"] == "open":
    conn = socket.socket(socket.AF_UNIX)
    try:
        conn.connect(asked["name"])
        report("", {"end": "exists"})
    except OSError:
        if os.path.lexists(asked["name"]):
            os.unlink(asked["name"])
        os.chdir(home)
        server = {"__name__": "bash_server"}
        exec(compile(asked["server"], "bash_server", "exec"), server)
        server["open_session"](place, asked["name"], asked, report)
elif asked["verb"] == "close all":
    for name in os.listdir(".") if there else ():
        if name.startswith(asked["name"]):
            speak(name, {"verb": "close"})
    report("", {"end": "done"})
else:
    report(*(there and speak(asked["name"], asked) or ("", {"end": "missing"})))
"""

#: Takes a multipart body apart that lies in a file, and puts its file where its fields say, as SWE-ReX's server does.
#: The body loses its name at once, so that nothing of it is left whatever ends the action.
UNPACK = r"""
import json, mmap, os, re, shutil, sys, zipfile
asked = json.loads(sys.stdin.buffer.read(int(sys.argv[1])))
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
