# make demo    kill a training in the middle of a save and see it continue as if nothing had happened
# make test    all tests            make test-fast   the units alone, without slow ones
# make test-frameworks   the tests of each framework, in an environment of its own (FRAMEWORKS="keras paddle": these; VERSIONS=lowest;
#                        ESSENTIAL=1: the essential ones alone)
# make lint    ruff, and mypy on the installed package
# make cluster six storage nodes on this machine, to try things with
# make bench   the benchmarks       make soak   the fault tests, at full length (CAMPAIGNS=tests/faults/kill: these alone)
# make docs    the documentation site, into build/docs
# make map     which folder imports which, and what has grown too large; make map-docs writes docs/design/files.md and the table of architecture.md
# make mutation    change the rules one by one, and print what no test notices (SUBJECTS="decisions": these alone)
# make clean   remove all that these made
#
# Each installs what it needs into .venv, with the python3 on the path: PYTHON=/path/to/python3.12 takes another.

PYTHON ?= python3
VENV := .venv
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, 2 * (os.cpu_count() or 1)))')
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo cluster test test-fast list-frameworks test-frameworks bench soak mutation lint docs map map-docs clean
.SUFFIXES:
.DELETE_ON_ERROR:

help:
	@sed -n '1,/^$$/s/^# \?//p' Makefile

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo.py

# Most tests wait for processes, disks and clocks, so two files run for each processor. The order of names puts the short units last.
# A test that hangs fails with the stacks of its threads. Alone on two processors the longest one takes about a minute.
test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0 -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile tests/unit -m 'not soak and not slow'

# A framework is a folder of tests/integration with requirements.txt (the newest versions), and mostly with requirements-lowest.txt.
# without-dependencies.txt lists packages whose own requirements are not installed; they may be for another version of Python, as the tests
# take only some of their source. unneeded.txt lists packages that are removed again.
VERSIONS ?= newest
REQUIREMENTS := requirements$(if $(filter lowest,$(VERSIONS)),-lowest).txt
FRAMEWORKS ?= $(patsubst tests/integration/%/$(REQUIREMENTS),%,$(sort $(wildcard tests/integration/*/$(REQUIREMENTS))))
# ESSENTIAL=1: the essential tests alone, in environments that take from .venv what it has (torch, jax), as CI does.
ENVIRONMENT := $(VERSIONS)$(if $(ESSENTIAL),-shared)
# mpi4py looks for the library of MPI in its own environment, and Lightning imports it if it is there.
MPI := $(if $(ESSENTIAL),$(addprefix MPI4PY_LIBMPI=$(CURDIR)/,$(wildcard $(VENV)/lib/libmpi.so.12)))

list-frameworks:
	@echo $(FRAMEWORKS)

test-frameworks: $(FRAMEWORKS:%=test-framework-%)

test-framework-%: .venv-frameworks/%-$(ENVIRONMENT)/.installed
	$(MPI) CKPT_TEST_FRAMEWORK=$* .venv-frameworks/$*-$(ENVIRONMENT)/bin/python -m pytest -q $(if $(ESSENTIAL),-m essential) \
		tests/integration/$* tests/integration/docs/test_framework_pages.py

.PRECIOUS: .venv-frameworks/%-$(ENVIRONMENT)/.installed
.SECONDEXPANSION:
.venv-frameworks/%-$(ENVIRONMENT)/.installed: pyproject.toml tests/integration/$$*/$(REQUIREMENTS) $(if $(ESSENTIAL),$(VENV)/.test)
	@echo "installing $* into $(@D) …"
	@$(PYTHON) -m venv $(@D)
	@$(if $(ESSENTIAL),$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth)
	@$(@D)/bin/python -m pip --disable-pip-version-check install -q -e . -r tests/integration/$*/$(REQUIREMENTS) 'pytest>=8' pytest-asyncio 'hypothesis>=6.100'
	@$(if $(wildcard tests/integration/$*/without-dependencies.txt),$(@D)/bin/python -m pip install -q --no-deps --ignore-requires-python \
		-r tests/integration/$*/without-dependencies.txt)
	@$(if $(wildcard tests/integration/$*/unneeded.txt),$(@D)/bin/python -m pip uninstall -q -y -r tests/integration/$*/unneeded.txt)
	@touch $@

cluster: $(VENV)/.cluster
	@$(BIN)/python examples/nodes.py

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py

soak: $(VENV)/.test
	@mkdir -p soak-results
	CKPT_SOAK=1 $(BIN)/python -m pytest -q -m soak -n $(WORKERS) --dist worksteal $(CAMPAIGNS) \
		--junitxml=soak-results/$$(date +%Y%m%dT%H%M%S).xml; status=$$?; $(BIN)/python .ci/campaigns.py soak-results; exit $$status

mutation: $(VENV)/.mutation
	@$(BIN)/python .ci/mutation.py $(SUBJECTS)

# mypy sees what a user's mypy sees: the package as installed, from a folder where the sources can't be imported.
lint: $(VENV)/.lint
	@rm -rf build && mkdir build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(PIP) install -q --no-deps --target build/site .
	cd build && MYPYPATH=site ../$(BIN)/mypy --config-file ../pyproject.toml -p ckpt

# The site is built from the package as installed: there the folders of the repository are put together.
docs: $(VENV)/.docs
	@rm -rf build/docs build/docs-package
	@$(PIP) install -q --no-deps --target build/docs-package .
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@$(BIN)/python .ci/site/offline.py build/docs

map:
	@$(PYTHON) .ci/map.py

map-docs:
	@$(PYTHON) .ci/map.py --docs

clean:
	rm -rf $(VENV) .venv-frameworks build dist demo-run comeback-run benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each set of extras of pyproject.toml; a changed pyproject.toml or setup.py installs it again. pip compiles what it copies, and
# not what it leaves in place: where python may not either (PYTHONDONTWRITEBYTECODE), each rank would take 0.1 s longer to start.
$(VENV)/.%: pyproject.toml setup.py | $(BIN)/python
	@echo "installing what 'make $*' needs into $(VENV) …"
	@$(PIP) install -q -e '.[$*]'
	@$(BIN)/python -m compileall -q ckpt storage aggregator recovery tools
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "ckpt needs Python 3.11 or newer, \
	$(PYTHON) is %d.%d: name another with make PYTHON=/path/to/python3.12" % v[:2])'
	@$(PYTHON) -m venv $(VENV)
