"""verl's own scorer judges programs: ``URL FILE AT_ONCE TIMEOUT_S``, a JSON list of {program, stdin, expected}."""

import importlib.metadata
import importlib.util
import json
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

logging.disable(logging.ERROR)
(init,) = [
    each.locate()
    for each in importlib.metadata.files("verl")
    if str(each).endswith("reward_score/sandbox_fusion/__init__.py")
]
# Alone, under a name of its own: the rest of verl needs torch and Ray.
spec = importlib.util.spec_from_file_location(
    "verl_sandbox_fusion", init, submodule_search_locations=[str(init.parent)]
)
module = importlib.util.module_from_spec(spec)
sys.modules["verl_sandbox_fusion"] = module
spec.loader.exec_module(module)

url, file, at_once, timeout_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
semaphore = threading.Semaphore(at_once)
scorer = sys.modules["verl_sandbox_fusion.utils"]
original = scorer.check_correctness


def judged(*args, **kwargs):
    return original(*args, **{**kwargs, "timeout": timeout_s})


module.check_correctness = judged


def score(each):
    completion = f"```python\n{each['program']}\n```"
    cases = {"inputs": [each["stdin"]], "outputs": [each["expected"]]}
    value, about = module.compute_score(url, semaphore, 1024, completion, cases)
    return {"score": value, "status": about[0].get("status"), "error": about[0].get("api_request_error")}


with open(file) as opened:
    programs = json.load(opened)
began = time.monotonic()
with ThreadPoolExecutor(at_once) as pool:
    scores = list(pool.map(score, programs))
print(json.dumps({"scores": scores, "seconds": time.monotonic() - began}))
