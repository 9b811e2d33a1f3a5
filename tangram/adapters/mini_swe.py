"""mini-swe-agent's environment: commands of an agent in a sandbox of a gateway.

environment:
  environment_class: tangram.adapters.mini_swe.MiniSweEnvironment
  image: swebench/sweb.eval.x86_64.django_1776_django-1
  cwd: /testbed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tangram.adapters.provider import CommandTimedOut, missing
from tangram.adapters.sync import SandboxProvider

try:
    from minisweagent.exceptions import Submitted
except ImportError as error:
    raise missing("mini_swe", "mini-swe-agent", error) from error

#: The first line of what an agent submits, by mini-swe-agent's own convention.
SUBMISSION = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_UNAME = ("system", "node", "release", "version", "machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniSweConfig:
    """The keys below ``environment`` in mini-swe-agent's YAML; others are refused by name."""

    #: Where the gateway is; TANGRAM_SERVER and TANGRAM_TOKEN without.
    server: str | None = None
    #: The exec function whose sandbox it is, and the RL task.
    function: str = "shell"
    task: str | None = None
    #: Chosen for the sandbox, as far as the function allows it (`sandbox.images`, `sandbox.trajectory`).
    image: str | None = None
    memory: str | None = None
    network: str | None = None
    idle_ttl: str | None = None
    #: Where commands run; the sandbox's own working directory without.
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    #: Seconds that a command may take, at most the function's own.
    timeout: int = 60
    #: What runs a command: a login shell, as images of SWE-bench need one.
    interpreter: tuple[str, ...] = ("bash", "-lc")
    #: Whether calls survive a gateway that is killed and started again.
    durable: bool = False


class MiniSweEnvironment:
    """One agent's sandbox, made on construction and ended by `cleanup`.

    A command that fails is data for the agent; what is our fault raises InfrastructureFailed and ends the run under
    that name, instead of a hundred steps against a dead box.
    """

    def __init__(self, *, provider: SandboxProvider | None = None, **options: Any) -> None:
        options["interpreter"] = tuple(options.get("interpreter", MiniSweConfig().interpreter))
        self.config = MiniSweConfig(**options)
        self._provider = provider or SandboxProvider(
            self.config.server, function=self.config.function, task=self.config.task, durable=self.config.durable
        )
        self._owns = provider is None
        self._closed = False
        chosen = {name: getattr(self.config, name) for name in ("image", "memory", "network", "idle_ttl")}
        try:
            self.sandbox = self._provider.open(**chosen)
        except BaseException:
            self.cleanup()
            raise
        self._uname: dict[str, str] = {}

    def execute(self, action: Mapping[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run the action's command; raises minisweagent's Submitted when it submits, and InfrastructureFailed."""
        command = [*self.config.interpreter, action.get("command", "")]
        bound_s = timeout or self.config.timeout
        try:
            ended = self._provider.run(
                self.sandbox,
                command,
                cwd=cwd or self.config.cwd or None,
                env=self.config.env,
                merge=True,
                timeout_s=bound_s,
            )
        except CommandTimedOut as late:
            return {
                "output": late.stdout.decode("utf-8", "replace"),
                "returncode": -1,
                "exception_info": f"An error occurred while executing the command: {late}",
                "extra": {"exception_type": "TimeoutExpired", "exception": str(late)},
            }
        output = {"output": ended.output, "returncode": ended.exit_code, "exception_info": ""}
        _raise_submission(output)
        return output

    def get_template_vars(self, **variables: Any) -> dict[str, Any]:
        """Return what prompts may name: the configuration, and what the sandbox's own ``uname`` says."""
        if not self._uname:
            uname = self._provider.run(self.sandbox, ["uname", "-snrvm"]).output.split()
            # The version has blanks in it: what is left between the three words before it and the one behind.
            values = (*uname[:3], " ".join(uname[3:-1]), uname[-1]) if len(uname) > 4 else ("",) * len(_UNAME)
            self._uname = dict(zip(_UNAME, values, strict=True))
        return {**asdict(self.config), **self._uname, **variables}

    def serialize(self) -> dict[str, Any]:
        """Return what mini-swe-agent writes into its trajectory file."""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        environment = {**asdict(self.config), "interpreter": list(self.config.interpreter), "sandbox": self.sandbox}
        return {"info": {"config": {"environment": environment, "environment_type": kind}}}

    def cleanup(self) -> None:
        """End the sandbox; again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._owns:
            self._provider.close()
        else:
            self._provider.end(self.sandbox)

    def __del__(self) -> None:
        # mini-swe-agent's own environments do so: its runners call no cleanup. Only what was opened here.
        if hasattr(self, "sandbox"):
            self.cleanup()


def _raise_submission(output: Mapping[str, Any]) -> None:
    lines = output["output"].lstrip().splitlines(keepends=True)
    if lines and lines[0].strip() == SUBMISSION and output["returncode"] == 0:
        submission = "".join(lines[1:])
        extra = {"exit_status": "Submitted", "submission": submission}
        raise Submitted({"role": "exit", "content": submission, "extra": extra})
