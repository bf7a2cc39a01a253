"""Which tests stay together when several workers share them."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """One worker takes all tests of a module, or of a module and a host: they share its server."""
    for item in items:
        host = item.callspec.params.get("host") if hasattr(item, "callspec") else None
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {host or ''}".strip()))
