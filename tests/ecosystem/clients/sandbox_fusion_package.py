"""The package sandbox-fusion: ``URL``."""

import asyncio
import base64
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from sandbox_fusion import RunCodeRequest, run_code, run_code_async, set_endpoint

set_endpoint(sys.argv[1])
data = base64.b64encode(b"\x00\xff").decode()
asked = {
    "good": RunCodeRequest(code="print(input())", language="python", stdin="7"),
    "bad": RunCodeRequest(code="assert False", language="python"),
    "slow": RunCodeRequest(code="import time; time.sleep(9)", language="python", run_timeout=0.3),
    "files": RunCodeRequest(
        code="open('b','wb').write(open('a','rb').read())", language="python", files={"a": data}, fetch_files=["b"]
    ),
}
told = {name: json.loads(run_code(request).json()) for name, request in asked.items()}
told["async"] = json.loads(asyncio.run(run_code_async(asked["good"])).json())
with ThreadPoolExecutor(16) as pool:
    told["many"] = [each.run_result.stdout for each in pool.map(run_code, [asked["good"]] * 16)]
print(json.dumps(told))
