"""OpenRLHF's own code asks for rewards: ``URL COUNT``. Its heavy siblings are not needed for that, and are stubs."""

import asyncio
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import sys
import types

logging_utils = types.ModuleType("openrlhf.utils.logging_utils")
logging_utils.init_logger = logging.getLogger
for name in ("openrlhf", "openrlhf.utils"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["openrlhf.utils.logging_utils"] = logging_utils
(path,) = [
    each.locate() for each in importlib.metadata.files("openrlhf") if str(each).endswith("openrlhf/utils/agent.py")
]
spec = importlib.util.spec_from_file_location("openrlhf.utils.agent", path)
agent = importlib.util.module_from_spec(spec)
spec.loader.exec_module(agent)


async def main(url, count):
    executor = object.__new__(agent.SingleTurnAgentExecutor)
    executor.reward_endpoints = [url]
    executor._reward_endpoint_cycle = itertools.cycle([url])
    asked = [([f"{i}+{i}={2 * i}"], [f"{i}+{i}="], [str(2 * i + i % 2)]) for i in range(count)]
    answers = await asyncio.gather(*(executor._fetch_rewards_via_http(*each) for each in asked))
    print(json.dumps([answer[0]["rewards"] for answer in answers]))


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
