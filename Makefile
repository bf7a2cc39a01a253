# The tasks live in tasks.py, which runs on every system; this is their short form.
PYTHON ?= $(shell command -v python3 || command -v python)

.PHONY: demo test lint bench clean
demo test lint bench clean:
	@$(PYTHON) tasks.py $@
