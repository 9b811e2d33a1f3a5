"""What begins a program in its sandbox: it lays out the files, sets the bound of memory and becomes the program.

It stays nowhere: the program that is judged runs in its place, so what the gateway sees of output, exit status and time
is the program's own and cannot be written by it. `BOOT` is shown to ``python3 -c`` as text; its input is a word of
`WORD_BYTES`, JSON of as many bytes as its argument says, and after it what the program reads. The word, which the
program never sees, begins what `BOOT` says if it could not become the program: nobody else can say that.
"""

from __future__ import annotations

#: How `BOOT` ends if it could not become the program.
REFUSED = 125
WORD_BYTES = 32

BOOT = r"""
import base64, json, os, resource, signal, sys
def need(count):
    parts = []
    while count:
        part = os.read(0, count)
        if not part:
            raise ValueError("its input ends too early")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
word = ""
def main():
    global word
    word = need(32).decode()
    request = json.loads(need(int(sys.argv[1])))
    os.makedirs(request["directory"], exist_ok=True)
    os.chdir(request["directory"])
    for name, data in request["files"].items():
        parent = os.path.dirname(name)
        if parent:
            os.makedirs(parent, exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(data))
    for name in request["limits"]:
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        bound = request["limits"][name] if hard == resource.RLIM_INFINITY else min(request["limits"][name], hard)
        resource.setrlimit(kind, (bound, hard))
    argv = [sys.executable if word == "{python}" else word for word in request["argv"]]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(argv[0], argv)
try:
    main()
except Exception as error:
    sys.stderr.write("%s the program could not be started: %s: %s\n" % (word, type(error).__name__, error))
    sys.stderr.flush()
    os._exit(125)
"""

#: Prints the files that its arguments name, below its first one, as JSON; those that are not there are left out.
FETCH = r"""
import base64, json, os, sys
os.chdir(sys.argv[1])
files = {}
for name in sys.argv[2:]:
    if os.path.isfile(name):
        with open(name, "rb") as file:
            files[name] = base64.b64encode(file.read()).decode()
print(json.dumps(files))
"""

#: Compiles its first argument to ``test``, with the libraries of SandboxFusion's own compiler line that are there.
COMPILE_CPP = r"""
libraries=
for library in crypto ssl; do
    case $(g++ -print-file-name=lib$library.so) in /*) libraries="$libraries -l$library" ;; esac
done
exec g++ -std=c++17 "$1" -o test $libraries -lpthread
"""
