# The two commands of the README are `make demo` and `make test`; both set everything up on a bare machine.
PYTHON := .venv/bin/python
SEEDS ?= 20000
# The order of the tests: make test SEED=7 plays that of an earlier run again.
SEED ?= $(shell date +%s)
# Processes that run tests, which wait for half of their time: twice as many as two cores.
WORKERS ?= 4
# Whatever the environment says, modules are compiled once: hundreds of gateways, nodes and commands start in the tests.
unexport PYTHONDONTWRITEBYTECODE
# What changes most, and needs neither Docker nor a network.
QUICK := tests/house tests/manager tests/gateway

.PHONY: demo cluster-demo test quick setup format lint types unit attacks cluster-faults sim bench bench-quick ecosystem ecosystem-all serve clean site wheels ray

demo: setup
	@$(PYTHON) -m scripts.demo

test: setup lint
	@$(MAKE) --no-print-directory -j 2 types unit

# A minute or two once set up; `make test` is the whole of it.
quick: lint
	$(PYTHON) -m pytest -q -n 2 --dist loadgroup -m "not slow and not docker and not network and not gpu" $(QUICK)

setup:
	@scripts/setup

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy

unit:
	scripts/run-tests -n $(WORKERS) --dist loadgroup --order $(SEED) --ignore tests/attacks --ignore tests/bench --ignore tests/ecosystem --ignore tests/ray --ignore tests/cluster/faults

# Rewards that somebody tries to forge, a few hundred ways: a step of its own in .ci/run, two to five minutes.
attacks: setup
	scripts/run-tests -q -n $(WORKERS) --dist loadgroup --begin-within 480 tests/attacks

# Nodes that are lost and frozen, with real daemons, beside those faults of tests/cluster that `make test` plays.
cluster-faults: setup
	$(PYTHON) -m pytest -q tests/cluster
	MEMBERSHIP_HISTORIES=100000 $(PYTHON) -m pytest -q tests/runtimes/node/test_membership.py

# More seeds of the deterministic simulation: make sim SEEDS=100000
sim: setup
	SIM_SEEDS=$(SEEDS) $(PYTHON) -m pytest tests/sim

# Every bench, one JSON object each on its last line (bench/report.py says its form).
bench: setup
	@for name in gateway sandbox scheduler figures rollouts model durable attacks kills dashboard facades cluster; do $(PYTHON) -m bench.$$name --json; done

# One quick run of each bench, and what judges them: a step of its own in .ci/run.
bench-quick: setup
	scripts/run-tests -q -n 2 --dist loadgroup tests/bench

# Real clients from the registry, each in an environment of its own (.cache/ecosystem), against the doors.
# A step of its own, with its own limit in .ci/run: what is left out is named at its end.
ecosystem: setup
	scripts/run-tests -q -rs --begin-within 600 -m "not far" tests/ecosystem

# Also those that take minutes to install or to run.
ecosystem-all: setup
	scripts/run-tests -q -rs tests/ecosystem

# The documentation, every link checked, in an environment of its own (.cache/site).
site: setup
	@scripts/site/build

# Both wheels, tried outside the repository on each interpreter of 3.11 to 3.13 that there is.
wheels: setup
	@$(PYTHON) .ci/wheels.py

# A real Ray cluster, in an environment of its own (.cache/ray): a step of its own, at most 4 minutes on an idle machine.
ray: setup
	@.ci/ray-tests -q -rs --begin-within 300 tests/ray

# Rollouts over a real Ray cluster of three nodes on this machine, while one dies and one joins; about three minutes.
cluster-demo: setup
	@scripts/cluster-demo

serve: setup .cache/models/teacher/config.json
	.venv/bin/tangram serve

# The example checkpoints that functions/ name: real, tiny, trained here in seconds.
.cache/models/teacher/config.json: scripts/make_checkpoint.py
	$(PYTHON) -m scripts.make_checkpoint .cache/models

clean:
	rm -rf .venv .cache .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
