"""What the runtimes of a machine are made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manager.function import SandboxSpec
from runtimes.api.secrets import Secrets
from runtimes.model.settings import ModelSettings
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.handler.copies import HandlerCopies
from runtimes.sandbox.handler.requirements import RequirementSettings
from runtimes.sandbox.sandbox import Provider


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """What the runtimes of a machine are made from: its rooms, and the settings of its configuration."""

    provider: Provider
    environments: Environments
    #: What a sandbox is where its function says nothing.
    sandbox: SandboxSpec
    models: ModelSettings
    secrets: Secrets
    requirements: RequirementSettings
    #: Where layers of requirements are kept.
    layers_dir: Path
    #: What handlers run in place of their directories.
    copies: HandlerCopies
