"""AReaL's own wrapper asks for rewards: ``URL TOKEN``. Its heavy siblings are not needed for that, and are stubs."""

import asyncio
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
import types

from tangram.adapters.areal import GatewayReward, reward

os.environ |= {"TANGRAM_SERVER": sys.argv[1], "TANGRAM_TOKEN": sys.argv[2], "TANGRAM_REWARD_PATIENCE_S": "1.5"}
for name in ("areal", "areal.utils"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["areal.utils"].logging = logging
(path,) = [each.locate() for each in importlib.metadata.files("areal") if str(each) == "areal/api/reward_api.py"]
spec = importlib.util.spec_from_file_location("areal.api.reward_api", path)
api = importlib.util.module_from_spec(spec)
spec.loader.exec_module(api)

PROMPT, IDS = "what is it?", [1, 2, 3]


async def told_of(asked, completion, **row):
    try:
        return await asked(PROMPT, completion, IDS, [len(completion)], **row)
    except Exception as error:
        return [type(error).__name__, getattr(error, "reason", "")]


async def main():
    told = {}
    os.environ["TANGRAM_REWARD_FUNCTION"] = "reward"
    wrapped = api.AsyncRewardWrapper(reward, timeout_seconds=8, max_workers=2)
    told["wrapped"] = [await told_of(wrapped, text, answer="4") for text in ("4", "5")]
    told["slow"] = await told_of(wrapped, "slow", answer="slow")
    told["never"] = await told_of(wrapped, "never", answer="never")
    told["fails"] = await told_of(wrapped, "fails", answer="")
    instead = GatewayReward("reward")
    many = [told_of(instead, str(number), answer="7") for number in range(64)]
    told["many"] = sum(await asyncio.gather(*many))
    told["instead"] = [await told_of(instead, text, answer="slow") for text in ("slow", "fails")]
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main())
