"""Where each rank is: the arithmetic of ports, what a router is told of it, and what can't be had side by side."""

from __future__ import annotations

from typing import Any

import pytest

from sglcache import paths
from sglcache.config import Config, parse
from sglcache.errors import ConfigError
from sglcache.server.plan import Seat, kv_events, plan


def configured(dp_size: int, pp_size: int, **sections: dict[str, Any]) -> Config:
    parallel = {"dp_size": dp_size, "pp_size": pp_size, **sections.pop("parallel", {})}
    return parse({"parallel": parallel, **sections})


def planned(dp_size: int, pp_size: int, **sections: dict[str, Any]) -> list[Seat]:
    return plan(configured(dp_size, pp_size, **sections))


def test_ranks_that_dial_all_dial_the_one_subscriber() -> None:
    seats = planned(2, 2, events={"endpoint": "tcp://router:65535", "mode": "connect"})
    assert {seat.endpoint for seat in seats} == {"tcp://router:65535"}
    assert [seat.replay_endpoint for seat in seats] == [f"tcp://127.0.0.1:{5657 + offset}" for offset in range(4)]


@pytest.mark.parametrize(("dp_size", "pp_size"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)])
def test_replica_d_is_at_base_plus_d_and_later_stages_come_behind_all_replicas(dp_size: int, pp_size: int) -> None:
    seats = planned(dp_size, pp_size, events={"endpoint": "tcp://*:5557"})
    assert [seat.offset for seat in seats] == list(range(dp_size * pp_size))
    for seat in seats:
        assert seat.offset == seat.pp_rank * dp_size + seat.dp_rank
        assert seat.endpoint == f"tcp://*:{5557 + seat.offset}"
        assert seat.replay_endpoint == f"tcp://127.0.0.1:{5657 + seat.offset}"
        assert seat.socket == str(paths.socket_path(seat.offset))
    assert [seat.endpoint for seat in seats if seat.pp_rank == 0] == [f"tcp://*:{5557 + d}" for d in range(dp_size)]


def test_a_host_has_the_ports_of_the_ranks_that_it_serves() -> None:
    seats = planned(2, 2, parallel={"pp_ranks": [1]})
    assert [(seat.dp_rank, seat.pp_rank, seat.endpoint) for seat in seats] == [
        (0, 1, "tcp://127.0.0.1:5559"),
        (1, 1, "tcp://127.0.0.1:5560"),
    ]
    assert [seat.socket for seat in planned(2, 2, parallel={"dp_ranks": [1]}, control={"socket": "/run/a"})] == [
        "/run/a-1",
        "/run/a-3",
    ]


def test_ipc_ipv6_and_the_systems_choice_are_each_ranks_own() -> None:
    seats = planned(2, 1, events={"endpoint": "ipc://kv", "replay_endpoint": "tcp://[::1]:0"})
    assert [seat.endpoint for seat in seats] == ["ipc://kv", "ipc://kv-1"]
    assert [seat.replay_endpoint for seat in seats] == ["tcp://[::1]:0"] * 2
    seats = planned(2, 1, events={"endpoint": "tcp://[::1]:5557"})
    assert [seat.endpoint for seat in seats] == ["tcp://[::1]:5557", "tcp://[::1]:5558"]
    assert [seat.endpoint for seat in planned(2, 1, events={"enabled": False})] == [None, None]


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"events": {"replay_endpoint": "tcp://127.0.0.1:5558"}},
            [
                "events.endpoint: tcp://127.0.0.1:5558 of rank 1 (dp 1, pp 0)",
                "events.replay_endpoint of rank 0",
                "4 or",
            ],
        ),
        ({"events": {"replay_endpoint": "tcp://*:5554"}}, ["events.replay_endpoint: tcp://*:5557 of rank 3", "rank 0"]),
        ({"http": {"port": 5559}}, ["events.endpoint: tcp://127.0.0.1:5559 of rank 2", "http.port of the supervisor"]),
        (
            {"events": {"endpoint": "ipc:///run/kv", "replay_endpoint": "ipc:///run/kv-2"}},
            ["events.endpoint: ipc:///run/kv-2 of rank 2", "events.replay_endpoint of rank 0"],
        ),
    ],
)
def test_an_overlap_is_refused_and_both_are_named(sections: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(2, 2, **sections)
    for words in told:
        assert words in caught.value.message
    assert caught.value.message.startswith(caught.value.path)


def test_what_lies_apart_or_elsewhere_is_no_overlap() -> None:
    assert len(planned(2, 2, events={"replay_endpoint": "tcp://127.0.0.1:5561"})) == 4
    assert len(planned(2, 2, events={"replay_endpoint": "tcp://127.0.0.2:5558"})) == 4
    assert len(planned(2, 2, http={"enabled": False, "port": 5559})) == 4
    # Stage 1 is another host's: nothing is bound twice here.
    stage_0 = {"events": {"replay_endpoint": "tcp://127.0.0.1:5559"}, "parallel": {"pp_ranks": [0]}}
    assert len(planned(2, 2, **stage_0)) == 2


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_a_range_beyond_the_last_port_is_refused_on_every_host(key: str) -> None:
    for here in ({}, {"pp_ranks": [0]}):
        with pytest.raises(ConfigError, match=r"65537 for rank 3; choose a base of at most 65532") as caught:
            planned(2, 2, events={key: "tcp://*:65534"}, parallel=here)
        assert caught.value.path == f"events.{key}"
    assert planned(2, 2, events={key: "tcp://*:65532"})


# -- what a router is told ---------------------------------------------------------------------------------


def told(dp_size: int, pp_size: int, **sections: Any) -> dict[str, object] | None:
    made = configured(dp_size, pp_size, **sections)
    return kv_events(made, plan(made))


def test_kv_events_is_sglangs_block() -> None:
    assert told(2, 2, events={"replay_endpoint": "tcp://[::1]:5657", "topic": "kv"}) == {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "kv",
        "block_size": 16,
        "dp_size": 2,
        "replay_endpoint_port_base": 5657,
    }


def test_the_base_is_the_same_on_a_host_with_some_of_the_replicas() -> None:
    block = told(4, 1, parallel={"dp_ranks": [2, 3]})
    assert block is not None
    assert block["endpoint_port_base"] == 5557


def test_topics_that_differ_are_told_by_what_they_begin_with() -> None:
    events = {"topic": "kv@{model}@{rank}"}
    assert [seat.topic for seat in planned(2, 1, events=events)] == ["kv@default@0", "kv@default@1"]
    one, two = told(1, 2, events=events), told(2, 1, events=events)
    assert one is not None
    assert two is not None
    assert (one["topic"], two["topic"]) == ("kv@default@0", "kv@default@")


def test_a_port_that_the_system_chose_can_be_told_for_one_replica_and_not_for_two() -> None:
    made = configured(2, 1)
    one = Seat(0, 0, 0, "/s", "tcp://127.0.0.1:40001", "tcp://127.0.0.1:40009")
    block = kv_events(configured(1, 1), [one])
    assert block is not None
    assert (block["endpoint_port_base"], block["replay_endpoint_port_base"]) == (40001, 40009)
    assert kv_events(made, [one, Seat(1, 1, 0, "/s", "tcp://127.0.0.1:40005", None)]) is None
    lucky = kv_events(made, [one, Seat(1, 1, 0, "/s", "tcp://127.0.0.1:40002", None)])
    assert lucky is not None
    assert "replay_endpoint_port_base" not in lucky


@pytest.mark.parametrize(
    "sections",
    [
        {"events": {"endpoint": "ipc:///tmp/a"}},
        {"events": {"enabled": False}},
        {"events": {"endpoint": "tcp://127.0.0.1:0"}},  # not bound yet
        {"parallel": {"pp_ranks": [1]}},  # nothing here that a router dials
        {"events": {"mode": "connect"}},  # the ranks dial
    ],
)
def test_kv_events_is_null_where_no_router_could_dial(sections: dict[str, Any]) -> None:
    assert told(2, 2, **sections) is None
