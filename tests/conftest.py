"""Which tests stay together when several workers share them."""

import re

import pytest

from tests.support_hosts import HOSTS


def group_of(nodeid):
    """Tests of a module, or of a module and a host, share a server: one worker takes them all."""
    module, _, test = nodeid.partition("::")
    hosts = [word for word in re.split(r"\W", test) if word in HOSTS]
    return " ".join([module, *hosts[:1]])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    if config.getoption("dist") != "loadscope":
        return None

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    return ByServer(config, log)
