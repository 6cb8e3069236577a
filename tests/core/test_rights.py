"""The file of rights: what it may have, which line an error names, and options beside it."""

from __future__ import annotations

import pytest

from pw.core.errors import ArgumentError, ConnectionFailed, QuotaExceeded
from pw.core.rights import (
    NO_BOUNDS,
    Resource,
    Rights,
    TenantRights,
    definitions,
    in_words,
    rights_of_options,
)
from pw.core.tenants import OPERATOR

FILE = """
[default]
devices = 8
host_memory = "4GiB"

[tenants."far away"]  # it has a space
share = 2
python = ["h0", "h1"]
may_drain = true
"""


def test_the_file_has_rights_of_tenants_and_of_the_rest() -> None:
    rights = rights_of_options(text=FILE, file="t.toml")
    far = rights.of("far away")
    assert (far.share, far.devices, far.may_drain, far.may_cancel) == (2.0, None, True, False)
    assert [far.runs_python_on(host) for host in ("h0", "h2")] == [True, False]
    assert rights.of("anyone").bounds() == {"devices": 8, "host_memory": 4 << 30}
    assert {type(bound) for bound in rights.of("anyone").bounds().values()} == {int}, "for messages"
    assert rights.of("anyone").runs_python_on("h2")
    assert [rights.bounds_python_on(host) for host in ("h0", "h2")] == [True, False]


def test_operators_are_not_bounded_by_the_default_and_may_do_all() -> None:
    own = rights_of_options(text=FILE, file="t.toml").of(OPERATOR)
    assert (own.devices, own.may_drain, own.may_cancel) == (None, True, True)
    own = rights_of_options(text="[tenants.operator]\ndevices = 3", file="t.toml").of(OPERATOR)
    assert (own.devices, own.may_drain, own.may_cancel) == (3, True, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "t.toml: .*line 1"),
        ("\n[other]\na = 1", "t.toml, line 2: 'other' is no section; there are .default. and"),
        ("[default]\n[teants.red]\nshare = 2", "t.toml, line 2: 'teants' is no section"),
        ("[default]\n\n[[other]]", "t.toml, line 3: 'other' is no section"),
        ("# share = 1\n\nshare = 2\n[default]", "t.toml, line 3: 'share' is no section"),
        ("\ntenants.red = 2", "t.toml, line 2: 'red' is no section; write rights below"),
        ("[default]\n[tenants.red.more]\na = 1", "t.toml, line 2: 'more' is no right"),
        ("default = 3", "t.toml, line 1: 'default' is no section"),
        ("[tenants]\nred = 1", "t.toml, line 2: 'red' is no section; write rights below"),
        ("[default]\n\nshare = 0", "t.toml, line 3: share = 0 is not a positive number"),
        ("[default]\nshare = inf", "t.toml, line 2: share = inf is not a positive number"),
        ("[default]\ndevices = -1", "line 2: devices = -1 is not a whole number, 0 or more"),
        ("[default]\ndevices = true", "line 2: devices = True is not a whole number, 0 or more"),
        (
            "[default]\nclients = 1\n[tenants.a]\nclients = 'x'",
            "line 4: clients = 'x' is not a whole",
        ),
        ("[tenants.a]\nhost_memory = 'much'", "host_memory = 'much' is not a size such as 4GiB"),
        ("[tenants.a]\ndisk = -1", "line 2: disk = -1 is not a size such as 4GiB"),
        ("[tenants.a]\npython = 3", "line 2: python = 3 is not true, false or a list of hosts"),
        (
            "[tenants.a]\nmay_reboot = true",
            "line 2: 'may_reboot' is no right; there are share, max_",
        ),
        ("[tenants.operator]\nmay_drain = true", "line 2: the tenant 'operator' may do all; leave"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        rights_of_options(text=text, file="t.toml")


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({"max_share": 2.0}, "max_share"),
        ({"max_priority": 2}, "max_priority"),
        ({"shares": {"red": 2.0}}, "share"),
    ],
)
def test_a_right_is_given_by_an_option_or_in_the_file(options: dict, right: str) -> None:
    text = f"[default]\nclients = 3\n{right} = 1"
    with pytest.raises(ArgumentError, match=f"t.toml, line 3: {right} is given here and by --"):
        rights_of_options(**options, text=text, file="t.toml")
    rights = rights_of_options(**options, text="[tenants.red]\nclients = 3", file="t.toml")
    assert rights.of("red").clients == 3
    assert getattr(rights.of("red"), right) == 2.0


def test_options_hold_for_all_tenants() -> None:
    rights = rights_of_options(4.0, 2, {"red": 3.0})
    assert (rights.of("red").share, rights.of("blue").share) == (3.0, 1.0)
    for tenant in ("red", "blue", OPERATOR):
        assert rights.of(tenant).bounded(9.0, 9) == (4.0, 2)
        with pytest.raises(QuotaExceeded, match=r"priority=3 is more than .* priority=2 or less"):
            rights.of(tenant).check(4.0, 3)
    assert NO_BOUNDS.of("red").bounded(9.0, 9) == (9.0, 9)


def test_a_script_that_reconnects_does_not_try_a_quota_again() -> None:
    assert not issubclass(QuotaExceeded, ConnectionFailed)


def test_each_resource_is_a_right_and_has_words() -> None:
    names = [one.name for one in definitions()]
    assert {resource.value for resource in Resource} < set(names)
    assert [Rights().bound(resource) for resource in Resource] == [None] * len(Resource)
    assert in_words(Resource.DEVICES, 1) == "1 device"
    assert in_words(Resource.PROGRAMS, 2) == "2 programs"
    assert in_words(Resource.HOST_MEMORY, 3 << 20) == "3.00 MiB of host memory"
    assert in_words(Resource.DISK, 3 << 20) == "3.00 MiB on disk"
    assert TenantRights(named={"red": Rights(devices=1)}).of("red").bounds() == {"devices": 1}
