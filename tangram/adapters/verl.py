"""verl's tool and agent loop: one sandbox for each rollout, ended with it.

    tools:                                            # actor_rollout_ref.rollout.multi_turn.tool_config_path
      - class_name: tangram.adapters.verl.RolloutShell
        config: {type: native, function: shell, timeout_s: 60}

    - name: tangram_agent                             # actor_rollout_ref.rollout.agent.agent_loop_config_path
      _target_: tangram.adapters.verl.AgentRollout

Rewards need no verl: `tangram.adapters.verl_reward`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any

from tangram.adapters.aio import AsyncSandboxProvider
from tangram.adapters.provider import CommandTimedOut, InfrastructureFailed, missing, told_to_model
from tangram.adapters.rewards import step_of

try:
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
except ImportError as error:
    raise missing("verl", "verl", error) from error

#: A rollout whose loop does not end its sandbox leaves it for so long at most.
IDLE_TTL = "5m"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a shell command in this rollout's sandbox. Files stay from call to call.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command, for bash."}},
            "required": ["command"],
        },
    },
}


class RolloutState:
    """What one run of an agent loop has in hand: its sandboxes, and the first failure that was not the agent's.

    ``step`` is that of the trainer, if it is told.
    """

    def __init__(self, step: int | None = None) -> None:
        self.step = step
        self.sandboxes: set[tuple[AsyncSandboxProvider, str]] = set()
        self.failed: InfrastructureFailed | None = None


_ROLLOUT: ContextVar[RolloutState | None] = ContextVar("tangram_rollout", default=None)


@cache
def provider_of(server: str | None, function: str, task: str | None) -> AsyncSandboxProvider:
    """Return the provider that the tools of this process share; tools are made once and used by all rollouts."""
    return AsyncSandboxProvider(server, function=function, task=task, durable=True)


class RolloutShell(BaseTool):
    """A shell in the rollout's sandbox, made at its first call.

    ``config`` takes ``server``, ``function``, ``task``, ``timeout_s`` and ``idle_ttl``; a row's ``create_kwargs``
    choose ``image``, ``env``, ``workdir``, ``user``, ``memory`` and ``network``.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self._timeout_s = float(config.get("timeout_s", 60))
        self._idle_ttl = str(config.get("idle_ttl", IDLE_TTL))
        self._provider = provider_of(config.get("server"), config.get("function", "shell"), config.get("task"))
        self._chosen: dict[str, Mapping[str, Any]] = {}

    async def create(self, instance_id: str | None = None, **options: Any) -> tuple[str, ToolResponse]:
        """Remember what the row chooses; verl calls this before every single call."""
        instance, answer = await super().create(instance_id)
        self._chosen[instance] = dict(options.get("create_kwargs") or {})
        return instance, answer

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **options: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run the command; its end is text for the model. What is our fault raises InfrastructureFailed.

        verl shows that to the model as the tool's answer; `AgentRollout` ends the rollout with it instead.
        """
        sandbox = f"verl-{options['agent_data'].request_id}"
        rollout = _ROLLOUT.get()
        try:
            if sandbox not in self._provider.sandboxes:
                chosen = {"step": None if rollout is None else rollout.step, **self._chosen[instance_id]}
                await self._provider.open(sandbox, idle_ttl=self._idle_ttl, **chosen)
            if rollout is not None:
                rollout.sandboxes.add((self._provider, sandbox))
            return ToolResponse(text=await self._said(sandbox, str(parameters.get("command", "")))), 0.0, {}
        except InfrastructureFailed as error:
            if rollout is not None and rollout.failed is None:
                rollout.failed = error
            raise

    async def release(self, instance_id: str, **options: Any) -> None:
        """Forget the call; the rollout's sandbox lives on."""
        self._chosen.pop(instance_id, None)

    async def _said(self, sandbox: str, command: str) -> str:
        try:
            ended = await self._provider.run(sandbox, ["bash", "-c", command], merge=True, timeout_s=self._timeout_s)
        except CommandTimedOut as late:
            return told_to_model(late)
        return told_to_model(ended)


class AgentRollout(ToolAgentLoop):
    """verl's tool agent loop, which ends its sandboxes with the rollout and fails with what is our fault."""

    async def run(self, sampling_params: dict[str, Any], **options: Any) -> Any:
        """Run one rollout; raises InfrastructureFailed where a tool could not do its work: no reward of 0 for that.

        Its sandboxes count for the step ``global_steps``, which verl's trainer v1 gives to agent loops.
        """
        rollout = RolloutState(step_of(options.get("global_steps")))
        before = _ROLLOUT.set(rollout)
        try:
            output = await super().run(sampling_params, **options)
            if rollout.failed is not None:
                raise rollout.failed
            return output
        finally:
            _ROLLOUT.reset(before)
            for provider, sandbox in rollout.sandboxes:
                await provider.end(sandbox)

    async def _call_tool(self, *arguments: Any, **options: Any) -> Any:
        answer = await super()._call_tool(*arguments, **options)
        rollout = _ROLLOUT.get()
        if rollout is not None and rollout.failed is not None:
            raise rollout.failed
        return answer
