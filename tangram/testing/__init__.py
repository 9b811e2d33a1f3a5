"""For tests of those who use the client: a scripted gateway, without a server, sockets or sandboxes."""

from tangram.testing.answers import Answer, broken, refusal
from tangram.testing.gateway import ScriptedGateway
from tangram.testing.script import Script, ScriptedCall, ScriptedFailure

__all__ = ["Answer", "Script", "ScriptedCall", "ScriptedFailure", "ScriptedGateway", "broken", "refusal"]
