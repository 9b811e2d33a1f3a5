"""SkyRL-Gym's tool group: a shell, Python and any function of the gateway, in one sandbox per episode.

class Env(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.tools = SandboxToolGroup(image=extras.get("image"))
        self.init_tool_groups([self.tools])

    def close(self):
        self.tools.close()
"""

from __future__ import annotations

import json
from typing import Any

from tangram.adapters.provider import CommandTimedOut, missing, told_to_model
from tangram.adapters.sync import SandboxProvider

try:
    from skyrl_gym.tools.core import ToolGroup, tool
except ImportError as error:
    raise missing("skyrl", "skyrl-gym", error) from error


class SandboxToolGroup(ToolGroup):
    """Tools that work in one sandbox, made at the first call; `close` ends it.

    What a command says and its exit status are text for the model; what is our fault raises InfrastructureFailed, so
    that the episode is dropped or tried again instead of being judged. ``functions`` are those that `call` may name.
    """

    def __init__(
        self,
        *,
        server: str | None = None,
        function: str = "shell",
        task: str | None = None,
        timeout_s: float = 30.0,
        functions: tuple[str, ...] = (),
        provider: SandboxProvider | None = None,
        **chosen: Any,
    ) -> None:
        self._provider = provider or SandboxProvider(server, function=function, task=task)
        self._owns = provider is None
        self._timeout_s, self._functions = timeout_s, functions
        self._chosen = {name: value for name, value in chosen.items() if value is not None}
        self._sandbox: str | None = None
        super().__init__(name=type(self).__name__)

    @property
    def sandbox(self) -> str:
        """The sandbox's name; it is made if it is not there."""
        if self._sandbox is None:
            self._sandbox = self._provider.open(**self._chosen)
        return self._sandbox

    @tool
    def shell(self, command: str) -> str:
        """Run shell text and return what it said."""
        return self._said(["bash", "-c", command])

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and return what it said; files stay, variables do not."""
        return self._said(["python3", "-"], code)

    @tool
    def call(self, function: str, arguments: str = "{}") -> str:
        """Run one of the functions that were named, in this sandbox; arguments and result are JSON."""
        if function not in self._functions:
            return f"There is no function {function!r}; there are: {', '.join(self._functions) or 'none'}."
        try:
            item = json.loads(arguments)
        except ValueError as error:
            return f"The arguments are no JSON: {error}"
        return json.dumps(self._provider.invoke(function, item, sandbox=self.sandbox, timeout_s=self._timeout_s))

    def close(self) -> None:
        """End the sandbox; again does nothing, and the next call begins in a new one."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self._provider.end(sandbox)

    def _said(self, command: list[str], stdin: str | None = None) -> str:
        try:
            ended = self._provider.run(self.sandbox, command, stdin=stdin, merge=True, timeout_s=self._timeout_s)
        except CommandTimedOut as late:
            return told_to_model(late)
        return told_to_model(ended)
