"""The doors in foreign protocols: ``server.facades`` of the YAML. None is open unless it is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal, Protocol

from manager.function import Setting


class FacadeSection(Protocol):
    """What every door has."""

    @property
    def port(self) -> int | None: ...

    @property
    def client_timeout_s(self) -> float | None: ...


Port = Annotated[
    int | None,
    Setting("a listener of its own, where its paths begin at the root; 0 takes a free one", ge=0, le=65535),
]
ClientTimeout = Annotated[
    float | None,
    Setting(
        "its clients give up after this time; a second before, a call is withdrawn. By default what is known of them"
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsFacade:
    """Remote rewards and retrieval: ``/rm/{function}`` (slime, OpenRLHF) and ``/retrieve/{function}`` (Search-R1)."""

    port: Port = None
    client_timeout_s: ClientTimeout = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFusionFacade:
    """SandboxFusion's ``/run_code``, as verl's code reward and ROLL ask."""

    languages: Annotated[
        Mapping[Literal["python", "pytest", "bash", "nodejs", "cpp"], str],
        Setting("language: the exec function that runs it, whose sandbox has python3 and what the language needs"),
    ]
    port: Port = None
    client_timeout_s: ClientTimeout = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsFacade:
    """Teachers and reward models: what clients of OpenAI, vLLM and SGLang ask of a model server."""

    port: Port = None
    client_timeout_s: ClientTimeout = None


@dataclass(frozen=True, slots=True, kw_only=True)
class McpFacade:
    """MCP over streamable HTTP, ``/mcp``: functions as the tools of a model's client; needs the extra ``mcp``."""

    functions: Annotated[
        tuple[Annotated[str, Setting(min_length=1)], ...],
        Setting("the functions that are tools, in this order; no other can be called"),
    ]
    sessions: Annotated[int, Setting("most sessions that live at once; beyond it none is opened", ge=1)] = 1024
    port: Port = None
    client_timeout_s: ClientTimeout = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwerexFacade:
    """SWE-ReX's runtime server, for SWE-agent: bash sessions, commands and files, one trajectory for each runtime."""

    function: Annotated[
        str,
        Setting(
            "the exec function that runs them where the API key names the trajectory (TOKEN.TRAJECTORY); "
            "its sandbox has bash and python3",
            min_length=1,
        ),
    ]
    keep: Annotated[bool, Setting("whether a trajectory lives on when its client closes the runtime")] = False
    port: Port = None
    client_timeout_s: ClientTimeout = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerFacade:
    """The Docker Engine API on a unix socket, for the docker CLI and docker-py: a container is a trajectory."""

    socket: Annotated[
        str,
        Setting(
            "where it listens, absolute; only the gateway's own user can open it",
            pattern=r"^/.*[^/]$",
            words="an absolute path",
        ),
    ]
    function: Annotated[
        str,
        Setting(
            "the exec function whose sandboxes are the containers, unless a label tangram.function names another",
            min_length=1,
        ),
    ]
    containers_max: Annotated[
        int, Setting("most containers, those that have ended and were not removed too", ge=1, le=65536)
    ] = 4096
    connections_max: Annotated[int, Setting("most connections at once", ge=1)] = 1024
    client_timeout_s: Annotated[
        float | None,
        Setting(
            "its clients give up after this time. By default what is known of them: docker-py 60s, the docker CLI never"
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FacadesSection:
    """Doors in other protocols, for clients as they are; off unless named (``rewards: {}``)."""

    rewards: Annotated[RewardsFacade | None, Setting("remote rewards and retrieval")] = None
    sandboxfusion: Annotated[SandboxFusionFacade | None, Setting("SandboxFusion's /run_code")] = None
    models: Annotated[ModelsFacade | None, Setting("model servers of OpenAI, vLLM and SGLang")] = None
    mcp: Annotated[McpFacade | None, Setting("functions as tools of MCP")] = None
    swerex: Annotated[SwerexFacade | None, Setting("SWE-ReX's runtime server")] = None
    docker: Annotated[DockerFacade | None, Setting("the Docker Engine API on a unix socket")] = None

    def opened(self) -> Iterator[tuple[str, FacadeSection]]:
        """Yield the doors that are open and speak plain HTTP, by the name of their field."""
        for each in fields(self):
            section = getattr(self, each.name)
            if section is not None and not isinstance(section, DockerFacade):
                yield each.name, section

    @property
    def ports(self) -> Mapping[str, int]:
        """The doors that have a listener of their own."""
        return {name: section.port for name, section in self.opened() if section.port is not None}
