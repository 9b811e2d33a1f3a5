"""Whether a response is the label, but for case and space around it."""


def score(event, context):
    given, wanted = (str(event[name]).strip().casefold() for name in ("response", "label"))
    return {"reward": 1.0 if given == wanted else 0.0}
