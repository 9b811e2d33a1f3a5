"""`tangram report`: one page of a real run, and of what it would have taken otherwise."""
