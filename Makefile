# The front door of SPACE. `make help` lists what there is; the build itself is described in meson.build.

BUILD ?= build
PREFIX ?= /usr/local
DESTDIR ?=
MAKEFLAGS += --no-print-directory

.DEFAULT_GOAL := help
.PHONY: help up down status test test-quick bench build packages install uninstall clean format

help: ## list the targets
	@echo "SPACE: every agent session its own computer. On Debian 12 or 13, as root:"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Variables: BUILD=$(BUILD) PREFIX=$(PREFIX) DESTDIR=$(DESTDIR); for test: ONLY=\"unit style system/test_run.py …\""

up: ## install what is missing, build, start spaced, build the default template, show a tour
	@BUILD='$(BUILD)' scripts/up.sh

down: ## stop spaced; sessions are kept (SUSPEND=1: suspend them first)
	@BUILD='$(BUILD)' scripts/down.sh

status: ## say whether spaced runs and what it can do
	@BUILD='$(BUILD)' scripts/status.sh

test: ## install what is missing, build with gcc, clang and sanitizers, run every test
	@scripts/install-packages.sh build run test
	@/usr/bin/python3 tests/run.py $(ONLY)

test-quick: ## unit and style tests only
	@scripts/install-packages.sh build run test
	@/usr/bin/python3 tests/run.py style unit

bench: build ## print one JSON line per figure
	@scripts/install-packages.sh build run test
	@/usr/bin/python3 bench/bench.py --bin '$(BUILD)/bin'

packages: ## install the packages that building and running need
	@scripts/install-packages.sh build run

build: packages ## build the programs into build/bin
	@scripts/build.sh '$(BUILD)'

install: build ## install programs, manual pages, unit and example configuration (DESTDIR, PREFIX)
	@DESTDIR='$(DESTDIR)' PREFIX='$(PREFIX)' BUILD='$(BUILD)' scripts/install.sh

uninstall: ## remove what install put there (data and configuration stay)
	@DESTDIR='$(DESTDIR)' PREFIX='$(PREFIX)' scripts/install.sh --remove

format: ## format all C files in place
	@git ls-files -z '*.c' '*.h' | xargs -0 clang-format -i

clean: ## remove build folders
	rm -rf '$(BUILD)' build-gcc build-clang build-asan build-fuzz
