"""Whether an answer is the reference, but for case and space around it."""


def score(event, context):
    given, wanted = (str(event[name]).strip().casefold() for name in ("answer", "reference"))
    return {"reward": 1.0 if given == wanted else 0.0}
