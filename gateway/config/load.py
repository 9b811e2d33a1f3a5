"""Read configuration files, merge and check them, with errors that name the place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar, cast

from gateway.auth import check_listeners, token_problem
from gateway.config import yaml
from gateway.config.schema import (
    MACHINE_KINDS,
    MAPS,
    NAMES,
    SECTIONS,
    Adapter,
    ClusterConfig,
    FunctionSection,
    NodeConfig,
    SandboxConfig,
    SchedulerConfig,
    ServerConfig,
    TlsSection,
    check,
    function_spec,
    suggestion,
)
from gateway.config.yaml import ConfigProblem, KeyPath, Position
from gateway.tls import server_context
from manager.config import (
    ManagerSpec,
    NodeSpec,
    ServiceSpec,
    TaskSpec,
)
from manager.errors import InvalidConfig
from manager.function import FunctionSpec
from manager.resources.pools import ResourceSpec
from runtimes.kind import DeclarationSite
from runtimes.model.request import ModelSettings
from tangram.types import files_of, nothing_there

#: Most files of one configuration.
FILES_MAX = 4096

#: Distributions of the extras that a section of the server needs.
EXTRAS: dict[str, tuple[str, ...]] = {
    "mcp": ("mcp",),
    "otel": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
}

_SectionT = TypeVar("_SectionT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """The text of one file; relative paths in it begin at its directory."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Everything that the YAML says, checked and frozen."""

    functions: Mapping[str, FunctionSpec] = field(default_factory=dict)
    tasks: Mapping[str, TaskSpec] = field(default_factory=lambda: {"default": TaskSpec()})
    resources: Mapping[str, ResourceSpec] = field(default_factory=dict)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    #: Other machines; None for this one alone.
    cluster: ClusterConfig | None = None
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    models: ModelSettings = field(default_factory=ModelSettings)
    #: Where each function is defined.
    origins: Mapping[str, Position] = field(default_factory=dict)
    #: The files that were read, absolute.
    files: tuple[Path, ...] = ()

    def manager_spec(
        self, nodes: tuple[NodeSpec, ...], services: Mapping[str, ServiceSpec] | None = None
    ) -> ManagerSpec:
        """What the core is built from, with the machines and the model services as they were found."""
        return ManagerSpec(
            nodes=nodes,
            resources=self.resources,
            tasks=self.tasks,
            services=services or {},
            scheduler=self.scheduler,
        )


def load(paths: Sequence[Path], env: Mapping[str, str], *, look: bool = True) -> GatewayConfig:
    """Read files and directories (``tangram.yaml`` and ``functions/*/function.yaml``) into one configuration.

    With ``look`` handlers and checkpoints must exist on this machine. Raises InvalidConfig with every problem.
    """
    sources, problems = read(paths)
    return build(sources, env, look=look, problems=problems)


def read(paths: Sequence[Path]) -> tuple[list[ConfigSource], list[ConfigProblem]]:
    """The texts of the files that ``paths`` name, each once, and what could not be read."""
    sources: dict[Path, ConfigSource] = {}
    problems: list[ConfigProblem] = []
    for path in paths:
        result = files_of(path)
        if not result:
            problems.append(ConfigProblem(message=nothing_there(path), position=Position(path, 1)))
        for file in result[:FILES_MAX]:
            try:
                if file.stat().st_size > yaml.TEXT_LIMIT_BYTES:
                    raise ValueError(f"the file is larger than {yaml.TEXT_LIMIT_BYTES} bytes")
                sources.setdefault(file.resolve(), ConfigSource(path=file, text=file.read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                problems.append(ConfigProblem(message=f"cannot be read: {error}", position=Position(file, 1)))
    return list(sources.values()), problems


def build(
    sources: Iterable[ConfigSource],
    env: Mapping[str, str],
    *,
    look: bool = True,
    problems: Sequence[ConfigProblem] = (),
    base: GatewayConfig | None = None,
    keep: GatewayConfig | None = None,
    roots: Sequence[Path] | None = None,
) -> GatewayConfig:
    """One configuration from the texts of its files; raises InvalidConfig with every problem, ``problems`` first.

    A server's section that no file holds (server, node, sandbox, models, scheduler) is that of ``base``; functions,
    tasks and resources that no file names are those of ``keep``. Nothing on this machine is looked at outside of
    ``roots``, if they are given.
    """
    assembly = _Assembly(env=env, look=look, problems=list(problems), base=base, keep=keep or GatewayConfig())
    assembly.roots = None if roots is None else tuple(root.resolve() for root in roots)
    for source in sources:
        assembly.add(source)
    config = assembly.config()
    if assembly.problems:
        raise refusal(assembly.problems)
    return config


def _installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def refusal(problems: Sequence[ConfigProblem]) -> InvalidConfig:
    """The error that carries all problems: in its message for people, in its detail for programs."""
    distinct = list(dict.fromkeys(problems))
    count = f"{len(distinct)} problems in the configuration:\n" if len(distinct) > 1 else ""
    listed = [
        {
            "file": None if each.position is None else str(each.position.file),
            "line": None if each.position is None else each.position.line,
            "path": yaml.show_path(each.path),
            "message": each.message,
        }
        for each in distinct
    ]
    return InvalidConfig(count + "\n".join(map(str, distinct)), component="config", detail={"problems": listed})


@dataclass(frozen=True, slots=True)
class _Entry:
    """A section or an entry of a map as it stands in its file."""

    value: object
    path: KeyPath
    document: yaml.YamlDocument

    @property
    def position(self) -> Position:
        return self.document.positions[self.path]

    @property
    def directory(self) -> Path:
        return self.document.file.absolute().parent


@dataclass(slots=True, kw_only=True)
class _Assembly:
    """Merges the files, then checks each part of them by itself, so that one problem hides no other."""

    env: Mapping[str, str]
    look: bool
    problems: list[ConfigProblem]
    base: GatewayConfig | None = None
    keep: GatewayConfig
    roots: tuple[Path, ...] | None = None
    files: list[Path] = field(default_factory=list)
    sections: dict[str, _Entry] = field(default_factory=dict)
    entries: dict[str, dict[str, _Entry]] = field(default_factory=lambda: {name: {} for name in MAPS})

    def add(self, source: ConfigSource) -> None:
        document = yaml.parse(source.text, source.path, self.env)
        self.files.append(source.path.absolute())
        self.problems += document.problems
        if document.values is None:
            return
        if not isinstance(document.values, dict):
            self.problems.append(ConfigProblem(message="must be a mapping", position=Position(source.path, 1)))
            return
        for key, value in document.values.items():
            entry = _Entry(value, (key,), document)
            if key in MAPS:
                self._add_entries(str(key), entry)
            elif key in SECTIONS:
                self._add_section(str(key), entry)
            else:
                known = suggestion(key, [*SECTIONS, *MAPS])
                self._refuse(entry, f"unknown key {key!r}{known}")

    def _add_section(self, name: str, entry: _Entry) -> None:
        if name == "version":
            self._checked(SECTIONS[name], entry)
        elif name in self.sections:
            self._refuse(entry, f"is given in two files, first at {self.sections[name].position}")
        elif entry.value is not None:
            self.sections[name] = entry

    def _add_entries(self, section: str, entry: _Entry) -> None:
        if entry.value is None:
            return
        if not isinstance(entry.value, dict):
            self._refuse(entry, "must be a mapping of names")
            return
        for name, value in entry.value.items():
            inner = _Entry(value, (section, name), entry.document)
            if check(NAMES[section], name, (), {})[1]:
                self._refuse(inner, f"{name!r} is no name: letters, digits or . _ - (text in quotes), at most 128")
            elif name in self.entries[section]:
                self._refuse(inner, f"is defined twice, first at {self.entries[section][name].position}")
            else:
                self.entries[section][name] = inner

    def config(self) -> GatewayConfig:
        """The configuration; complete only if there are no problems."""
        server = self._server()
        node = self._section("node", NodeConfig)
        cluster = self._cluster()
        sandbox = self._section("sandbox", SandboxConfig)
        if "sandbox" in self.sections and (refused := sandbox.default.refuses(sandbox.default.user)):
            self._refuse(self.sections["sandbox"], refused, ("user",))
        needed = sandbox.requirements
        needed = replace(needed, find_links=self._absolute("sandbox", needed.find_links))
        sandbox = replace(sandbox, requirements=needed)
        models = self._section("models", ModelSettings)
        scheduler = self._section("scheduler", SchedulerConfig)
        resources = self._resources()
        tasks = {name: cast(TaskSpec, value) for name, value in self._valid("tasks")}
        self._task_problems(tasks, scheduler)
        models = replace(models, dir=self._absolute("models", models.dir))
        node = replace(node, cpu=replace(node.cpu, topology=self._absolute("node", node.cpu.topology)))
        functions = self._functions(resources, sandbox, models, elsewhere=cluster is not None)
        if cluster is not None:  # each machine says itself what it is able to run
            functions = {name: replace(function, anywhere=False) for name, function in functions.items()}
        self._engine_problems(functions, node)
        self._facade_problems(server, functions)
        return GatewayConfig(
            functions=functions,
            tasks={"default": TaskSpec(), **self.keep.tasks, **tasks},
            resources=resources,
            scheduler=scheduler,
            server=server,
            node=node,
            cluster=cluster,
            sandbox=sandbox,
            models=models,
            origins={
                **self.keep.origins,
                **{name: entry.position for name, entry in self.entries["functions"].items()},
            },
            files=tuple(self.files),
        )

    def _cluster(self) -> ClusterConfig | None:
        """The section, that of the base where it is absent; None where no other machines may join."""
        if "cluster" not in self.sections:
            return None if self.base is None else self.base.cluster
        cluster = self._section("cluster", ClusterConfig)
        for key in ("listen", "advertise"):
            address = getattr(cluster, key)
            host, _, port = address.rpartition(":")
            if (address or key == "listen") and not (host and port.isdecimal() and int(port) < 65536):
                self._refuse(self.sections["cluster"], f"{address!r} is no HOST:PORT", (key,))
        if not cluster.link.beat_s < cluster.link.silent_s < cluster.times.lost_after_s:
            message = "beat, silent and lost_after must be each longer than the one before"
            self._refuse(self.sections["cluster"], message)
        self._check_ray(cluster)
        return cluster

    def _check_ray(self, cluster: ClusterConfig) -> None:
        """Machines that join by themselves need an address to dial and a name each."""
        if cluster.ray is None:
            return
        host = cluster.listen.rpartition(":")[0]
        if host in ("0.0.0.0", "[::]", "") and not cluster.advertise:  # compared, not bound
            message = f"cluster.ray needs advertise: no machine can dial {cluster.listen}"
            self._refuse(self.sections["cluster"], message, ("listen",))
        if "{address}" not in cluster.ray.name and "{id}" not in cluster.ray.name:
            message = f"{cluster.ray.name!r} names every machine alike: put {{address}} or {{id}} into it"
            self._refuse(self.sections["cluster"], message, ("ray", "name"))

    def _server(self) -> ServerConfig:
        if "server" not in self.sections and self.base is not None:
            return self.base.server
        server = self._section("server", ServerConfig)
        token = server.token
        if server.token_file is not None:
            file = self._absolute("server", server.token_file)
            assert file is not None
            if token:
                self._refuse(self.sections["server"], "give one of token and token_file")
            # It cannot change while the gateway runs: for a request nothing is read.
            token = self._token(file) if self.base is None else self.base.server.token
        if token and self.base is None and (problem := token_problem(token)):
            self._refuse(self.sections["server"], problem, ("token_file" if server.token_file else "token",))
        if "server" in self.sections:
            try:
                check_listeners(replace(server, token=token))
            except InvalidConfig as error:
                self._refuse(self.sections["server"], error.message)
        self._port_problems(server)
        self._extra_problems(server)
        state_dir = self._absolute("server" if server.state_dir != ServerConfig().state_dir else "", server.state_dir)
        assert state_dir is not None
        return replace(
            server,
            token=token,
            tls=self._tls(server.tls),
            token_file=self._absolute("server", server.token_file),
            secrets_dir=self._absolute("server", server.secrets_dir),
            state_dir=state_dir,
        )

    def _port_problems(self, server: ServerConfig) -> None:
        """Two servers cannot listen at one port; 0 is another each time."""
        ports = {f"facades.{name}.port": port for name, port in server.facades.ports.items()}
        if server.ports.port is not None:
            ports["ports.port"] = server.ports.port
        taken: dict[int, str] = {0: ""}
        for name, port in {"port": server.port, "grpc_port": server.grpc_port, **ports}.items():
            if taken.setdefault(port, name) not in ("", name) and "server" in self.sections:
                message = f"{port} is {taken[port]} already: choose another, or 0 for a free one"
                self._refuse(self.sections["server"], message, tuple(name.split(".")))

    def _extra_problems(self, server: ServerConfig) -> None:
        """What is asked for needs its library on the machine that serves."""
        if not self.look or self.base is not None or "server" not in self.sections:
            return
        needs = {
            ("traces", "endpoint"): ("otel", bool(server.traces.endpoint)),
            ("facades", "mcp"): ("mcp", server.facades.mcp is not None),
        }
        for key, (extra, wanted) in needs.items():
            if wanted and not all(map(_installed, EXTRAS[extra])):
                message = f"needs {' and '.join(EXTRAS[extra])}: pip install 'tangram-gateway[{extra}]'"
                self._refuse(self.sections["server"], message, key)

    def _token(self, file: Path) -> str:
        """The token in a file, which must hold one."""
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            self._refuse(self.sections["server"], f"token_file {file} cannot be read: {error}")
            return ""
        if not token:
            self._refuse(self.sections["server"], f"token_file {file} is empty")
        return token

    def _tls(self, tls: TlsSection | None) -> TlsSection | None:
        """The certificates by their absolute paths; that they can be used is looked at where the files are."""
        if tls is None:
            return None
        cert, key, client_ca = (self._absolute("server", path) for path in (tls.cert, tls.key, tls.client_ca))
        assert cert is not None and key is not None
        result = TlsSection(cert=cert, key=key, client_ca=client_ca)
        if self.look and self.base is None:
            try:
                server_context(result, ())
            except InvalidConfig as error:
                self._refuse(self.sections["server"], error.message.removeprefix("server."))
        return result

    def _functions(
        self, resources: Mapping[str, ResourceSpec], sandbox: SandboxConfig, models: ModelSettings, *, elsewhere: bool
    ) -> dict[str, FunctionSpec]:
        functions = dict(self.keep.functions)
        kinds = {*MACHINE_KINDS, *resources, *self.entries["resources"]}
        for name, value in self._valid("functions"):
            entry = self.entries["functions"][name]
            roots = None if self.roots is None else (*self.roots, *self._model_places(models))
            place = DeclarationSite(
                directory=entry.directory,
                models_dir=models.dir,
                look=self.look,
                models_elsewhere=elsewhere,
                roots=roots,
            )
            section = cast(FunctionSection, value)
            function = function_spec(name, section, place, kinds=kinds, sandbox=sandbox)
            refusal = sandbox.requirements.refusal()
            if refusal and not elsewhere and function.handler is not None and function.handler.requirements:
                place.refuse(("requirements",), refusal)  # another machine would install them from where it says itself
            functions[name] = function
            for path, message in place.problems:
                self._refuse(entry, message, path)
        return functions

    def _model_places(self, models: ModelSettings) -> list[Path]:
        """Where checkpoints may lie for a request: in ``models.dir``, and where those lie that are served already."""
        served = [] if self.base is None else [each.model for each in self.base.functions.values()]
        places = [model.path for model in served if model is not None and model.engine is None]
        return places if models.dir is None else [models.dir.resolve(), *places]

    def _engine_problems(self, functions: Mapping[str, FunctionSpec], node: NodeConfig) -> None:
        """What an external engine frees by sleeping goes to the driver; the arenas of our own models keep theirs."""
        models = {name: function.model for name, function in functions.items() if function.model is not None}
        own = sorted(name for name, model in models.items() if model.engine is None)
        if not own or node.devices.kind == "cpu":
            return
        named = self.entries["functions"]
        for name in sorted(models.keys() - own):
            message = (
                f"an external engine needs devices of its own, and this gateway's own models ({', '.join(own)}) hold "
                "the memory of every device of the node for good: serve it from a gateway of its own, or call it as an "
                "api function with a concurrency resource as its cost"
            )
            # One that is kept was declared elsewhere: what is new beside it is at fault.
            place = named.get(name) or next(entry for each, entry in named.items() if each in models)
            self._refuse(place, message, ("model", "engine") if name in named else ())

    def _facade_problems(self, server: ServerConfig, functions: Mapping[str, FunctionSpec]) -> None:
        """A facade that runs programs names functions that run commands, one that has tools names functions."""
        if "server" not in self.sections:
            return
        known = {*functions, *self.entries["functions"]}
        for name in () if server.facades.mcp is None else server.facades.mcp.functions:
            if name not in known:
                message = f"{name!r} is no function{suggestion(name, known)}"
                self._refuse(self.sections["server"], message, ("facades", "mcp", "functions"))
        facades = server.facades
        commands = {name for name, function in functions.items() if function.runtime == "exec"}
        runnable = commands | {name for name in self.entries["functions"] if name not in functions}
        languages = {} if facades.sandboxfusion is None else facades.sandboxfusion.languages
        named: list[tuple[tuple[str, ...], str]] = [
            (("sandboxfusion", "languages", str(language)), name) for language, name in languages.items()
        ]
        own = {"swerex": facades.swerex, "e2b": facades.e2b, "docker": facades.docker}
        named += [((name, "function"), section.function) for name, section in own.items() if section is not None]
        for place, name in named:
            if name not in runnable:
                path = ("facades", *place)
                self._refuse(self.sections["server"], f"{name!r} is no exec function{suggestion(name, commands)}", path)

    def _resources(self) -> dict[str, ResourceSpec]:
        """Those that are declared, and after them those that are kept."""
        for name, entry in self.entries["resources"].items():
            if name in (*MACHINE_KINDS, "memory"):
                self._refuse(entry, f"{name!r} is the machine's own: it is discovered, and bounded in the node section")
        return {**self.keep.resources, **{name: cast(ResourceSpec, value) for name, value in self._valid("resources")}}

    def _task_problems(self, tasks: Mapping[str, TaskSpec], scheduler: SchedulerConfig) -> None:
        kinds = {*MACHINE_KINDS, *self.entries["resources"], *self.keep.resources}
        for name, task in tasks.items():
            for kind in task.caps.keys() - kinds:
                message = f"{kind!r} is no resource{suggestion(kind, kinds)}"
                self._refuse(self.entries["tasks"][name], message, ("caps", kind))
        shared = any(spec.name == "adaptive" for spec in scheduler.policies.values())
        if scheduler.objective == "step" and not shared and "scheduler" in self.sections:
            problem = "step is an objective of the policy adaptive, which no resource has"
            self._refuse(self.sections["scheduler"], problem, ("objective",))
        for kind in scheduler.policies.keys() - kinds - {"default"}:
            message = f"{kind!r} is no resource{suggestion(kind, kinds | {'default'})}"
            self._refuse(self.sections["scheduler"], message, ("policy", kind))

    def _section(self, name: str, model: type[_SectionT]) -> _SectionT:
        """The section, that of the base where it is absent, or its defaults."""
        entry = self.sections.get(name)
        value = getattr(self.base, name, None) if entry is None else self._checked(SECTIONS[name], entry)
        return value if isinstance(value, model) else model()

    def _valid(self, section: str) -> list[tuple[str, object]]:
        checked = [(name, self._checked(MAPS[section], entry)) for name, entry in self.entries[section].items()]
        return [(name, value) for name, value in checked if value is not None]

    def _checked(self, adapter: Adapter, entry: _Entry) -> object:
        value, problems = check(adapter, entry.value, entry.path, entry.document.positions)
        self.problems += problems
        return value

    def _absolute(self, section: str, path: Path | None) -> Path | None:
        """A path from the directory of the file that holds the section; a default begins at the current one."""
        if path is None:
            return None
        base = self.sections[section].directory if section in self.sections else Path.cwd()
        return base / path.expanduser()

    def _refuse(self, entry: _Entry, message: str, inner: KeyPath = ()) -> None:
        path = (*entry.path, *inner)
        place = next(entry.document.positions[each] for each in yaml.walk_up(path) if each in entry.document.positions)
        self.problems.append(ConfigProblem(message=message, path=path, position=place))
