"""boto3 loses patience: ``URL TOKEN CALLS``; each call takes longer than one read time-out, and is tried five times."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import boto3
from botocore.config import Config

config = Config(read_timeout=1, max_pool_connections=16, retries={"mode": "legacy", "max_attempts": 4})
client = boto3.client(
    "lambda",
    endpoint_url=sys.argv[1],
    region_name="us-east-1",
    aws_access_key_id=sys.argv[2],
    aws_secret_access_key="anything",
    config=config,
)


def call(_):
    return json.load(client.invoke(FunctionName="slow", Payload=b'{"command": "sleep 2"}')["Payload"])["exit_code"]


with ThreadPoolExecutor(4) as pool:
    print(json.dumps(list(pool.map(call, range(int(sys.argv[3]))))))
