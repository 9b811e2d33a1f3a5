"""A reward of one for the right number at the end of the answer."""

import re


def grade(event, context):
    numbers = re.findall(r"-?\d+(?:\.\d+)?", event["response"])
    return float(bool(numbers) and float(numbers[-1]) == float(event["label"]))
