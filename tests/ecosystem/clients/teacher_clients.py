"""TRL's own teacher client, lifted out of a module that needs torch, and the OpenAI SDK: ``URL TOKEN IDS_JSON``."""

import ast
import importlib.metadata
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import requests
from openai import NotFoundError, OpenAI

url, token, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
(path,) = [each.locate() for each in importlib.metadata.files("trl") if str(each).endswith("generation/vllm_client.py")]
tree = ast.parse(path.read_text())
(client,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "VLLMClient"]
wanted = {"get_sequence_logprobs", "_format_sequence_logprobs"}
client.body = [node for node in client.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
client.bases = []
namespace = {"math": math, "ThreadPoolExecutor": ThreadPoolExecutor}
exec(compile(ast.Module([client], []), "vllm_client.py", "exec"), namespace)


class Teacher(namespace["VLLMClient"]):
    """What the lifted methods need: the address, the model's name and a post."""

    def __init__(self, base_url):
        self.base_url = base_url
        assert requests.get(f"{base_url}/health", timeout=10).status_code == 200
        self.model = requests.get(f"{base_url}/v1/models", timeout=10).json()["data"][0]["id"]

    def _post(self, address, json):
        answer = requests.post(address, json=json, timeout=60)
        answer.raise_for_status()
        return answer.json()


told = {}
for name in ("one", "two"):
    teacher = Teacher(f"{url}/models/~{token}/{name}")
    scored = teacher.get_sequence_logprobs(ids, [1] * len(ids), top_logprobs=8, chunk_size=2)
    told[name] = {"model": teacher.model, **scored}

sdk = OpenAI(base_url=f"{url}/openai/v1", api_key=token, max_retries=0)
told["models"] = sorted(each.id for each in sdk.models.list())
chat = sdk.chat.completions.create(
    model="writer", messages=[{"role": "user", "content": "def f"}], max_tokens=4, temperature=0
)
told["chat"] = [chat.choices[0].message.role, chat.choices[0].finish_reason, chat.usage.completion_tokens]
stream = sdk.chat.completions.create(
    model="writer", messages=[{"role": "user", "content": "def f"}], max_tokens=4, temperature=0, stream=True
)
told["stream"] = "".join(each.choices[0].delta.content for each in stream) == chat.choices[0].message.content
told["text"] = len(sdk.completions.create(model="writer", prompt="import ", max_tokens=4, temperature=0).choices)
told["embedding"] = len(sdk.embeddings.create(model="embedder", input=["import os", "x"]).data)
try:
    sdk.completions.create(model="nowhere", prompt="x")
except NotFoundError as error:
    told["missing"] = error.status_code
print(json.dumps(told))
