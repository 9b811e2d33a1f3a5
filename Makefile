# The two commands of the README are `make demo` and `make test`; both set everything up on a bare machine.
PYTHON := .venv/bin/python
SEEDS ?= 5000
# The order of the tests: make test SEED=7 plays that of an earlier run again.
SEED ?= $(shell date +%s)
# Processes that run tests; they wait for a third of their time.
WORKERS ?= 3
# Whatever the environment says, modules are compiled once: hundreds of gateways, nodes and commands start in the tests.
unexport PYTHONDONTWRITEBYTECODE
# Four tiers. Each fits its limit on two quiet cores, once set up; .ci/tiers has the limits of the parts of test-all.
#   quick     at most 1 minute   format, lint, and what needs no Docker, no sandbox and no network
#   check     seconds            format, lint, types (the first run fills mypy's cache: a minute)
#   test      at most 8 minutes  check, and every test that is neither marked slow nor in a folder of test-all
#   test-all  at most 90 minutes   everything else, one part after the other
QUICK := tests/house tests/manager tests/gateway
# Other doors, and what runs in sandboxes or plays whole workloads.
NOT_QUICK := tests/gateway/facades tests/gateway/grpc tests/gateway/http/test_snapshots.py tests/gateway/test_steps.py \
	tests/gateway/cli/test_simulate.py
# Folders whose tests are parts of test-all, whole.
APART := tests/attacks tests/bench tests/cluster tests/ecosystem tests/faults tests/ray
RUN := $(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup --order $(SEED)

.PHONY: demo paper cluster-demo quick check test test-all setup format lint types unit slow faults attacks browser sim \
	gpu-check engines bench bench-quick ecosystem ecosystem-all serve clean site wheels release ray

demo: setup
	@$(PYTHON) -m scripts.demo

# Every figure and table of the paper's evaluation, in ten minutes: out/paper/index.html
paper: setup
	@$(PYTHON) -m bench.paper --keep; status=$$?; $(PYTHON) -m scripts.figures; exit $$status

quick: lint
	$(PYTHON) -m pytest -q -n 2 --dist loadgroup -m "not slow and not docker and not network and not gpu and not browser" \
		$(NOT_QUICK:%=--ignore %) $(QUICK)

check: lint types

test: setup lint
	@$(MAKE) --no-print-directory -j 2 types unit

# What `make test` leaves out, part by part, each within its own limit; the end says which failed.
test-all: setup
	@.ci/tiers

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
	$(RUN) -m "not slow and not browser" $(APART:%=--ignore %)

# --- the parts of test-all ---

# Tests that take seconds, build images or environments, or look at every case where `make test` looks at one; and
# properties by many examples.
slow:
	@scripts/setup --with crun --with iproute2 --with docker-registry --with g++
	$(RUN) --hypothesis-profile=full --begin-within 700 -m "(slow or hypothesis) and not browser" $(APART:%=--ignore %) --ignore tests/sim

# Processes, engines and nodes that are killed, frozen and cut off, with real daemons.
faults: setup
	$(RUN) --begin-within 700 tests/faults tests/cluster
	MEMBERSHIP_HISTORIES=20000 $(PYTHON) -m pytest -q tests/runtimes/node/test_membership.py

# Rewards that somebody tries to forge, a few hundred ways.
attacks: setup
	$(RUN) -q --begin-within 330 tests/attacks

# The page in a real browser.
browser:
	@scripts/setup --with chromium --with fonts-dejavu-core
	$(RUN) --timeout 120 --begin-within 150 -m browser $(APART:%=--ignore %)

# Seeded worlds: make sim SEEDS=100000, or others by SIM_FIRST=5000; make sim SEED=7 tells the shortest history of one
sim: setup
ifeq ($(origin SEED),command line)
	@$(PYTHON) -m tests.sim.whole --seed $(SEED)
else
	PYTHONHASHSEED=0 SIM_SEEDS=$(SEEDS) SIM_FIRST=$${SIM_FIRST:-0} \
		$(RUN) --hypothesis-profile=full --begin-within 270 tests/sim
endif

# Every bench, one JSON object each on its last line (bench/report.py says its form).
bench: setup
	@for name in gateway sandbox scheduler paper model durable attacks kills runner cancels cluster; do $(PYTHON) -m bench.$$name --json; done

# One quick run of each bench, and what judges them.
bench-quick: setup
	$(RUN) -q --begin-within 240 tests/bench

# Real clients from the registry, each in an environment of its own (.cache/ecosystem), against the doors.
# What has not begun in time is left out and named at the end.
ecosystem: setup
	$(PYTHON) -m pytest -q -rs --begin-within 440 -m "not far" tests/ecosystem

# Also those that take minutes to install or to run.
ecosystem-all: setup
	$(PYTHON) -m pytest -q -rs tests/ecosystem

# The documentation, every link checked, in an environment of its own (.cache/site).
site: setup
	@scripts/site/build

# Both wheels, tried outside the repository on each interpreter of 3.11 to 3.13 that there is, and the client's on 3.10.
wheels: setup
	@$(PYTHON) .ci/wheels.py

# The same, after a look at versions, CHANGELOG.md and classifiers.
release: setup
	@$(PYTHON) .ci/wheels.py --release

# What a machine with a GPU would run, rehearsed on the CPU beside no more packages than that machine has.
gpu-check: setup
	@$(PYTHON) .ci/gpu-check

# Engines that sleep, wake and are killed at random, and vLLM's CPU build against transformers; it is fetched once (3 GB).
engines: setup
	@timeout 270 $(PYTHON) -m bench.model.engines || { echo "left out: vLLM was not installed in 270 seconds"; exit 0; }; \
		$(PYTHON) -m bench.model --quick --json --only engines,vllm

# A real Ray cluster, in an environment of its own (.cache/ray); three minutes.
ray:
	@scripts/setup --with iproute2
	@.ci/ray-tests -q -rs --begin-within 260 tests/ray

# Rollouts over a real Ray cluster of three nodes on this machine, while one dies and one joins; about three minutes.
cluster-demo: setup
	@scripts/cluster-demo

serve: setup .cache/models/teacher/config.json
	.venv/bin/tangram serve . examples/models

# The example checkpoints that examples/models names: real, tiny, trained here in seconds.
.cache/models/teacher/config.json: scripts/make_checkpoint.py
	$(PYTHON) -m scripts.make_checkpoint .cache/models

clean:
	rm -rf .venv .cache .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
