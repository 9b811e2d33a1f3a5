"""A whole gateway with models on the machine's device: HTTP, swaps, batches, a killed gateway and the next one.

python -m bench.model.served cuda /dev/shm
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from bench.model.architectures import plain_numbers
from bench.model.checkpoints import SHAPES, write_checkpoint
from bench.serving import GATEWAY, TOKEN, BenchConnection, ServerProcess
from runtimes.model.checkpoint import Head
from runtimes.model.engine import nvml

CONFIG = """
version: 1
server: {{token: {token}, state_dir: {directory}/state, port: 0, grpc_port: 0}}
sandbox: {{provider: none}}
node: {{devices: {{kind: {device}, count: 1, memory: {arena}}}}}
functions:
"""
FUNCTION = "  {name}: {{runtime: model, model: {{path: {path}, action: {action}}}, cost: {{gpu: 1}}, timeout: 2m}}\n"
#: Largest difference of a log-probability or score from transformers on the same device, by the model's dtype.
LIMITS = {"float32": 1e-3, "bfloat16": 0.15}
#: Cold calls of each service, and calls at once of one.
ROUNDS, AT_ONCE = 5, 64
#: Seconds after which a killed gateway's memory is back.
GONE_S = 20.0


class ServedCheckpoints:
    """Four services, two rewards and two teachers, of which the arena holds two at a time."""

    def __init__(self, device: str, directory: Path) -> None:
        self.device, self.directory = device, directory
        self.size, self.dtype = ("600m", "bfloat16") if device == "cuda" else ("toy", "float32")
        shape = SHAPES[self.size]
        self.paths: dict[str, Path] = {}
        self.expected: dict[str, list[float]] = {}
        self.ids = torch.randint(1, shape["vocab_size"], (256 if device == "cuda" else 32,)).tolist()
        for seed, head in enumerate((Head.SCORE, Head.LM, Head.SCORE, Head.LM)):
            path = write_checkpoint(directory, "qwen3", head, shape, dtype=self.dtype, device=device, seed=seed)
            self.paths[f"{head}_{seed}"] = path
            self.expected[f"{head}_{seed}"] = self._plain(path, head)
        self.bytes = max(
            sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in self.paths.values()
        )
        functions = "".join(
            FUNCTION.format(name=name, path=path, action="score" if name.startswith("score") else "logprobs")
            for name, path in self.paths.items()
        )
        arena = int(2.2 * self.bytes)
        settings = CONFIG.format(token=TOKEN, directory=directory, device=device, arena=arena)
        (directory / "tangram.yaml").write_text(settings + functions)

    def _plain(self, path: Path, head: Head) -> list[float]:
        """Return what transformers computes."""
        untyped: Any = transformers
        kind = untyped.AutoModelForCausalLM if head is Head.LM else untyped.AutoModelForSequenceClassification
        model = kind.from_pretrained(path, dtype=getattr(torch, self.dtype)).eval().to(self.device)
        return plain_numbers(model, head, self.ids)

    async def invoke(self, connection: BenchConnection, name: str) -> Mapping[str, Any]:
        """Return the record of one call; raises RuntimeError where it did not succeed."""
        body = json.dumps({"token_ids": [self.ids]}).encode()
        record = json.loads(await connection.post(f"/v1/functions/{name}/invocations", body))
        if record["state"] != "succeeded":
            raise RuntimeError(f"{name}: {json.dumps(record)[:1000]}")
        return dict(record)

    def difference(self, name: str, result: Mapping[str, Any]) -> float:
        """Return the largest difference from transformers."""
        values = torch.tensor(result["scores" if name.startswith("score") else "logprobs"]).flatten()
        expected = torch.tensor(self.expected[name])
        values = values[-len(expected) :]  # a first token has no log-probability
        return float((values - expected).abs().max())


async def play(served: ServedCheckpoints) -> tuple[bool, dict[str, object]]:
    """Calls through a gateway, its kill, and calls through the next one."""
    server = ServerProcess(GATEWAY, str(served.directory / "tangram.yaml"), log=served.directory / "log")
    uuid = nvml().gpus()[0].uuid if served.device == "cuda" else ""
    before = nvml().used_bytes(uuid) if uuid else None
    found: dict[str, object] = {"size": served.size, "dtype": served.dtype, "model_bytes": served.bytes}
    differences: list[float] = []
    record: Mapping[str, Any] = {}
    try:
        began = time.perf_counter()
        await server.start()
        found["start_s"] = time.perf_counter() - began
        connection = BenchConnection(server.port)
        cold: list[float] = []
        warm: list[float] = []
        for number in range(ROUNDS):
            for name in served.paths:
                for times in (cold, warm):
                    began = time.perf_counter()
                    record = await served.invoke(connection, name)
                    if number:
                        times.append(time.perf_counter() - began)
                    differences.append(served.difference(name, record["result"]))
        found["usage"] = record["usage"]
        found["cold_ms"], found["warm_ms"] = (statistics.median(times) * 1e3 for times in (cold, warm))
        found["calls_per_s_at_once"] = await at_once(served, server.port)
        found["used_bytes"] = nvml().used_bytes(uuid) if uuid else None
        _, answer = await connection.send("GET", "/v1/resources")
        found["models"] = json.loads(answer).get("models")
        connection.close()
        began = time.perf_counter()
        await server.end(signal.SIGKILL)
        found["memory_back_s"] = await memory_back(uuid, before, began)
        await server.start()
        connection = BenchConnection(server.port)
        for name in served.paths:
            record = await served.invoke(connection, name)
            differences.append(served.difference(name, record["result"]))
        connection.close()
        began = time.perf_counter()
        found["end_status"] = await server.end(signal.SIGTERM)
        found["memory_back_after_end_s"] = await memory_back(uuid, before, began)
    except Exception as error:  # noqa: BLE001  # with what was seen until then
        found["error"] = f"{type(error).__name__}: {error} {record!s:.1200}"[:4000]
        found["log"] = server.log(4000)
    finally:
        if server.process.returncode is None:
            await server.end(signal.SIGKILL)
    found["max_abs_diff"] = max(differences, default=None)
    back = found.get("memory_back_s") is not None and found.get("memory_back_after_end_s") is not None
    right = "error" not in found and max(differences) <= LIMITS[served.dtype] and back and found["end_status"] == 0
    return right, found


async def at_once(served: ServedCheckpoints, port: int) -> float:
    """Return calls a second of one service with many in flight."""
    name = next(iter(served.paths))
    connections = [BenchConnection(port) for _ in range(AT_ONCE)]
    began = time.perf_counter()
    for _ in range(2):
        await asyncio.gather(*(served.invoke(each, name) for each in connections))
    took = time.perf_counter() - began
    for each in connections:
        each.close()
    return 2 * AT_ONCE / took


async def memory_back(uuid: str, before: int | None, began: float) -> float | None:
    """Return the seconds since then until the device holds what it held before the gateway; None if it never does."""
    if before is None:
        return 0.0
    while time.perf_counter() - began < GONE_S:
        used = nvml().used_bytes(uuid)
        if used is not None and used <= before + 64 * 2**20:
            return time.perf_counter() - began
        await asyncio.sleep(0.1)
    return None


def main(arguments: Sequence[str]) -> int:
    """Play it in a directory below the given one."""
    device, place = arguments
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=place, prefix="served-") as directory:
        right, found = asyncio.run(play(ServedCheckpoints(device, Path(directory))))
    print(json.dumps({"section": "served", "device": device, "right": right, **found}, default=str))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
