"""The paper's evaluation, and our policies where nobody tuned them: ``python -m bench.paper``."""
