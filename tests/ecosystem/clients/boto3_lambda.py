"""boto3 invokes functions: ``URL TOKEN``. Two of its calls are slower than its patience, once each."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError


def client(**config):
    return boto3.client(
        "lambda",
        endpoint_url=sys.argv[1],
        region_name="us-east-1",
        aws_access_key_id=sys.argv[2],
        aws_secret_access_key="anything",
        config=Config(**config),
    )


lambdas = client(max_pool_connections=64)
told = {}
answer = lambdas.invoke(FunctionName="echo", Payload=json.dumps({"a": 1, "log": "said\n"}), LogType="Tail")
told["invoke"] = [answer["StatusCode"], json.load(answer["Payload"]), answer["ExecutedVersion"], answer["LogResult"]]
arn = "arn:aws:lambda:us-east-1:123456789012:function:echo"
told["arn"] = json.load(lambdas.invoke(FunctionName=arn, Payload=b'{"b": 2}')["Payload"])
failed = lambdas.invoke(FunctionName="echo", Payload=json.dumps({"reason": "handler_error"}))
told["failed"] = [failed["StatusCode"], failed["FunctionError"], sorted(json.load(failed["Payload"]))]
told["event"] = lambdas.invoke(FunctionName="echo", InvocationType="Event", Payload=b"{}")["StatusCode"]
told["dry"] = lambdas.invoke(FunctionName="echo", InvocationType="DryRun")["StatusCode"]
try:
    lambdas.invoke(FunctionName="nowhere")
except lambdas.exceptions.ResourceNotFoundException as error:
    told["missing"] = error.response["Error"]["Code"]
try:
    client(retries={"max_attempts": 1}).invoke_with_response_stream(FunctionName="echo")
except ClientError as error:
    told["streaming"] = error.response["Error"]["Code"]
pages = lambdas.get_paginator("list_functions").paginate(PaginationConfig={"PageSize": 3})
told["functions"] = [each["FunctionName"] for page in pages for each in page["Functions"]]
lambdas.get_waiter("function_active_v2").wait(FunctionName="echo")
big = {"x": "y" * 6_000_000}
told["large"] = json.load(lambdas.invoke(FunctionName="echo", Payload=json.dumps(big))["Payload"]) == big
with ThreadPoolExecutor(64) as pool:
    sent = pool.map(lambda i: lambdas.invoke(FunctionName="again", InvocationType="Event", Payload=b"{}"), range(200))
    told["events"] = sum(each["StatusCode"] == 202 for each in sent)
# Five tries in all, each broken off by a read time-out while the function runs.
impatient = client(read_timeout=1, retries={"mode": "legacy", "max_attempts": 4})
told["slow"] = json.load(impatient.invoke(FunctionName="slow", Payload=b'{"n": 1}')["Payload"])
print(json.dumps(told))
