"""Attributes of streams."""

from __future__ import annotations

import numpy as np
import pytest

import rstream as rs


def test_defaults(stream):
    attributes = stream.attributes
    assert attributes.synchronization_policy is None
    assert attributes.priority == 0
    assert attributes.mem_sync_domain == "default"
    assert attributes.mem_sync_domain_map == (0, 1)
    assert attributes.access_policy_window.nbytes == 0
    assert str(stream.id) in repr(attributes)


@pytest.mark.parametrize("policy", ["auto", "spin", "yield", "blocking_sync"])
def test_what_was_set_is_read_back(stream, policy):
    stream.attributes.synchronization_policy = policy
    assert stream.attributes.synchronization_policy == policy


def test_priority_is_clamped_and_shown_by_the_stream(stream, device):
    least, greatest = device.priority_range
    for asked, got in ((greatest, greatest), (-100, greatest), (100, least), (2**40, least)):
        stream.attributes.priority = asked
        assert stream.attributes.priority == stream.priority == got


def test_memory_synchronization_domains(stream, device):
    stream.attributes.mem_sync_domain = "remote"
    assert stream.attributes.mem_sync_domain == "remote"
    stream.attributes.mem_sync_domain_map = (1, 0)
    assert stream.attributes.mem_sync_domain_map == (1, 0)
    count = device.attributes["mem_sync_domain_count"]
    for bad in ((count, 0), (0, count), (-1, 0), (0, 300)):
        with pytest.raises(rs.InvalidValueError, match=str(max(bad, key=abs))):
            stream.attributes.mem_sync_domain_map = bad
    assert stream.attributes.mem_sync_domain_map == (1, 0)


def test_access_policy_window(stream, device):
    array = rs.device_empty(1 << 20, np.uint8, device)
    window = rs.AccessPolicyWindow(array.ptr, array.nbytes, 0.5, "persisting", "streaming")
    stream.attributes.access_policy_window = window
    assert stream.attributes.access_policy_window[2:] == (0.5, "persisting", "streaming")
    assert stream.attributes.access_policy_window.nbytes > 0
    too_large = device.attributes["max_access_policy_window_size"] + 1
    for change, match in (
        ({"hit_ratio": 2.0}, "hit_ratio 2"),
        ({"hit_ratio": float("nan")}, "hit_ratio"),
        ({"miss": "persisting"}, "cannot persist"),
        ({"hit": "often"}, 'hit="often"'),
        ({"nbytes": too_large}, str(too_large)),
    ):
        with pytest.raises(rs.InvalidValueError, match=match):
            stream.attributes.access_policy_window = window._replace(**change)
    stream.attributes.access_policy_window = None
    assert stream.attributes.access_policy_window.nbytes == 0


def test_all_attributes_are_copied(stream, device):
    other = rs.Stream(device)
    stream.attributes.synchronization_policy = "spin"
    stream.attributes.priority = device.priority_range[1]
    stream.attributes.mem_sync_domain = "remote"
    stream.attributes.mem_sync_domain_map = (1, 1)
    other.copy_attributes(stream)
    assert other.attributes.synchronization_policy == "spin"
    assert other.priority == other.attributes.priority == device.priority_range[1]
    assert other.attributes.mem_sync_domain == "remote"
    assert other.attributes.mem_sync_domain_map == (1, 1)
    with pytest.raises(rs.InvalidValueError, match="soft:1"):
        other.copy_attributes(rs.Stream("soft:1"))


@pytest.mark.parametrize("name", ["synchronization_policy", "mem_sync_domain"])
def test_a_bad_name_is_quoted_with_the_good_ones(stream, name):
    with pytest.raises(rs.InvalidValueError, match=f'{name}="fast": expected "(auto|default)"'):
        setattr(stream.attributes, name, "fast")


def test_attributes_outlive_nothing(device):
    stream = rs.Stream(device)
    attributes = stream.attributes
    stream.close()
    with pytest.raises(rs.ClosedError):
        _ = attributes.priority
    with pytest.raises(rs.ClosedError):
        attributes.priority = 0
    with pytest.raises(AttributeError):
        rs.Stream(device).attributes.speed = 3
