"""NeMo-Gym's own sandbox API, which finds the provider by its entry point alone: ``URL``."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from nemo_gym.sandbox.api import AsyncSandbox
from nemo_gym.sandbox.providers.base import SandboxCreateError, SandboxSpec


async def main():
    told = {}
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "run.sh"
        source.write_text("#!/bin/sh\necho ran\n")
        source.chmod(0o755)
        async with AsyncSandbox({"tangram": {"server": sys.argv[1]}}) as box:
            await box.start(SandboxSpec(files={"/tmp/given": "text"}))
            ended = await box.exec("cat /tmp/given; echo err >&2; exit 3")
            told["exec"] = [ended.stdout, ended.stderr, ended.return_code, ended.error_type]
            await box.upload(source, "/tmp/run.sh")
            told["mode"] = (await box.exec("/tmp/run.sh")).stdout
            await box.download("/tmp/given", Path(directory) / "deep" / "out")
            told["download"] = (Path(directory) / "deep" / "out").read_text()
            late = await box.exec("sleep 1000", timeout_s=1)
            told["late"] = [late.error_type, late.return_code]
            told["status"] = (await box.status()).value
    try:
        async with AsyncSandbox({"tangram": {"server": sys.argv[1], "function": "nowhere"}}) as box:
            await box.start(SandboxSpec())
    except SandboxCreateError as error:
        told["refused"] = "nowhere" in str(error)
    print(json.dumps(told))


asyncio.run(main())
