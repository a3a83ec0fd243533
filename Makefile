# Everything starts here: `make` alone tells what there is.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first Python of a version that will do; `make setup PYTHON=...` takes another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
RUN := .venv/bin/python -m
CHECKED := $(wildcard dags plugins spark_apps)

# Tests side by side; each has its own topics and folders. More than 2 Spark sessions want more memory.
JOBS ?= 2
# How many seeded worlds the simulation runs.
SEEDS ?= 1000
# The size of the benchmark (1: 3.2 million messages), and how often each contender runs.
SCALE ?= 1
ROUNDS ?= $(if $(AGAINST),5,3)

# Set up is what these files say, to the byte: the stamp's name carries their checksum.
STAMP := .venv/.ready-$(shell cat requirements-uv.lock requirements.lock pyproject.toml | cksum | tr ' ' -)

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(STAMP) ## .venv with the locked packages, the JARs, the compiled fold, Spark's classes; does only what is missing
	@.venv/bin/seriatim jars fetch --group spark --group kafka
	@$(RUN) seriatim.fast
	@$(RUN) seriatim.class_archive

$(STAMP):
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 on PATH: install 3.11, or make setup PYTHON=/path/to/python"; exit 2; }
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; command -v "$$java" >/dev/null || \
		{ echo "no Java ($$java): install Java 17 or 21 first, or set JAVA_HOME to one"; exit 2; }
	@rm -f .venv/.ready-*
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --require-hashes -r requirements-uv.lock
	.venv/bin/uv pip sync --compile-bytecode --require-hashes requirements-uv.lock requirements.lock
	.venv/bin/uv pip install --quiet --offline --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: lock
lock: ## Make requirements.lock again from requirements.txt (JARs: seriatim jars lock)
	.venv/bin/uv pip compile requirements.txt --universal --generate-hashes --no-emit-index-url \
		--no-header --python-version 3.11 --output-file requirements.lock

.PHONY: format
format: setup ## Format the code
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

.PHONY: lint
lint: setup ## ruff, mypy, and the tests of style
	.venv/bin/ruff format --check --quiet .
	.venv/bin/ruff check --quiet .
	.venv/bin/mypy --no-error-summary -p seriatim
	$(if $(CHECKED),.venv/bin/mypy --no-error-summary $(CHECKED))
	$(RUN) pytest --quiet tests/test_tidy.py tests/test_directions.py tests/test_exports.py tests/test_readme.py

# A browser comes with no Python package. CI may install Debian's; people decide for themselves.
.PHONY: browser
browser:
	@if ! command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null; then \
		if [ -n "$${CI:-}" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } \
				>/dev/null 2>&1 || echo "Chromium could not be installed: tests of the page that click are skipped"; \
		else echo "no Chromium on PATH: tests of the page that click are skipped"; fi; fi

.PHONY: test
test: lint browser ## All that CI runs: set-up, lint, tests with a sample of the long suites
	$(RUN) pytest -n $(JOBS) --dist loadfile --durations 25

# Without the watchdog against hanging tests, which is a thread for each test and costs more than a small test.
.PHONY: test-fast
test-fast: $(STAMP) ## Only tests that need no broker and no Spark: seconds
	$(RUN) pytest --quiet --fast -o faulthandler_timeout=0 tests/engine tests/ledger tests/operations tests/alerts tests/sim tests/test_tidy.py

.PHONY: test-full
test-full: lint browser ## All tests, the long suites in full
	$(RUN) pytest -n $(JOBS) --dist loadfile --full --durations 20

.PHONY: sim
sim: setup ## Simulated streams with crashes: make sim SEEDS=10000
	$(RUN) pytest tests/sim --seeds $(SEEDS)

.PHONY: bench
bench: setup ## CPU per message, ours beside its peers: make bench SCALE=0.25 ROUNDS=2 ONLY=floor,table SHAPE=cdc; AGAINST=REF: beside ours of then
	$(RUN) bench.run --scale $(SCALE) --rounds $(ROUNDS) $(if $(SHAPE),--shape $(SHAPE)) \
		$(if $(ONLY),--only $(ONLY)) $(if $(DOCS),--docs) \
		$(if $(AGAINST),--against $(AGAINST))

.PHONY: demo
demo: setup ## A living system: Kafka, Airflow, a producer, mails; other ports: make demo PORT=18080; in a bucket: STORE=s3
	@$(RUN) seriatim.demo.stage up $(if $(PORT),--port $(PORT)) $(if $(STORE),--store $(STORE))

.PHONY: demo-break
demo-break: $(STAMP) ## Damage messages of the running demo on their way to Kafka
	@$(RUN) seriatim.demo.stage break

.PHONY: demo-cdc
demo-cdc: setup ## A table in PostgreSQL that keeps changing, Debezium, and `current`, which equals it
	@$(RUN) seriatim.demo.capture up

.PHONY: demo-cdc-break
demo-cdc-break: $(STAMP) ## Lose a change of the running demo-cdc on its way to Kafka: what finds it, what heals it
	@$(RUN) seriatim.demo.capture break

.PHONY: demo-stop
demo-stop: ## End the demo, and what a demo that was killed has left running
	@$(RUN) seriatim.demo.stage stop

.PHONY: clean
clean: ## Remove .venv and what tools left; caches under SERIATIM_HOME stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
