"""The SWE-bench harness's own evaluation over whichever engine ``DOCKER_HOST`` names: ``DATASET PREDICTIONS RUN``.

It is run in the directory of the data set, where it leaves its logs.
"""

import json
import os
import sys
from pathlib import Path

from swebench.harness.run_evaluation import main

dataset, predictions, run = sys.argv[1:]
os.chdir(Path(dataset).parent)
report = main(
    dataset_name=dataset, split="test", instance_ids=[], predictions_path=predictions, max_workers=2,
    open_file_limit=4096, run_id=run, timeout=10, rewrite_reports=False, modal=False,
)  # fmt: skip
summary = json.loads(Path(report).read_text())
tests = {}
for file in sorted(Path("logs/run_evaluation", run).rglob("report.json")):
    tests |= json.loads(file.read_text())
kept = ("completed_ids", "resolved_ids", "unresolved_ids", "error_ids", "empty_patch_ids")
print(json.dumps({"summary": {name: summary.get(name) for name in kept}, "tests": tests}))
