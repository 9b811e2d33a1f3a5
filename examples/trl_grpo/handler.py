"""How short a program is: 1 for the shortest, 0 for what does not parse."""

import ast


def brief(event, context):
    try:
        tree = ast.parse(event["program"])
    except SyntaxError:
        return {"reward": 0.0}
    size = sum(isinstance(node, ast.expr) for node in ast.walk(tree))
    return {"reward": max(0.0, 1.0 - size / 24)}
